"""How contenders are measured: each is set up, called once, checked and captured; then they are timed, and
checked again on other data.

``measure_all`` times them in interleaved rounds (``shmemkit.Timer``): as the GPU reaches its power limit its
clock drops, so a contender measured first would look faster. ``measure`` times one by itself, calls in a row:
for what takes microseconds, and without the memory that the others take.

All ranks go through the contenders in one order. What one rank cannot do (``agreed``), none does: that
contender is stopped, and its note says why; the others go on. Nothing is under way while one is set up, since
compiling and loading may wait for all that runs.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from .refusal import Refused, agreed


def noting(world) -> Any:
    """-> a context; what it gives is None, or has take(): the modules of the kernels launched in it. Another
    program may put its own in the place of this."""
    return contextlib.nullcontext()


def budgets(options):
    """-> the budgets of multiprocessors to measure with: None, and those of --sms"""
    return [None, *(options.sms or ())]


def name_of(method, sms):
    """-> the name of a method of ours within a budget, `sms`, or None"""
    return method if sms is None else f"{method}, sms={sms}"


class Contender:
    """What is measured. A subclass has `method`, its name, prepared() or call(), and what it needs of the
    others; start(), stop() and close() are collective.

    out            where the result is; None before the first call if that makes it
    took           the method that "auto" took, or None
    rooms          the modules of the kernels that it launched, if ``noting`` says it
    ran, version   the kernels of a call, and the version of the library, where they are known
    start(case)    set up for a case
    prepared(case) what start() keeps for call(): a function without arguments
    call()         enqueue one
    capture        None, or capture(iters) -> replay: a CUDA graph of its own, or what it has for one
    captured(graph, iters)  CuPy's graph of `iters` calls is there; not called where there is none. It never
                   raises
    repeat(replay) the data of the case have changed: enqueue it again, as ``replay()`` does
    stop()         the case is over, also if start() has raised
    close()        at the very end

    start(), call() and capture() raise ValueError, or MemoryError, for what cannot run.
    """

    method: Any
    _case: Any
    _run: Any = None
    capture: Callable | None = None
    out: Any = None
    took: str | None = None
    ran: str | None = None
    version: str | None = None
    rooms: list[str] | None = None
    symmetric = False  # whether its result is in symmetric memory, where that is varied

    def __init__(self, world):
        self.world = world

    @property
    def about(self):
        """What a row says of it."""
        out = "symmetric" if self.symmetric else None
        return {"out": out, "took": self.took, "ran": self.ran, "version": self.version, "rooms": self.rooms}

    def forget(self):
        """What was noted of an earlier case."""
        self.took = self.ran = self.rooms = None

    def start(self, case):
        self._case, self.out = case, case.output()
        self._run = self.prepared(case)

    def prepared(self, case):
        pass

    def call(self):
        self._run()

    def captured(self, graph, iters):
        pass

    def repeat(self, replay):
        replay()

    def stop(self):
        self._case = self.out = self._run = None

    def close(self):
        pass


class Ours(Contender):
    """One method of the case's host object, within a budget of multiprocessors or None, `sms`, into private
    or, with `symmetric`, symmetric memory; `more` goes to the object, too. What it is made and called with,
    the case says."""

    _object: Any = None

    def __init__(self, world, method="auto", symmetric=False, sms=None, **more):
        super().__init__(world)
        self.method, self.symmetric = name_of(method, sms), symmetric
        self._chosen = {"method": method, "sms": sms, **more}

    def start(self, case):
        self._object = case.object(**self._chosen)
        self.out = case.output_for(self._object, self.symmetric)
        self._arguments = case.arguments
        self._options = {"out": self.out if self.out.size else None, **case.options}  # gather: the root's
        if self._chosen["method"] == "auto":
            self.took = case.choice(self._object, self.symmetric)

    def call(self):
        self._object(*self._arguments, **self._options)

    def stop(self):
        super().stop()
        if hasattr(self._object, "free"):
            self._object.free()
        self._object, self._arguments, self._options = None, (), {}


def measure(world, timer, case, contender):
    """-> (microseconds of a call or None, note), the data of the case having been made. Collective."""

    def times(replays):
        return [timer.time(replay, 1) for replay in replays]

    return _measure(world, timer, [(case, contender)], lambda i: None, times)[0]


def measure_all(world, timer, pairs, step=lambda i: None):
    """-> [(microseconds of a call or None, note), ...], of each (case, contender) of `pairs`, timed together.
    Collective.

    ``step(i)`` tells that ``pairs[i]`` is set up next.
    """
    return _measure(world, timer, pairs, step, timer.times)


def _measure(world, timer, pairs, step, times):
    """Between the checks all data change, of a case in several pairs once. Checked are the first call, the
    timed graph, and a single call."""
    notes, running = [""] * len(pairs), {}  # i: its replay
    for i, (case, contender) in enumerate(pairs):
        step(i)
        try:
            running[i], notes[i] = _set_up(world, timer, case, contender)
        except Refused as reason:
            notes[i] = f"refused: {reason}"
            contender.stop()
    us = dict(zip(running, times(list(running.values())), strict=True))
    for i in us:
        us[i] /= timer.iters_for(pairs[i][0].bytes)
    several = any(timer.iters_for(case.bytes) > 1 for case, _ in pairs)
    # Among calls alike, one that reads what the one before wrote is right: so a single call is checked, too.
    for single in (False, True) if several else (False,):
        for case in dict.fromkeys(case for case, _ in pairs):
            case.flip()
        for i, replay in running.items():
            case, contender = pairs[i]
            try:
                agreed(world, functools.partial(contender.repeat, contender.call if single else replay))
                notes[i] = notes[i] or case.check(contender.out)
            except Refused as reason:
                us[i], notes[i] = None, f"refused: {reason}"
    for i in running:
        pairs[i][1].stop()
    return [(us.get(i), note) for i, note in enumerate(notes)]


def _set_up(world, timer, case, contender):
    """-> (replay, what is wrong with the first result or "")"""
    contender.forget()
    iters = timer.iters_for(case.bytes)
    with noting(world) as launches:
        agreed(world, lambda: contender.start(case))
        if contender.out is not None:
            case.spoil(contender.out)
        agreed(world, contender.call)
        wrong = case.check(contender.out)
        capture = contender.capture or functools.partial(timer.capture, contender.call)
        replay = agreed(world, lambda: capture(iters))
        contender.rooms = launches and launches.take()
    if graph := getattr(replay, "graph", None):
        contender.captured(graph, iters)
    return replay, wrong
