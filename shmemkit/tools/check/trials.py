"""The ways that a subject is run, and what is said of a wrong result.

eagerly         calls, each waited for
back to back    calls that nothing waits between, each with data and an output of its own
in a graph      calls that are captured; the graph is replayed with other data each time, without a wait
under skew      as back to back, while some ranks sleep, and their GPUs, too
"""

from __future__ import annotations

import random
import time

import numpy as np
from numba import cuda

from shmemkit.runtime.launch import bind

from .subjects import POISON

SHOWN = 6  # wrong elements
EARLIER = 8  # calls that a wrong element may be of


@cuda.jit
def spin(times):
    for _ in range(times):
        cuda.nanosleep(1000)


class Wrong(Exception):
    """A wrong result, of some rank; raised on all. `findings`: texts, each with the ranks that have it."""

    def __init__(self, findings):
        super().__init__("\n".join(findings))
        self.findings = findings


class Trials:
    """Runs subjects on a World. `step(text)` is told what is run next; `seed`: of who sleeps, and when."""

    def __init__(self, world, seed, step):
        self.world, self.step, self.emulated = world, step, world.backend.name == "emulator"
        self.random, self.call = random.Random(seed + 1000 * world.rank), 0
        self._spin = bind(spin, 1, 1, (1,))  # now: loading waits for what runs

    def run(self, subject, thin=False):
        """In all ways. -> their names. `thin`, on the emulator, which takes its time: in those that show the
        most."""
        few = self.emulated and (thin or subject.slow)
        ways = ("back to back",) if few else tuple(WAYS)
        ways = ways if subject.ways is None else subject.ways
        for way in ways:
            self.step(f"{subject.name}, {way}")
            WAYS[way](self, subject)
        return ways

    def first(self, subject):
        """The first call, which binds the operation, and may be refused."""
        self._in_turn(subject, 1)

    # -- ways
    def eager(self, subject):
        self._in_turn(subject, 1 if self.emulated else 3, wait=True)

    def back_to_back(self, subject):
        n = (2 if subject.slow else 4) if self.emulated else 6
        self._in_turn(subject, min(subject.calls, n))

    def skewed(self, subject):
        self._in_turn(subject, min(subject.calls, 2 if self.emulated else 6), skew=True)

    def graph(self, subject):
        n, replays = (2, 2) if self.emulated else (3, 3)
        world, copy = self.world, self.world.backend.copy
        stages = [subject.inputs(self._next()) for _ in range(n)]
        outs = [subject.outputs() for _ in range(n)]
        for given, out in zip(stages, outs, strict=True):
            subject.enqueue(given, out)  # binds the calls
        self._settle()
        stream = world.stream
        stream.begin_capture()
        for given, out in zip(stages, outs, strict=True):
            subject.enqueue(given, out)
        graph = stream.end_capture()
        handle = world.backend.handle(None)
        poison = [[self._poison(x) for x in out] for out in outs]
        rounds = []
        for _ in range(replays):
            calls = [self._next() for _ in range(n)]
            inputs = [subject.inputs(call) for call in calls]
            kept = [[subject.arrays.empty(x.shape, x.dtype) for x in out] for out in outs]
            rounds.append((calls, inputs, kept))
        self._settle()
        for _, inputs, kept in rounds:
            for to, given in zip([*stages, *outs], [*inputs, *poison], strict=True):
                for dst, src in zip(to, given, strict=True):
                    if src.size:
                        copy(_bytes(dst), _bytes(src))(handle)
            if not subject.private:
                world.barrier()  # peers write to the outputs
            graph.launch(stream)
            for to, out in zip(kept, outs, strict=True):
                for dst, src in zip(to, out, strict=True):
                    if src.size:
                        copy(_bytes(dst), _bytes(src))(handle)
            if not subject.private:
                world.barrier()
        world.synchronize()
        made = [pair for calls, _, kept in rounds for pair in zip(calls, kept, strict=True)]
        self._check(subject, made)

    def _in_turn(self, subject, n, wait=False, skew=False):
        world = self.world
        calls = [self._next() for _ in range(n)]
        inputs, outs = [subject.inputs(call) for call in calls], [subject.outputs() for _ in calls]
        for out in outs:
            for x in out:
                self._fill(x)
        self._settle()
        for given, out in zip(inputs, outs, strict=True):
            if skew:
                self._sleep()
            subject.enqueue(given, out)
            if wait:
                world.synchronize()
        world.synchronize()
        self._check(subject, list(zip(calls, outs, strict=True)))

    def mixed(self, chosen, in_graph):
        """Calls of several subjects, (name, subject), one behind the other; a graph of them is replayed with
        other data each time. -> how many"""
        world, stream, copy = self.world, self.world.stream, self.world.backend.copy
        calls = [self._next() for _ in chosen]
        staged = [(s.inputs(call), s.outputs()) for (_, s), call in zip(chosen, calls, strict=True)]

        def enqueue(skew):
            for (_, subject), (given, out) in zip(chosen, staged, strict=True):
                if skew:
                    self._sleep()
                subject.enqueue(given, out)

        graph, replays = None, 1
        if in_graph:
            enqueue(False)  # binds them
            self._settle()
            stream.begin_capture()
            enqueue(False)
            graph, replays = stream.end_capture(), 4
        for _ in range(replays):
            if in_graph:
                calls = [self._next() for _ in chosen]
                inputs = [subject.inputs(call) for (_, subject), call in zip(chosen, calls, strict=True)]
                self._settle()
                for (to, _), given in zip(staged, inputs, strict=True):
                    for dst, src in zip(to, given, strict=True):
                        if src.size:
                            copy(_bytes(dst), _bytes(src))(world.backend.handle(None))
            for _, out in staged:
                for x in out:
                    self._fill(x)
            self._settle()
            graph.launch(stream) if graph is not None else enqueue(True)
            world.synchronize()
            finding = None
            for (name, subject), call, (_, out) in zip(chosen, calls, staged, strict=True):
                wanted = subject.wanted([call] * subject.n) if out else []
                for k, (x, want) in enumerate(zip(out, wanted, strict=True)):
                    differ = subject.differs(k, x, want)
                    if finding is None and bool(differ.any()):
                        found = self.finding(subject, call, k, x, want, differ, calls[0], calls[-1])
                        finding = f"{name}, {found}"
            self.agree(finding)
        return (replays + in_graph) * len(chosen)

    # -- inside
    def _next(self):
        self.call += 1
        return self.call

    def _settle(self):
        """All ranks have done what they did to arrays."""
        self.world.synchronize()
        self.world.host_barrier()

    def _fill(self, array):
        with self.world.stream:
            _bytes(array)[...] = POISON

    def _poison(self, array):
        return self.world.xp.full(max(1, array.nbytes), POISON, "uint8")[: array.nbytes]

    def _sleep(self):
        where = self.random.randrange(4)
        if where == 0 and not self.emulated:
            time.sleep(self.random.choice((1e-4, 1e-3, 3e-3)))
        elif where == 1:
            self._spin.set("times", self.random.randrange(1, 4 if self.emulated else 300))
            self._spin()
        elif where == 2:
            self.world.stream.synchronize()

    def _check(self, subject, made):
        """Compare the outputs of `made`, [(call, outputs), ..]: Wrong, on all ranks, if any is."""
        finding = None
        for call, outs in made:
            wanted = subject.wanted([call] * subject.n) if outs else []
            for k, (out, want) in enumerate(zip(outs, wanted, strict=True)):
                differ = subject.differs(k, out, want)
                if finding is None and bool(differ.any()):
                    finding = self.finding(subject, call, k, out, want, differ, made[0][0], made[-1][0])
        self.agree(finding)

    def agree(self, finding):
        """Wrong, on all ranks, if any has a `finding`; what several have is said once. Collective."""
        those = {}
        for rank, text in enumerate(self.world.host_allgather(finding)):
            if text:
                those.setdefault(text, []).append(str(rank))
        if those:
            raise Wrong([f"rank{'s' * (len(r) > 1)} {', '.join(r)}, {text}" for text, r in those.items()])

    def finding(self, subject, call, k, out, wanted, differ, first, last):
        """What is wrong with output `k` of `call` on this rank; the text does not name it."""
        host, widen = self.world.asnumpy, subject.arrays.widen
        where = host(differ.reshape(-1)).nonzero()[0]
        got, want = (host(widen(x)).reshape(-1)[where] for x in (out, wanted[0]))
        text = (
            f"call {call - first + 1} of {last - first + 1}: {len(where)} of "
            f"{differ.size} elements are wrong{f' in output {k}' if len(subject.out_dtypes) > 1 else ''}, "
            f"the first at {_listed(where)}: {_listed(got)} instead of {_listed(want)}"
        )
        return f"{text}. {self._whose(subject, call, k, out, where)}"

    def _whose(self, subject, call, k, out, where):
        """Of which rank and call wrong elements are, as far as that explains them."""
        host, ranks = self.world.asnumpy, range(subject.n)
        bits = host(out).reshape(-1).view("uint8").reshape(out.size, -1)[where]
        found = [(int((bits == POISON).all(axis=1).sum()), "were not written")]
        some = [(f"rank {subject.world.ranks[r]}", [r]) for r in ranks] + [("all ranks", ranks)]
        for earlier in range(call - 1, max(0, call - EARLIER), -1):
            for who, those in some:
                other = subject.wanted([earlier if r in those else call for r in ranks])[k]
                same = ~host(subject.differs(k, out, other)).reshape(-1)[where]
                ago = f"{call - earlier} call{'s' * (call - earlier > 1)} earlier"
                found.append((int(same.sum()), f"equal the result with the data of {who} from {ago}"))
        count, what = max(found, key=lambda each: each[0])
        return f"{count} of them {what}" if count else "They match the data of no earlier call"


WAYS = {
    "eagerly": Trials.eager,
    "back to back": Trials.back_to_back,
    "in a graph": Trials.graph,
    "under skew": Trials.skewed,
}


def _bytes(array):
    return array.reshape(-1).view("uint8")


def _listed(numbers):
    shown = ", ".join(f"{n:g}" if isinstance(n, np.floating) else str(n) for n in numbers[:SHOWN])
    return shown + (", .." if len(numbers) > SHOWN else "")
