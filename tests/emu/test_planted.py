"""The programs of tests/planted: each bug is found and reported rightly, and no right program is accused."""

import re
from pathlib import Path

import pytest
from planted import DELIVERIES, PLANTED

PAGES = Path(__file__).resolve().parents[2] / "docs"
SEEDS = 60  # of each delivery


@pytest.mark.parametrize("case", PLANTED, ids=lambda case: case.name)
def test_bug(case, request):
    if case.out_of_reach:
        request.applymarker(pytest.mark.xfail(reason=case.out_of_reach, strict=True))
    outcome = case.outcome()
    assert case.is_found(outcome), f"{outcome!r}: {case.reason}"
    assert not case.differs(outcome), outcome


@pytest.mark.every(8)
@pytest.mark.parametrize("case", PLANTED, ids=lambda case: case.name)
def test_right_program(case):
    assert case.alarm(3) is None


@pytest.mark.slow
@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("case", PLANTED, ids=lambda case: case.name)
def test_right_program_in_many_schedules(case, delivery):
    assert case.alarm(SEEDS, [delivery]) is None


def test_each_has_a_name_and_a_paragraph():
    """Each paragraph is a heading of its page, or is bold there."""
    assert len({case.name for case in PLANTED}) == len(PLANTED) >= 300
    assert sum(bool(case.out_of_reach) for case in PLANTED) <= 1
    for paragraph in {case.paragraph for case in PLANTED}:
        page, _, words = paragraph.partition(": ")
        text = (PAGES / f"{page}.md").read_text()
        assert re.search(rf"^#+ {re.escape(words)}|\*\*{re.escape(words)}\*\*", text, re.MULTILINE), paragraph
