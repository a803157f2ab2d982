"""Which tests are fast, which run, and that the run of all fast tests fails when they leave something out."""

import re
from pathlib import Path

import cpu_seconds
import pytest
from fast import covering
from hypothesis import settings
from numba import cuda
from touched import TO_TOUCH, is_whole, primitives_of

from shmemkit import device
from shmemkit.device import notify, rank, wait

TESTS = Path(__file__).parents[1]

PLUGINS = ["-p", "fast", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]  # as in test_pytest_plugin.py
SUITE = """
import cpu_seconds
import pytest
from fast import examples, full, slow
from hypothesis import given, strategies

@pytest.mark.parametrize("a", [1, *slow(2)])
@pytest.mark.parametrize("b, c", [(3, 4), *slow((5, 6), pytest.param(7, 8, id="seven"))])
def test_values(a, b, c):
    pass

@pytest.mark.each_value
@pytest.mark.parametrize("a", "12")
@pytest.mark.parametrize("b", [*"34", *slow("5", "6")])
def test_combinations(a, b):
    pass

@pytest.mark.each_value
@pytest.mark.parametrize("a", "12")
@pytest.mark.parametrize("b", "34")
@pytest.mark.parametrize("c", "56")
def test_pairs(a, b, c):
    pass

@pytest.mark.every(2)
@pytest.mark.parametrize("a", [1, *slow(2), 3, 4, 5])
def test_every(a):
    pass

@pytest.mark.slow
@pytest.mark.parametrize("a", [*full(1), 2, 3])
def test_slow(a):
    pass

@pytest.mark.slow
def test_slower():
    pass

@pytest.mark.slow
def test_slowest():
    pass

@pytest.mark.parametrize("a", [1, *full(2)])
@pytest.mark.parametrize("b", [3, *slow(4)])
def test_large(a, b):
    pass

counted = []

@examples(40)
@given(strategies.integers())
def test_any(value):
    counted.append(value)

def test_number_of_examples():
    print(len(counted), "examples")
"""
FAST = ["test_values[3-4-1]", "test_combinations[3-1]", "test_combinations[4-2]"]
FAST += ["test_large[3-1]", "test_any", "test_number_of_examples"]
SLOW = ["test_values[3-4-2]", "test_combinations[3-2]", "test_combinations[4-1]"]
SLOW += ["test_slow[2]", "test_slow[3]", "test_slower", "test_slowest"]
SLOW += [*(f"test_values[{b}-{a}]" for b in ("5-6", "seven") for a in (1, 2)), "test_large[4-1]"]
SLOW += ["test_combinations[5-1]", "test_combinations[6-2]"]
FAST += ["test_pairs[5-3-1]", "test_pairs[6-4-2]"]
SLOW += ["test_pairs[5-3-2]", "test_pairs[5-4-1]", "test_pairs[6-3-1]"]
FAST += ["test_every[1]", "test_every[4]"]
SLOW += ["test_every[2]", "test_every[3]", "test_every[5]"]
FULL = [
    "test_slow[1]",
    "test_combinations[5-2]",
    "test_combinations[6-1]",
    "test_large[3-2]",
    "test_large[4-2]",
]
FULL += ["test_pairs[5-4-2]", "test_pairs[6-3-2]", "test_pairs[6-4-1]"]


@pytest.fixture
def run(pytester):
    """-> run(*options): (names of the tests that ran, what they printed)"""
    profile = settings.get_current_profile_name()

    def run(*options):
        pytester.makepyfile(test_suite=SUITE)
        result = pytester.inline_run(*PLUGINS, *options)
        reports = [r for r in result.getreports("pytest_runtest_logreport") if r.when == "call"]
        return [r.nodeid.partition("::")[2] for r in reports], "".join(r.capstdout for r in reports)

    yield run
    settings.load_profile(profile)


@pytest.mark.parametrize(
    "options, expected",
    [
        ([], FAST),
        (["-m", "not gpu"], FAST),
        (["--slow"], FAST + SLOW),
        (["--full"], FAST + SLOW + FULL),
        (["-m", "full"], FULL),
        (["test_suite.py::test_large[4-2]"], ["test_large[4-2]"]),
        (["-m", "slow"], SLOW),
        (["-m", "not gpu and slow"], SLOW),
        (["test_suite.py::test_slow"], ["test_slow[1]", "test_slow[2]", "test_slow[3]"]),
        (["--sample"], ["test_slow[2]", "test_slowest"]),
        (["test_suite.py::test_values[3-4-2]"], ["test_values[3-4-2]"]),
        (
            ["test_suite.py::test_combinations"],
            [name for name in FAST + SLOW + FULL if name.startswith("test_combinations")],
        ),
        (["-k", "combinations"], FAST[1:3]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_runs(run, options, expected):
    ran, _ = run(*options)
    assert sorted(ran) == sorted(expected)


@pytest.mark.parametrize("options, number", [([], 10), (["--slow"], 40)])
def test_a_quarter_of_the_examples(run, options, number):
    assert f"{number} examples\n" in run(*options)[1]


def test_as_few_combinations_as_have_each_value():
    all_of_them = [(a, b, c) for a in range(2) for b in range(5) for c in range(3)]
    chosen = covering(all_of_them, lambda combination: dict(zip("abc", combination, strict=True)))
    assert len(chosen) == 5
    assert [set(values) for values in zip(*chosen, strict=True)] == [{0, 1}, {0, 1, 2, 3, 4}, {0, 1, 2}]


def test_the_map_names_every_folder_and_what_tests_share():
    named = set(re.findall(r"`([\w/.]+)`", (TESTS / "README.md").read_text()))
    tests = list(TESTS.rglob("test_*.py"))
    folders = {path.parent.name for path in tests}
    shared = {path.name for path in TESTS.glob("*.py")}
    assert folders | shared <= {name.strip("/") for name in named}
    assert len({path.name for path in tests}) == len(tests)  # pytest takes no two of one name


# ---- what the fast set must touch

FORMS = (wait, rank)


@cuda.jit
def of_a_function(signal):
    wait(signal, 1)


def test_primitives_of_a_kernel():
    closed_over = notify

    def kernel(signal):
        of_a_function(signal)
        closed_over(signal, 0, 1)
        device.quiet()

    def by_number(form):
        FORMS[form]()

    assert set(primitives_of(kernel)) == {"wait", "notify", "quiet"}
    assert set(primitives_of(by_number)) == {"wait", "rank", "my_pe"}


def test_what_is_to_be_touched():
    wanted = {"AllReduce: method 'ring'", "Gemm.__call__", "shmemkit.device.put", "examples/00_hello.py"}
    assert wanted <= TO_TOUCH and "shmemkit.device.Teams" not in TO_TOUCH


TOUCHING = """
import numpy as np
from numba import cuda
import shmemkit as sk
from emulated import emulate, spmd
from shmemkit.device import quiet

@cuda.jit
def kernel():
    quiet()

def main(world):
    kernel[1, 1]()
    gather = sk.AllGather(world, 64, "ll")
    gather(np.zeros(4, "int32"))
    gather.free()

def test_touching():
    spmd(2, main)
    assert emulate(["-n", "2", {hello!r}]) == 0
"""


@pytest.mark.slow
def test_the_fast_set_fails_when_it_leaves_something_out(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    pytester.makepyprojecttoml('[tool.pytest.ini_options]\ntestpaths = ["."]')
    pytester.makeconftest('pytest_plugins = ["fast", "touched"]')
    pytester.makepyfile(TOUCHING.format(hello=str(TESTS.parent / "examples" / "00_hello.py")))
    result = pytester.runpytest_subprocess()
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.assert_outcomes(passed=1)
    said = result.outlines[next(i for i, line in enumerate(result.outlines) if "no test touches" in line) :]
    assert {"AllGather: method 'pull'", "examples/02_all_gather.py", "shmemkit.device.put"} <= set(said)
    touched = {"AllGather: method 'll'", "examples/00_hello.py", "shmemkit.device.quiet"}
    assert touched <= TO_TOUCH and not touched & set(said)


@pytest.mark.parametrize(
    "options, whole",
    [
        ([], True),
        (["-m", "not gpu"], True),
        (["--slow"], True),
        (["-n", "2"], True),
        (["-k", "ll"], False),
        (["-m", "slow"], False),
        (["test_it.py"], False),
        (["--lf"], False),
        (["--sample"], False),
        (["--collect-only"], False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_only_the_run_of_all_fast_tests_must_touch_everything(pytester, options, whole):
    pytester.makepyprojecttoml('[tool.pytest.ini_options]\ntestpaths = ["."]')
    pytester.makepyfile(test_it="")
    assert is_whole(pytester.parseconfig("-p", "fast", *options)) == whole


# ---- what a test may take

TAKING = """
import subprocess, sys, time
import cpu_seconds
import pytest

def take(seconds):
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass

def test_little():
    time.sleep(0.1)  # of a clock, not of a core

@pytest.fixture
def made():
    take(0.06)

def test_more(made):
    pass

def test_four_times():
    subprocess.run([sys.executable, "-S", "-c", "import time\\nwhile time.process_time() < 0.3: pass"])

@pytest.mark.slow
def test_slow():
    take(0.12)
"""


@pytest.fixture
def timed(pytester, monkeypatch):
    """Tests whose budgets are 0.05 and 0.2 CPU seconds, run by ``pytester``."""
    pytester.makepyprojecttoml('[tool.pytest.ini_options]\ntestpaths = ["."]')
    pytester.makepyfile(test_taking=TAKING)
    for name, value in {"FAST": 0.05, "SLOW": 0.3, "slower": lambda: 1, "compiles": lambda: False}.items():
        monkeypatch.setattr(cpu_seconds, name, value)
    return pytester


def over(result):
    """-> {title of a list of the report: its tests}"""
    lists = {}
    for line in result.outlines:
        if title := re.search(r"=+ (tests over .*: \d) =", line):
            lists[title[1]] = []
        elif " CPU s  " in line:
            lists[list(lists)[-1]].append(line.partition("::")[2])
    return lists


OVER = {"tests over 4 times their budget, to be smaller or slow: 1": ["test_four_times"]}
OVER |= {"tests over their budget: 1": ["test_more"]}


@pytest.mark.slow
def test_what_takes_four_times_its_budget_fails_the_run(timed):
    result = timed.runpytest_inprocess(*PLUGINS, "-p", "cpu_seconds", "--slow")
    assert (result.ret, over(result)) == (pytest.ExitCode.TESTS_FAILED, OVER)


def test_what_takes_so_long_once_does_not(timed):
    """A neighbour does that."""
    once = "\nran = []\n\ndef test_once():\n    take(0 if ran else 0.3)\n    ran.append(1)\n"
    timed.makepyfile(test_taking=TAKING.partition("@pytest.fixture")[0] + once)
    result = timed.runpytest_inprocess(*PLUGINS, "-p", "cpu_seconds", "--slow")
    assert (result.ret, over(result)) == (0, {})
    result.assert_outcomes(passed=2)


@pytest.mark.slow
def test_so_do_workers(timed, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    settings = "cpu_seconds.FAST, cpu_seconds.slower, cpu_seconds.compiles = 0.05, lambda: 1, bool"
    timed.makeconftest(f'import cpu_seconds\n{settings}\npytest_plugins = ["fast", "cpu_seconds"]')
    result = timed.runpytest_subprocess("-m", "not gpu", "-n", "2")
    assert (result.ret, over(result)) == (pytest.ExitCode.TESTS_FAILED, OVER)


def test_chosen_tests_over_their_budget_are_named_only(timed):
    result = timed.runpytest_inprocess(*PLUGINS, "-p", "cpu_seconds", "-k", "four_times")
    assert (result.ret, over(result)) == (0, {"tests over their budget: 1": ["test_four_times"]})


def test_seconds_of_a_slow_machine_are_longer(monkeypatch):
    monkeypatch.setattr(cpu_seconds, "LOOP", 1e-9)
    assert cpu_seconds.slower() > 1000
    monkeypatch.setattr(cpu_seconds, "LOOP", 1000)
    assert cpu_seconds.slower() == 1
