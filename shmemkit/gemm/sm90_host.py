"""The Hopper GEMM on given arrays: which arrays the TMA takes, the choice of tile and parts of K, and the
launch.
"""

import functools
from typing import Any, NamedTuple

import numpy as np

from shmemkit.backends.streams import address_of_stream
from shmemkit.device.cuda.tma import tensor_map
from shmemkit.device.cuda.wgmma import ROW_BYTES, SLAB
from shmemkit.runtime.launch import bind
from shmemkit.support.arrays import address_of

from .block_scales import WIDTHS, scale_arguments, scaled_kernel
from .problem import FLOAT8, HALVES, Problem, arrays_of, check_order, not_of_tensor_cores
from .sm90 import Kinds, Layout, Tile, arrival_elements, box_rows, gemm_kernel, partial_elements, shared_bytes

CLOCK = 1.5e9  # cycles of ``estimate``, per second
FEW = 32  # rows of A: of so many no more are loaded
DTYPES = (*HALVES, FLOAT8)
ALIGNED = 16  # bytes: at multiples of them rows begin, and so many the TMA writes at a time


def as_rows(operand):
    """An operand (rows, K), A or the transpose of B, or its transpose: the one whose rows are contiguous; the
    operand if both are, or neither."""
    return operand if _consecutive(operand) or not _consecutive(operand.T) else operand.T


def major(operand):
    """How an operand (rows, K) is stored: "k" if consecutive elements are of K, else "mn"."""
    return "k" if as_rows(operand) is operand else "mn"


def taken(by_rows):
    """Whether the TMA takes an array, by rows."""
    pitch_is_right = by_rows.shape[0] == 1 or (by_rows.strides[0] > 0 and by_rows.strides[0] % ALIGNED == 0)
    return _consecutive(by_rows) and pitch_is_right and address_of(by_rows) % ALIGNED == 0


def _consecutive(array):
    return array.shape[1] == 1 or array.strides[1] == array.dtype.itemsize


def rows_that_cannot_be_stored(out):
    """-> why `tma_store` would write beyond the rows of `out`, or None."""
    if out.shape[1] * out.dtype.itemsize % ALIGNED:
        return (
            f"out is {out.dtype} {out.shape}; its rows must be a multiple of {ALIGNED} bytes, as much as the "
            "TMA writes at a time"
        )
    return None


def rows_that_are_not_of_k(*operands):
    """-> why the tensor cores do not take operands of float8, (rows, K), or None."""
    if any(major(operand) != "k" for operand in operands):
        strides = " and ".join(str(operand.strides) for operand in operands)
        return (
            f"the operands are {FLOAT8}, (rows, K) of strides {strides}; rows of K must be contiguous. Store "
            "weights with K last; sk.matmul takes a weight (N, K) as w.T"
        )
    return None


def map_of_operand(operand, extent):
    """-> the tensor map of A (M, K), or of B's transpose (N, K), of which a tile has `extent` rows."""
    by_rows = as_rows(operand)
    return tensor_map(by_rows, (box_rows(major(operand), extent), ROW_BYTES // by_rows.itemsize))


class Choice(NamedTuple):
    tile: Tile
    splits: int


# Cycles of a multiprocessor, by rows of a tile: for 128 bytes that come to it; for each column of a tile's
# products with 64 of K, and for all columns; and, for each column of a tile and part, to add up parts of K.
LOAD = {64: 2.6, 128: 1.9}
COLUMN, COLUMNS = {64: 2.0, 128: 3.75}, {64: 0, 128: 64}
PART_COST = {64: 9.4, 128: 28.0}
# For what a tile needs besides its products, and, where K is split, to begin adding up parts.
TILE_COST, SPLIT_COST = 3000, 14000
MEMORY = 18.0  # bytes per cycle and multiprocessor that all of them together get from memory
NARROW = 6e-4  # of their time more, for each column that tiles of 128 rows have less than 256: more power


def estimate(m, n, k, choice, sms=132):
    """-> about how many cycles an M by N by K product takes on `sms` multiprocessors.

    Rounds of tiles, times what a tile takes: its products or its loads, the longer ones; at least what memory
    takes for all.

    It tells tiles apart, not products, whose power decides how fast an H200's clock is: of large products
    (4096 x 4096 x 4096 to 8192 x 8192 x 8192) it is the time by 1.44 to 1.53 GHz, of 512 x 7168 x 8192 by
    1.55 to 1.57, of 64 x 7168 x 8192 by 1.52 to 1.62, of 256 x 4096 x 7168, in one round, by 1.9. For the
    tiles of one product that is the same within some percent, with K split within 15.
    """
    (tile, splits), rows = choice, choice.tile.m
    rounds = -(-tile.count(m, n) * splits // sms)
    product = max(COLUMN[rows] * tile.n + COLUMNS[rows], rows + rows / 64 * tile.n)
    loads = LOAD[rows] * (rows + tile.n)
    cycles = rounds * (-(-k // SLAB // splits) * max(product, loads) + TILE_COST)
    if rows == 128:
        cycles *= 1 + NARROW * (256 - tile.n)
    least = 2.0 * (m * k + n * k + m * n) / (MEMORY * sms)
    cost = max(cycles, least) + 0.1 * cycles
    return cost + SPLIT_COST + PART_COST[rows] * tile.n * splits if splits > 1 else cost


def choices_of(tiles, m, n, k, sms, splits=None):
    """-> the Choices of these tiles, and of numbers of parts of K that are worth a thought; or of `splits`
    parts, if K has so many."""
    if splits is not None:
        splits = min(splits, -(-k // SLAB))
        return [Choice(tile._replace(split=splits > 1), splits) for tile in tiles]
    choices = []
    for tile in tiles:
        most = max(1, min(32, -(-k // SLAB) // 4, sms // tile.count(m, n)))
        choices += [Choice(tile._replace(split=splits > 1), splits) for splits in range(1, most + 1)]
    return choices


def choose(m, n, k, sms=132, tile=None, splits=None, widths=(256, 224, 192, 160, 128, 96, 64)):
    """-> the Choice of tile and parts of K for an M by N by K product on `sms` multiprocessors: the least
    ``estimate``, over tiles of 128 rows (64 for M up to 64) and widths, or over what is given, `tile`, (rows,
    columns), and `splits`.

    A large tile loads least per product, and 128 by 256 are all that the registers hold: best where it fills
    the multiprocessors, as in large products. Otherwise the last round is mostly idle, and what counts is how
    the tiles of the result fit their number: 512 by 7168 is 112 tiles of 256 columns, but 128 of 224. Where
    the whole result has fewer tiles than there are multiprocessors, K may be split.

    Of float8 half of K takes as long: give that.
    """
    widths = [w for w in widths if w < n + 32] or [32]
    tiles = [Tile(*tile)] if tile else [Tile(64 if m <= 64 else 128, w) for w in widths]
    choices = choices_of(tiles, m, n, k, sms, splits)
    return min(choices, key=lambda choice: estimate(m, n, k, choice, sms))


def bind_gemm(
    kernel_of,
    problem,
    choice,
    sms,
    *more,
    m=None,
    n=None,
    k=None,
    n_tiles=None,
    outs=None,
    sources=None,
    beside=0,
    co_resident=False,
    group=None,
):
    """-> the launch of ``kernel_of(tile, kinds)``, which takes what ``gemm_kernel`` does, and then `more`.

    problem   a Problem of arrays that the TMA takes; rows of out may be longer than those of b
    sms       multiprocessors that it may take
    m         rows that it goes through; None: those of a
    n, k      what the kernel gets; None: columns and rows of b
    n_tiles   at most; None: those of m by n
    outs      the arrays that the kernel gets the tensor maps of, one after another; None: out alone
    sources   likewise for a
    beside    blocks that do something else
    group     as of ``bind``: for kernels that use other ranks' memory

    The caller keeps the arrays alive: tensor maps hold addresses only.
    """
    a, b, out, bias, activation, _ = problem
    arrays: Any = arrays_of(out)
    tile, splits = choice
    m, k, n = m or a.shape[0], k or b.shape[0], n or b.shape[1]
    n_tiles = tile.count(m, n) if n_tiles is None else n_tiles
    bias_dtype = None if bias is None else bias.dtype.name
    if tile.loaded is None and m <= FEW and major(a) == "k":
        tile = tile._replace(loaded=next(rows for rows in (8, 16, FEW) if m <= rows))
    kinds = Kinds(a.dtype.name, major(a), major(b.T), out.dtype.name, bias_dtype, activation)
    box = 16, Layout(tile, kinds).columns
    map_out = arrays.concatenate([tensor_map(array, box) for array in outs or [out]])
    if bias is None:
        bias = arrays.zeros(1, "float32")
    elif bias_dtype != "float32":
        bias = bias.view("uint16")
    partials = arrays.empty(partial_elements(tile, m, n, splits) if splits > 1 else 1, "float32")
    arrivals = arrays.zeros(arrival_elements(tile, m, n) if splits > 1 else 1, "int32")
    map_a = arrays.concatenate([map_of_operand(array, tile.rows_of_a) for array in sources or [a]])
    maps = map_a, map_of_operand(b.T, tile.n), map_out
    launch = bind(
        kernel_of(tile, kinds),
        min(n_tiles * splits, sms) + beside,
        tile.threads,
        ((*maps, bias), (m, n, k), (splits, partials, arrivals), *more),
        shared=shared_bytes(tile, kinds),
        co_resident=co_resident,
        group=group,
    )
    if arrays.ndarray is not np.ndarray:
        arrays.cuda.get_current_stream().synchronize()  # all that is there, on any stream
    return launch


class Sm90:
    """A product that is bound to the kernel of sm90.py: call it with a stream.

    What a graph has captured is kept as long as the process: nobody knows when the graph is gone, which reads
    the tensor maps.
    """

    of_graphs = []

    @staticmethod
    def unsupported(problem, gpu):
        """-> why it cannot compute `problem`, or None."""
        a, b, out, *_ = problem
        if gpu.compute_capability[0] != 9:
            return f"the GPU has compute capability {gpu.capability}; it must be 9.0"
        if reason := not_of_tensor_cores(problem, DTYPES) or rows_that_cannot_be_stored(out):
            return reason
        if problem.scales and (reason := rows_that_are_not_of_k(a, b.T)):
            return reason
        for array, by_rows in (a, as_rows(a)), (b, as_rows(b.T)), (out, out):
            if not taken(by_rows):
                return (
                    f"an array has strides {array.strides} and address {address_of(array):#x}; its rows (of "
                    f"operands: or columns) must be contiguous, and begin at multiples of {ALIGNED} bytes"
                )
        return None

    def __init__(self, problem: Problem, gpu, choice=None, order=None):
        kernel_of, more, (m, n, k) = gemm_kernel, (), problem.size
        if problem.scales:
            kernel_of, more = scaled_kernel, (scale_arguments(problem.scales[0], problem.scales[1].T),)
            choice = choice or choose(m, n, -(-k // 2), gpu.multiprocessors, widths=WIDTHS)
        choice = choice or choose(m, n, k, gpu.multiprocessors)
        tile = choice.tile
        check_order(order, -(-m // tile.m), -(-n // tile.n))
        kernel_of = functools.partial(kernel_of, order=order)
        self._launch = bind_gemm(kernel_of, problem, choice, gpu.multiprocessors, *more)
        self._kept = self._emulated(gpu)

    @staticmethod
    def _emulated(gpu):
        """What the emulator captures has its arguments."""
        return gpu.arrays.ndarray is np.ndarray

    def __call__(self, stream=None):
        if not self._kept and self._captures(stream):
            self._kept = True
            self.of_graphs.append(self._launch)
        self._launch(stream)

    def _captures(self, stream):
        import cupy

        stream = self._launch.stream if stream is None else stream
        return cupy.cuda.runtime.streamIsCapturing(address_of_stream(stream))
