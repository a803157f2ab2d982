"""Ranks for a notebook: processes that live on between cells, and to which ``%%px`` sends a cell.

    engines = sk.notebook.cluster(4)

    %%px
    import shmemkit as sk
    world = sk.init()

A rank is an IPython engine (ipyparallel) that mpirun has started: ``init()`` works there as under
``shmemkit run``, on GPUs and on the emulator. It needs the extra ``notebook``, and an MPI for several ranks.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import subprocess
import tempfile
import time
from typing import Any

from shmemkit.runtime.world import choose_backend
from shmemkit.support.gpus import n_gpus
from shmemkit.support.notebook import shell
from shmemkit.support.settings import integer, shown
from shmemkit.tools import mpirun

__all__ = ["Engines", "cluster"]


def __dir__():
    return __all__


DEFAULT = 4  # ranks on the emulator
# Ends the process groups whose numbers it reads, once the notebook's process has ended, however that was, and
# removes their folder.
GUARD = 'while read -r group; do groups="$groups -$group"; done; kill -- $groups; rm -rf -- "$1"'


def cluster(n: int | None = None, timeout: float = 60) -> Engines:
    """Start ranks for this notebook and return them as Engines. ``%%px`` then runs a cell on all ranks.

    n        ranks, all on this host. Default: one for each GPU if ``init()`` would use GPUs, else 4
    timeout  seconds within which all ranks must have started

    Root, more ranks than cores, and an mpirun that is not on PATH need no options: the ranks are started as
    by ``shmemkit run``. They inherit the environment and the working directory of the notebook, so set
    SHMEMKIT_TIMEOUT, SHMEMKIT_BACKEND and the like in ``os.environ`` before.

    ImportError without ipyparallel; RuntimeError if there is no MPI for several ranks, or if they do not
    start in time; TypeError or ValueError for wrong arguments.
    """
    if n is None:
        n = n_gpus() if choose_backend()[0] == "nvshmem" else DEFAULT
    elif integer("cluster()", "n", n) < 1:
        raise ValueError(f"cluster(): n is {n}; it must be 1 or more")
    if not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ValueError(f"cluster(): timeout is {shown(timeout)}; it must be a positive number of seconds")
    try:
        import ipyparallel as _  # noqa: F401
    except ImportError as error:
        text = f"cluster() needs ipyparallel ({error}): pip install 'shmemkit[notebook]'"
        raise ImportError(text) from None
    return Engines(n, timeout)


class Engines:
    """The ranks of a notebook, which ``sk.notebook.cluster`` has started. Engine r is rank r.

    n        how many there are
    client   the ipyparallel.Client that is connected to them
    view     its DirectView of all ranks, which ``%%px`` uses: ``view["x"]`` is the list of all ranks' `x`

    They end with ``stop()``, at the end of a ``with`` block, and with the notebook's process.
    """

    client: Any = None
    view: Any = None

    def __init__(self, n: int, timeout: float):
        self.n, self._timeout = n, timeout
        self._cluster: Any = None
        options, program = mpirun.parse(["-n", str(n), "-m", "ipyparallel.engine"])
        found = mpirun.find_launcher(n, None, [])
        command, self._environment = mpirun.command_for(found, options)
        self._command = [*command, *program, *["--mpi"] * (found is not None)]
        self._start()

    def __repr__(self):
        ranks = f"{self.n} rank{'s' * (self.n > 1)}"
        if self.client is None:
            return f"<Engines: {ranks}, stopped; restart() starts them again>"
        return f"<Engines: {ranks}; %%px runs a cell on all of them>"

    def _start(self):
        import ipyparallel

        folder = tempfile.mkdtemp(prefix="shmemkit-notebook-")  # an IPython profile: keys, logs, history
        try:
            self._guard: Any = subprocess.Popen(
                ["/bin/sh", "-c", GUARD, "sh", folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
            self._cluster = started = ipyparallel.Cluster(
                engines=_launcher(self._command), profile_dir=folder, log_level=logging.CRITICAL
            )
            started.start_controller_sync()
            self._watch(started.controller)
            started.start_engines_sync(self.n, environment=self._environment)
            self._watch(started.engine_set)
            self.client = started.connect_client_sync()
            self._wait_for_engines()
        except BaseException:
            self.stop()
            raise
        self.view = self.client[:]
        self.view.block = True
        if running := shell():
            self.view.activate()
            running.run_line_magic("pxconfig", "--progress-after 1e6")  # no line of progress below cells

    def _watch(self, launcher):
        """The guard ends what `launcher` has started, a session of its own."""
        self._guard.stdin.write(f"{launcher.pid}\n")
        self._guard.stdin.flush()

    def _wait_for_engines(self):
        launcher, end = self._cluster.engine_set, time.monotonic() + self._timeout
        while len(self.client.ids) < self.n:
            alive = launcher.process.is_running()
            if not alive or time.monotonic() > end:
                there = f"{len(self.client.ids)} are there after {self._timeout} s"
                why, output = there if alive else "their launcher has ended", launcher.get_output().strip()
                raise RuntimeError(
                    f"cluster(): the {self.n} ranks did not start: {why}. 'shmemkit doctor' shows what is "
                    f"missing here. The launcher's output:\n{output[-2000:] or '(none)'}"
                )
            time.sleep(0.05)

    def interrupt(self) -> None:
        """Interrupt the cell that runs on the ranks, as the notebook's own interrupt does while it waits for
        a cell: each rank that runs Python code gets a KeyboardInterrupt."""
        self._check_running("interrupt")
        self.client.send_signal(signal.SIGINT, block=True)

    def restart(self) -> None:
        """End all ranks, whatever they do, and start as many new ones. All their variables are gone."""
        self.stop()
        self._start()

    def stop(self) -> None:
        """End all ranks, whatever they do. A second call does nothing."""
        started, self._cluster = self._cluster, None
        client, self.client, self.view = self.client, None, None
        try:
            if started is not None:
                with contextlib.suppress(Exception):  # what does not end is left to the guard
                    started.stop_cluster_sync()
        finally:
            if client is not None:
                client.close()
            self._guard.communicate()

    def _check_running(self, what):
        if self.client is None:
            raise RuntimeError(f"{what}(): these ranks are stopped; restart() starts them again")

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _launcher(command):
    """-> the class by which ipyparallel starts the engines"""
    from ipyparallel.cluster.launcher import EngineLauncher, LocalProcessLauncher

    class Launcher(LocalProcessLauncher, EngineLauncher):
        def find_args(self):
            return [*command, *self.cluster_args, *self.engine_args]

        def start(self, n):
            self.n = n
            return super().start()

    return Launcher
