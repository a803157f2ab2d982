"""How contenders are measured together: those that fail become notes, and do not disturb the others."""

import numpy as np
import pytest

import shmemkit as sk
from shmemkit.bench.cases import Checked, negate
from shmemkit.bench.measure import Contender, measure, measure_all


class Twice(Checked):
    """The result is twice x."""

    bytes, flips = 32, 0

    def __init__(self, world):
        self.world, self.x = world, np.arange(1, 9, dtype="float32") + world.rank

    def output(self):
        return np.empty_like(self.x)

    def flip(self):
        negate(self.x)
        self.flips += 1

    def _found(self, out):
        return "" if (out == 2 * self.x).all() else "wrong: not twice"


class Doubling(Contender):
    """It logs what is done with it; on rank 1 it refuses to `refuse`."""

    factor = 2

    def __init__(self, world, name, log, refuse=None):
        super().__init__(world)
        self.method, self.log, self.refuse = name, log, refuse

    def did(self, what):
        self.log.append((self.method, what))
        if what == self.refuse and self.world.rank == 1:
            raise ValueError(f"no {what}")

    def start(self, case):
        super().start(case)
        self.did("start")

    def call(self):
        self.did("call")
        np.multiply(self._case.x, self.factor, out=self.out)

    def capture(self, iters):
        self.did("capture")
        return lambda: [self.call() for _ in range(iters)]

    def repeat(self, replay):
        self.did("repeat")
        replay()

    def stop(self):
        super().stop()
        self.did("stop")


class Wrong(Doubling):
    factor = 3


class Stale(Doubling):
    """From its second call on it gives what it gave first."""

    def call(self):
        if not any(what == "call" for name, what in self.log if name == self.method):
            super().call()


class OneCallLate(Doubling):
    """Each call gives the result of what x was in the call before: among calls alike nobody sees it."""

    before = None

    def call(self):
        x, self.before = self.before, self._case.x.copy()
        np.multiply(self._case.x if x is None else x, self.factor, out=self.out)


def measured(contenders, replays=3, iters=2):
    """`contenders(world, log)` of one case -> [(what measure_all gave, log, flips), ...] of two ranks"""

    def main():
        world, log = sk.init(), []
        case = Twice(world)
        pairs = [(case, contender) for contender in contenders(world, log)]
        found = measure_all(world, sk.Timer(world, iters, replays), pairs)
        return found, log, case.flips

    return sk.emu.run(main, 2)


@pytest.mark.parametrize("fails", ["start", "call", "capture", "repeat"])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_what_one_rank_refuses_does_not_disturb_the_others(fails, place):
    def contenders(world, log):
        names = ["a", "b"]
        names.insert(place, "refusing")
        return [Doubling(world, name, log, fails if name == "refusing" else None) for name in names]

    for found, log, flips in measured(contenders):
        assert found.pop(place) == (None, f"refused: no {fails}") and flips == 2
        assert all(us > 0 and note == "" for us, note in found)
        for name in ("a", "b"):
            done = [what for which, what in log if which == name]
            repeated = ["repeat", "call", "call", "repeat", "call"]  # the graph of two, and one
            assert done == ["start", "call", "capture"] + 6 * ["call"] + repeated + ["stop"]
        of_refusing = [what for which, what in log if which == "refusing"]
        assert of_refusing.count("stop") == 1 and of_refusing[-1] == "stop"


def test_all_are_set_up_before_the_first_is_timed_and_rounds_have_all():
    def contenders(world, log):
        return [Doubling(world, name, log) for name in "abc"]

    (found, log, _), (_, other, _) = measured(contenders, replays=4, iters=1)
    assert log == other and len(found) == 3
    assert log[:9] == [(name, what) for name in "abc" for what in ("start", "call", "capture")]
    rounds = [sorted(name for name, _ in log[i : i + 3]) for i in range(9, 21, 3)]
    assert rounds == [["a", "b", "c"]] * 4 and {what for _, what in log[9:21]} == {"call"}


@pytest.mark.parametrize("kind", [Wrong, Stale, OneCallLate])
def test_wrong_results_are_found_among_others(kind):
    def contenders(world, log):
        return [Doubling(world, "a", log), kind(world, "b", log), Doubling(world, "c", log)]

    for found, _, _ in measured(contenders):
        assert [note for _, note in found] == ["", "wrong: not twice", ""]
        assert all(us > 0 for us, _ in found)


def test_nobody_can():
    def contenders(world, log):
        return [Doubling(world, name, log, "start") for name in "ab"]

    assert [found for found, _, _ in measured(contenders)] == [[(None, "refused: no start")] * 2] * 2


@pytest.mark.parametrize("n", [1, 3])
def test_one(n):
    def main():
        world, log = sk.init(), []
        return measure(world, sk.Timer(world), Twice(world), Doubling(world, "a", log)), log

    steps = ["start", "call", "capture", "call", "repeat", "call", "stop"]
    for (us, note), log in sk.emu.run(main, n):
        assert us > 0 and note == "" and [what for _, what in log] == steps


def test_cases_of_several_contenders_change_once():
    def main():
        world, log = sk.init(), []
        cases = [Twice(world), Twice(world)]
        pairs = [(cases[i % 2], Doubling(world, str(i), log)) for i in range(4)]
        assert [note for _, note in measure_all(world, sk.Timer(world), pairs)] == [""] * 4
        return [case.flips for case in cases]

    assert sk.emu.run(main, 2) == [[1, 1]] * 2
