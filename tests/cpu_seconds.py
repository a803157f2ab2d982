"""What a test may take: CPU seconds, its processes' too, since seconds of a busy machine say little.

At its end a run lists the tests that are over their budget. A run of the whole fast set, or of all slow
tests, fails when one takes four times its budget, twice: it is run once more, and the lesser number counts.
What is less, or once, may be a neighbour on the same core.
What is done once for several tests is not counted: fixtures of a wider scope, and Numba's typing of a kernel
that is new in this process. A process that the test starts has seconds of its own, if the mark
``processes(n)`` says how many there are. On a machine slower than the one that the budgets are for, they are
longer by as much: a test that is over its budget is followed by a loop that measures that.
"""

import contextlib
import functools
import resource
import statistics
import sys
import time

import pytest
from _pytest.runner import runtestprotocol
from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib
from fast import is_chosen, with_slow

FAST, SLOW = 0.5, 10.0  # budgets
PROCESS = 1.5  # to start Python with shmemkit and Numba
FAILS = 4  # budgets
LOOP = 0.005  # seconds of the loop below on the machine that the budgets are for
LISTED = 20

_once = [0.0, 0]  # CPU seconds of what is done once, and how deep this is in it
_BEGAN = pytest.StashKey()
_OVER = "over_budget"


def cpu_seconds():
    """-> those of this process, and of all that it has waited for"""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def slower():
    """How many times longer than on the machine of the budgets this one takes now; 1 if it is as fast."""
    return max(1.0, statistics.median(_loop() for _ in range(9)) / LOOP)


def _loop():
    began, values = time.process_time(), {}
    for i in range(60_000):
        values[i & 255] = values.get(i & 127, i) + 1
    return time.process_time() - began


def budget(item):
    if item.get_closest_marker("full"):
        return float("inf")
    many = item.get_closest_marker("hypothesis") and with_slow(item.config)  # four times the examples
    started = sum(mark.args[0] for mark in item.iter_markers("processes"))
    return (SLOW if many or item.get_closest_marker("slow") else FAST) + PROCESS * started


@contextlib.contextmanager
def _done_once():
    began, _once[1] = cpu_seconds(), _once[1] + 1
    try:
        yield
    finally:
        _once[1] -= 1
        if not _once[1]:
            _once[0] += cpu_seconds() - began


def pytest_sessionstart(session):
    """Others have imported the library by now, if they need it."""
    if type_check := sys.modules.get("shmemkit.compiler.type_check"):
        patch = pytest.MonkeyPatch()
        session.config.add_cleanup(patch.undo)
        patch.setattr(type_check, "check", functools.wraps(type_check.check)(_done_once()(type_check.check)))


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef):
    with contextlib.nullcontext() if fixturedef.scope == "function" else _done_once():
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item):
    item.stash[_BEGAN] = cpu_seconds() - _once[0]
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    try:
        return (yield)
    finally:
        taken, most = cpu_seconds() - _once[0] - item.stash[_BEGAN], budget(item)
        if taken > most and not item.get_closest_marker("gpu"):
            taken /= slower()
            if taken > most:
                item.user_properties.append((_OVER, (taken, most)))


def _over(of):
    """What a test, or a report, says of a budget that was not enough: (seconds taken, budget), or None"""
    return next((tuple(value) for name, value in of.user_properties if name == _OVER), None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """What would fail the run is run once more; that teardown is reported, too."""
    result = yield
    found = _over(item)
    if found and found[0] > FAILS * found[1] and not compiles():
        item.user_properties[:] = [each for each in item.user_properties if each[0] != _OVER]
        item._initrequest()
        teardown = runtestprotocol(item, log=False, nextitem=nextitem)[-1]
        item.ihook.pytest_runtest_logreport(report=teardown)
    return result


class Judge:
    """Of the process that reports: workers of xdist send it their reports."""

    def __init__(self, config):
        self.config, self.over, self.failed, self._least = config, [], [], {}

    def pytest_runtest_logreport(self, report):
        """Of a test that is run once more the lesser number counts; that may be within the budget."""
        nodeid, found = report.nodeid, _over(report)
        if report.when == "teardown" and (found or nodeid in self._least):
            found = found or (0, 0)
            self._least[nodeid] = min(found, self._least.get(nodeid, found))

    def pytest_sessionfinish(self, session, exitstatus):
        self.over = [(*found, name) for name, found in self._least.items() if found[1]]
        self.failed = [entry for entry in self.over if entry[0] > FAILS * entry[1]]
        if not self.failed or is_chosen(self.config) or compiles():
            self.failed = []
        elif exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter):
        if self.over:
            title = f"tests over {FAILS} times their budget, to be smaller or slow"
            _write(terminalreporter, self.failed, title, red=True)
            within = [entry for entry in self.over if entry not in self.failed]
            _write(terminalreporter, within, "tests over their budget")


def _write(reporter, entries, title, **markup):
    if entries:
        reporter.section(f"{title}: {len(entries)}", **markup)
    for taken, most, name in sorted(entries, reverse=True)[: None if markup else LISTED]:
        reporter.write_line(f"{taken:6.2f} of {most:g} CPU s  {name}")
    if len(entries) > LISTED and not markup:
        reporter.write_line(f"       and {len(entries) - LISTED} more")


def compiles():
    """Whether kernels are compiled to machine code here. That takes longer, and is not judged."""
    try:
        for name in ("nvrtc", "nvvm"):
            load_nvidia_dynamic_lib(name)
    except DynamicLibNotFoundError:
        return False
    return True


def pytest_configure(config):
    config.addinivalue_line(
        "markers", "processes(n): starts n that import shmemkit; its budget is longer by as many"
    )
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Judge(config), "cpu_seconds_judge")
