"""The overlapping product on given arrays: which tiles, in which groups, and its launch."""

from shmemkit.device.wgmma import SLAB
from shmemkit.kernels.gemm.sm90_host import Choice, bind_gemm, choose, map_of_operand, taken

from .sm90 import ag_gemm_kernel


def aligned_groups(tile, *rows):
    """`tile`, with groups of rows of tiles that do not reach from one part of so many `rows` into the next
    one, where that can be done with groups that are not small; else for the next of `rows`."""
    for of_part in rows:
        n, rest = divmod(of_part, tile.m)
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
    reads_x  whether my rows are read from x, and need not be copied to `a`
    """

    def __init__(self, x, problem, engine, gpu, by_columns=False):
        a, rows, row_bytes = problem.a, x.shape[0], x.shape[1] * x.itemsize
        rank, n_ranks = engine.world.rank, engine.world.n_ranks
        tile, splits = choose(*problem.size, gpu.multiprocessors)
        parts = 1 if by_columns or engine.parts == 1 else engine.parts_of(x.nbytes)
        parts = 1 if rows % parts else parts
        tile = aligned_groups(tile, rows // parts, rows)
        slabs = engine.columns_of(row_bytes) // (x.itemsize * SLAB) if by_columns else 0
        self.reads_x = rows % tile.m == 0 and taken(x)
        self.launch = bind_gemm(
            lambda tile, kinds: ag_gemm_kernel(tile, kinds, by_columns),
            *(problem, Choice(tile, splits), gpu.multiprocessors),
            *(map_of_operand(x if self.reads_x else a, tile.m), engine.arrived, engine.parts // parts),
            *(rows // parts, rank * parts, parts, slabs, n_ranks * parts),
            (rank * rows, (rank + 1) * rows) if self.reads_x else (0, 0),
        )

    def __call__(self, stream=None):
        self.launch(stream)
