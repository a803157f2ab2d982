"""Two hosts: two network namespaces with names of their own, and a cable between them, on one machine.

Open MPI starts its daemon on the other host by a script in the place of ssh, and talks over TCP. The
emulator's ranks are on two nodes of two, and share memory, as they can here.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from launch_outcomes import ROOT, alive, check, run, write_script
from launched import RUN, environment

MPIRUN = os.path.join(os.path.dirname(sys.executable), "mpirun")
N = 4  # two on each host
WHY_NOT = (
    "needs root, to make network namespaces"
    if os.geteuid()
    else "needs ip, of iproute2; on Debian .ci/launchers installs it"
    if not shutil.which("ip")
    else f"needs Open MPI's {MPIRUN}"
    if not os.path.exists(MPIRUN)
    else ""
)
pytestmark = [pytest.mark.full, pytest.mark.processes(N), pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]


class Hosts:
    """`names` of both; `near`, the command that runs another on the first; `agent`, which does as ssh."""

    def __init__(self, folder, stack):
        self.names = [f"sk{os.getpid()}{letter}" for letter in "ab"]
        self.addresses = "10.255.77.1", "10.255.77.2"
        known = "".join(f"{a} {name}\n" for a, name in zip(self.addresses, self.names, strict=True))
        for name in self.names:
            stack.callback(shutil.rmtree, f"/etc/netns/{name}", ignore_errors=True)
            os.makedirs(f"/etc/netns/{name}")
            with open(f"/etc/netns/{name}/hosts", "w") as file:
                file.write(f"127.0.0.1 localhost\n{known}")
            need("ip", "netns", "add", name)
            stack.callback(ip, "netns", "delete", name)
            stack.callback(self.kill, name)
        one, two = self.names
        cable = "type", "veth", "peer", "name", "cable", "netns", two
        need("ip", "link", "add", "cable", "netns", one, *cable)
        for name, address in zip(self.names, self.addresses, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", "cable")
            for link in ("lo", "cable"):
                ip("-n", name, "link", "set", link, "up")
        self.near = [
            "ip",
            "netns",
            "exec",
            one,
            "unshare",
            "--uts",
            "sh",
            "-c",
            f'hostname {one}; exec "$@"',
            "sh",
        ]
        need(*self.near, "true")
        self.agent = folder / "agent"
        self.agent.write_text(
            '#!/bin/sh\nhost=$1; shift\nexec ip netns exec $host unshare --uts sh -c "hostname $host; $*"\n'
        )
        self.agent.chmod(0o755)

    def pids(self, name):
        """Empty if `name` has gone: who cleans up must not hide what failed before."""
        found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def kill(self, name):
        for pid in self.pids(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def mpirun(self, script, how, *options):
        return [
            *self.near,
            *(
                MPIRUN,
                "--allow-run-as-root",
                "-n",
                str(N),
                "-H",
                ",".join(f"{name}:2" for name in self.names),
            ),
            *("--bind-to", "none", "--prtemca", "plm_ssh_agent", self.agent, *options),
            *("-x", "PYTHONPATH"),
            *(sys.executable, "-m", "mpi4py", script, how),
        ]

    def shmemkit_run(self, folder, how):
        """It needs `self.variables`."""
        file = folder / "hosts"
        file.write_text("".join(f"{name} slots=2\n" for name in self.names))
        self.variables = {"PRTE_MCA_plm_ssh_agent": str(self.agent)}
        return [*self.near, *RUN, "-n", str(N), "--hostfile", file, write_script(folder), how]


def need(*command):
    """Run what a host may refuse: a container without CAP_SYS_ADMIN, a kernel without veth."""
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        pytest.skip(f"no two hosts here; {' '.join(command)}: {run.stderr.strip()}")


def ip(*arguments):
    run = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert run.returncode == 0, f"ip {' '.join(arguments)}: {run.stderr}"
    return run.stdout


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        yield Hosts(tmp_path_factory.mktemp("hosts"), stack)


@pytest.mark.parametrize("how", ["kill", "raise"])
def test_ranks_of_two_hosts(hosts, tmp_path, how):
    outcome = run(hosts.mpirun(write_script(tmp_path), how))
    check(how, outcome, N)
    for name in hosts.names:
        assert outcome[1].count(f" on {name} of 2\n") == 2


def test_shmemkit_run_on_two_hosts(hosts, tmp_path):
    """With a host file; everything else is as on one host."""
    outcome = run(hosts.shmemkit_run(tmp_path, "end"), **hosts.variables)
    check("end", outcome, N)
    for name in hosts.names:
        assert outcome[1].count(f" on {name} of 2\n") == 2


@pytest.mark.parametrize("lost", ["host", "link"])
def test_a_host_or_the_link_to_it_is_lost(hosts, tmp_path, lost):
    """All of the job ends, here and there, and mpirun says which host it was. (Its exit status is 0.)"""
    keepalive = {"time": "2", "intvl": "1", "probes": "2"}  # in the place of shmemkit run's 30 s
    job = subprocess.Popen(
        hosts.shmemkit_run(tmp_path, "wait"),
        env=environment(
            PYTHONPATH=str(ROOT),
            **hosts.variables,
            **{f"PRTE_MCA_oob_tcp_keepalive_{name}": value for name, value in keepalive.items()},
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    far = hosts.names[1]
    try:
        output, pids = "", []
        while len(pids) < N and (line := job.stdout.readline()):
            output += line
            pids += re.findall(rf"rank \d of {N}: 10, process (\d+)", line)
        assert len(pids) == N, output
        start = time.monotonic()
        if lost == "host":
            hosts.kill(far)
        else:
            ip("-n", far, "link", "set", "cable", "down")
        report = job.communicate(timeout=60)[0]
        while alive(pids) and time.monotonic() < start + 30:
            time.sleep(0.1)
        took = time.monotonic() - start
        assert not alive(pids) and took < 25, (
            took,
            report,
        )  # 7 s, 11 s for a link; where nobody else computes
    finally:
        job.kill()
        for name in hosts.names:
            hosts.kill(name)
        subprocess.run(["ip", "-n", far, "link", "set", "cable", "up"])  # if not, the next test says so
    assert re.search(rf"Remote (host|daemon): .*\b{far}\n", report), report
