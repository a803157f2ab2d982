"""The overlapping product on given arrays: which tiles, in which groups, and its launch."""

from shmemkit.device.tma import tensor_map
from shmemkit.device.wgmma import SLAB
from shmemkit.kernels.gemm.sm90 import Kinds, arrival_elements, box_of_a, partial_elements, shared_bytes
from shmemkit.kernels.gemm.sm90_host import choose, major, maps
from shmemkit.launch import bind

from . import columns, sm90


def aligned_groups(tile, *rows):
    """`tile`, with groups of rows of tiles that do not reach from one part of so many `rows` into the next
    one, where that can be done with groups that are not small; else for the next of `rows`."""
    for of_part in rows:
        n, rest = divmod(of_part, tile.m * tile.m_blocks)
        if not rest and (n >= tile.group // 2 or of_part == rows[-1]):
            return tile._replace(group=-(-n // -(-n // tile.group)))
    return tile


class Fused:
    """A product that waits for its rows, bound to given arrays; called with a stream, between ``start`` and
    ``finish`` of the Transfer that gathers x in `a`.

    x        (rows, K), C-contiguous
    problem  a Problem, of `a`, the gathered (n_ranks * rows, K), C-contiguous; ``gemm.Sm90`` supports it
    engine   the copy engine
    gpu      a Gpu
    by_columns
             whether x comes by columns
    choice   a Choice; what ``choose`` gives if None

    reads_x  whether my rows are read from x, and need not be copied to `a`
    """

    def __init__(self, x, problem, engine, gpu, by_columns=False, choice=None):
        a, b, out, bias, activation = problem
        (m, k), n, rows, arrays = a.shape, b.shape[1], x.shape[0], gpu.arrays
        rank, n_ranks = engine.world.rank, engine.world.n_ranks
        tile, splits = choice or choose(m, n, k, gpu.multiprocessors)
        parts = 1 if by_columns or engine.parts == 1 else engine.parts_of(x.nbytes)
        parts = 1 if rows % parts else parts
        tile = aligned_groups(tile, rows // parts, rows)
        bias_dtype = None if bias is None else str(bias.dtype)
        kinds = Kinds(str(a.dtype), "k", major(b, True), str(out.dtype), bias_dtype, activation)
        self.reads_x = rows % tile.m == 0
        map_a, map_b, map_out = maps(tile, kinds, a, b, out)
        map_x = tensor_map(x, (box_of_a(tile, kinds).rows, SLAB)) if self.reads_x else map_a
        if bias is None:
            bias = arrays.zeros(1, "float32")
        elif bias_dtype != "float32":
            bias = bias.view("uint16")
        split = splits > 1
        partials = arrays.empty(partial_elements(tile, m, n, splits) if split else 1, "float32")
        arrivals = arrays.zeros(arrival_elements(tile, m, n) if split else 1, "int32")
        tiles = -(-m // (tile.m * tile.m_blocks)) * -(-n // (tile.n * tile.n_blocks))
        mine = engine.columns_of(k * x.itemsize) // (x.itemsize * SLAB) if by_columns else parts
        of_parts = engine.parts // parts, rows // parts, rank * parts, mine, n_ranks * parts
        from_x = (rank * rows, (rank + 1) * rows) if self.reads_x else (0, 0)
        self.launch = bind(
            (columns if by_columns else sm90).ag_gemm_kernel(tile, kinds),
            min(tiles * splits, gpu.multiprocessors // tile.cluster) * tile.cluster,
            tile.threads,
            (
                *(map_x, map_a, map_b, map_out, bias, m, n, k, splits, partials, arrivals),
                *(engine.arrived, *of_parts, from_x),
            ),
            shared=shared_bytes(tile, kinds),
            cluster=tile.cluster if tile.cluster > 1 else None,
        )

    def __call__(self, stream=None):
        self.launch(stream)
