"""The emulator as a World sees it; ``shmemkit.backends.nvshmem`` has the same interface for NVSHMEM."""

import sys
from copy import copy as copy_of
from functools import cached_property
from typing import Any

import numpy as np

from shmemkit.comm.communicator import SingleComm
from shmemkit.emu import launch_hook, timeline
from shmemkit.emu.array_module import ArrayModule
from shmemkit.emu.collective_calls import Calls
from shmemkit.emu.device_arrays import address
from shmemkit.emu.grid import Launch, Shape
from shmemkit.emu.heap import ALIGNMENT, heap_size, private_memory
from shmemkit.emu.host_arrays import HostArray, perform
from shmemkit.emu.machine import Machine
from shmemkit.emu.members import Members, book_of, book_size
from shmemkit.emu.multicast_memory import Multicast
from shmemkit.emu.processes import Meeting, Processes
from shmemkit.emu.report import user_line
from shmemkit.emu.run import LocalComm, current_host, schedule_of
from shmemkit.emu.schedules import Seeded
from shmemkit.emu.stream import Stream, copy, copy_by, copy_rows, memory_operations
from shmemkit.emu.thread import current_thread
from shmemkit.support.agreement import reported_by
from shmemkit.support.call_site import users_call
from shmemkit.support.hosts import Hosts, machine, this_host
from shmemkit.support.settings import shown

from . import multicast
from .slabs import slab_is_full

_users = 0  # worlds alive in this process


class _Memory:
    """Part of the heap as NumPy's array interface, so that views keep `owner` alive."""

    def __init__(self, raw, owner):
        self.__array_interface__ = raw.__array_interface__
        self.owner = raw, owner


class EmulatorBackend:
    """`comm`: a Communicator, or None (one PE, or the PE of ``emu.run`` that calls).

    A group's is a copy, with `members`, `comm` and others of its own.
    """

    name = gpu_name = "emulator"
    slab = meeting = (
        None  # of a group: its part of the heap; how its host programs meet, in several processes
    )
    compute_capability = cached_property(lambda self: self.machine.gpu.compute_capability)
    multiprocessors = cached_property(lambda self: self.machine.gpu.sms)
    block_shared = cached_property(lambda self: self.machine.gpu.shared - self.machine.gpu.reserved)

    def __init__(self, comm):
        self.host = host = current_host()
        self.processes = None
        if host is not None:
            self.machine, self.pe, self.comm = host.program.machine, host.pe, LocalComm(host)
        elif comm is None or comm.Get_size() == 1:
            self.comm = SingleComm() if comm is None else comm
            races, delivery, seed = schedule_of()
            choice = None if seed is None else Seeded(seed)
            memory = private_memory(heap_size())
            self.machine = Machine(memory, 1, [0], 1, delivery=delivery, choice=choice, races=races)
            self.pe = 0
        else:
            if any(schedule != (False, "eager", None) for schedule in comm.allgather(schedule_of())):
                n = comm.Get_size()
                text = (
                    "init(): SHMEMKIT_RACES, SHMEMKIT_DELIVERY or SHMEMKIT_SEED is set, and the ranks are "
                    f"{n} processes. They need all ranks in one process: start 'shmemkit emu -n {n} "
                    "script.py' without a launcher, or unset them"
                )
                raise reported_by(0, RuntimeError(text))
            self.comm, self.pe, self.processes = comm, comm.Get_rank(), Processes(comm)
            p = self.processes
            self.machine = Machine(p.memory, p.n, [p.rank], p.n, p.lock, calls=p.calls)
            p.attach(self.machine)
            self.machine.heaps[p.rank].reserve = p.reserve
            comm.barrier()  # every rank's counters are zero
        self.xp = ArrayModule(self.machine)
        self.default_local_size = self.machine.local_size if self.processes is None else self.hosts.local_size
        self.heap, self.members = self.machine.heaps[self.pe], self.machine.members[self.pe]
        if self.pe not in self.machine.defaults:
            self.machine.defaults[self.pe] = Stream(self.machine, self.pe).use()
        self.stream = Stream(self.machine, self.pe, blocking=False).__enter__()
        _install()

    calls = property(lambda self: self.members.calls)
    gpu_id = property(lambda self: self.pe)

    @cached_property
    def hosts(self):
        """Of the ranks of the World."""
        if self.processes is not None:
            return self.processes.hosts
        return Hosts([(this_host(), machine())] * self.machine.n_ranks)

    # -- groups
    def new_slab(self, n_bytes):
        """Return a part of the symmetric memory, from which groups of these ranks allocate. Collective."""
        n_bytes += book_size(self.members.n) + ALIGNMENT
        return self.heap.new_slab(n_bytes, self.slab or self.heap.whole, slab_is_full)

    def free_slab(self, slab):
        """Give it back: its groups have ended. Collective."""
        self.heap.free_slab(slab, self.slab or self.heap.whole)

    def group(self, ranks, comm, slab, key):
        """-> the backend of a group of `ranks` of these, in order, which allocates from `slab`. This rank is
        one of them. All have called it before any of them uses it.

        comm  the communicator of these
        key   what no other group of this backend has, alike on all members
        """
        group, pes = copy_of(self), [self.members.pes[rank] for rank in ranks]
        group.comm, group.slab, book = comm, slab, self.heap.allocate(book_size(len(pes)), slab)
        book.fill(0)
        self.heap.groups.append((slab, pes))
        arrivals, *shared = book_of(book, len(pes))
        met, table = (self.heap.on(part, pes[0]) for part in shared)
        calls, key = Calls(table, pes.index(self.pe), pes), (*self.members.key, key)
        group.members = self.machine.groups[key] = Members(pes, self.pe, 1, arrivals, calls, key)
        if self.processes is not None:
            group.meeting = Meeting(comm, pes, met[:-1], met[-1:])
        return group

    def end_group(self):
        """The group ends, and has freed its arrays. Other ranks may still read what ``free_slab`` gives
        back."""
        self.machine.groups.pop(self.members.key, None)
        self.heap.groups = [group for group in self.heap.groups if group[0] is not self.slab]

    @property
    def over(self):
        """Whether a rank has failed, so that no others wait for it any more."""
        return self.processes is not None and bool(self.processes.failed[0])

    def fail(self, error):
        """This rank has left by `error`: those who wait for it are told."""
        if self.processes is not None:
            self.processes.fail(error)

    def transport(self):
        """How kernels reach ranks on other nodes."""
        return "the emulator's network"

    def mapped(self):
        """Whether the memory of each rank is mapped here: that of the same node is."""
        size = self.machine.local_size
        return [pe // size == self.pe // size for pe in self.members.pes]

    def unreached(self, nvlink, ranks=None):
        """Why kernels here do not reach `ranks` (default: all), or None: they do."""
        mapped = self.mapped()
        for rank in range(len(mapped)) if ranks is None else ranks:
            if not mapped[rank]:
                pe = self.members.pes[rank]
                return f"rank {self.pe} cannot access the memory of rank {pe}, which is on another node"
        return None

    def set_local_size(self, local_size):
        if self.slab is None:
            self.machine.set_local_size(local_size)
        else:
            self.members.local_size = local_size

    def allgather(self, value, call):
        """`value` of every rank; kernels go on meanwhile. `call` is what the host program calls."""
        if self.host is not None:
            self.machine.check_thread()
            return self.comm.allgather(value, call)
        if self.processes is not None:
            return self.processes.allgather(value, call, self.meeting)
        return self.comm.allgather(value)

    def allocate(self, n_bytes):
        return self.heap.allocate(n_bytes, self.slab)

    def as_array(self, raw, shape, dtype, owner):
        """Bytes `raw` as an array; `owner` lives as long as it or a view of it."""
        result = np.asarray(_Memory(raw, owner)).view(dtype).reshape(shape)
        return result if self.machine.races is None else result.view(HostArray)

    def describe(self, raw, name, dtype):
        """What the allocation `raw` holds, for reports."""
        allocation: Any = self.heap.find(raw)
        allocation.name, allocation.dtype = name, dtype

    def leave_empty(self, raw):
        """Give `raw` the content of memory of ``empty``. What the program asked for itself is marked as not
        written; objects of shmemkit have padding, which their kernels copy."""
        line = user_line()
        frame: Any = sys._getframe(1)
        file = frame.f_code.co_filename
        while frame.f_code.co_filename == file:
            frame = frame.f_back
        asked = (frame.f_code.co_filename, frame.f_lineno) == line
        self.heap.leave_empty(raw, line if asked else None)

    def free(self, raw):
        self.machine.network.settle()  # NVSHMEM's begins with a barrier of all, which completes all messages
        if self.processes is not None:
            self.processes.barrier("free", self.meeting)
        allocation = self.heap.free(raw, user_line())
        self.machine.writers.freed(address(raw), allocation.size)
        if self.machine.races is not None:
            self.machine.races.freed(self.pe, allocation)

    def address(self, array):
        return address(array)

    def peer_view(self, array, rank):
        there = self.heap.on(array, self.members.pes[rank])
        if reason := self.unreached(nvlink=False, ranks=[rank]):
            raise ValueError(f"peer_view(): {reason}. Use put and get")
        return there

    def multicast_view(self, array, ranks):
        """`array`, symmetric, on all ranks of this node, which are `ranks`. ValueError on GPUs older than
        Hopper."""
        multicast.check_capability(self.compute_capability)
        return Multicast(array)

    def barrier(self, stream):
        stream = self.handle(stream)
        shape = Shape(members=self.members)
        stream.enqueue(Launch(stream, f"{users_call('barrier')}", _barrier, [], [], shape))

    def follow(self, later, earlier):
        """What is enqueued on stream `later` from now on runs after what is on `earlier` now (None: the
        World's). See ``shmemkit.backends.nvshmem``."""
        if self.capture_of(later) == self.capture_of(earlier):
            self.order(self.handle(later), self.handle(earlier))

    def capture_of(self, stream):
        """What identifies the capture that `stream` (None: the World's) takes part in, or None."""
        captured = self.handle(stream).captured
        return None if captured is None else captured.number

    # -- copies and memory operations of streams: see ``shmemkit.backends.nvshmem``
    def handle(self, stream):
        if stream is not None and not isinstance(stream, Stream):
            raise TypeError(f"stream is {shown(stream)}; on the emulator it must be one of Numba's, or None")
        return stream or self.stream

    def new_stream(self):
        return Stream(self.machine, self.pe, blocking=False)

    def order(self, later, earlier):
        later.wait_event(earlier.record())

    def no_copies(self, ranks=None):
        return self.unreached(nvlink=False, ranks=ranks)

    def copy(self, dst, src):
        return lambda stream: stream.enqueue(copy(stream, dst, src))

    def copy_pieces(self, places, src, empty):
        from shmemkit.device.packets.lamport import emulated_copy

        return lambda stream: stream.enqueue(copy_by(emulated_copy, stream, places, src, empty))

    def copy_rows(self, dst, src):
        return lambda stream: stream.enqueue(copy_rows(stream, dst, src))

    def memory_operations(self, operations):
        return lambda stream: stream.enqueue(memory_operations(stream, operations))

    def record(self, records):
        """Record a timeline from now on. -> ``stop()``, which ends that and returns what was recorded: the
        file's dictionary, or None to all but the first of the ranks that share a process."""
        machine = self.machine
        running = machine.timeline
        since = (0, 0) if running is None else (len(running.spans), len(running.marks))
        running = running or timeline.begin(machine, records)
        running.users += 1
        first = next(pe for pe in self.members.pes if pe in machine.local_pes)

        def stop():
            running.users -= 1
            data = running.data(since) if self.pe == first else None
            if not running.users and machine.timeline is running:
                timeline.stop(machine)
            return data

        return stop

    def synchronize(self):
        self.machine.synchronize(self.pe)

    def to_host(self, array, stream):
        self.machine.refuse_freed(self.pe, array, "asnumpy reads")
        stream = self.handle(stream)
        stream.synchronize()
        if self.machine.races is None:
            return np.array(array)
        found = []
        perform(lambda: found.append(np.array(array)), [(array, ...)], stream=stream)
        stream.synchronize()
        return found[0]

    def finalize(self):
        if self.processes is not None:
            self.processes.finish()
        default = self.machine.defaults[self.pe]
        if self.machine.current[self.pe] is self.stream is not default:
            self.stream.__exit__()
        if self.host is None or self.host.process is None:  # streams of scripts need no World
            for stream in self.machine.streams[self.pe]:
                stream.ended = self.host is None or stream is not default
        _uninstall()
        races = self.machine.races
        if self.host is None and races is not None:
            races.judge()

    def abandon(self):
        """Leave after a failure. (``emu.run`` itself ends the threads of all its PEs.)"""
        if self.host is None:
            self.machine.clear()
            self.machine.races = None  # they are reported, or the failure has another cause
        self.finalize()


def _barrier():
    current_thread("barrier").barrier_all("thread")


def _device_modules():
    from .nvshmem_device_names import modules

    return modules()


def _install():
    global _users
    if _users == 0:
        launch_hook.install(_device_modules)
    _users += 1


def _uninstall():
    global _users
    _users -= 1
    if _users == 0:
        launch_hook.uninstall()
