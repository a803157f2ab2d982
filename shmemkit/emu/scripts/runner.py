"""Run a script on several PEs of this process, each as if it had a process of its own."""

import atexit
import contextlib
import functools
import os
import sys
import time
import traceback
import types

from .. import backend, report
from ..errors import DeadlockError, EmulatorError, RaceError
from ..run import current_host, run
from . import cuda_core, cupy, mpi, numba_cuda, nvshmem_core
from .modules import installed
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
        self.shared = frozenset(sys.modules)  # what was imported before it ran
        self.surroundings = Surroundings()
        self.surroundings.argv = [path, *arguments]
        # Without the folder of the script that runs this one.
        self.surroundings.path = [os.path.dirname(self.path), *sys.path[1:]]

    def program(self):
        host = current_host()
        module = types.ModuleType("__main__")
        module.__file__, module.__builtins__ = self.path, __builtins__
        host.process = process = Process(host, self.surroundings, self.shared)
        process.modules["__main__"] = module
        process.enter()
        try:
            exec(self.code, module.__dict__)
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


def _call_at_exit(process):
    while process.at_exit:
        function, args, kwargs = process.at_exit.pop()
        function(*args, **kwargs)


@contextlib.contextmanager
def surroundings():
    """What scripts import, and where kernels run, while they run; all is as before afterwards."""
    stand_ins = {
        **mpi.modules(),
        **nvshmem_core.modules(),
        **cupy.modules(),
        **cuda_core.modules(),
    }
    main, before = sys.modules.get("__main__"), Surroundings()
    register, sleep = atexit.register, time.sleep
    backend._install()
    atexit.register, time.sleep = _of_process(register, _at_exit), _of_process(sleep, _give_turn)
    try:
        with installed(stand_ins, refused=["cupyx", "cuda.bindings"]), numba_cuda.installed():
            yield
    finally:
        atexit.register, time.sleep = register, sleep
        backend._uninstall()
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


def _at_exit(process, _, function, *args, **kwargs):
    process.at_exit.append((function, args, kwargs))
    return function


def _give_turn(process, sleep, seconds):
    process.give_turn("time.sleep")
    sleep(seconds)


def run_script(script, n_pes, **options):
    """Run `script` on `n_pes` PEs; `options` are those of ``shmemkit.emu.run``. Raises as it does."""
    with surroundings():
        run(script.program, n_pes, **options)


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
    shown = traceback.TracebackException.from_exception(error)
    _forget_ours(shown)
    return "".join(shown.format()).rstrip()


def _forget_ours(shown):
    """Drop the emulator's frames from a TracebackException and from those that it follows."""
    while shown is not None:
        shown.stack = traceback.StackSummary.from_list([f for f in shown.stack if not _is_ours(f.filename)])
        if shown.__cause__ is not None:
            _forget_ours(shown.__context__)
        shown = shown.__cause__ or shown.__context__


def _is_ours(file):
    """Whether `file` is the emulator's, or what runs it."""
    return file.startswith(report._HIDDEN) or file.startswith("<frozen")
