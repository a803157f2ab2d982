"""``sk.notebook.cluster``: what is missing is said, and ranks end with the notebook."""

import json
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time

import pytest
from launched import needs_mpi

import shmemkit as sk


@pytest.mark.parametrize(
    "arguments, kind, said",
    [
        ({"n": 0}, ValueError, r"cluster\(\): n is 0; it must be 1 or more"),
        ({"n": "4"}, TypeError, r"cluster\(\): n is '4'"),
        ({"timeout": 0}, ValueError, "timeout is 0; it must be a positive number"),
    ],
)
def test_wrong_arguments(arguments, kind, said):
    with pytest.raises(kind, match=said):
        sk.notebook.cluster(**arguments)


def test_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ipyparallel", None)
    with pytest.raises(ImportError, match=r"pip install 'shmemkit\[notebook\]'"):
        sk.notebook.cluster(2)


def test_says_how_to_get_mpi(monkeypatch):
    pytest.importorskip("ipyparallel")
    monkeypatch.setenv("SHMEMKIT_MPIRUN", "no-such-mpirun")
    with pytest.raises(RuntimeError, match="SHMEMKIT_MPIRUN=no-such-mpirun is not a program"):
        sk.notebook.cluster(2)


@pytest.mark.slow
def test_shows_what_the_launcher_prints(monkeypatch, tmp_path):
    pytest.importorskip("ipyparallel")
    mpirun = tmp_path / "mpirun"
    mpirun.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "mpirun (Open MPI) 5.0.8" || echo no slots left\n'
    )
    mpirun.chmod(mpirun.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("SHMEMKIT_MPIRUN", str(mpirun))
    with pytest.raises(
        RuntimeError, match="2 ranks did not start: their launcher has ended(?s:.*)no slots left"
    ):
        sk.notebook.cluster(2)


def in_notebook(folder, code):
    """A process that runs `code` with `engines`, two ranks, of which it has printed the process numbers. Its
    temporary files are in `folder`."""
    head = """
    import os, signal, time
    import shmemkit as sk
    engines = sk.notebook.cluster(2)
    print(engines.view.apply_sync(os.getpid), flush=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(code)]
    variables = {**os.environ, "TMPDIR": str(folder)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True, env=variables
    )
    return process, json.loads(process.stdout.readline())


def wait_for_the_end_of(ranks, folder):
    deadline = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{rank}") for rank in ranks) or list(folder.glob("shmemkit-notebook-*")):
        assert time.monotonic() < deadline, "ranks or their files live on"
        time.sleep(0.1)


@needs_mpi
@pytest.mark.slow
def test_ranks_end_when_the_notebook_is_killed(tmp_path):
    pytest.importorskip("ipyparallel")
    process, ranks = in_notebook(tmp_path, "time.sleep(600)")
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    wait_for_the_end_of(ranks, tmp_path)


@needs_mpi
@pytest.mark.slow
def test_restart_after_a_rank_has_died(tmp_path):
    pytest.importorskip("ipyparallel")
    process, ranks = in_notebook(
        tmp_path,
        """
    os.kill(engines.view.apply_sync(os.getpid)[1], signal.SIGKILL)
    engines.restart()
    engines.view.execute("import shmemkit as sk; world = sk.init(); found = world.host_allgather(world.rank)")
    print(engines.view["found"])
    """,
    )
    printed, _ = process.communicate(timeout=100)
    assert printed == "[[0, 1], [0, 1]]\n"
    wait_for_the_end_of(ranks, tmp_path)
