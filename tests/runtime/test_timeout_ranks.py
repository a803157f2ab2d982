"""Ranks that do not reach a barrier of the host programs are named: RankTimeout, under mpirun."""

import re

import pytest
from launched import MPIRUN, mpirun

pytestmark = pytest.mark.skipif(MPIRUN is None, reason="mpirun is not installed")

PRELUDE = """
from mpi4py import MPI
from shmemkit.runtime import host_barrier
from shmemkit.runtime.host_barrier import BoundedBarrier
from shmemkit.support.timeouts import RankTimeout
comm = MPI.COMM_WORLD
rank = comm.rank
def say(*text):
    print(*text, flush=True)
"""


@pytest.mark.slow
def test_a_late_rank_is_named_on_all_ranks_and_to_itself():
    status, output, seconds = mpirun(
        3,
        PRELUDE
        + """
barrier = BoundedBarrier(comm, 1.0)
for _ in range(50):
    barrier.wait("zeros")
if rank == 2:
    time.sleep(0.6)
barrier.wait("full")  # late, but in time
if rank == 1:
    time.sleep(3.0)
for call in ("host_barrier", "free"):
    start = time.monotonic()
    try:
        barrier.wait(call)
    except RankTimeout as error:
        say(f"{rank} {error.missing} {error.call} {time.monotonic() - start < 2.5} {error}")
""",
    )
    assert status == 0, output
    text = (
        "[1] host_barrier True rank 1 has not come to host_barrier() within 1 s; ranks 0 and 2 are there{}. "
        "No further barrier of these ranks can complete. End the program"
    )
    expected = [f"{r} " + text.format("; rank 1 came too late" if r == 1 else "") for r in range(3)]
    assert sorted(output.splitlines()) == sorted(expected * 2)


@pytest.mark.slow
def test_several_are_missing():
    status, output, _ = mpirun(
        4,
        PRELUDE
        + """
barrier = BoundedBarrier(comm, 0.5)
if rank % 2:
    time.sleep(3.0)
else:
    try:
        barrier.wait("zeros")
    except RankTimeout as error:
        say(error.missing, error)
""",
    )
    assert status == 0, output
    assert (
        output.count("[1, 3] ranks 1 and 3 have not come to zeros() within 0.5 s; ranks 0 and 2 are there")
        == 2
    )


@pytest.mark.slow
def test_without_a_limit_one_rank_says_who_is_missing_and_all_wait_on():
    status, output, _ = mpirun(
        3,
        PRELUDE
        + """
host_barrier.PATIENCE = 0.5
barrier = BoundedBarrier(comm)
if rank == 0:
    time.sleep(2.0)
barrier.wait("finalize")
barrier.close()
say("passed")
""",
    )
    assert status == 0, output
    said = "shmemkit: rank 0 has not come to finalize() within 0.5 s; ranks 1 and 2 are there, waiting"
    assert sorted(output.splitlines()) == ["passed"] * 3 + [said]


@pytest.mark.slow
@pytest.mark.parametrize("first", (0, 2))
def test_host_barrier_of_the_emulator(first):
    """One rank's limit passes first: rank 0 shows the error, whoever finds it."""
    status, output, seconds = mpirun(
        3,
        f"""
        from mpi4py import MPI
        os.environ["SHMEMKIT_TIMEOUT"] = "1" if MPI.COMM_WORLD.rank == {first} else "15"
        world = sk.init()
        if world.rank == 1:
            time.sleep(30)
        world.host_barrier()
        """,
    )
    assert status == 1 and seconds < 20
    assert "RankTimeout: rank 1 has not come to host_barrier() (" in output, output
    assert "script.py:14) within 1 s; ranks 0 and 2 are there" in output, output
    assert len(re.findall(r"rank \d of 3 failed", output)) == 1


@pytest.mark.slow
def test_deadlocks_of_the_emulator_are_found_as_ever():
    status, output, seconds = mpirun(
        2,
        """
        @cuda.jit
        def stuck(signals):
            wait(signals, 1, "sys", "acquire", 1)

        world = sk.init()
        stuck[1, 1, world.stream](sk.signals(1))
        world.synchronize()
        """,
        SHMEMKIT_TIMEOUT="30",
    )
    assert status == 1 and seconds < 20
    assert "deadlock: no rank can go on" in output and "RankTimeout" not in output
