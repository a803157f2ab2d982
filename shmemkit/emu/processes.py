"""One process per PE: the machine's memory is shared by the ranks of one host, and deadlocks are found together.

Control words at the front of the shared memory:
  epoch        grows when a process has done something and has nothing left to do
  failed       1 + the rank that failed first, or 0
  arrived      arrivals at host barriers so far
  state[r]     HOST (its host program runs), RUNNING (its threads run), FINISHED, or 2 * epoch + can_go_on: idle since that epoch
  reported[r]  epoch at which it wrote its part of a deadlock report

A process is idle in epoch e when it read e, then polled all its waits twice without a change. Whoever changes memory adds to the
epoch before it is idle itself. So when all are idle in the same epoch, nobody has missed a change, and nothing will ever change.
A process that waits for a launch (`can_go_on`) then returns to its host program, which may start what the others need.
"""

import fcntl
import mmap
import os
import socket
import sys
import tempfile
import time

import numpy as np

from .errors import EmulatorError
from .heap import heap_size
from .report import deadlock as explain

HOST, RUNNING, FINISHED = -1, -2, -3
EPOCH, FAILED, ARRIVED, STATE = 0, 1, 2, 8
REPORT_BYTES = 1 << 16
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


class Processes:
    """The shared memory and the control words of `comm`, an mpi4py communicator whose ranks share a host."""

    def __init__(self, comm):
        self.comm, self.rank, self.n = comm, comm.Get_rank(), comm.Get_size()
        words = STATE + 2 * self.n
        front = -(-(words * 8 + self.n * REPORT_BYTES) // 4096) * 4096
        file = self._shared_file(front + self.n * heap_size(DEFAULT_HEAP))
        everything = np.frombuffer(mmap.mmap(file.fileno(), 0), np.uint8)
        self.words = everything[: words * 8].view(np.int64)
        self.state, self.reported = self.words[STATE : STATE + self.n], self.words[STATE + self.n :]
        self.reports = everything[words * 8 : words * 8 + self.n * REPORT_BYTES].reshape(self.n, REPORT_BYTES)
        self.memory = everything[front:]
        self.lock = FileLock(file)
        self.seen_progress = self.seen_epoch = None
        self.barriers = 0
        self.state[self.rank] = HOST
        comm.Barrier()

    def _shared_file(self, size):
        """A sparse file of `size` zeros that all ranks have open and that no name leads to any more."""
        request = size
        name = None
        if self.rank == 0:
            handle, name = tempfile.mkstemp(prefix="shmemkit-", dir=_roomiest_folder(size))
            os.truncate(handle, size)
            os.close(handle)
        host, name, size = self.comm.bcast((socket.gethostname(), name, size))
        error = None
        if size != request:
            error = f"rank 0 has a symmetric heap of {size} bytes, rank {self.rank} one of {request}: set NVSHMEM_SYMMETRIC_SIZE alike"
        elif socket.gethostname() != host:
            error = "the emulator runs on one host: start all ranks on the same machine, or use GPUs"
        errors = [e for e in self.comm.allgather(error) if e]
        file = None if errors else open(name, "r+b")
        self.comm.Barrier()
        if self.rank == 0:
            os.unlink(name)
        if errors:
            raise RuntimeError(errors[0])
        return file

    def attach(self, machine):
        """`machine` runs in this process: its host program waits through here."""
        self.machine = machine
        machine.host_waiter = self.wait
        machine.scheduler.idle = self.idle

    def wait(self, pe, is_done, key, can_go_on):
        """Run this process's threads until `is_done()`; see Machine.wait_on_host."""
        self.can_go_on = can_go_on
        self.quiet_since, self.warned = time.monotonic(), False
        self.state[self.rank] = RUNNING
        try:
            if not self.machine.scheduler.run_until(is_done) and not can_go_on:
                raise self.deadlock()
        except EmulatorError:
            with self.lock:
                if not self.words[FAILED]:
                    self.words[FAILED] = self.rank + 1
            raise
        finally:
            self.state[self.rank] = HOST
            self.seen_epoch = None

    def idle(self):
        """Nothing can run here. -> False when nothing can run anywhere, so that waiting has no sense."""
        scheduler, words = self.machine.scheduler, self.words
        if scheduler.progress != self.seen_progress:
            self.seen_progress = scheduler.progress
            self.quiet_since = time.monotonic()
            self.state[self.rank] = RUNNING
            self._next_epoch()
            return True
        epoch = int(words[EPOCH])
        if scheduler.poll() or epoch != self.seen_epoch:
            self.seen_epoch = epoch
            return True
        failed = int(words[FAILED])
        if failed:
            raise EmulatorError(f"rank {failed - 1} failed; its own report says why")
        self.state[self.rank] = 2 * epoch + self.can_go_on
        states = self.state.tolist()
        if all(s == FINISHED or s >> 1 == epoch for s in states) and words[EPOCH] == epoch:
            if self.can_go_on or not any(s >= 0 and s & 1 for s in states):
                return False  # otherwise the one that can go on will
        return self._be_patient(states)

    def _be_patient(self, states):
        waited = time.monotonic() - self.quiet_since
        if waited > 1e-3:
            time.sleep(min(waited / 20, 1e-3))
        else:
            os.sched_yield()
        if waited > PATIENCE and not self.warned and RUNNING not in states and HOST in states:
            self.warned = True
            hosts = [r for r, s in enumerate(states) if s == HOST]
            text = f"shmemkit: rank {self.rank} has waited {waited:.0f} s for ranks {hosts}, which are in their host programs"
            if self.can_go_on:
                print(f"{text}; its host program goes on, the kernel stays on its stream", file=sys.stderr, flush=True)
                return False
            print(f"{text}:\n{explain(self.machine)}", file=sys.stderr, flush=True)
        return True

    def _next_epoch(self):
        with self.lock:
            self.words[EPOCH] += 1

    def barrier(self):
        """All host programs meet; kernels of this process go on meanwhile."""
        with self.lock:
            self.words[ARRIVED] += 1
        self.barriers += 1
        target = self.barriers * self.n
        self.machine.scheduler.progress += 1
        self.machine.wait_on_host(
            self.rank, lambda: self.words[ARRIVED] >= target, None, lambda: "the other ranks in a host barrier", False
        )

    def deadlock(self):
        """Put the reports of all stuck ranks together."""
        text = explain(self.machine).encode()[: REPORT_BYTES - 8]
        self.reports[self.rank, : len(text)] = np.frombuffer(text, np.uint8)
        self.reports[self.rank, len(text)] = 0
        epoch = int(self.words[EPOCH])
        self.reported[self.rank] = epoch
        stuck = [r for r in range(self.n) if self.state[r] != FINISHED]
        deadline = time.monotonic() + PATIENCE
        while any(self.reported[r] != epoch for r in stuck) and time.monotonic() < deadline:
            time.sleep(1e-3)
        parts = [self.reports[r].tobytes().split(b"\0")[0].decode() for r in stuck if self.reported[r] == epoch]
        finished = [r for r in range(self.n) if r not in stuck]
        if finished:
            parts.append(f"  ranks {finished} have finished")
        error = self.machine.deadlock_error("\n".join(p for p in parts if p))
        error.shown_by = stuck[0]
        return error

    def finish(self):
        """This process takes no more part."""
        self.state[self.rank] = FINISHED
        self._next_epoch()
