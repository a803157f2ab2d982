"""What ``bench ag_gemm``, ``gemm_rs`` and ``gemm_ar`` have in common.

A shape MxNxK is that of a whole layer, of which each rank has a part. Three cases of it are timed in the same
rounds: a rank's product alone, what goes between the ranks alone, and both: by one of our host objects, and
by NCCL and cuBLAS, in turn (``InTurn``), as a user would do otherwise.
"""

import shmemkit as sk
from shmemkit.runtime.symmetric_memory import as_dtype

from .command import Command, Entry
from .gemm import Cublas
from .measure import Contender, Ours, budgets
from .nccl import Nccl
from .product_cases import BY_SIZE
from .results import NCCL, NCCL_WAYS, nccl_cublas
from .shapes import Shapes

DTYPES = ("bfloat16", "float16")
SHAPES = "8192x14336x4096,8192x28672x8192,8192x8192x8192,512x28672x8192"


def share(world, op, shape):
    """-> M, a rank's part of N, K"""
    m, n, k = shape
    shared = {"N": n} if op == "gemm_ar" else {"M": m, "N": n}
    if any(size % world.n_ranks for size in shared.values()):
        raise SystemExit(
            f"--shapes has {m}x{n}x{k}; {' and '.join(shared)} must be "
            f"{'multiples' if len(shared) > 1 else 'a multiple'} of {world.n_ranks}, the number of ranks"
        )
    return m, n // world.n_ranks, k


class Step:
    """A part of a layer as a case for one of InTurn: from `x`, and `b`, into `out`."""

    def __init__(self, x, out, b=None, nccl=None):
        self.x, self.b, self.nccl, self._out = x, b, nccl, out

    def output(self, empty=None):
        return self._out


class InTurn(Contender):
    """NCCL, in one of its ways, and cuBLAS, one after the other, in one graph. A case has

    steps(empty)  -> [(Nccl or Cublas, Step), ...], in their order; what NCCL reads or writes comes of
                  ``empty(shape, dtype)``
    """

    def __init__(self, world, way=NCCL, path=None):
        super().__init__(world)
        self.method = nccl_cublas(way)
        self._of, self._steps = {Nccl: Nccl(world, way, path), Cublas: Cublas(world)}, []

    def start(self, case):
        nccl, self._steps, self.ran = self._of[Nccl], [], None
        nccl.connect()
        for kind, step in case.steps(nccl.empty):
            self._of[kind].start(step)
            self._steps.append(self._of[kind])
        self.out, self.version = self._steps[-1].out, nccl.version

    def call(self):
        for step in self._steps:
            step.call()

    def captured(self, graph, iters):
        self._of[Nccl].captured(graph, iters)
        self.ran = self._of[Nccl].ran

    def repeat(self, replay):
        self._of[Nccl].repeat(replay)

    def stop(self):
        super().stop()
        for contender in self._of.values():
            contender.stop()

    def close(self):
        for contender in self._of.values():
            contender.close()


def plan(world, options, alone, part, host, fused, cases):
    """-> the Entries, and `cases(shape, dtype)` of all shapes. Entries are: Gemm, ours `alone`, the parts by
    cuBLAS and NCCL, PyTorch's `fused`, both parts in turn in the ways of --vs, and the methods of `host`."""
    ways = [way for way in options.vs if way in NCCL_WAYS]
    entries = [Entry(Ours(world), "product", "Gemm"), alone]
    entries += [Entry(Cublas(world), "product")] if ways else []
    entries += [Entry(Nccl(world, way, options.nccl), part) for way in ways]
    entries += [Entry(fused(world))] if "torch" in options.vs else []
    entries += [Entry(InTurn(world, way, options.nccl)) for way in ways]
    methods = options.methods or ("auto", *getattr(sk, host).methods_for(world.n_nodes))
    entries += [Entry(Ours(world, method, sms=sms)) for sms in budgets(options) for method in methods]
    return entries, [cases(shape, as_dtype(options.dtype)) for shape in options.shapes]


def command(op, host, plan, other, parts, fused=None):
    """The Command of a layer, of which each rank has `parts`."""
    shape = f"M, N and K of the whole layer, of which each rank has a part of {parts}"
    return Command(
        op,
        f"every method of {host}, and {other}",
        plan,
        shapes=Shapes(SHAPES, "32x32x32", shape),
        dtypes=DTYPES,
        host=host,
        peers={**dict.fromkeys(NCCL_WAYS, "and cuBLAS"), **({"torch": fused} if fused else {})},
        sms=True,
        iters=BY_SIZE,
    )
