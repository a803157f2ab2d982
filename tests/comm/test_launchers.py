"""A launch counts when 3 ranks make a right all-reduce, a rank killed by -9 ends the others in 5 s, and an
exception of rank 1 is read on the terminal: under torchrun, and with the variables of other launchers."""

import contextlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile

import pytest
from launch_outcomes import finished
from launched import ROOT
from started import Job, clean, free_port, plain

N = 3
PROGRAM = """
import os, signal, sys, time
import numpy as np
import shmemkit as sk

how = sys.argv[1]
{before}
with sk.init({arguments}) as world:
    rank, n = world.rank, world.n_ranks
    total = sk.all_reduce(np.full(8, rank + 1.0, "float32"))
    assert n == 3 and (total == 6).all() and type(world.comm).__name__ == "SocketComm"
    group = world.split(rank % 2)
    both = sk.all_reduce(np.full(8, rank + 1.0, "float32"), group=group)
    assert (both == (2 if rank % 2 else 4)).all() and group.comm.allgather(rank) == list(group.ranks)
    world.print(f"rank {{rank}} of {{n}} is right")
    if how == "raise" and rank == 1:
        raise ValueError("boom of rank 1")
    if how == "kill" and rank == 2:
        print(f"killed at {{time.time()}}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(300 * (how != "well")):
        print(f"alive {{time.time()}}", flush=True)
        time.sleep(0.2)
"""
OWN_COMM = """
import pathlib, pickle

class Files:
    '''A communicator by files in a folder.'''

    def __init__(self, folder, rank, size):
        self.folder, self.rank, self.size, self.calls = pathlib.Path(folder), rank, size, 0

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.size

    def allgather(self, value):
        self.calls += 1
        new = self.folder / f"new {self.rank}"
        new.write_bytes(pickle.dumps(value))
        new.rename(self.folder / f"{self.calls}.{self.rank}")  # whole from the first moment
        names = [self.folder / f"{self.calls}.{rank}" for rank in range(self.size)]
        while not all(name.exists() for name in names):
            time.sleep(0.01)
        return [pickle.loads(name.read_bytes()) for name in names]
"""


def ray(rank, n, port):
    """As Ray Train: the address is that of the host."""
    others = {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(n), "NODE_RANK": "0"}
    return plain(rank, n, port) | others | {"MASTER_ADDR": socket.gethostname()}


def kubernetes(rank, n, port):
    """An indexed Job; the pods' secret is one of the cluster's."""
    said = {name: text for name, text in plain(rank, n, port).items() if name != "RANK"}
    return said | {"JOB_COMPLETION_INDEX": str(rank), "SHMEMKIT_SECRET": "from a Secret of the cluster"}


def own(rank, n, port):
    """No variable that shmemkit knows."""
    return {"MY_RANK": str(rank)}


def torchrun(how, before, arguments):
    """-> (exit status, output of all ranks)"""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as script:
        script.write(PROGRAM.format(before=before, arguments=arguments))
        script.flush()
        command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={N}"]
        command += [f"--master-port={free_port()}", script.name, how]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        job = subprocess.Popen(command, env=clean(), text=True, **pipes)
        output = finished(job, 120)
    return job.returncode, output


def loop(of, how, before, arguments):
    with tempfile.TemporaryDirectory() as folder:
        job = Job(N, PROGRAM.format(before=before, arguments=arguments), how, of=of, FOLDER=folder)
        found = job.ended()
    statuses = [status for status, _ in found.values()]
    if how == "kill":
        assert statuses == [1, 1, -9], found
    return max(statuses), "".join(output for _, output in found.values())


needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs PyTorch: torchrun")
GLOO = "import torch.distributed; torch.distributed.init_process_group('gloo')"
FILES = OWN_COMM + "comm = Files(os.environ['FOLDER'], int(os.environ['MY_RANK']), 3)"
LAUNCHERS = {
    "plain": (plain, "", ""),
    "ray": (ray, "", ""),
    "kubernetes": (kubernetes, "", ""),
    "own_comm": (own, FILES, "comm=comm"),
    "torchrun": (torchrun, "", ""),
    "torchrun_gloo": (torchrun, GLOO, ""),
    "from_torch": (torchrun, GLOO, "comm=sk.comm.from_torch(torch.distributed.new_group())"),
}
ENDS = {  # ranks of ray and own_comm end as plain ones, those of from_torch as torchrun_gloo's
    "ray": ["well"],
    "kubernetes": ["well", "kill"],  # by TCP
    "own_comm": ["well"],
    "from_torch": ["well"],
    "torchrun_gloo": ["raise", "kill"],
}
CASES = [
    pytest.param(name, how, marks=needs_torch if way is torchrun else ())
    for name, (way, *_) in LAUNCHERS.items()
    for how in ENDS.get(name, ["well", "raise", "kill"])
]


@pytest.mark.processes(6)
@pytest.mark.slow
@pytest.mark.parametrize("launcher, how", CASES)
def test_launch(launcher, how):
    way, *rest = LAUNCHERS[launcher]
    status, output = torchrun(how, *rest) if way is torchrun else loop(way, how, *rest)
    assert all(f"rank {rank} of {N} is right" in output for rank in range(N)), output
    assert (status == 0) == (how == "well"), output
    if how == "raise":
        assert "shmemkit: rank 1 of 3 failed\nTraceback" in output and "ValueError: boom of rank 1" in output
    if how == "kill":
        assert "rank 0: rank 2 has died: its connection is lost. All ranks end" in output
        (killed,) = re.findall(r"killed at ([\d.]+)", output)
        assert float(max(re.findall(r"alive ([\d.]+)", output))) - float(killed) < 5


@pytest.mark.processes(2)
def test_two_ranks_without_mpi():
    code = """
        import sys
        import shmemkit as sk
        for _ in range(2):  # World after World
            with sk.init() as world:
                print(world.host_allgather(world.rank))
        assert "mpi4py" not in sys.modules
        """
    for status, output in Job(2, code).ended().values():
        assert status == 0 and output == "[0, 1]\n" * 2


@pytest.mark.processes(2)
def test_ranks_with_different_backends():
    def of(rank, n, port):
        return plain(rank, n, port) | {"SHMEMKIT_BACKEND": "emulator" if rank else "nvshmem"}

    said = "ranks disagree: rank 0 takes the backend 'nvshmem' (SHMEMKIT_BACKEND asks for it), rank 1 takes"
    for status, output in Job(2, "import shmemkit as sk; sk.init()", of=of).ended().values():
        assert status == 1 and f"RuntimeError: {said}" in output


def test_ctrl_c_ends_the_ranks_of_the_loop(tmp_path):
    """As docs/launchers.md has it."""
    text = (ROOT / "docs/launchers.md").read_text()
    script = re.search(r"```bash\n(pids=.*?)```", text, re.DOTALL)[1]
    python = tmp_path / "python"
    python.write_text("#!/bin/bash\necho $$ $MASTER_PORT\nexec sleep 60\n")
    python.chmod(0o755)
    env = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    # In the background of a shell Ctrl-C is ignored, and a script cannot trap what was ignored before it.
    begin = "import os, signal, sys; signal.signal(2, signal.SIG_DFL); os.execvp('bash', sys.argv[1:])"
    command = [sys.executable, "-c", begin, "bash", "-c", script]
    loop = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    ranks = [loop.stdout.readline().split() for _ in range(4)]
    loop.send_signal(signal.SIGINT)
    try:
        loop.communicate(timeout=10)  # the end of its output is that of all ranks
    finally:
        for pid, _ in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
    assert loop.returncode == 130 and len({port for _, port in ranks}) == 1


def test_a_failure_never_ends_with_status_0():
    """The system keeps the last eight bits of a status."""
    from shmemkit.runtime.program_end import ExitHandler

    class Ended(BaseException):
        pass

    class Comm:
        def Get_rank(self):
            return 0

        def Get_size(self):
            return 2

        def Abort(self, status):
            raise Ended(status)

    handler = ExitHandler(Comm())
    try:
        handler.exit(0)
        for status, expected in ((256, 1), (3, 3), (-1, 255), ("why", 1)):
            with pytest.raises(Ended, match=f"^{expected}$"):
                handler.exit(status)
    finally:
        handler.forget()


@pytest.mark.parametrize("answer", ["ranks of another", "too few"])
def test_a_communicator_that_is_wrong(answer):
    import shmemkit as sk

    class Wrong:
        def Get_rank(self):
            return 0

        def Get_size(self):
            return 2

        def allgather(self, value, /):
            return [value, value] if answer != "too few" else [value]

    with pytest.raises(ValueError, match=r"comm\.allgather\(\) of each rank's number returned \[0"):
        sk.init("emulator", comm=Wrong())
