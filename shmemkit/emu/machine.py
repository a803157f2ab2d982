"""The emulated machine: the PEs that live in this process, their memory, and what connects them to the
others."""

import contextlib
import threading
import weakref
from typing import Any

import numpy as np

from shmemkit.support.progress import showing

from .clocked_threads import CheckedBlock
from .collective_calls import SLOT, SLOTS, Calls
from .collectives import Collectives
from .device_arrays import address, device_view
from .errors import DeadlockError, RaceError, add_text, races_text
from .gpu_model import gpu_of
from .grid import Block
from .heap import Heap
from .last_writers import Writers
from .members import N_TEAMS, Members
from .network import Network
from .races import Races
from .report import deadlock, use_after_free
from .scheduler import Scheduler
from .shadow_arrays import untracked


class Machine:
    """`memory` holds the symmetric heaps of all `n_ranks`; `local_pes` run in this process; a node has
    `local_size` PEs.

    `lock` is a context manager that makes a read-modify-write of symmetric memory indivisible, where there
    are other processes. `delivery` is when messages arrive (``network.py``), `choice` picks the schedule
    (``schedules.py``), and with `races` unordered accesses are found (``races.py``). `calls` is the table of
    ``collective_calls.py`` that other processes see, too.
    """

    def __init__(
        self,
        memory,
        n_ranks,
        local_pes,
        local_size,
        lock=None,
        delivery="eager",
        choice=None,
        races=False,
        calls=None,
        gpu=None,
    ):
        self.gpu = gpu_of(gpu)
        self.memory, self.memory_address = memory, address(memory)
        self.n_ranks, self.local_pes, self.local_size = n_ranks, list(local_pes), local_size
        self.heap_size = memory.size // n_ranks
        self.lock = lock or contextlib.nullcontext()
        self.scheduler = Scheduler(choice)
        self.network = self.scheduler.network = Network(self, delivery)
        self.races = Races(self) if races else None
        self.block = CheckedBlock if races else Block
        self.timeline: Any = None  # a Timeline, where one is recorded
        self.writers = Writers(self)
        self.collectives = Collectives(self)
        self.emptied = (
            weakref.WeakValueDictionary()
        )  # by address of a place (``device/packets/lamport.py``): by whom
        self.heaps = {pe: Heap(memory, n_ranks, pe) for pe in self.local_pes}
        table = np.zeros((n_ranks, SLOTS), SLOT) if calls is None else calls
        self.members = {}  # PE -> those of the World
        for pe, heap in self.heaps.items():
            arrivals = heap.allocate(N_TEAMS * n_ranks * 8).view(np.uint64).reshape(N_TEAMS, n_ranks)
            self.members[pe] = Members(range(n_ranks), pe, local_size, arrivals, Calls(table, pe), ())
        self.groups = {}  # key -> Members, of one of this process's PEs, of a group
        self.streams = {pe: [] for pe in self.local_pes}
        self.defaults, self.current = {}, {}  # PE -> its default stream, and CuPy's current one
        self.ended = set()  # PEs whose host program has returned
        self.os_thread = threading.get_ident()  # that runs everything
        self.host_waits = {}  # PE -> () -> what its host program waits for
        self.host_waiter = self._run_here  # how a host program waits; several PEs or processes replace it

    def located(self, at):
        """-> (PE, offset in its heap) of address `at` in symmetric memory; elsewhere two None"""
        offset = at - self.memory_address
        return divmod(offset, self.heap_size) if 0 <= offset < self.memory.size else (None, None)

    def seen(self, array, is_sized):
        """`array` as a kernel sees it: device memory, whose accesses may be checked."""
        view = device_view(array, is_sized)
        return view if self.races is None else self.races.tracked(view)

    def peer(self, block, array, pe):
        """Symmetric `array` of the block's PE, on `pe`."""
        views = block.launch.peers.get(id(array))
        if views is None:  # a slice made in the kernel
            return self._on(block.pe, array, pe)
        if pe not in views:
            views[pe] = self._on(block.pe, array, pe)
        return views[pe]

    def _on(self, me, array, pe):
        there = self.heaps[me].on(untracked(array), pe)
        return there if self.races is None else self.races.tracked(there)

    def refuse_freed(self, pe, array, use):
        """UseAfterFreeError if `array` lies in symmetric memory that `pe` has freed; `use` begins a
        sentence that ends with the array."""
        _, offset = self.located(address(array)) if isinstance(array, np.ndarray) else (None, None)
        if offset is not None and (allocation := self.heaps[pe].freed_at(offset)):
            raise use_after_free(allocation, use)

    def written(self, key):
        """Something was stored at address `key`: whoever waits for it may go on."""
        scheduler = self.scheduler
        scheduler.progress += 1
        if self.timeline is not None:
            self.timeline.stored(key)
        if scheduler.waiters or scheduler.choice is not None:
            scheduler.wake(key)

    def set_local_size(self, local_size):
        """From now on this many consecutive PEs share a node."""
        self.network.check_nodes(self.n_ranks // local_size)
        self.local_size = local_size
        for members in self.members.values():
            members.local_size = local_size

    def under_way(self):
        """What kernels do at the moment, in a line. (For another thread: nothing here changes anything.)"""
        launches = list(self.scheduler.launches)
        if not launches:
            return "host code"
        first = launches[0]
        ours = first.function.__module__.startswith(
            ("shmemkit.collectives.", "shmemkit.gemm.", "shmemkit.moe.")
        )
        name = first.members.calls.last if ours else first.name
        ended, n_blocks = sum(la.ended for la in launches), sum(la.n_blocks for la in launches)
        return f"{name}: {ended} of {n_blocks} blocks ended, {self.scheduler.progress:,} steps"

    def synchronize(self, pe):
        """The host program of `pe` waits for all its work."""
        for stream in list(self.streams[pe]):
            stream.synchronize()

    def wait_on_host(self, pe, is_done, key, why, can_go_on):
        """The host program of `pe` waits. With `can_go_on` (a launch), it returns although not done when the
        machine is stuck, as a launch on a GPU returns before the kernel has finished; otherwise being stuck
        is a deadlock."""
        if is_done():
            return
        self.check_thread()
        with self.host_waits_for(pe, why):
            self.host_waiter(pe, is_done, key, can_go_on)

    @contextlib.contextmanager
    def host_waits_for(self, pe, why):
        """In it the host program of `pe` waits; ``why()`` says in reports what for."""
        self.host_waits[pe] = why
        try:
            yield
        finally:
            self.host_waits.pop(pe, None)

    def check_thread(self):
        if threading.get_ident() != self.os_thread:
            raise RuntimeError(
                "shmemkit is called from another thread of this process; call it from the thread that called "
                "sk.init()"
            )

    def _run_here(self, pe, is_done, key, can_go_on):
        """The only PE of the only process: its host program runs the scheduler."""
        try:
            with showing(self.under_way):
                if not self.scheduler.run_until(is_done) and not can_go_on:
                    raise self.deadlock()
        except BaseException as error:
            self.clear()
            self.blame(error)
            raise

    def blame(self, error):
        """Add the races that were found to `error`, which ends the run: it may have failed for them."""
        if self.races is None or not isinstance(error, Exception) or isinstance(error, RaceError):
            return
        if races := self.races.untold():
            error.races = races
            add_text(error, f"Besides, {races_text(races)}")
        if unwritten := self.races.untold_unwritten():
            add_text(error, f"Besides, {unwritten}")

    def clear(self):
        """End all threads and forget what the streams still had to do (after a failure)."""
        self.scheduler.kill()
        for streams in self.streams.values():
            for stream in streams:
                stream.queue.clear()

    def deadlock(self):
        blocks = (block for launch in self.scheduler.launches for block in launch.blocks)
        missed = next((error for block in blocks if (error := block.missed_call())), None)
        return missed or self.deadlock_error(deadlock(self))

    def deadlock_error(self, report):
        all_members = [self.members[self.local_pes[0]], *self.groups.values()]
        calls = [line for members in all_members for line in members.calls.missing()]
        return DeadlockError("\n".join(["deadlock: no rank can go on", *calls, report]))
