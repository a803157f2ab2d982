"""Run a script on several PEs of this process, each as if it had a process of its own."""

import atexit
import contextlib
import functools
import importlib.util
import os
import sys
import time
import types

from shmemkit.backends import emulator
from shmemkit.compiler import type_check
from shmemkit.emu.errors import DeadlockError, EmulatorError, RaceError
from shmemkit.emu.run import current_host, run
from shmemkit.emu.stand_in_modules import installed
from shmemkit.support.tracebacks import traceback_of

from . import cuda_core, cupy, mpi, numba_cuda, nvshmem_core
from .process import Process, Surroundings, leave_all

CLEAN, FAILED, RACE, DEADLOCK = range(4)  # exit statuses
INTERRUPTED = 130  # as shells have it
OUTCOMES = {CLEAN: "clean", RACE: "race", DEADLOCK: "deadlock"}  # and "failed"


class ScriptExit(Exception):
    """A PE ended the job with `code`, by sys.exit or MPI's Abort."""

    def __init__(self, code, text):
        super().__init__(text)
        self.code = code

    @property
    def status(self):
        """The exit status: `code`, unless that means something else here."""
        return FAILED if self.code in (RACE, DEADLOCK) else self.code & 255 or FAILED


class Script:
    """The script `path`, to be run with `arguments`. ``program()`` is what each PE runs."""

    def __init__(self, path, arguments=()):
        self.path = os.path.abspath(path)
        with open(self.path, "rb") as file:
            self.code = compile(file.read(), self.path, "exec", dont_inherit=True)
        self._surround(os.path.dirname(self.path), [path, *arguments])

    def _surround(self, folder, argv):
        """What it begins in: `folder` comes first in sys.path."""
        self.shared = frozenset(sys.modules)  # what was imported before it ran
        self.surroundings = Surroundings()
        self.surroundings.argv = argv
        # Without the folder of the script that runs this one.
        self.surroundings.path = [folder, *sys.path[1:]]

    def load(self, main):
        """-> the code, to be run in the module `main`, once the PE is in its process."""
        main.__file__ = self.path
        return self.code

    def program(self):
        host = current_host()
        module = types.ModuleType("__main__")
        module.__builtins__ = __builtins__
        host.process = process = Process(host, self.surroundings, self.shared)
        process.modules["__main__"] = module
        process.enter()
        try:
            exec(self.load(module), module.__dict__)
            _call_at_exit(process)
        except SystemExit as exit:
            _call_at_exit(process)
            code = exit.code
            if code is None or code == 0:
                return
            text = "" if isinstance(code, int) else f"{code}\n"
            code = code if isinstance(code, int) else FAILED
            raise ScriptExit(code, f"{text}rank {process.pe} exited with status {code}") from exit
        except KeyboardInterrupt as interrupt:
            if hasattr(interrupt, "add_note"):
                interrupt.add_note(f"interrupted on rank {process.pe}")
            raise
        except mpi.Aborted as abort:
            raise ScriptExit(abort.code, str(abort)) from abort


class Module(Script):
    """The module `name`, or __main__ of the package `name`, as ``python -m`` runs it."""

    def __init__(self, name, arguments=()):
        self.name = name
        self._surround(os.getcwd(), ["-m", *arguments])

    def load(self, main):
        spec = _spec_of(self.name)  # imports its package: each PE has its own
        code = spec.loader.get_code(spec.name)
        if code is None:
            raise ScriptExit(FAILED, f"{spec.name} is not a module of Python code")
        main.__spec__, main.__package__, main.__loader__ = spec, spec.parent, spec.loader
        main.__file__, main.__cached__ = spec.origin, spec.cached
        sys.argv[0] = spec.origin
        return code


def _spec_of(name):
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # what its package imports is not there
            raise
        spec = None
    if spec is None:
        raise ScriptExit(FAILED, f"No module named {name}")
    return spec if spec.submodule_search_locations is None else _spec_of(f"{name}.__main__")


def _call_at_exit(process):
    while process.at_exit:
        function, args, kwargs = process.at_exit.pop()
        function(*args, **kwargs)


@contextlib.contextmanager
def surroundings():
    """What scripts import, and where kernels run, while they run; all is as before afterwards."""
    stand_ins = {**mpi.modules(), **nvshmem_core.modules(), **cupy.modules(), **cuda_core.modules()}
    main, before = sys.modules.get("__main__"), Surroundings()
    register, sleep, leave = atexit.register, time.sleep, os._exit
    type_check.prepare()  # while cuda.bindings, which parts of numba-cuda import, is still there
    emulator._install()
    atexit.register, time.sleep = _of_process(register, _at_exit), _of_process(sleep, _give_turn)
    os._exit = _of_process(leave, _leave)
    try:
        with installed(stand_ins, refused=["cupyx", "cuda.bindings"]), numba_cuda.installed():
            yield
    finally:
        atexit.register, time.sleep, os._exit = register, sleep, leave
        emulator._uninstall()
        leave_all()
        sys.modules["__main__"] = main
        before.restore()


def _of_process(function, replacement):
    """`function`; in a host program of a script, ``replacement(process, function, ...)``."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        host = current_host()
        if host is None or host.process is None:
            return function(*args, **kwargs)
        return replacement(host.process, function, *args, **kwargs)

    return call


def _leave(process, _, status):
    """os._exit: here it would end all ranks, which are threads of one process, without a word."""
    raise ScriptExit(status or FAILED, f"rank {process.pe} left by os._exit({status})")


def _at_exit(process, _, function, *args, **kwargs):
    process.at_exit.append((function, args, kwargs))
    return function


def _give_turn(process, sleep, seconds):
    process.give_turn("time.sleep")
    sleep(seconds)


def run_script(script, n_ranks, **options):
    """Run `script` on `n_ranks` PEs; `options` are those of ``shmemkit.emu.run``. Raises as it does."""
    with surroundings():
        run(script.program, n_ranks, **options)


def status_of(error):
    """The exit status for what a run raised."""
    if error is None:
        return CLEAN
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, RaceError):
        return RACE
    if isinstance(error, DeadlockError):
        return DEADLOCK
    return error.status if isinstance(error, ScriptExit) else FAILED


def text_of(error):
    """The report of what a run raised; of the script's own failures, the traceback without our frames."""
    if isinstance(error, (EmulatorError, ScriptExit)):
        return str(error)
    return traceback_of(error)
