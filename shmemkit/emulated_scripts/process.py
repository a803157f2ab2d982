"""What each PE of a script has of its own although all share a process: its ``__main__``, the modules of the
script, and what ``Surroundings`` holds."""

import copy
import logging
import os
import random
import sys
import sysconfig
import time
from collections import Counter
from types import ModuleType

import numpy as np

from .streams import ScriptStream

_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
IDLE = 10.0  # seconds in which nothing happens but polls of host programs, until they count as a deadlock
_inside = None  # the Process whose things are installed


def launcher_variables(pe, n_ranks, local_size):
    """What mpirun, torchrun and srun tell a process about itself."""
    names = {
        "OMPI_COMM_WORLD_RANK PMI_RANK RANK SLURM_PROCID": pe,
        "OMPI_COMM_WORLD_SIZE PMI_SIZE WORLD_SIZE SLURM_NTASKS": n_ranks,
        "OMPI_COMM_WORLD_LOCAL_RANK LOCAL_RANK SLURM_LOCALID": pe % local_size,
        "OMPI_COMM_WORLD_LOCAL_SIZE LOCAL_WORLD_SIZE": local_size,
    }
    return {name: str(value) for joint, value in names.items() for name in joint.split()}


class Surroundings:
    """What a process has but for its modules: sys.argv and sys.path, the environment, the working directory,
    loggers, the states of random number generators."""

    def __init__(self):
        self.argv, self.path = list(sys.argv), list(sys.path)
        self.environment, self.folder = os.environ.copy(), os.getcwd()
        self.loggers = dict(logging.root.manager.loggerDict)
        self.handlers, self.level = list(logging.root.handlers), logging.root.level
        self.random = random.getstate(), np.random.get_state()

    def restore(self):
        sys.argv[:], sys.path[:] = self.argv, self.path
        for name in os.environ.keys() - self.environment.keys():
            del os.environ[name]
        for name, value in self.environment.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        if os.getcwd() != self.folder:
            os.chdir(self.folder)
        logging.root.manager.loggerDict.clear()
        logging.root.manager.loggerDict.update(self.loggers)
        logging.root.handlers[:] = self.handlers
        if logging.root.level != self.level:
            logging.root.setLevel(self.level)
        if self.random is not None:
            random.setstate(self.random[0])
            np.random.set_state(self.random[1])


class Process:
    """Modules that are not installed belong to the PE, but for those `shared`, and of packages that are.
    `surroundings`: those it begins in."""

    def __init__(self, host, surroundings, shared):
        self.host, self.pe, self.machine = host, host.pe, host.program.machine
        self.shared = shared
        self.surroundings = copy.copy(surroundings)
        self.surroundings.environment = {
            **surroundings.environment,
            **launcher_variables(self.pe, self.machine.n_ranks, self.machine.local_size),
        }
        self.surroundings.random = None  # as it comes: PEs that do not seed have different numbers
        self.modules = {}  # while others run
        self.at_exit = []
        self.null = self.machine.defaults[self.pe] = self.stream = ScriptStream(process=self)
        self.device = 0
        self.random = np.random.RandomState()  # CuPy's
        self.inits = 0  # calls of nvshmem.core.init without their finalize
        self.allocations = {}  # address -> [symmetric array, references], of nvshmem.core
        self.splits, self.finalized = Counter(), False  # of MPI: communicator -> how often it was split
        self.polled = (-1, 0.0)  # the scheduler's progress at a poll, and when that was first so

    # -- whose turn it is
    def enter(self):
        """The host program of this PE goes on."""
        global _inside
        if _inside is self:
            return
        if _inside is not None:
            _inside.leave()
        _inside = self
        sys.modules.update(self.modules)
        self.surroundings.restore()

    def leave(self):
        global _inside
        _inside = None
        self.modules = {name: m for name, m in list(sys.modules.items()) if self._is_mine(name, m)}
        for name in self.modules:
            del sys.modules[name]
        self.surroundings = Surroundings()

    def poll(self, is_ready, why):
        """-> whether `is_ready()`. If not, the others have had a turn first; `why`: what it waits for."""
        if not is_ready():
            self.give_turn(why)
        return is_ready()

    def give_turn(self, why):
        """Between two polls of the host program: the others go on."""
        scheduler, host = self.machine.scheduler, self.host
        if scheduler.progress != self.polled[0]:
            self.polled = scheduler.progress, time.monotonic()
        host.can_go_on = time.monotonic() - self.polled[1] < IDLE  # it may look at the clock, too
        try:
            with self.machine.host_waits_for(self.pe, lambda: why):
                scheduler.spin(host, lambda: why)
        finally:
            host.can_go_on = False

    def _is_mine(self, name, module):
        if name == "__main__":
            return True
        if name.partition(".")[0] in self.shared or type(module) is not ModuleType:
            return False
        file = getattr(module, "__file__", None)
        place = file or next(iter(getattr(module, "__path__", ())), "")  # of a package without __init__.py
        return (place.endswith(".py") or not file) and place != "" and not _is_installed(place)

    # -- streams
    @property
    def streams(self):
        return self.machine.streams[self.pe]

    @property
    def stream(self):
        """CuPy's current one."""
        return self.machine.current[self.pe]

    @stream.setter
    def stream(self, stream):
        stream.use()

    def synchronize(self):
        """Wait for all work of this PE."""
        self.machine.synchronize(self.pe)

    def settle(self):
        """What CuPy does comes after the work on its current stream; it is done at once here, so wait for
        that."""
        self.stream.settle()


def _is_installed(file):
    return "-packages" in file or file.startswith(_STANDARD_LIBRARY)


def leave_all():
    if _inside is not None:
        _inside.leave()
