"""The cases of tests/race_cases: no right program is accused, and of each wrong one the lines are named."""

import pytest
from race_cases import CASES, ERROR, RIGHT


def named(case):
    beyond = [pytest.mark.xfail(reason=case.out_of_reach, strict=True)] if case.out_of_reach else []
    return pytest.param(case, id=f"{case.group}-{case.name}", marks=beyond)


@pytest.mark.parametrize("case", [named(c) for c in CASES if c.label != RIGHT])
def test_wrong_program(case):
    error = case.report()
    assert case.found(error), f"{case.name}: {error!r}; {case.reason}"
    assert case.lines_right(error), f"{case.name}: {error}"


@pytest.mark.every(3)
@pytest.mark.parametrize("case", [named(c) for c in CASES if c.label == RIGHT])
def test_right_program(case):
    error = case.alarm()
    assert error is None, f"{case.name}: {error}"


def test_cases_are_as_many_as_promised():
    groups = {case.group for case in CASES}
    assert len(CASES) >= 100 and len({case.name for case in CASES}) == len(CASES)
    for group in groups:
        right = sum(case.label == RIGHT for case in CASES if case.group == group)
        wrong = sum(case.label != RIGHT for case in CASES if case.group == group)
        assert right >= 3 and wrong >= 3, (group, right, wrong)
    assert sum(case.label == ERROR for case in CASES) <= 6
    assert sum(bool(case.out_of_reach) for case in CASES) <= 1
