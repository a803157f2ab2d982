"""What a program fails by is read at the terminal, whatever took the place of ``sys.stderr`` and of
``sys.excepthook``, and shows the program's own lines."""

import importlib.util
import os
import signal
import subprocess
import sys

import pytest
from fast import slow
from launched import ROOT, environment, launch, needs_mpi

PROGRAM = """
import io, sys, threading
how, late = sys.argv[1:]
def init_torch():
    import os, torch, torch.distributed as dist
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
    dist.init_process_group("gloo", init_method=f"file://{__file__}.store", rank=rank, world_size=2)

if how == "torch" and not late:
    init_torch()
import shmemkit as sk
world = sk.init("emulator")

def fail(rank):
    if world.rank == rank:
        raise ValueError("boom")

if how == "buffer":
    sys.stderr = io.StringIO()
if how == "hook":
    sys.excepthook = lambda *_: None
if how == "torch" and late:
    init_torch()
if how == "thread":  # of one that calls shmemkit, the others wait for the call
    thread = threading.Thread(target=lambda: world.rank == 1 and world.peer_view("boom", 0))
    thread.start()
    thread.join()
else:
    fail(1)
world.host_barrier()
"""
found = importlib.util.find_spec("torch")
torch = pytest.mark.skipif(found is None, reason="needs PyTorch")
PATHS = str(ROOT)
if found is not None and found.origin is not None:  # where this Python has PyTorch from
    PATHS += os.pathsep + os.path.dirname(os.path.dirname(found.origin))


@pytest.mark.processes(2)
@pytest.mark.parametrize(
    "how, late",
    [
        ("buffer", ""),
        *slow(("hook", ""), ("thread", "")),
        pytest.param("torch", "", marks=[torch, pytest.mark.slow]),
        pytest.param("torch", "late", marks=[torch, pytest.mark.slow]),
    ],
)
@needs_mpi
def test_it_is_shown(how, late, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    job = launch("-n", "2", script, how, late, PYTHONPATH=PATHS)
    shown = job.stderr + job.stdout
    assert job.returncode == 1 and "rank 1 of 2 failed" in shown and "boom" in shown, shown
    assert "program.py" in shown and "shmemkit/" not in shown.partition("rank 1 of 2 failed")[2], shown


@pytest.mark.slow
@needs_mpi
def test_a_thread_that_calls_nothing_of_ours_ends_no_rank(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import threading\nimport shmemkit as sk\nworld = sk.init('emulator')\n"
        "thread = threading.Thread(target=lambda: 1 / 0)\nthread.start()\nthread.join()\n"
        "world.host_barrier()\nprint('well')\n"
    )
    job = launch("-n", "2", script, PYTHONPATH=str(ROOT))
    assert job.returncode == 0 and job.stdout.count("well") == 2, job.stdout + job.stderr
    assert "ZeroDivisionError" in job.stderr


def run(script, **variables):
    command = [sys.executable, script]
    run = subprocess.run(
        command,
        env=environment(PYTHONPATH=str(ROOT), **variables),
        capture_output=True,
        text=True,
        timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    return run.returncode, run.stderr


@pytest.mark.slow
@pytest.mark.processes(2)
@pytest.mark.parametrize("whole", [False, *slow(True)])
def test_frames_of_ours_are_hidden(whole, tmp_path):
    """The program's lines stay: its call and its kernel's line, which are above and below ours."""
    script = tmp_path / "program.py"
    script.write_text(
        "import shmemkit as sk\nfrom numba import cuda\n\n@cuda.jit\ndef kernel(x):\n    x[0] = 1 // x[0]\n\n"
        "world = sk.init('emulator')\nsk.bind(kernel, 1, 1, (sk.zeros(1, 'int64'),))\nsk.zeros(-1)\n"
    )
    status, shown = run(script, SHMEMKIT_FULL_TRACEBACK=str(int(whole)))
    assert status == 1 and "line 10, in <module>" in shown and "ValueError: zeros(): shape is -1" in shown
    assert ("symmetric_memory.py" in shown) == whole, shown


@pytest.mark.processes(1)
@pytest.mark.slow
def test_an_interrupt_is_shown_and_ends_by_it(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import os, signal\nimport shmemkit as sk\nworld = sk.init('emulator')\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
    )
    status, shown = run(script)
    assert status == -signal.SIGINT and "KeyboardInterrupt" in shown, shown
