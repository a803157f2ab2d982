"""Ranks that a loop starts, which the environment's variables tell who they are."""

import os
import re
import socket
import subprocess
import sys
import textwrap
import time

import pytest
from launched import ROOT, environment

OF_LAUNCHERS = re.compile(r"RANK|WORLD_SIZE|LOCAL_|GROUP_|ROLE_|MASTER_|TORCHELASTIC_|JOB_COMPLETION_INDEX")


def free_port():
    """A port that nobody uses, nor the one behind it."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port = first.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except (OSError, OverflowError):
                continue
            return port


def clean(**changes):
    env = {name: value for name, value in environment().items() if not OF_LAUNCHERS.match(name)}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return env | {"PYTHONPATH": path, "SHMEMKIT_BACKEND": "emulator", "OMP_NUM_THREADS": "1"} | changes


def plain(rank, n, port):
    """What a program of one's own sets for each rank."""
    return {"RANK": str(rank), "WORLD_SIZE": str(n), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


class Job:
    """`n` ranks that run `code`, or only those of `ranks`, each with the variables ``of(rank, n, port)``, and
    ``before(rank)`` before the command."""

    def __init__(
        self, n, code, *arguments, ranks=None, of=plain, port=None, before=lambda rank: [], **variables
    ):
        self.port, self.since = port or free_port(), time.monotonic()
        self.processes = {
            rank: subprocess.Popen(
                [*before(rank), sys.executable, "-c", textwrap.dedent(code), *arguments],
                env=clean(**of(rank, n, self.port), **variables),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in (range(n) if ranks is None else ranks)
        }

    def ended(self, timeout=40):
        """-> {rank: (exit status, output)}. After `timeout` s all ranks are ended, and the test fails with
        what they printed."""
        found, late, deadline = {}, [], time.monotonic() + timeout
        for rank, process in self.processes.items():
            try:
                output, _ = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                late.append(rank)
                process.kill()
                output, _ = process.communicate()
            found[rank] = process.returncode, output
        self.seconds = time.monotonic() - self.since
        if late:
            pytest.fail(f"ranks {late} had not ended after {timeout} s: {found}")
        return found
