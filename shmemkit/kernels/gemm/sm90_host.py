"""The Hopper GEMM on given arrays: which tiles, in how many parts of K, and its launch."""

from typing import NamedTuple

import numpy as np

from shmemkit.device.tma import tensor_map
from shmemkit.device.wgmma import SLAB
from shmemkit.launch import address_of_stream, bind

from .sm90 import (
    Kinds,
    Layout,
    Tile,
    arrival_elements,
    box_of_a,
    box_of_b,
    gemm_kernel,
    partial_elements,
    shared_bytes,
)

STORED = 16  # bytes that the TMA writes at a time
_of_graphs = []  # products that graphs have captured: nobody knows when those are gone, so they stay


def maps(tile, kinds, a, b, out):
    """-> the tensor maps of A (M, K), B (K, N) and out (M, N). ValueError for arrays that the TMA cannot
    take."""
    if reason := rows_that_cannot_be_stored(out):
        raise ValueError(reason)
    box_a, box_b = box_of_a(tile, kinds), box_of_b(tile, kinds)
    columns = Layout(tile, kinds).columns
    return (
        tensor_map(a if kinds.a_major == "k" else a.T, (box_a.rows, SLAB)),
        tensor_map(b.T if kinds.b_major == "k" else b, (box_b.rows, SLAB)),
        tensor_map(out, (16, columns)),
    )


def rows_that_cannot_be_stored(out):
    """-> why `tma_store` would write beyond the rows of `out`, or None."""
    if out.shape[1] * out.dtype.itemsize % STORED:
        return (
            f"out is {out.dtype} {out.shape}: the TMA writes {STORED} bytes at a time, rows of a multiple of "
            f"{STORED} bytes are allowed"
        )
    return None


def major(array, rows_are_k):
    """How an operand is stored: "k" if consecutive elements are of K, else "mn". `rows_are_k`: its first
    dimension is K. ValueError if neither dimension is contiguous."""
    k, other = (0, 1) if rows_are_k else (1, 0)
    itemsize = array.dtype.itemsize
    if array.shape[k] == 1 or array.strides[k] == itemsize:
        return "k"
    if array.shape[other] == 1 or array.strides[other] == itemsize:
        return "mn"
    raise ValueError(
        f"a GEMM's operands have consecutive rows or columns, given {array.shape} with strides "
        f"{array.strides}: copy the array"
    )


class Choice(NamedTuple):
    tile: Tile
    splits: int


# Cycles of a multiprocessor for 128 bytes that come to it, for what a tile needs besides its products, and,
# where K is split, to begin adding up parts, and for each column of a tile and part.
LOAD, TILE_COST, SPLIT_COST, PART_COST = 2.6, 3000, 14000, 9.4
MEMORY = 18.0  # bytes per cycle and multiprocessor that all of them together get from memory


def estimate(m, n, k, choice, sms=132):
    """-> about how many cycles an M by N by K product takes on `sms` multiprocessors.

    Rounds of tiles, times what a tile takes: its products (64 rows by n columns by 64 of K take the tensor
    cores 2 n cycles, but 64 + n to read them in shared memory) or its loads, the longer ones; at least what
    memory takes for all.

    It tells tiles apart, not products, whose power decides how fast an H200's clock is: of six large products
    (4096 x 4096 x 4096 to 8192 x 8192 x 8192, four tiles each) it is the time by 1.44 to 1.50 GHz, of 512 x
    7168 x 8192 by 1.54 to 1.55, of 64 x 7168 x 8192 by 1.52 to 1.62. For the tiles of one product that is the
    same within 1 percent, of the last one 6.
    """
    tile, splits = choice
    tiles = -(-m // (tile.m * tile.m_blocks)) * -(-n // (tile.n * tile.n_blocks))
    rounds = -(-tiles * splits // (sms // tile.cluster))
    product = (tile.m // 64) * 4 * max(tile.n / 2, 16 + tile.n / 4)
    loads = LOAD * (tile.m / tile.n_blocks + tile.n / tile.m_blocks)
    cycles = rounds * (-(-k // SLAB // splits) * max(product, loads) + TILE_COST)
    least = 2.0 * (m * k + n * k + m * n) / (MEMORY * sms)
    cost = max(cycles, least) + 0.1 * cycles
    return cost + SPLIT_COST + PART_COST * tile.n * splits if splits > 1 else cost


def choose(m, n, k, sms=132):
    """-> the Choice of tile and parts of K for an M by N by K product on `sms` multiprocessors: the least
    ``estimate``, over tiles of 128 rows (64 for M up to 64) and widths.

    A large tile loads least per product, and 128 by 256 are all that the registers hold: best where it fills
    the multiprocessors, as in large products. Otherwise the last round is mostly idle, and what counts is how
    the tiles of the result fit their number: 512 by 7168 is 112 tiles of 256 columns, but 128 of 224. Where
    the whole result has fewer tiles than there are multiprocessors, K may be split. No clusters: blocks that
    share loads were not faster on an H200, whose L2 cache serves them as well.
    """
    choices = [
        Choice(tile._replace(split=splits > 1), splits)
        for tile in _candidates(m, n)
        for splits in _splits(tile, m, n, k, sms)
    ]
    return min(choices, key=lambda choice: estimate(m, n, k, choice, sms))


def _candidates(m, n):
    widths = [w for w in (256, 224, 192, 160, 128, 96, 64) if w < n + 32] or [32]
    return [Tile(64, w) if m <= 64 else Tile(128, w, group=16) for w in widths]


def _splits(tile, m, n, k, sms):
    """Numbers of parts of K that are worth a thought."""
    tiles = -(-m // (tile.m * tile.m_blocks)) * -(-n // (tile.n * tile.n_blocks))
    most = min(32, -(-k // SLAB) // 4, sms // tile.cluster // tiles)
    return range(1, max(most, 1) + 1)


class Gemm:
    """A product of given arrays, bound to its kernel: ``gemm(stream)`` computes it.

    a, b          (M, K) and (K, N), float16 or bfloat16, of consecutive rows or columns
    out           (M, N), float16, bfloat16 or float32, of consecutive rows
    bias          (N,), contiguous, float16, bfloat16 or float32; None: there is none
    activation    None, "relu", "gelu" or "silu"
    choice        a Choice; what ``choose`` gives if None
    arrays        CuPy, or on the emulator NumPy: what makes the arrays that the kernel needs besides

    One call at a time, on one stream or ordered: all write to `out`, and where K is split they share other
    memory, too. Keep it until its calls have been computed: it has the tensor maps, which the kernel reads.
    What a graph has captured is kept as long as the process, for the graph.

    ValueError for what the TMA cannot take: rows (columns, for operands of consecutive columns) begin at
    multiples of 16 bytes, and rows of out are multiples of that.
    """

    def __init__(self, a, b, out, bias=None, activation=None, choice=None, arrays=None, sms=None):
        if arrays is None:
            import cupy as arrays
        (m, k), n = a.shape, b.shape[1]
        if (
            b.shape[0] != k
            or out.shape != (m, n)
            or (bias is not None and bias.shape != (n,))
            or not m * n * k
        ):
            raise ValueError(
                f"a GEMM of (M, K), (K, N) and (M, N), bias (N,), sizes at least 1, given {a.shape}, "
                f"{b.shape}, {out.shape}, {None if bias is None else bias.shape}"
            )
        if choice is not None and not 1 <= choice.splits <= -(-k // SLAB):
            raise ValueError(f"a GEMM splits K={k} into at most {-(-k // SLAB)} parts, given {choice}")
        if sms is None:
            sms = arrays.cuda.Device().attributes["MultiProcessorCount"]
        self.choice = choice or choose(m, n, k, sms)
        tile, splits = self.choice
        bias_dtype = None if bias is None else str(bias.dtype)
        kinds = Kinds(str(a.dtype), major(a, False), major(b, True), str(out.dtype), bias_dtype, activation)
        self.maps = maps(tile, kinds, a, b, out)
        if bias is None:
            bias = arrays.zeros(1, "float32")
        elif bias_dtype != "float32":
            bias = bias.view("uint16")
        split = splits > 1
        partials = arrays.empty(partial_elements(tile, m, n, splits) if split else 1, "float32")
        arrivals = arrays.zeros(arrival_elements(tile, m, n) if split else 1, "int32")
        tiles = -(-m // (tile.m * tile.m_blocks)) * -(-n // (tile.n * tile.n_blocks))
        self.launch = bind(
            gemm_kernel(tile, kinds),
            min(tiles * splits, sms // tile.cluster) * tile.cluster,
            tile.threads,
            (*self.maps, bias, m, n, k, splits, partials, arrivals),
            shared=shared_bytes(tile, kinds),
            cluster=tile.cluster if tile.cluster > 1 else None,
        )
        self.operands = a, b, out, bias  # the maps hold addresses only
        self._captured = arrays is np  # what the emulator captures has its arguments

    def __call__(self, stream=None):
        if not self._captured and self._captures(stream):
            self._captured = True
            _of_graphs.append(self)
        self.launch(stream)

    def _captures(self, stream):
        import cupy

        stream = self.launch.stream if stream is None else stream
        return cupy.cuda.runtime.streamIsCapturing(address_of_stream(stream))
