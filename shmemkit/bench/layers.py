"""What ``bench ag_gemm``, ``gemm_rs`` and ``gemm_ar`` have in common.

A shape MxNxK is that of a whole layer, of which each rank has a part. Three cases of it are timed in the same
rounds: a rank's product alone, what goes between the ranks alone, and both: by one of our host objects
(``Ours``), and by NCCL and cuBLAS, in turn (``InTurn``), as a user would do otherwise.
"""

from collections.abc import Callable
from typing import Any

from .gemm import Cublas
from .measure import Contender, name_of
from .nccl import Nccl
from .results import NCCL, NCCL_WAYS, nccl_cublas
from .shapes import Entry

NCCL_PEERS = {way: f"{way} (and cuBLAS)" for way in NCCL_WAYS}
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


class Ours(Contender):
    """One method of a host object, within a budget of multiprocessors or None, `sms`; it is called with `x`,
    `b` and out. A subclass has

    make(case, **chosen)  -> the object, with its method and sms
    choice(case)  -> the method that "auto" takes
    """

    make: Callable
    choice: Callable
    _object: Any = None

    def __init__(self, world, method, sms=None):
        super().__init__(world)
        self.method, self._chosen = name_of(method, sms), {"method": method, "sms": sms}

    def start(self, case):
        self._object = self.make(case, **self._chosen)
        super().start(case)
        self.took = self.choice(case) if self._chosen["method"] == "auto" else None

    def call(self):
        self._object(self._case.x, self._case.b, self.out)

    def stop(self):
        super().stop()
        if self._object is not None:
            self._object.free()
        self._object = None


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


def by_nccl(world, options, part):
    """-> (Entries of the parts alone, by cuBLAS and NCCL, those of both in turn), in the ways of --vs"""
    ways = [way for way in options.vs if way in NCCL_WAYS]
    alone = [Entry(Cublas(world), "product")] if ways else []
    alone += [Entry(Nccl(world, way, options.nccl), part) for way in ways]
    return alone, [Entry(InTurn(world, way, options.nccl)) for way in ways]
