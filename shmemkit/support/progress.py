"""What takes longer than two seconds shows on the terminal how far it is, in one line that goes at the end.

    with progress.showing("explore", total=300, unit="schedules") as task:
        for ...:
            task.done += 1

A thread looks at the tasks that are under way and draws the line with tqdm, which it imports only then. So a
task costs microseconds. The line is that of the outermost task; inner tasks that take long are named at its
end. What the program prints to the terminal meanwhile stands above the line.

Nothing is shown where standard error is not a terminal (captured output, a file, a pipe), with TERM=dumb,
under CI, on ranks other than 0, or with SHMEMKIT_PROGRESS=0. Under mpirun, standard error is a pipe, of which
the launcher passes on whole lines only: `shmemkit run` sets SHMEMKIT_PROGRESS to the terminal's path.
"""

import contextlib
import functools
import os
import signal
import stat
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

from .settings import switch

AFTER = 2.0  # seconds until a task is shown
INTERVAL = 0.2  # seconds between two looks
WIDTH = 80  # columns of a terminal that does not say
# By whether there is a total, and a unit.
_FORMATS = {
    (True, False): "{desc}: {n_fmt} of {total_fmt} |{bar:20}| {elapsed}{postfix}",
    (True, True): "{desc}: {n_fmt} of {total_fmt} {unit} |{bar:20}| {elapsed}<{remaining}{postfix}",
    (False, True): "{desc}: {n_fmt} {unit}, {elapsed}{postfix}",
    (False, False): "{desc}, {elapsed}{postfix}",
}
_RANKS = "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID", "RANK"
_first = all(os.environ.get(variable, "0") == "0" for variable in _RANKS)

end_line = None  # () -> None: called before the line is first drawn, to end one that others have started
_lock = threading.RLock()
_tasks = []  # under way, in the order of their begin
_awake = threading.Event()  # there are tasks, or were at the last look
_thread = _line = None


class Task:
    """Something that takes time: `what`, a text or () -> text. `done` of `total` steps have been taken (None:
    the total is unknown); with a `unit`, each takes about as long. `detail` says more. All may change."""

    def __init__(self, what, total=None, unit=""):
        self.what, self.total, self.unit = what, total, unit
        self.done, self.detail, self.since = 0, "", time.time()

    def __str__(self):
        return self.what() if callable(self.what) else self.what


@contextlib.contextmanager
def showing(*args, **kwargs):
    """A Task, made of these arguments, that is under way in the ``with`` block."""
    task = Task(*args, **kwargs)
    if place() is None:
        yield task
        return
    with _lock:
        _tasks.append(task)
        _awake.set()
        _look_after()
    try:
        yield task
    finally:
        with _lock:
            _tasks.remove(task)
            if _line is not None and _line.task is task:
                _line.end()


def place():
    """Where to draw: on standard error, at the path of a terminal, or, None, nowhere."""
    path, stream = os.environ.get("SHMEMKIT_PROGRESS", ""), sys.stderr
    if not path.startswith("/"):
        path = None
        if not switch("SHMEMKIT_PROGRESS", True) or os.environ.get("TERM") == "dumb" or os.environ.get("CI"):
            return None
    if not _first or stream is None:
        return None
    if path:
        # If it is another stream, somebody captures what is written.
        return path if stream is sys.__stderr__ and _is_terminal(path) else None
    return stream if stream.isatty() else None


@functools.cache
def _is_terminal(path):
    try:
        if not stat.S_ISCHR(os.stat(path).st_mode):
            return False
        with _opened(path) as file:
            return file.isatty()
    except OSError:
        return False


def _opened(path):
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_NOCTTY), "w")


@contextlib.contextmanager
def _not_stopped():
    """In here, writing to a terminal does not stop the process after ``stty tostop``, though it may be in the
    background: Open MPI's ranks are."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _look_after():
    global _thread
    if _thread is None or not _thread.is_alive():  # at first, and after a fork
        _thread = threading.Thread(target=_look_on, name="shmemkit-progress", daemon=True)
        _thread.start()


def _look_on():
    while True:
        _awake.wait()
        time.sleep(INTERVAL)
        with _lock:
            if not _tasks:
                _awake.clear()
            elif time.time() - _tasks[0].since > AFTER:
                with contextlib.suppress(Exception):  # it never stops the work
                    (_line or _Line(_tasks[0])).draw()


class _Line:
    """The line of `task`, the outermost one."""

    def __init__(self, task):
        global _line
        from tqdm import tqdm

        where = place()
        stream: Any = _opened(where) if isinstance(where, str) else where
        self.stream = stream
        if end_line is not None:
            end_line()
        _line, self.task = self, task
        self.drawn = False
        self.whole, self.since = True, 0.0  # whether what others have written ends a line, and when that was
        encoding = getattr(stream, "encoding", None)
        file: Any = SimpleNamespace(write=stream.write, flush=stream.flush, encoding=encoding)
        self.bar = tqdm(file=file, unit=task.unit, leave=False, delay=1e-9)  # a delay: it is not drawn yet
        self.bar.start_t = task.since
        self.hooked = []
        for other in {sys.stdout, sys.stderr} - {None}:
            if stream is not sys.stderr or other.isatty():
                self._hook(other)

    def _hook(self, stream):
        """What is written there replaces the line, which is drawn anew below it."""
        original = stream.write

        def write(text):
            with _lock:
                self.clear()
                self.whole, self.since = text.endswith("\n") if text else self.whole, time.time()
                return original(text)

        with contextlib.suppress(AttributeError):  # a stream that takes no attributes
            stream.write = write
            self.hooked.append((stream, write))

    @_not_stopped()
    def draw(self):
        task, bar, now = self.task, self.bar, time.time()
        if not self.whole or now - self.since < INTERVAL:
            return
        texts = dict.fromkeys(str(t) for t in _tasks if t is not task and now - t.since > AFTER)
        bar.n, bar.total, bar.ncols = task.done, task.total, _width(self.stream)
        bar.bar_format = _FORMATS[bool(task.total), bool(task.unit)]
        bar.set_description_str(str(task), refresh=False)
        bar.set_postfix_str(", ".join(filter(None, [task.detail, *texts])), refresh=False)
        bar.refresh()
        self.drawn = True

    @_not_stopped()
    def clear(self):
        if self.drawn:
            self.drawn = False
            self.bar.clear()
            self.stream.flush()

    @_not_stopped()
    def end(self):
        global _line
        self.clear()
        _line = None
        for stream, write in self.hooked:
            if stream.__dict__.get("write") is write:
                del stream.write
        self.bar.close()
        if self.stream is not sys.stderr:
            self.stream.close()


def _width(stream):
    try:
        return os.get_terminal_size(stream.fileno()).columns or WIDTH
    except (OSError, ValueError, AttributeError):
        return WIDTH
