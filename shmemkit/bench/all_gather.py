"""``bench all_gather``: every method of ``AllGather``, and NCCL and PyTorch, at every size."""

import functools

import numpy as np

import shmemkit as sk

from . import p2p
from .nccl import Nccl
from .refusal import Refused, agreed
from .sizes import size_text
from .timing import Clock
from .torch_peer import TorchNccl, TorchSymmetric

PEERS = {"nccl": Nccl, "torch_nccl": TorchNccl, "torch_symm": TorchSymmetric}


def methods():
    """The names that --methods takes."""
    return (*sk.AllGather.methods, "auto")


class Case:
    """Random data of one size, once ``make`` has made them: `x`, this rank's part, 1-D, and what all ranks'
    make together.

    `n_bytes` are rounded down to 16 bytes per rank (or up to one element): `bytes` of the gathered array.
    """

    def __init__(self, world, n_bytes, dtype):
        self.world, self.dtype, self.n_bytes = world, dtype, n_bytes
        self.segment = max(n_bytes // world.n_ranks // 16 * 16, dtype.itemsize)
        self.bytes = self.segment * world.n_ranks

    def make(self):
        world = self.world
        parts = [
            np.frombuffer(np.random.default_rng([rank, self.n_bytes]).bytes(self.segment), "uint8")
            for rank in range(world.n_ranks)
        ]
        self.x = world.xp.asarray(parts[world.rank].view(self.dtype))
        if world.xp is np:
            self.x = self.x.copy()  # frombuffer's is read-only
        self.expected = world.xp.asarray(np.concatenate(parts))

    def output(self, empty=None):
        """An array for the result: this rank's own, or of ``empty(elements, dtype)``."""
        return (empty or self.world.xp.empty)(self.bytes // self.dtype.itemsize, self.dtype)

    def spoil(self, out):
        """Make every byte of `out` wrong, on every rank, before any of them goes on. Collective."""
        self.world.xp.invert(self.expected, out=out.view("uint8"))
        self.world.synchronize()
        self.world.host_barrier()

    def flip(self):
        """Every bit of the data changes: what was right is wrong in every byte."""
        for array in (self.x.view("uint8"), self.expected):
            self.world.xp.invert(array, out=array)

    def check(self, out):
        """-> "", or what is wrong, the same on every rank. Refused without the memory for it. Collective."""
        self.world.synchronize()
        found = agreed(self.world, lambda: self._found(out))
        return next(filter(None, self.world.host_allgather(found)), "")

    def _found(self, out):
        differ = out.reshape(-1).view("uint8") != self.expected
        if not bool(differ.any()):
            return ""
        count, first = int(differ.sum()), int(differ.argmax())
        return (
            f"wrong: on rank {self.world.rank} {count} of {self.bytes} bytes differ, the first at "
            f"{first}, in the part of rank {first // self.segment}"
        )


class Ours:
    """One method of ``AllGather``, into private memory or, with `symmetric`, symmetric memory."""

    capture = None

    def __init__(self, world, method, symmetric):
        self.world, self.method, self.symmetric, self.out = world, method, symmetric, None
        self._gather = self.took = None

    def start(self, case):
        self.took = None
        self._gather = sk.AllGather(self.world, case.bytes, method=self.method)
        self._x, self.out = case.x, case.output(self._gather.output if self.symmetric else None)
        if self.method == "auto":
            self.took = self._gather.method_for(case.bytes, self.symmetric)

    def gather(self):
        self._gather(self._x, self.out)

    def changed(self):
        pass

    def stop(self):
        if self._gather is not None:
            self._gather.free()
        self._gather = self._x = self.out = None

    def close(self):
        pass


def measure(world, clock, case, contender):
    """-> (microseconds or None, note). Collective.

    A contender has `method`, its name, `out` (None before the first call if it makes its own) and

        start(case)   collective, as stop() and close()
        gather()      enqueue one
        capture       None, or capture(iters) -> replay: a CUDA graph of its own
        changed()     case.x has changed
        stop()        the case is over, also if start has raised; close() at the very end

    of which the first three raise ValueError, or MemoryError, for what cannot run.
    """
    iters = clock.iters(case.bytes)
    try:
        agreed(world, lambda: contender.start(case))
        if contender.out is not None:
            case.spoil(contender.out)
        agreed(world, contender.gather)
        wrong = case.check(contender.out)
        capture = contender.capture or functools.partial(clock.capture, contender.gather)
        replay = agreed(world, lambda: capture(iters))
        us = clock.time(replay, iters)
        case.flip()
        contender.changed()
        replay()
        note = wrong or case.check(contender.out)
    except Refused as reason:
        us, note = None, f"refused: {reason}"
    contender.stop()
    return us, note


def run(world, results, options, progress):
    """Fill in the rows. Collective."""
    clock, n = Clock(world, options.iters, options.replays), world.n_ranks
    contenders = [PEERS[name](world) for name in options.vs]
    contenders += [Ours(world, name, out == "symmetric") for name in options.methods for out in options.out]
    with progress(1 + len(options.sizes) * len(contenders)) as step:
        if n > 1:
            step("what one rank can send to another")
            results.p2p_GBps = p2p.limit(world, clock)
        for size in options.sizes:
            case, refused = Case(world, size, options.dtype), None
            try:
                agreed(world, case.make)
            except Refused as reason:
                refused = None, f"refused: {reason}"
            for contender in contenders:
                step(f"{size_text(case.bytes)}, {contender.method}")
                us, note = refused or measure(world, clock, case, contender)
                bus = case.bytes * (n - 1) / n / us / 1e3 if us else None
                row = results.add("all_gather", contender.method, case.bytes, us, bus, note=note)
                if isinstance(contender, Ours):
                    row.out = "symmetric" if contender.symmetric else None
                    row.took = None if refused else contender.took
    for contender in contenders:
        contender.close()
