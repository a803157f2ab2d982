"""One process per PE: the ranks of one host share the machine's memory, and find deadlocks together.

Words in shared memory, one of each per rank r:
  changes[r]   grows when r has done something and has nothing left to do; only r writes it. The epoch is
               their sum
  state[r]     HOST (its host program runs), RUNNING (its threads run), FINISHED, RAISED (in a notebook, its
               cell has ended by an exception), or 2 * epoch + can_go_on: idle since then
  arrived[r]   host barriers that r has come to
  reported[r]  1 + the epoch at which it wrote its part of a deadlock report
and two for all: `failed`, 1 + the rank that failed first, or 0; and `met`, the collective calls that
completed. Once a rank has failed, no more do: whoever waits for others raises, and all can make a new World.
`met` and `failed` are written under the lock, so that all agree whether a collective call completed; those
who go on to MPI's calls are all ranks or none.

A process is idle in epoch e when it read e, and after that polled all its waits without a change, and each of
its spin loops once. Whoever changes memory adds to the epoch before it is idle itself; a host program may
have changed memory whenever it begins to wait. So when all are idle in the same epoch, and it is still that
epoch, each has polled after the last change of any other, and nothing will ever change. (Each word of the sum
only grows, so equal sums are equal words.) A process that waits for a launch (`can_go_on`) then returns to
its host program, which may start what the others need; only if there is none is it a deadlock.

Data and the signal behind it are ordinary stores of one process; that others see them in this order is a
property of x86-64. Processors with weaker ordering are untried.
"""

import contextlib
import fcntl
import json
import mmap
import os
import tempfile
import time
from typing import Any

import numpy as np

from shmemkit.support import timeouts
from shmemkit.support.agreement import of_group, ranks_text, reported_by
from shmemkit.support.call_site import Call
from shmemkit.support.command_line import say
from shmemkit.support.hosts import Hosts
from shmemkit.support.notebook import shell, watch_cells
from shmemkit.support.progress import showing

from .collective_calls import SLOT, SLOTS
from .errors import EmulatorError
from .heap import heap_size, too_large
from .report import deadlock as explain

HOST, RUNNING, FINISHED, RAISED = -1, -2, -3, -4
REPORT_BYTES, CAUSE_BYTES = 1 << 16, 1 << 12
GO_ON = ". To go on, call shmemkit.init() on all ranks: it makes a new World"
DEFAULT_HEAP = 256 << 20  # bytes per rank; untouched pages cost nothing
PATIENCE = 5.0  # seconds without progress, while others are in their host programs


class FileLock:
    """A lock between processes, as a context manager."""

    def __init__(self, file):
        self.file = file

    def __enter__(self):
        fcntl.lockf(self.file, fcntl.LOCK_EX)

    def __exit__(self, *_):
        fcntl.lockf(self.file, fcntl.LOCK_UN)


def _roomiest_folder(size):
    """Where a file of `size` bytes has room: in memory, if it may be filled there."""
    shm = "/dev/shm"
    if os.path.isdir(shm) and os.access(shm, os.W_OK):
        free = os.statvfs(shm)
        if free.f_bavail * free.f_frsize > size:
            return shm
    return tempfile.gettempdir()


def _identity(file):
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino


class Meeting:
    """A barrier of the host programs of `ranks`, in memory that all of them see.

    comm     theirs
    arrived  int64: how often each of them has come
    met      int64 (1,): how often all have
    """

    def __init__(self, comm, ranks, arrived, met):
        self.comm, self.ranks, self.arrived, self.met = comm, ranks, arrived, met
        self.rank = comm.Get_rank()

    def late(self, target):
        return sorted(self.ranks[k] for k in np.flatnonzero(self.arrived < target))


class Processes:
    """The shared memory and the words of `comm`, a Communicator whose ranks share a host."""

    def __init__(self, comm):
        self.comm, self.rank, self.n = comm, comm.Get_rank(), comm.Get_size()
        words = 4 * self.n + 2
        causes = words * 8 + self.n * REPORT_BYTES
        calls = causes + self.n * CAUSE_BYTES
        front = -(-(calls + self.n * SLOTS * SLOT.itemsize) // 4096) * 4096
        self.hosts = Hosts.of(comm)
        self.reserve = None  # (first, n_bytes): see `_reserve`
        self.file = file = self._shared_file(front, heap_size(DEFAULT_HEAP))
        try:
            everything = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        except (OSError, ValueError):
            raise too_large(os.fstat(file.fileno()).st_size) from None
        self.front = front
        table = everything[: words * 8].view(np.int64)
        self.changes, self.state, arrived, self.reported = table[: 4 * self.n].reshape(4, self.n)
        self.failed, met = table[4 * self.n :].reshape(2, 1)
        self.all = Meeting(comm, range(self.n), arrived, met)
        self.reports = everything[words * 8 : causes].reshape(self.n, REPORT_BYTES)
        self.causes = everything[causes:calls].reshape(self.n, CAUSE_BYTES)  # why it failed
        self.calls = everything[calls:][: self.n * SLOTS * SLOT.itemsize].view(SLOT).reshape(self.n, SLOTS)
        self.memory = everything[front:]
        self.lock = FileLock(file)
        self.seen_progress = self.seen_epoch = None
        self.state[self.rank] = HOST
        comm.barrier()

    def _shared_file(self, front, heap):
        """A sparse file of zeros, `front` bytes and everybody's `heap`. However the ranks end, nothing of it
        stays."""
        if len({machine.boot for machine in self.hosts.machines}) > 1:
            text = f"the ranks are on {self.hosts.text()}; the emulator runs on one host. Start all ranks on "
            raise reported_by(0, RuntimeError(f"{text}the same host, or use GPUs"))
        sizes = {}
        for rank, n_bytes in enumerate(self.comm.allgather(heap)):
            sizes.setdefault(n_bytes, []).append(rank)
        if len(sizes) > 1:
            given = "; ".join(f"{ranks_text(ranks)}: {n_bytes} bytes" for n_bytes, ranks in sizes.items())
            raise RuntimeError(
                f"ranks disagree on the size of the symmetric heap: {given}. Set NVSHMEM_SYMMETRIC_SIZE to "
                "the same value on all ranks"
            )
        size = front + self.n * heap
        if size >= 1 << 47:  # the addresses of a process
            raise too_large(size)
        return self._nameless_file(size) or self._named_file(size, front)

    def _nameless_file(self, size):
        """Memory of rank 0's that the others find as a file of its process. None where some do not find it:
        there is no /proc, or ranks are in different containers."""
        file: Any = None
        place: Any = None
        if self.rank == 0 and hasattr(os, "memfd_create"):
            file = open(os.memfd_create("shmemkit"), "r+b")
            os.truncate(file.fileno(), size)
            place = f"/proc/{os.getpid()}/fd/{file.fileno()}", _identity(file)
        place = self.comm.bcast(place)
        if self.rank > 0 and place is not None:
            with contextlib.suppress(OSError):
                file = open(place[0], "r+b")
        found = file is not None and _identity(file) == place[1]
        return file if all(self.comm.allgather(found)) else None

    def _named_file(self, size, front):
        name = error = None
        if self.rank == 0:
            handle, name = tempfile.mkstemp(prefix="shmemkit-", dir=_roomiest_folder(size))
            try:
                os.truncate(handle, size)
                os.posix_fallocate(handle, 0, front)
            except OSError as e:
                error = str(e)
                os.unlink(name)
            os.close(handle)
        name, error = self.comm.bcast((name, error))
        if error is not None:
            raise MemoryError(
                f"the ranks' shared memory, {size} bytes in {name}, cannot be made: {error}. Set "
                "TMPDIR to a folder with more room, or a smaller NVSHMEM_SYMMETRIC_SIZE"
            )
        self.reserve, self.name = self._reserve, name
        file: Any = None
        with contextlib.suppress(OSError):
            file = open(name, "r+b")
        identities = self.comm.allgather(None if file is None else _identity(file))
        if self.rank == 0:
            os.unlink(name)
        if missing := [rank for rank, identity in enumerate(identities) if identity != identities[0]]:
            text = f"{ranks_text(missing)} cannot open {name}, which rank 0 has made: their file systems "
            do = "differ, as in different containers. Start all ranks in one, or share /dev/shm among them"
            raise reported_by(0, RuntimeError(f"{text}{do}"))
        return file

    def _reserve(self, first, n_bytes):
        """Have the pages of this part of `memory` now: where the folder is full, a store would end the
        process by SIGBUS."""
        try:
            os.posix_fallocate(self.file.fileno(), self.front + first, n_bytes)
        except OSError as error:
            raise MemoryError(
                f"{os.path.dirname(self.name)} has no room for {n_bytes} bytes of symmetric memory: "
                f"{error.strerror}. Make room there, or set TMPDIR to a folder with more"
            ) from None

    def attach(self, machine):
        """`machine` runs in this process: its host program waits through here."""
        self.machine = machine
        machine.host_waiter = self.wait
        machine.scheduler.idle = self.idle
        self._watch_no_more = watch_cells(self.host_raised)

    def wait(self, pe, is_done, key, can_go_on):
        """Run this process's threads until `is_done()`; see Machine.wait_on_host."""
        self.can_go_on = can_go_on
        self.quiet_since, self.warned = time.monotonic(), False
        self.seen_progress = self.seen_epoch = None  # the host program may have changed memory
        self.state[self.rank] = RUNNING
        try:
            with showing(self.machine.under_way):
                if not self.machine.scheduler.run_until(is_done) and not can_go_on:
                    raise self.deadlock()
        except BaseException as error:
            self.fail(error)
            self.machine.clear()
            raise
        finally:
            self.state[self.rank] = HOST

    def fail(self, error):
        """This rank meets the others no more, because of `error`."""
        with self.lock:
            if not self.failed[0]:
                _write(self.causes[self.rank], _cause(error))
                self.failed[0] = self.rank + 1

    def host_raised(self, error):
        """The host program has ended by `error`, as a cell of a notebook does, or (None) goes on."""
        if error is not None:
            _write(self.causes[self.rank], _cause(error))
        self.state[self.rank] = HOST if error is None else RAISED
        self.changes[self.rank] += 1

    def check(self):
        """Raise, once a rank has failed: nobody waits for others any more."""
        failed = int(self.failed[0]) - 1
        if failed < 0:
            return
        text, *timeout = json.loads(_text(self.causes[failed]))
        reported_by = failed
        if timeout:  # these are the same for all
            call, missing, reported_by = timeout
            text = text.partition(": ")[2]
            text += f"; rank {self.rank} came too late" if self.rank in missing else ""
            error: Any = timeouts.RankTimeout(f"{text}{_go_on()}", self.rank, call, missing)
        else:
            error = EmulatorError(f"rank {failed} has failed: {text}{_go_on()}")
        error.reported_by = reported_by
        raise error

    def idle(self):
        """Nothing can run here. -> False when nothing can run anywhere, so that waiting has no sense."""
        scheduler = self.machine.scheduler
        if scheduler.progress != self.seen_progress:
            self.seen_progress = scheduler.progress
            self.quiet_since = time.monotonic()
            self.state[self.rank] = RUNNING
            self.changes[self.rank] += 1
            return True
        epoch = self._epoch()
        if epoch != self.seen_epoch:
            self.seen_epoch = epoch
            return True  # the scheduler polls everything once more, and asks again
        self.check()
        self.state[self.rank] = 2 * epoch + self.can_go_on
        states = self.state.tolist()
        if all(s in (FINISHED, RAISED) or s >> 1 == epoch for s in states) and self._epoch() == epoch:
            if self.can_go_on or not any(s >= 0 and s & 1 for s in states):
                return False  # otherwise the one that can go on will
        return self._be_patient(states)

    def _epoch(self):
        return sum(self.changes.tolist())

    def _be_patient(self, states):
        waited = time.monotonic() - self.quiet_since
        if waited > 1e-3:
            time.sleep(min(waited / 20, 1e-3))
        else:
            os.sched_yield()
        if RUNNING in states or HOST not in states:
            return True
        limit, late = timeouts.default(), ranks_text([r for r, s in enumerate(states) if s == HOST])
        there = "still in host code" + " or done with their cells" * (shell() is not None)
        text = f"rank {self.rank} has waited {waited:.3g} s for {late}, {there}"
        if limit is not None and waited > limit and not self.can_go_on:
            raise timeouts.SignalTimeout(f"{text}{_go_on()}\n{explain(self.machine)}", self.rank)
        if waited > min(PATIENCE, limit or PATIENCE) and not self.warned:
            self.warned = True
            text = f"shmemkit: {text}"
            if self.can_go_on:
                say(f"{text}; its host program goes on, the kernel stays on its stream")
                return False
            say(f"{text}:\n{explain(self.machine)}")
        return True

    def allgather(self, value, call, meeting=None):
        """-> the `value` of every rank of `meeting` (default: all). A barrier of their host programs; kernels
        of this process go on meanwhile. `call` is what this one calls."""
        meeting = meeting or self.all
        self.check()
        try:
            self.barrier(call, meeting)
        except BaseException:  # one of them has failed, or the host program was interrupted
            if meeting.met[0] >= meeting.arrived[meeting.rank]:  # too late: the others do not know of it yet
                meeting.comm.allgather(value)
            raise
        return meeting.comm.allgather(value)

    def barrier(self, call, meeting=None):
        """A barrier of the host programs of `meeting` (default: all)."""
        meeting = meeting or self.all
        self.check()
        meeting.arrived[meeting.rank] += 1
        target = meeting.arrived[meeting.rank].item()
        start, limit = time.monotonic(), timeouts.default()

        def all_are_there():
            if meeting.met[0] >= target:
                return True
            if min(meeting.arrived.tolist()) >= target:
                with self.lock:
                    if not self.failed[0]:
                        meeting.met[0] = target
                return meeting.met[0] >= target
            if limit is not None and time.monotonic() - start > limit:
                raise self._timeout(meeting, target, call, limit)
            return False

        self.machine.wait_on_host(
            self.rank, all_are_there, None, lambda: self._late(meeting, target, call), can_go_on=False
        )

    def _timeout(self, meeting, target, call, limit):
        missing = meeting.late(target)
        there = sorted(r for r in meeting.ranks if r not in missing)
        text = timeouts.missing_text(call, missing, there, limit) + of_group(meeting.ranks, self.n)
        error: Any = timeouts.RankTimeout(f"{text}{_go_on()}", self.rank, call, missing)
        error.reported_by = there[0]
        return error

    def _late(self, meeting, target, call):
        return (
            f"{ranks_text(meeting.late(target))} to call {Call(call)}, too{of_group(meeting.ranks, self.n)}"
        )

    def deadlock(self):
        """Put the reports of all stuck ranks together."""
        _write(self.reports[self.rank], explain(self.machine))
        states = self.state.tolist()  # before the others can raise, for which they wait for this report
        mark = self.reported[self.rank] = self._epoch() + 1
        stuck = [r for r, state in enumerate(states) if state not in (FINISHED, RAISED)]
        deadline = time.monotonic() + PATIENCE
        while any(self.reported[r] != mark for r in stuck) and time.monotonic() < deadline:
            time.sleep(1e-3)
        parts = [_text(self.reports[r]) for r in stuck if self.reported[r] == mark]
        for r in range(self.n):
            if states[r] == RAISED:
                why = json.loads(_text(self.causes[r]))[0]
                parts.append(f"  rank {r}: its host program has raised {why}")
            elif states[r] == FINISHED:
                parts.append(f"  rank {r}: its host program has ended")
        error = self.machine.deadlock_error("\n".join(p for p in parts if p))
        error.reported_by = stuck[0]
        return error

    def finish(self):
        """This process takes no more part."""
        self._watch_no_more()
        self.changes[self.rank] += 1
        self.state[self.rank] = FINISHED


def _go_on():
    """What a notebook's user can do after a failure; a program ends."""
    return GO_ON if shell() else ""


def _cause(error):
    """`error` in one line, and of a RankTimeout the call, who is missing and who shows it, as JSON."""
    text = f"{type(error).__name__}: {error}".partition("\n")[0].partition(GO_ON)[0][:500]
    more = []
    if isinstance(error, timeouts.RankTimeout):
        more = [error.call, error.missing, getattr(error, "reported_by", None)]
    return json.dumps([text.rstrip(": "), *more])


def _write(where, text):
    text = text.encode()[: where.size - 1]
    where[: len(text)] = np.frombuffer(text, np.uint8)
    where[len(text)] = 0


def _text(report):
    return report.tobytes().split(b"\0")[0].decode(errors="replace")
