"""SHMEMKIT_CHECKED=FILE: GPU tests write which modules' kernels they launched, and what came of it, to FILE,
for docs/checked.py (``shmemkit.tools.ledger``).

Rank 0 writes when all ranks have passed. A rank whose tests fail writes, and then ends them all
(conftest.py).
"""

import json
import os

from shmemkit.tools import ledger

ANSWERS = {"passed": "right", "failed": "wrong", "skipped": "not tried"}
_run = None


class Run:
    """What the tests of this process launched on `world`. Collective."""

    def __init__(self, world, file):
        self.world, self.file, self.cases = world, file, {}
        self.about, self.launches = ledger.about(world), ledger.Launches(world)
        self.launches.__enter__()

    def note(self, report):
        case = self.cases.setdefault(report.nodeid, {"case": report.nodeid, "answer": "right"})
        if not report.passed:
            case["answer"] = ANSWERS[report.outcome]
        if report.when == "teardown":
            case["rooms"] = self.launches.take()

    def end(self):
        self.launches.__exit__()
        wrong = any(case["answer"] == "wrong" for case in self.cases.values())
        if not wrong:
            self.world.host_barrier()  # no rank has failed
            if self.world.rank:
                return
        cases = [case for case in self.cases.values() if case.get("rooms")]
        found = {"ledger": self.about, "answer": "wrong" if wrong else "passed", "cases": cases}
        with open(self.file, "w") as file:
            json.dump(found, file, indent=1)


def begin(world):
    """From now on tests are noted, if they shall be. Collective."""
    global _run
    if _run is None and (file := os.environ.get("SHMEMKIT_CHECKED")):
        _run = Run(world, file)


def pytest_runtest_logreport(report):
    if _run is not None:
        _run.note(report)


def pytest_sessionfinish(session, exitstatus):
    global _run
    ended, _run = _run, None
    if ended is not None and exitstatus in (0, 1):
        ended.end()
