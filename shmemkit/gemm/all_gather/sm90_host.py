"""The overlapping product on given arrays: which tiles, in which groups, and its launch."""

from shmemkit.device.cuda.wgmma import SLAB

from ..problem import Problem
from ..sm90_host import Choice, bind_gemm, choose, map_of_operand, taken
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
    tile     (rows, columns), and `splits` parts of K; what is None is chosen
    by_columns
             whether x comes by columns
    reads_x  whether the own rows are read from x, and need not be copied to `a`
    """

    def __init__(self, x, problem: Problem, engine, gpu, tile=None, splits=None, by_columns=False):
        a, rows, row_bytes = problem.a, x.shape[0], x.shape[1] * x.itemsize
        me, n_ranks = engine.me, engine.n_ranks
        tile, splits = choose(*problem.size, gpu.multiprocessors, tile, splits)
        tile, arrived, slabs = aligned_groups(tile, rows), engine.arrived, 0
        if by_columns:
            arrived, slabs = engine.by_columns, engine.columns_of(row_bytes) // (x.itemsize * SLAB)
        self.reads_x = rows % tile.m == 0 and taken(x)
        self.launch = bind_gemm(
            lambda tile, kinds: ag_gemm_kernel(tile, kinds, by_columns),
            *(problem, Choice(tile, splits), gpu.multiprocessors),
            *(map_of_operand(x if self.reads_x else a, tile.m), arrived, arrived.size // n_ranks),
            *(rows, me, slabs, n_ranks, (me * rows, (me + 1) * rows) if self.reads_x else (0, 0)),
        )

    def __call__(self, stream=None):
        self.launch(stream)
