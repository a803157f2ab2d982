"""What counts as started: one script under each launcher: to its end, with a killed rank, with an exception.

All ranks are in one World, whose all-reduce is right. The others end within 5 s of a rank that SIGKILL ended.
An exception of rank 1 is read where the launcher writes. docs/launchers.md has the table of the results.
"""

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launched import ROOT, environment

N = 3
SCRIPT = """
import os, signal, sys, time
import shmemkit as sk

with sk.init("emulator") as world:
    total = sk.all_reduce(sk.full(4, world.rank + 1, "float32"))
    line = f"rank {world.rank} of {world.n_ranks}: {total[0]:g}, process {os.getpid()}"
    line += f" on {os.uname().nodename} of {world.local_size}"
    os.write(1, f"{line}\\n".encode())  # whole, beside those of others
    world.barrier()
    how = sys.argv[1]
    if how == "kill" and world.rank == 1:
        os.write(1, f"killed at {time.time()}\\n".encode())
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise" and world.rank == 1:
        raise ValueError("rank 1 has found a mistake")
    while how != "end":  # until this rank is ended, too
        time.sleep(0.05)
        world.barrier()
"""


def write_script(folder):
    script = Path(folder) / "script.py"
    script.write_text(SCRIPT)
    return script


def run(command, timeout=100, **variables):
    """-> (exit status, what was printed, when it ended)"""
    variables = environment(PYTHONPATH=str(ROOT), **variables)
    process = subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    output = finished(process, timeout)
    return process.returncode, output, time.time()


def finished(process, timeout):
    """-> what it printed. After `timeout` s it and its ranks are ended, and the test fails."""
    try:
        return "".join(filter(None, process.communicate(timeout=timeout)))
    except subprocess.TimeoutExpired:
        process.terminate()  # a launcher then ends its ranks
    try:
        output = "".join(filter(None, process.communicate(timeout=40)))  # torchrun's patience is 30 s
    except subprocess.TimeoutExpired as error:
        output = b"".join(filter(None, (error.output, error.stderr))).decode(errors="replace")
        process.kill()
        process.wait()
    kill(re.findall(r"rank \d of \d: \d+, process (\d+)", output))
    pytest.fail(f"not ended after {timeout} s: {output}")


def kill(pids):
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def alive(pids):
    """Those that run."""
    found = []
    for pid in pids:
        try:
            if ") Z " not in Path(f"/proc/{pid}/stat").read_text():
                found.append(pid)
        except OSError:
            pass
    return found


def check(how, outcome, n=N):
    """Whether a run of the script with `how` went as it has to."""
    status, output, end = outcome
    ranks = re.findall(rf"rank (\d) of {n}: {n * (n + 1) // 2}, process (\d+)", output)
    pids, deadline = [pid for _, pid in ranks], time.time() + 15
    if alive(pids):  # mpirun ends as soon as it has sent them a signal
        while alive(pids) and time.time() < deadline:
            time.sleep(0.05)
        end = time.time()
    left = alive(pids)
    kill(left)
    assert sorted(int(rank) for rank, _ in ranks) == [*range(n)], output
    assert not left, output
    assert (status == 0) == (how == "end"), output
    if how == "kill":
        killed = re.search(r"killed at ([\d.]+)", output)
        assert killed and end - float(killed[1]) < 5, output
    if how == "raise":
        assert output.count("ValueError: rank 1 has found a mistake") == 1, output
