"""Slurm on this host, for tests of srun: a node, its controller and munge, with all files in a folder."""

import contextlib
import os
import random
import shutil
import socket
import subprocess
import time

import pytest

MISSING = [
    name
    for name in ("munged", "slurmctld", "slurmd", "srun")
    if not shutil.which(name, path="/usr/sbin:/usr/bin")
]
WHY_NOT = (
    f"needs root, to run {', '.join(('munged', 'slurmctld', 'slurmd'))}"
    if os.geteuid()
    else f"{MISSING[0]} is not installed; on Debian .ci/launchers installs it"
    if MISSING
    else ""
)
CONFIGURATION = """
ClusterName=tests
FirstJobId={first}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
StateSaveLocation={folder}
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
KillWait=2
NodeName={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=tests Nodes=ALL Default=YES MaxTime=10 State=UP
"""


def _free_ports(n):
    with contextlib.ExitStack() as sockets:
        found = [sockets.enter_context(socket.socket()) for _ in range(n)]
        for each in found:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in found]


def _until(condition, what, folder, processes=()):
    """Skips if one of `processes`, (name, process), has ended: it cannot run here, as in a container."""
    deadline = time.monotonic() + 60
    while not condition():
        for name, process in processes:
            if process.poll() is not None:
                last = (folder / f"{name}.log").read_text().strip().rpartition("\n")[2]
                pytest.skip(f"{name} cannot run here, and exits with {process.returncode}: {last}")
        if time.monotonic() > deadline:
            logs = {path.name: path.read_text()[-2000:] for path in folder.glob("*.log")}
            pytest.fail(f"{what} for 60 s; {logs}")
        time.sleep(0.05)


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """-> the variables that srun, sbatch and salloc need"""
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    folder = tmp_path_factory.mktemp("slurm")
    controller, node = _free_ports(2)
    key, configuration = folder / "munge.key", folder / "slurm.conf"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    (folder / "spool").mkdir()
    # MPICH names its shared memory by the job. What a killed one has left there breaks the next of that name.
    first = random.randrange(1, 60_000_000)
    host = socket.gethostname()
    configuration.write_text(
        CONFIGURATION.format(host=host, first=first, controller=controller, node=node, folder=folder)
    )
    variables = {"SLURM_CONF": str(configuration)}

    started = []
    with contextlib.ExitStack() as daemons:

        def start(name, *arguments):
            log = daemons.enter_context(open(folder / f"{name}.log", "w"))
            command = [shutil.which(name, path="/usr/sbin:/usr/bin"), *arguments]
            process = subprocess.Popen(command, env=os.environ | variables, stdout=log, stderr=log)
            daemons.callback(process.wait, 30)
            daemons.callback(process.terminate)
            started.append((name, process))

        def ask(*command):
            run = subprocess.run(
                command, env=os.environ | variables, capture_output=True, text=True, timeout=20
            )
            return run.stdout.strip()

        files = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munge.pid"}
        files |= {"seed-file": folder / "munge.seed", "log-file": folder / "munged.log"}
        start("munged", "--foreground", "--force", *(f"--{name}={path}" for name, path in files.items()))
        _until(files["socket"].exists, "munged has opened no socket", folder, started)
        start("slurmctld", "-D")
        start("slurmd", "-D")
        idle = "sinfo", "-h", "-o", "%t"
        _until(lambda: ask(*idle) == "idle", "Slurm's node was not idle", folder, started)
        yield variables
        ask("scancel", "--signal=KILL", "--partition=tests")
        _until(lambda: not ask("squeue", "-h"), "a job has not ended", folder)
