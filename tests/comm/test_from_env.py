"""``shmemkit.comm.from_env``: ranks that the environment's variables bring together, and what goes wrong."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from started import Job, free_port, plain

from shmemkit.comm import choice, environment

MEET = """
import os, sys, time
from shmemkit.comm import from_env
comm = from_env(*map(float, sys.argv[1:]))
print(comm.allgather(comm.Get_rank()), from_env() is comm, flush=True)
"""
SECRET = "a secret of the tests"
NAMES = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT JOB_COMPLETION_INDEX".split()
SLURM = {"SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "4"}
AT = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


# -- what the variables say


@pytest.fixture
def told(monkeypatch):
    prefixes = "OMPI_", "PMI", "MPI_", "SLURM_", "TORCHELASTIC_", "SHMEMKIT_"
    for name in [*(n for n in os.environ if n.startswith(prefixes)), *NAMES]:
        monkeypatch.delenv(name, raising=False)

    def told(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        found = environment.read()
        return found if found is None else (found.rank, found.size)

    return told


@pytest.mark.parametrize(
    "variables, expected",
    [
        ({}, None),
        ({"RANK": "1", "WORLD_SIZE": "3"}, (1, 3)),
        ({"WORLD_SIZE": "1"}, (None, 1)),
        ({"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "3"}, (2, 3)),
        (SLURM, (2, 4)),
        (SLURM | {"RANK": "5", "WORLD_SIZE": "8"}, (5, 8)),  # torchrun, started by srun
        (SLURM | {"WORLD_SIZE": "4"}, (2, 4)),
        (SLURM | {"SLURM_PTY_PORT": "4000"}, None),  # srun --pty bash
        (SLURM | {"OMPI_COMM_WORLD_SIZE": "1"}, None),  # mpirun, which starts its own processes by srun
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # a batch script
    ],
)
def test_who_am_i(told, variables, expected):
    assert told(**variables) == expected


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"RANK": "x", "WORLD_SIZE": "2"}, "RANK is 'x'; it must be an integer, 0 or more"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE is '0'; it must be an integer, 1 or more"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "this is rank 2, but WORLD_SIZE is 2: ranks are 0 to 1"),
        ({"WORLD_SIZE": "2"}, r"there are 2 ranks \(WORLD_SIZE\), but no variable says which .* needs RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "says where rank 0 is. Each rank needs RANK"),
        ({"RANK": "0", "WORLD_SIZE": "2", **AT, "MASTER_PORT": "70000"}, "'70000'; .* integer, 1 to 65535"),
        (
            {"RANK": "0", "WORLD_SIZE": "2", **AT, "MASTER_ADDR": "node1"},
            "MASTER_ADDR is 'node1', so ranks may be on several hosts.* Set SHMEMKIT_SECRET on all ranks",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", **AT, "SHMEMKIT_SECRET": "short"},
            "5 characters; .* 16 or more",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", **AT, "MASTER_PORT": "65535", "SHMEMKIT_SECRET": SECRET},
            "MASTER_PORT is 65535, .* smaller MASTER_PORT, or set SHMEMKIT_PORT",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2", **AT, "MASTER_ADDR": "a" * 64, "SHMEMKIT_SECRET": SECRET},
            "MASTER_ADDR is 'a{64}', which cannot be a host's name",
        ),
    ],
)
def test_wrong_variables(told, variables, message):
    """Also of ``sk.init()``: WORLD_SIZE is never ignored."""
    for call in (choice.from_env, choice.default):
        with pytest.raises(ValueError, match=message):
            told(**variables)
            call()


@pytest.mark.parametrize(
    "variables, message",
    [
        ({"RANK": "1"}, "RANK is 1, and WORLD_SIZE is not set"),
        ({"RANK": "0", **AT}, "RANK is 0, and WORLD_SIZE is not set"),
        ({"JOB_COMPLETION_INDEX": "0"}, "JOB_COMPLETION_INDEX is 0, .* completions, .* or WORLD_SIZE=1"),
        ({"JOB_COMPLETION_INDEX": "3"}, "JOB_COMPLETION_INDEX is 3, .* WORLD_SIZE is not set"),
    ],
)
def test_a_rank_of_how_many(told, monkeypatch, variables, message):
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    told(**variables)
    with pytest.raises(ValueError, match=message):
        choice.default()
    told(WORLD_SIZE="1", RANK="0")
    assert choice.default() is None


@pytest.mark.processes(1)
def test_srun_without_pmi():
    """In a process of its own: MPI, which it looks for, would stay in this one."""
    job = Job(1, "import shmemkit as sk; sk.init()", of=lambda rank, n, port: SLURM)
    status, output = job.ended()[0]
    where = r"4 ranks \(SLURM_STEP_NUM_TASKS\), but .* where rank 0 is.*srun --mpi=pmix or --mpi=pmi2"
    assert status == 1 and re.search(where, output, re.DOTALL), output


@pytest.mark.parametrize(
    "variables, expected",
    [
        (AT, b""),
        (AT | {"MASTER_ADDR": "node1", "LOCAL_WORLD_SIZE": "4"}, b""),  # torchrun, Ray: all on one host
        (SLURM | {"SLURM_STEP_NUM_NODES": "1"}, b""),
        (AT | {"SHMEMKIT_SECRET": SECRET}, ("127.0.0.1", 29501)),
        (AT | {"SHMEMKIT_SECRET": SECRET, "SHMEMKIT_PORT": "4000"}, ("127.0.0.1", 4000)),
        (AT | {"SHMEMKIT_SECRET": SECRET, "MASTER_ADDR": "[::1]"}, ("::1", 29501)),
        (
            AT | {"MASTER_PORT": "65535", "SHMEMKIT_SECRET": SECRET, "SHMEMKIT_PORT": "4000"},
            ("127.0.0.1", 4000),
        ),
    ],
)
def test_where_ranks_meet(told, variables, expected):
    told(RANK="1", WORLD_SIZE="4", **variables)
    address, secret = environment.rendezvous("from_env()", environment.read())
    if expected:
        assert address == expected and secret == SECRET.encode()
    else:
        assert address.startswith(b"\0shmemkit-") and secret == b""
        told(MASTER_ADDR="localhost")
        assert environment.rendezvous("from_env()", environment.read())[0] == address  # another name of it
        told(MASTER_PORT="29600")
        assert environment.rendezvous("from_env()", environment.read())[0] != address  # another job


def test_a_secret_of_any_bytes(told):
    told(RANK="1", WORLD_SIZE="4", SHMEMKIT_SECRET=os.fsdecode(b"\xff" * 16), **AT)
    assert environment.rendezvous("from_env()", environment.read())[1] == b"\xff" * 16


def test_one_rank(told):
    for size in (None, "1"):
        if size:
            told(WORLD_SIZE=size)
        assert choice.from_env().allgather(5) == [5]
    with pytest.raises(TypeError, match=r"from_env\(\): timeout is '5'; it must be a number of seconds"):
        choice.from_env(timeout="5")  # pyright: ignore[reportArgumentType]


# -- processes. They do not import the rest of shmemkit


@pytest.mark.every(2)
@pytest.mark.processes(1)
@pytest.mark.parametrize("secret", [{}, {"SHMEMKIT_SECRET": SECRET}], ids=["one_host", "tcp"])
def test_ranks_meet(secret):
    for status, output in Job(3, MEET, **secret).ended().values():
        assert status == 0 and output == "[0, 1, 2] True\n"


@pytest.mark.processes(1)
def test_a_rank_that_never_comes_is_named():
    found = Job(3, MEET, "5", ranks=[0, 2]).ended()
    text = "rank 1 has not come to from_env() within 5 s; ranks 0 and 2 are there. Are all 3 ranks"
    assert all(status == 1 and f"RankTimeout: {text}" in output for status, output in found.values()), found


@pytest.mark.processes(1)
@pytest.mark.parametrize("secret", [{}, {"SHMEMKIT_SECRET": SECRET}], ids=["one_host", "tcp"])
def test_rank_0_never_comes(secret):
    ((status, output),) = Job(2, MEET, "0.5", ranks=[1], **secret).ended().values()
    assert status == 1, output
    assert "rank 0 has not come to from_env() within 0.5 s; rank 1 is there, and looks at" in output


@pytest.mark.processes(1)
def test_another_secret():
    def of(rank, n, port):
        return plain(rank, n, port) | {"SHMEMKIT_SECRET": SECRET + str(rank)}

    found = Job(2, MEET, "5", of=of).ended()
    assert "PermissionError: from_env(): SHMEMKIT_SECRET is not that of rank 0. Set it" in found[1][1], found
    assert "a process that calls itself rank 1 has another SHMEMKIT_SECRET" in found[0][1]
    assert "RankTimeout: rank 1 has not come" in found[0][1]


@pytest.mark.every(2)
@pytest.mark.processes(1)
@pytest.mark.parametrize(
    "wrong, said",
    [
        ({"WORLD_SIZE": "4"}, "rank 2 was told of 4 ranks, rank 0 of 3"),
        ({"RANK": "1"}, "there is a rank 1 already"),
    ],
)
def test_ranks_disagree(wrong, said):
    def of(rank, n, port):
        return plain(rank, n, port) | (wrong if rank == 2 else {})

    found = Job(3, MEET, "30", of=of).ended()
    assert all(f"RuntimeError: from_env(): {said}" in output for _, output in found.values()), found


@pytest.mark.processes(1)
def test_the_port_is_in_use():
    """By a program that speaks another protocol, or says nothing."""
    port = free_port()
    with socket.create_server(("127.0.0.1", port + 1)) as other:

        def answer():
            while True:
                try:
                    sock, _ = other.accept()
                except OSError:
                    return
                sock.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=answer, daemon=True).start()
        found = Job(2, MEET, "5", port=port, SHMEMKIT_SECRET=SECRET).ended()
        other.shutdown(socket.SHUT_RDWR)
    at = f"127.0.0.1, port {port + 1}"
    assert (
        f"rank 0 cannot listen at {at}. Another program uses it. Choose another SHMEMKIT_PORT" in found[0][1]
    )
    assert f"another program than rank 0 answers at {at}. Choose another port: SHMEMKIT_PORT" in found[1][1]


@pytest.mark.processes(1)
def test_another_job_has_this_port(told):
    """On one host, too, though it takes no port. The earlier one, which still waits, ends: it would take
    ranks of the later one."""
    job = Job(2, MEET, "30", ranks=[0])
    told(**plain(0, 2, job.port))
    name = environment.rendezvous("from_env()", environment.read())[0][1:].decode()
    deadline = time.monotonic() + 20
    while f"@{name}\n" not in Path("/proc/net/unix").read_text():
        assert time.monotonic() < deadline, job.ended()
        time.sleep(0.05)
    second = Job(2, MEET, "30", ranks=[0], port=job.port).ended()
    assert "rank 0 cannot listen at the Unix socket shmemkit-" in second[0][1], second
    assert "has been told to end, too. Choose another MASTER_PORT" in second[0][1], second
    assert "RuntimeError: from_env(): there is a rank 0 already" in job.ended()[0][1]


@pytest.mark.every(3)
@pytest.mark.processes(2)
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("secret", [{}, {"SHMEMKIT_SECRET": SECRET}], ids=["one_host", "tcp"])
def test_kill_9_of_one_ends_all(victim, secret):
    job = Job(4, MEET + "while True: time.sleep(0.1)  # in no collective call", **secret)
    lines = {rank: process.stdout.readline() for rank, process in job.processes.items()}
    assert set(lines.values()) == {"[0, 1, 2, 3] True\n"}
    job.processes[victim].send_signal(signal.SIGKILL)
    since = time.monotonic()
    found = job.ended()
    assert time.monotonic() - since < 5
    assert [status for status, _ in found.values()] == [-9 if r == victim else 1 for r in range(4)]
    said = "".join(output for _, output in found.values())
    assert f"rank {victim} has died: its connection is lost. All ranks end" in said


@pytest.mark.processes(1)
def test_abort_ends_all_with_its_status():
    """What was printed before is not lost."""
    code = """
        print("buffered", end="")
        if comm.rank == 1:
            sys.stdout.flush()
            time.sleep(0.5)  # the others print, too
            comm.Abort(7)
        time.sleep(60)
        """
    for status, output in Job(3, MEET + textwrap.dedent(code)).ended(10).values():
        assert status == 7 and output.endswith("buffered")


@pytest.mark.processes(1)
def test_a_child_of_a_rank():
    """It leaves its parent's connections alone, and is told so."""
    code = """
        child = os.fork()
        if child == 0:
            try:
                comm.allgather(5)
            except RuntimeError as error:
                print(error, flush=True)
            sys.exit()
        os.waitpid(child, 0)
        print(comm.allgather(comm.rank))
        """
    for rank, (status, output) in Job(2, MEET + textwrap.dedent(code)).ended().items():
        assert status == 0 and output.endswith("[0, 1]\n"), output
        assert f"this process is a child (fork) of rank {rank}: only that rank" in output


@pytest.mark.slow
@pytest.mark.processes(1)
def test_a_communicator_of_ones_own_over_several_hosts():
    """Its ranks meet by TCP, with a secret that it brings them."""
    code = """
        from shmemkit.comm import choice
        class Own:
            Get_rank, Get_size, allgather = comm.Get_rank, comm.Get_size, comm.allgather
        choice._host = lambda: ("host", comm.rank)
        ours = choice.whole(Own())
        ours.Split(0, 0).barrier()
        print(ours.allgather(-comm.rank), {peer.family.name for peer in ours.link.peers.values()})
        """
    for status, output in Job(3, MEET + textwrap.dedent(code)).ended().values():
        assert status == 0 and re.search(r"\[0, -1, -2\] {'AF_INET6?'}", output), output


# -- hosts: network namespaces, in which all traffic stays


@pytest.fixture
def two_hosts():
    """-> (names of two namespaces, which a link connects; the address of the first)"""
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2, for network namespaces")
    number = os.getpid() % 65536
    names = [f"sk{number:x}{letter}" for letter in "ab"]

    def ip(*arguments):
        return subprocess.run(["ip", *arguments], capture_output=True, text=True)

    def need(*arguments):
        if (made := ip(*arguments)).returncode:
            pytest.skip(f"no two hosts here; ip {' '.join(arguments)}: {made.stderr.strip()}")

    def do(*arguments):
        done = ip(*arguments)
        assert done.returncode == 0, (arguments, done.stderr)

    try:
        for name in names:
            need("netns", "add", name)
        need("-n", names[0], "link", "add", "sk0", "type", "veth", "peer", "name", "sk0", "netns", names[1])
        for number, name in enumerate(names, 1):
            do("-n", name, "addr", "add", f"10.99.7.{number}/24", "dev", "sk0")
            for device in ("lo", "sk0"):
                do("-n", name, "link", "set", device, "up")
        yield names, "10.99.7.1"
    finally:
        for name in names:
            ip("netns", "del", name)


@pytest.mark.slow
@pytest.mark.processes(1)
@pytest.mark.parametrize("what", ["well", "kill", "link"])
def test_two_hosts(two_hosts, what):
    names, address = two_hosts

    def of(rank, n, port):
        return plain(rank, n, port) | {"MASTER_ADDR": address, "SHMEMKIT_SECRET": SECRET}

    code = MEET + ("" if what == "well" else "time.sleep(60)")
    job = Job(2, code, of=of, before=lambda rank: ["ip", "netns", "exec", names[rank]])
    if what == "well":
        assert list(job.ended().values()) == [(0, "[0, 1] True\n")] * 2
        return
    for process in job.processes.values():
        assert process.stdout.readline() == "[0, 1] True\n"
    if what == "kill":
        job.processes[1].kill()
    else:
        subprocess.run(["ip", "-n", names[1], "link", "set", "sk0", "down"], check=True)
    since = time.monotonic()
    found = job.ended()
    assert time.monotonic() - since < (5 if what == "kill" else 30)
    assert "rank 1 has died: its connection is lost" in found[0][1]
    assert what == "kill" or "rank 0 has died: its connection is lost" in found[1][1]
