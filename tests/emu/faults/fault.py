"""Planted bugs: what each must be found as, and that its correct twin is not.

A fault is a test function of one argument, ``correct``: it makes the kernel, with the bug or without it, and
returns ``main(world)``, which returns what this rank ended up with. Most are

    @fault(RaceError, "slot", "wait", right=[[-1], [7]])
    def test_missing_wait(correct):
        \"\"\"The receiver reads its slot without waiting for the signal.\"\"\"

        @cuda.jit
        def kernel(slot, full, out):
            if rank() == 0:
                symm_at(slot, 1)[0] = 7  # first
                notify(full, 1, 1)
            else:
                if correct:
                    wait(full, 1, "sys", "acquire", 1)
                out[0] = slot[0]  # second

        return lambda world: result(world, kernel[1, 1], sk.zeros(1, "int32"), sk.signals(1))

The bug runs once, in the mode that finds it; a race must be between the lines marked ``# first`` and
``# second``. The twin, a slow test, runs under 100 seeds of each delivery, looks for races in each, and gives
the right result each time.
"""

import functools
import inspect
import re

import numpy as np
import pytest
from fast import slow

import shmemkit as sk
from shmemkit.emu import (
    DeadlockError,
    EmulatorError,
    OutOfBoundsError,
    RaceError,
    UninitializedReadError,
    UseAfterFreeError,
)

__all__ = [
    "HEAP",
    "WRONG",
    "DeadlockError",
    "EmulatorError",
    "OutOfBoundsError",
    "RaceError",
    "UninitializedReadError",
    "UseAfterFreeError",
    "fault",
    "result",
]

WRONG = "wrong result"
SEEDS = range(100)
HEAP = 1 << 14


def fault(found, *details, right, pes=2, delivery="eager", seed=None, local_size=None, source=()):
    """Decorator: makes ``test(correct)`` the tests of the bug and of its twin.

    found      how the bug shows: an error of shmemkit.emu, or WRONG
    details    of a RaceError: the arrays, then words of a sentence that says what is missing; of other
               errors: words of the report
    right      what the twin gives on each rank
    delivery, seed   the mode that finds the bug
    source     kernels and functions whose lines are marked, besides those of the test
    """

    def decorate(make):
        make = functools.cache(make)
        marks = {mark: lines_marked(mark, make.__wrapped__, *source) for mark in ("first", "second")}

        def bug():
            if found is WRONG:
                assert run(make(False), pes, local_size, delivery, seed) != right
                return
            with pytest.raises(found) as caught:
                run(make(False), pes, local_size, delivery, seed)
            assert caught.type is found, caught.value
            report = str(caught.value)
            if found is RaceError:
                check_races(caught.value.races, marks["first"], marks["second"], *details)
            else:
                assert [words for words in details if words not in report] == [], report
            assert (caught.value.delivery, caught.value.seed) == (delivery, seed)

        @pytest.mark.parametrize("case", ["bug", *slow("twin-eager", "twin-ordered", "twin-unordered")])
        def test(case):
            kind, _, delivery = case.partition("-")
            check_correct(make(True), right, delivery, pes, local_size) if kind == "twin" else bug()

        test.__name__, test.__doc__ = make.__name__, make.__doc__
        return test

    return decorate


def run(main, pes, local_size, delivery, seed):
    options = dict(local_size=local_size, heap_size=HEAP, races=True, delivery=delivery, seed=seed)
    return sk.emu.run(lambda: main(sk.init()), pes, **options)


def check_correct(main, right, delivery, pes, local_size=None):
    """`main` gives the `right` results, and no races, under every seed."""
    for seed in SEEDS:
        assert run(main, pes, local_size, delivery, seed) == right, f"delivery {delivery}, seed {seed}"


def lines_marked(mark, *functions):
    """Numbers of the lines of `functions` that have a comment with the word `mark`."""
    found = []
    for function in functions:
        lines, first = inspect.getsourcelines(getattr(function, "py_func", function))
        found += [first + i for i, line in enumerate(lines) if re.search(rf"#.*\b{mark}\b", line)]
    return found


def check_races(races, first, second, arrays, *words):
    """All of the `races` are the planted one, or follow from it."""
    assert {race.array for race in races} == set(arrays.split())
    for race in races:
        assert race.first.line in first and race.second.line in second, (race, first, second)
    sentences = [race.missing for race in races]
    assert any(all(w in sentence for w in words) for sentence in sentences), sentences


def result(world, launch, *arrays, out=1):
    """Call ``launch(*arrays, out)``, out being `out` integers of this rank. -> what they are in the end"""
    found = np.full(out, -1, "int32")
    launch(*arrays, found)
    world.synchronize()
    return found.tolist()
