"""When what kernels have reported is raised."""

import pytest

from shmemkit.device.shmem import bounded_waits
from shmemkit.support import kernel_reports


@pytest.fixture
def report(monkeypatch):
    def reported():
        raise ValueError("as a kernel says")

    def put(checks):
        monkeypatch.setattr(kernel_reports, checks, [reported])

    return put


def test_a_report_of_one_rank_is_raised_before_a_launch(report):
    report("CHECKS")
    with pytest.raises(ValueError, match="as a kernel says"):
        bounded_waits.check()


def test_a_report_of_all_ranks_is_raised_after_a_wait_alone(report):
    report("AFTER_WAITS")
    bounded_waits.check()
    with pytest.raises(ValueError, match="as a kernel says"), bounded_waits.checked():
        pass
