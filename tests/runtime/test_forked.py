"""Children that are forked after ``sk.init()``: all they call of shmemkit raises, and the parent goes on."""

import pytest
from fast import full, slow
from launched import ROOT, launch, needs_mpi

# Each child, and what it does: on GPUs, shmemkit run -n 2 tests/scripts/forked_children.py
PROGRAM = ROOT / "tests" / "scripts" / "forked_children.py"


@pytest.mark.slow
@pytest.mark.processes(3)
@pytest.mark.parametrize(
    "n, way, times",
    [
        pytest.param(1, "plain", 1),
        *slow((1, "with", 1), (2, "plain", 2), (2, "with", 1)),
        *full((2, "plain", 30)),
    ],
)
@needs_mpi
def test_children_are_no_ranks(n, way, times):
    for _ in range(times):  # what MPI_Finalize of a child does to the parent differs from run to run
        job = launch("-n", str(n), PROGRAM, way, PYTHONPATH=str(ROOT))
        output = job.stdout + job.stderr
        assert job.returncode == 0 and job.stdout.count("rank ok") == n, output
        assert "of the child" in output and "MPI_ABORT" not in output, output
