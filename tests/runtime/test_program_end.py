"""However one rank ends, all end: with its exit status, and nobody hangs."""

import pytest
from fast import slow
from launched import launch, needs_mpi

pytestmark = needs_mpi

PROGRAM = """
import sys
from numba import cuda
import shmemkit as sk
from shmemkit.device import wait

@cuda.jit
def stuck(signals):
    wait(signals, 1, "sys", "acquire", 1)

def end(how, world):
    if world.rank == world.n_ranks - 1:
        if how == "status": sys.exit(3)
        if how == "message": sys.exit("wrong data")
        if how == "raise": raise ValueError("boom")
    if how == "stuck":
        signals = sk.signals(1)
        stuck[1, 1](signals)  # returns, since the host might still set the signal; at exit it is a deadlock

how, managed = sys.argv[1:]
world = sk.init("emulator")
if managed == "with":
    with world:
        end(how, world)
        world.host_barrier()
else:
    end(how, world)
    world.host_barrier()
"""


@pytest.mark.slow
@pytest.mark.processes(2)
def test_different_collective_calls(tmp_path):
    script = tmp_path / "program.py"
    script.write_text("import shmemkit as sk\nworld = sk.init('emulator')\nif world.rank == 0: sk.zeros(3)\n")
    job = launch("-n", "3", script)
    assert job.returncode == 1 and "program.py:3), ranks 1 and 2 call finalize()." in job.stderr, job.stderr


@pytest.mark.processes(2)
@pytest.mark.each_value
@pytest.mark.every(2)
@pytest.mark.parametrize("n", [2, *slow(1)])
@pytest.mark.parametrize("managed", ["with", "without"])
@pytest.mark.parametrize(
    "how, status, message",
    [
        ("well", 0, ""),
        *slow(("status", 3, ""), ("message", 1, "wrong data"), ("raise", 1, "ValueError: boom")),
        ("stuck", 1, "signals[0] on rank 0 >= 1, now 0"),
    ],
)
def test_status(how, status, message, managed, n, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    job = launch("-n", str(n), script, how, managed)
    assert job.returncode == status and message in job.stderr, job.stdout + job.stderr
