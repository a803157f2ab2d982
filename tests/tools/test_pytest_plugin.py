"""The pytest plugin: schedules, options, and what failures look like; docs/testing.md is true."""

import importlib.metadata
import re
from pathlib import Path

import pytest

import shmemkit as sk

sk.emu.run(sk.init, 1)  # imports what each run of pytester would otherwise import anew

INSTALLED = importlib.metadata.entry_points(group="pytest11", name="shmemkit")
PLUGIN = ["-p", "no:cacheprovider", "-p", "no:hypothesispytest"]  # which would be imported anew, too
PLUGIN += [] if INSTALLED else ["-p", "shmemkit.pytest_plugin"]
PAGE = (Path(__file__).parents[2] / "docs" / "testing.md").read_text()
PROGRAM = re.search(r"```python\n(.*?)```", PAGE, re.S)[1]

KERNEL = """
import numpy as np
import pytest
import shmemkit as sk
from numba import cuda
from shmemkit.device import notify, rank, symm_at, wait


@cuda.jit
def kernel(slot, full, out, wanted):
    if rank() == 0:
        symm_at(slot, 1)[0] = 7
        notify(full, 1, 1)
    elif wanted > 0:
        wait(full, 1, "sys", "acquire", wanted)
        out[0] = slot[0]
    else:
        out[0] = slot[0]


def main(wanted=1):
    world = sk.init()
    out = np.zeros(1, "int32")
    kernel[1, 1](sk.zeros(1, "int32"), sk.signals(1), out, wanted)
    world.stream.synchronize()
    return int(out[0])
"""


@pytest.fixture
def run(pytester, monkeypatch):
    """``run(tests, *options)`` runs pytest on the source `tests`. -> pytester's RunResult"""
    for name in ("SHMEMKIT_SEED", "SHMEMKIT_DELIVERY", "SHMEMKIT_RACES", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)

    def run(tests, *options):
        pytester.makepyfile(test_it=KERNEL + tests)
        return pytester.runpytest_inprocess(*PLUGIN, "-q", *options)

    return run


def names(result):
    """The names of the tests of a run with -v or --collect-only, without the file's."""
    return [line.split()[0].partition("::")[2] for line in result.outlines if "::" in line]


# ---- schedules

ONE = "def test_one(pes):\n    assert pes(2).run(main) == [0, 7]\n"
MARKED = "@pytest.mark.schedules(deliveries=('eager', 'unordered'), seeds=[3, None])\n" + ONE


def named(deliveries, seeds):
    return [f"test_one[{delivery}-{seed}]" for delivery in deliveries for seed in seeds]


MARKED_NAMES = [f"test_one[{s}]" for s in ("eager-3", "eager", "unordered-3", "unordered")]


def test_one_run_by_default(run):
    assert names(run(ONE, "--collect-only")) == ["test_one"]
    run(ONE).assert_outcomes(passed=1)


@pytest.mark.parametrize(
    "tests, options, environment, expected",
    [
        (MARKED, [], {}, MARKED_NAMES),
        (MARKED, ["--shmem-seeds", "2"], {}, named(("eager", "unordered"), range(2))),
        (MARKED, ["--shmem-seeds", "0"], {}, ["test_one[eager]", "test_one[unordered]"]),
        (MARKED, ["--shmem-delivery", "ordered"], {}, ["test_one[ordered-3]", "test_one[ordered]"]),
        (
            ONE,
            ["--shmem-delivery", "all", "--shmem-seeds", "1"],
            {},
            named(("eager", "ordered", "unordered"), [0]),
        ),
        (ONE, ["--shmem-seeds", "3"], {}, named(["eager"], range(3))),
        (MARKED, [], {"SEED": "8"}, ["test_one[eager-8]", "test_one[unordered-8]"]),
        (MARKED, [], {"SEED": "8", "DELIVERY": "ordered"}, ["test_one[ordered-8]"]),
        (ONE, [], {"DELIVERY": "ordered"}, ["test_one[ordered]"]),
        (ONE, ["--shmem-seeds", "1"], {"SEED": "8"}, ["test_one[eager-0]"]),
        ("@pytest.mark.schedules\n" + ONE, [], {}, named(("eager", "unordered"), range(20))),
        (
            "pytestmark = pytest.mark.schedules(deliveries='ordered')\n" + ONE,
            [],
            {},
            named(["ordered"], range(20)),
        ),
        (ONE + "def test_other(): pass\n", ["--shmem-seeds", "1"], {}, ["test_one[eager-0]", "test_other"]),
    ],
)
def test_schedules_of_a_test(run, monkeypatch, tests, options, environment, expected):
    for name, value in environment.items():
        monkeypatch.setenv(f"SHMEMKIT_{name}", value)
    assert names(run(tests, "--collect-only", *options)) == expected


def test_each_schedule_is_what_its_name_says(run):
    result = run(
        """
@pytest.mark.parametrize("x", [1, 2])
@pytest.mark.schedules(deliveries=["ordered", "unordered"], seeds=[None, 5])
def test_it(pes, x, request, monkeypatch):
    seen = []
    monkeypatch.setattr(sk.emu, "run", lambda *args, **options: seen.append((args[1:], options)))
    pes(3).run(main)
    pes(4, races=False, delivery="eager", seed=9, local_size=2, heap_size=5).run(main, 1, 2)
    (n, args), options = seen[0]
    assert (n, args) == (3, ()) and options.keys() == {"races", "delivery", "seed"} and options["races"]
    schedule = [str(options[name]) for name in ("delivery", "seed") if options[name] is not None]
    assert request.node.name == f"test_it[{'-'.join([*schedule, str(x)])}]"
    assert seen[1] == ((4, (1, 2)), dict(races=False, delivery="eager", seed=9, local_size=2, heap_size=5))


@pytest.fixture
def two(pes):
    return pes(2)


def test_through_a_fixture(two):
    assert two.run(main) == [0, 7]
"""
    )
    result.assert_outcomes(passed=9)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "marker, words",
    [
        (
            "deliveries=['late']",
            "a delivery is 'late'; it must be 'eager', 'ordered', 'unordered', or as 'node 1 late'",
        ),
        ("seeds=[1.5]", "a seed is 1.5; it must be an integer or None"),
        ("seeds=[]", "it must have one element or more"),
        ("seed=3", "{'seed': 3} is given; it must be deliveries= or seeds="),
        ("'eager'", "('eager',) is given; it must be deliveries= or seeds="),
    ],
)
def test_wrong_markers(run, marker, words):
    result = run(f"@pytest.mark.schedules({marker})\n{ONE}")
    assert result.ret != 0 and words in result.stdout.str() + result.stderr.str()


@pytest.mark.parametrize(
    "options, environment, words",
    [
        (["--shmem-seeds", "-1"], {}, "--shmem-seeds is -1; it must be 0 or more"),
        (["--shmem-delivery", "late"], {}, "invalid choice: 'late'"),
        ([], {"DELIVERY": "late"}, "SHMEMKIT_DELIVERY is 'late'"),
        ([], {"SEED": "x"}, "SHMEMKIT_SEED is 'x'"),
    ],
)
def test_wrong_options(run, monkeypatch, options, environment, words):
    for name, value in environment.items():
        monkeypatch.setenv(f"SHMEMKIT_{name}", value)
    result = run(ONE, *options)
    assert result.ret != 0 and words in result.stdout.str() + result.stderr.str()


# ---- failures


def shown(result):
    """What stands between the head of the failure and the summary."""
    text = result.stdout.str()
    assert "shmemkit/emu" not in text and "greenlet" not in text  # not the way through the scheduler
    return re.search(r"^_+ \S+ _+\n(.*)^=+ short test summary", text, re.S | re.M)[1]


def test_a_race_is_shown_as_the_report(run):
    text = shown(run("def test_one(pes):\n    pes(2).run(main, 0)\n"))
    assert "\n>       pes(2).run(main, 0)\nE       shmemkit.emu.errors.RaceError: 1 data race\n" in text
    assert "race on slot[0] on rank 1" in text and "symm_at(slot, 1)[0] = 7" in text
    assert text.endswith("- the same again -".center(80, "-") + "\npytest test_it.py::test_one\n")
    assert text.count("test_it.py:") == 4  # the accesses, the test, the command


def test_a_deadlock_is_shown_as_the_report(run):
    text = shown(run("def test_one(pes):\n    pes(2).run(main, 2)\n"))
    assert "E       shmemkit.emu.errors.DeadlockError: deadlock: no rank can go on\n" in text
    assert "waits for full[0] on rank 1 >= 2, now 1" in text and "def test_one" in text


def test_an_access_out_of_bounds_is_shown_as_the_report(run):
    text = shown(
        run(
            """
@cuda.jit
def beyond(x):
    x[3] = 1


def test_one(pes):
    pes(1).run(lambda: [sk.init(), beyond[1, 1](sk.zeros(3))])
"""
        )
    )
    assert "E       shmemkit.emu.errors.OutOfBoundsError: x[3] is out of bounds: x is float32 (3,)" in text


ASSERTING = """
def check(wanted):
    got = main(wanted)
    numbers = [got, sk.current().rank]
    assert numbers == [0, 0] or numbers == [8, 1]


@pytest.mark.schedules(deliveries="unordered", seeds=[7])
def test_one(pes):
    pes(2).run(check, WANTED)
"""


def test_a_failing_assertion_of_main_begins_in_main(run):
    text = shown(run(ASSERTING.replace("WANTED", "1")))
    assert text.lstrip().startswith("wanted = 1\n\n    def check(wanted):\n")
    assert "E       assert ([7, 1] == [0, 0]" in text  # rewritten
    assert "def test_one" not in text
    assert text.endswith(
        "\nrank 1 of 2, delivery 'unordered', seed 7\npytest 'test_it.py::test_one[unordered-7]'\n"
    )


def test_a_race_besides_a_failing_assertion(run):
    """The assertion comes first; the race is in its notes."""
    text = shown(run(ASSERTING.replace("WANTED", "0"), "--shmem-seeds", "0", "--shmem-delivery", "eager"))
    assert "AssertionError" in text and "Besides, 1 data race\n" in text
    assert text.index("[7, 1] == [0, 0]") < text.index("Besides, 1 data race")
    assert text.endswith("\nSHMEMKIT_DELIVERY=eager pytest 'test_it.py::test_one[eager]'\n")


def test_the_command_runs_the_test_again(run, monkeypatch):
    """Of a schedule that came from the command line, and of one of the marker."""
    text = shown(run(ASSERTING.replace("WANTED", "1"), "--shmem-seeds", "1"))
    *environment, _, node = text.splitlines()[-1].split()
    for setting in environment:
        monkeypatch.setenv(*setting.split("="))
    result = run(ASSERTING.replace("WANTED", "1"), node.strip("'"))
    result.assert_outcomes(failed=1)
    assert text.splitlines()[-2:] == shown(result).splitlines()[-2:]


def test_other_failures_are_left_alone(run):
    """A failure behind the run, one that was expected, and a wrong argument."""
    text = run(
        """
def test_result(pes):
    assert pes(2).run(main) == [0, 8]


def test_expected(pes):
    with pytest.raises(sk.emu.RaceError, match="slot"):
        pes(2).run(main, 0)
    assert 1 == 2


def test_wrong_argument(pes):
    pes(0).run(main)
"""
    ).stdout.str()
    assert (
        "assert [0, 7] == [0, 8]" in text and "assert 1 == 2" in text and "n_ranks is 0; it must be" in text
    )
    assert text.count("the same again") == 1  # of the last one


def test_the_cause_of_an_exception_is_shown(run):
    text = shown(
        run(
            """
def check():
    try:
        main(1)
        {}["key"]
    except KeyError:
        assert sk.current().rank == 3


def test_one(pes):
    pes(2).run(check)
"""
        )
    )
    assert "KeyError: 'key'" in text and "During handling of the above exception" in text
    assert "AssertionError" in text or "assert 0 == 3" in text


def test_full_trace_shows_the_emulator(run):
    text = run("def test_one(pes):\n    pes(2).run(main, 0)\n", "--full-trace").stdout.str()
    assert "scheduler.run_until" in text


def test_races_can_be_switched_off(run, monkeypatch):
    monkeypatch.setenv("SHMEMKIT_RACES", "0")
    run("def test_one(pes):\n    pes(2).run(main, 0)\n").assert_outcomes(passed=1)


@pytest.mark.slow
def test_with_xdist(run):
    pytest.importorskip("xdist")
    result = run(ASSERTING.replace("WANTED", "1"), "-n", "2", "--shmem-seeds", "2")
    result.assert_outcomes(failed=2)
    assert "\nrank 1 of 2, delivery 'unordered', seed 1\n" in result.stdout.str()


# ---- the rest


def test_nothing_heavy_is_imported_before_the_fixture_is_used(pytester):
    pytester.makepyfile(
        """
import sys

def test_one():
    assert not {"numba", "greenlet", "numpy", "shmemkit.emu"} & set(sys.modules)
"""
    )
    pytester.runpytest_subprocess(*PLUGIN).assert_outcomes(passed=1)


def test_marker_and_options_are_documented(pytester):
    for option, words in (("--markers", "@pytest.mark.schedules(deliveries="), ("--help", "--shmem-seeds")):
        assert words in pytester.runpytest_inprocess(*PLUGIN, option).stdout.str()


def without_what_depends_on_python(output):
    """Python 3.10 has no notes on exceptions, and pytest no carets there."""
    lines = [line.rstrip() for line in output.splitlines()]
    return [x for x in lines if not re.fullmatch(r" *\^+|E +(raised on rank|the same again).*|", x)]


def test_page(pytester, monkeypatch):
    """docs/testing.md: its tests pass, and without the fence they fail as it shows."""
    monkeypatch.setenv("COLUMNS", "80")
    pytester.makepyfile(test_ring=PROGRAM)
    pytester.runpytest_inprocess(*PLUGIN).assert_outcomes(passed=40)
    pytester.makepyfile(test_ring=PROGRAM.replace("    fence()\n", ""))
    outputs = re.findall(r"```\n(___.*?)```", PAGE, re.S)
    for races, output in zip(("1", "0"), outputs, strict=True):
        monkeypatch.setenv("SHMEMKIT_RACES", races)
        printed = pytester.runpytest_inprocess(*PLUGIN, "-x").stdout.str()
        found = re.search(r"^___.*(?=^=+ short test summary)", printed, re.S | re.M)[0]
        assert without_what_depends_on_python(found) == without_what_depends_on_python(output)
