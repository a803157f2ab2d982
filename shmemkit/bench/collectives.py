"""``bench all_gather``, ``all_reduce``, ``reduce_scatter``, ``all_to_all``, ``broadcast``, ``gather``,
``scatter`` and ``reduce``: every method of the host object, and NCCL and PyTorch, at every size."""

import shmemkit as sk

from . import p2p
from .cases import CASES
from .measure import Contender, budgets, measure, name_of
from .nccl import Nccl
from .refusal import Refused, agreed
from .results import NCCL_WAYS
from .sizes import size_text
from .torch_peer import TorchNccl, TorchOneShot, TorchSymmetric, TorchTwoShot

TORCH = {
    "torch_nccl": TorchNccl,
    "torch_symm": TorchSymmetric,
    "torch_one_shot": TorchOneShot,
    "torch_two_shot": TorchTwoShot,
}
PEERS = (*NCCL_WAYS, *TORCH)  # what --vs takes
HOSTS = {
    "all_gather": "AllGather",
    "all_reduce": "AllReduce",
    "reduce_scatter": "ReduceScatter",
    "all_to_all": "AllToAll",
    "broadcast": "Broadcast",
    "gather": "Gather",
    "scatter": "Scatter",
    "reduce": "Reduce",
}


def host_of(op):
    """The class of the host object."""
    return getattr(sk, HOSTS[op])


def methods(op):
    """The names that --methods takes."""
    return (*host_of(op).methods, "auto")


class Ours(Contender):
    """One method of the case's host object, into private memory or, with `symmetric`, symmetric memory. `sms`
    is a budget of multiprocessors, or None."""

    _object = took = None

    def __init__(self, world, method, symmetric=False, sms=None):
        super().__init__(world)
        self.method, self.symmetric = name_of(method, sms), symmetric
        self._chosen = {"method": method, "sms": sms}

    def start(self, case):
        self.took = None
        self._object = host_of(case.op)(self.world, case.bytes, **self._chosen)
        self._x = case.x if case.x.size else None  # of a scatter, only the root has one
        self.out = case.output(self._object.output if self.symmetric else None)
        self._out = self.out if self.out.size else None  # of a gather, only the root has one
        if self._chosen["method"] == "auto":
            self.took = self._object.method_for(case.bytes, self.symmetric)

    def call(self):
        self._object(self._x, self._out)

    def stop(self):
        if self._object is not None:
            self._object.free()
        self._object = self._x = self.out = self._out = None


def run(world, results, options, progress):
    """Fill in the rows. Collective."""
    timer, n = sk.Timer(world, options.iters, options.replays), world.n_ranks
    contenders = [
        Nccl(world, name, options.nccl) if name in NCCL_WAYS else TORCH[name](world) for name in options.vs
    ]
    contenders += [
        Ours(world, name, out == "symmetric", sms)
        for sms in budgets(options)
        for name in options.methods
        for out in options.out
    ]
    with progress(1 + len(options.sizes) * (1 + len(contenders))) as step:
        if n > 1:
            step("what one rank can send to another")
            results.p2p_GBps = p2p.limit(world, timer)
        cases = [CASES[options.command](world, size, options.dtype) for size in options.sizes]
        cases = list({case.bytes: case for case in cases}.values())  # sizes may be the same when rounded
        while cases:  # the data of one size go before those of the next come
            case, refused = cases.pop(0), None
            step(f"{size_text(case.bytes)}, its data")
            try:
                agreed(world, case.make)
            except Refused as reason:
                refused = None, f"refused: {reason}"
            for contender in contenders:
                step(f"{size_text(case.bytes)}, {contender.method}")
                us, note = refused or measure(world, timer, case, contender)
                bus = case.passes * case.bytes * (n - 1) / n / us / 1e3 if us else None
                about = {} if refused else contender.about
                out = "symmetric" if getattr(contender, "symmetric", False) else None
                results.add(case.op, contender.method, case.bytes, us, bus, note=note, out=out, **about)
    for contender in contenders:
        contender.close()
