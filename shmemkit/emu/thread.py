"""An emulated CUDA thread, and what the primitives of ``shmemkit.device`` ask of it.

``current_thread`` is the one door from a primitive into the emulator: outside of a kernel it raises.
"""

import itertools
import sys
from typing import Any

import numpy as np

from shmemkit.support.settings import shown

from . import clusters
from .async_proxy import SharedArray
from .cuda_integers import wrap
from .device_arrays import address
from .report import other_name, place
from .scheduler import COMPARE
from .spin_loops import state_of
from .workers import begin, current

_getframe, _get, _set = sys._getframe, np.ndarray.__getitem__, np.ndarray.__setitem__
LOOKS = 256  # addresses that a thread remembers having looked at


class Thread:
    """One CUDA thread of a block. `block` has the PE, the grid and the threads it can synchronize with."""

    __slots__ = (
        *("block", "pe", "threadIdx", "thread_id", "why", "looks", "polls", "at_turn", "timeline"),
        *("worker", "dead", "__weakref__"),
    )
    timeline: Any  # its Clock, where one is recorded

    def __init__(self, block, index, thread_id):
        self.block, self.pe, self.threadIdx, self.thread_id = block, block.pe, index, thread_id
        self.worker, self.dead = None, False  # the greenlet that runs it, while it has begun and not ended
        self.why = None  # () -> what it waits for, while it waits
        self.looks = None  # address -> value seen there by a poll
        self.polls = -1, {}  # with a choice: its block's effects; (address, its state) -> writes there so far
        self.at_turn = False  # whether it lets others go first, before an access that they can observe

    def run(self):
        block, launch = self.block, self.block.launch
        try:
            if (result := launch.function(*launch.arguments)) is not None:
                raise TypeError(f"the kernel returns {shown(result)}; a kernel must return nothing")
        except Exception as error:
            launch.fail(self, error)
        if launch.to_start:
            self.turn("write", ("room for blocks", self.pe))
        block.leave(self)
        self.worker, self.dead = None, True

    def switch(self):
        """Begin, or go on."""
        if self.worker is None:
            begin(self)
        else:
            self.worker.switch()

    # where it stands, while it waits
    gr_frame = property(lambda self: self.worker and self.worker.gr_frame)

    def let_go(self):
        """The run has ended the thread: drop what it keeps alive."""
        self.worker = self.why = self.looks = None

    # -- who and where
    members = property(lambda self: self.block.launch.members)
    rank = property(lambda self: self.block.launch.members.rank)  # which the kernel takes me for
    n_ranks = property(lambda self: self.block.launch.members.n)
    n_threads = property(lambda self: self.block.n_threads)
    lane = property(lambda self: self.thread_id % 32)

    def warp_size(self):
        """Return the threads of its warp: 32, or fewer in the last one."""
        return min(32, self.block.n_threads - self.thread_id // 32 * 32)

    def peer(self, array, rank):
        """Return symmetric `array` on `rank`, which must be of this node, for loads and stores."""
        machine, pe = self.block.machine, self.members.pe(rank)
        there = machine.peer(self.block, array, pe)
        size = machine.local_size
        if self.pe // size != pe // size:
            raise ValueError(
                f"rank {rank} is on another node than rank {self.rank}. Loads, stores and notify() do not "
                "reach it; use put(), get(), put_signal() or signal_op()"
            )
        return there

    # -- memory that others wait on
    def turn(self, kind=None, key=None):
        """A scheduling point before an access that other threads can observe. `kind` is that of the access to
        the word at address `key`, if that is known yet."""
        scheduler = self.block.scheduler
        if scheduler.choice is not None:
            scheduler.turn(self)
            if kind is not None:
                scheduler.effect(self, kind, key)

    def wait(self, array, index, compare, value, scope="sys", semantic="acquire"):
        """Park until ``array[index] <compare> value``. -> the element seen."""
        value, holds = converted(value, array.dtype), COMPARE[compare]
        self._wait_for(
            array,
            index,
            lambda element: holds(element, value),
            f"{_SIGN[compare]} {value}",
            shown=lambda element: (
                f"{element}{other_name(self.block.machine, self.pe, address_of(array, index))}"
            ),
        )
        return array[index]

    def _passes(self):
        """Whether nobody is told of a wait that is satisfied already."""
        scheduler = self.block.scheduler
        return scheduler.choice is None and scheduler.timeline is None

    def wait_until(self, key, is_satisfied, why, satisfies=None):
        """Park until ``is_satisfied()``, which looks at the word at address `key`. ``satisfies(bytes)`` says
        whether these, at that address, would do."""
        timeline = self.block.machine.timeline
        if timeline is None:
            self._park_until(key, is_satisfied, why)
        else:
            timeline.wait(self, key, is_satisfied, why, satisfies, self._park_until)

    def _park_until(self, key, is_satisfied, why):
        scheduler = self.block.scheduler
        scheduler.wait_for(self, key, is_satisfied, why)
        while scheduler.choice is not None:
            self.turn("wait", key)  # it may be different after that
            if is_satisfied():
                break
            scheduler.wait_for(self, key, is_satisfied, why)

    def wait_word(self, array, index, is_satisfied, why, shown=str):
        """Park until ``is_satisfied(array[index])``, relaxed: nothing else is known then. -> the element.
        ``shown(element)`` is what a report says of it."""
        return self._wait_for(array, index, is_satisfied, why, shown)

    def _wait_for(self, array, index, is_satisfied, why, shown):
        item, key = array.item, address_of(array, index)
        if self._passes() and is_satisfied(item(index)):
            return item(index)
        self.wait_until(
            key,
            lambda: is_satisfied(item(index)),
            lambda: f"{place(self.block.machine, self, key)} {why}, now {shown(item(index))}",
            lambda word: is_satisfied(word.view(array.dtype).item(0)),
        )
        return item(index)

    def wait_line(self, line, is_satisfied, why):
        """Park until ``is_satisfied(line[-1])``. -> the words of `line`, of which all are stored at once."""
        self.wait_word(line, line.size - 1, is_satisfied, why)
        return np.array(line)

    def acquired(self, key):
        """The thread has waited for the word at address `key`. One that is checked learns from it."""

    def came(self):
        """Return when the thread reaches others, and the clock of what it did and knew: two None if races are
        not looked for."""
        return None, None

    def learn(self, clock):
        """From now on the thread knows what another one did and knew, its `clock`."""

    def copy(self, dst, src, first, last):
        """Copy elements `first` to `last` of contiguous arrays: ordinary loads and stores."""
        if isinstance(dst, SharedArray):
            dst.reshape(-1).stored(slice(first, last))
        if dst.ndim != 1:
            dst = np.ndarray.reshape(dst, -1)
        if src.ndim != 1:
            src = np.ndarray.reshape(src, -1)
        part = slice(first, last)
        _set(dst, part, _get(src, part))

    def bytes_of(self, what, array, first, last):
        """Bytes `first` to `last` of a contiguous array, as uint8, for a read or a write."""
        if what == "write" and isinstance(array, SharedArray):
            array.reshape(-1).view(np.uint8).stored(slice(first, last))
        return np.asarray(array).reshape(-1).view(np.uint8)[first:last]

    def touch(self, what, array, limit=None):
        """Note an access to at most `limit` elements of `array`. Only a thread that is checked keeps it."""

    def written_since(self, array, came):
        """A thread of another PE may have written `array` since it `came`; likewise."""

    def touch_bytes(self, what, array, firsts, n_bytes):
        """Note an access to `n_bytes` bytes from each of `firsts` on; likewise."""

    def spin_load(self, array, index, scope="sys"):
        """Read ``array[index]``, perhaps in a loop: when the same value is read again, the others run
        first."""
        here = address_of(array, index)
        for others_ran in (False, True):
            self.turn("read", here)
            value = array[index]
            if not self.look(here, value, others_ran):
                break
        if self.block.machine.timeline is not None:
            self.block.machine.timeline.polled(self, here, others_ran)
        return value

    def look(self, here, value, others_ran=False):
        """`value` was polled at address `here`. If it was so before, the others run now, unless they just
        have. -> whether they did.

        Who reads a value again without effect spins. Only a value that has changed counts as progress:
        without any, a spin loop is stuck.
        """
        machine = self.block.machine
        scheduler = machine.scheduler
        looks = self.looks
        if looks is None:
            looks = self.looks = {}
        seen = looks.get(here, value)
        spins = here in looks and not others_ran
        if len(looks) == LOOKS and here not in looks:
            looks.clear()
            spins = True
        looks[here] = value
        awaited = None if scheduler.choice is None else self._awaited(here)
        if seen != value == value:  # a NaN is no change
            scheduler.progress += 1
            return False
        if not spins:
            return False
        if scheduler.choice is not None and not awaited:  # its turns are enough
            scheduler.spinning.poll(scheduler.progress, len(scheduler.ready))
            return False
        scheduler.spin(
            self, lambda: f"{place(machine, self, here)} to change (polled in a loop), now {value}", awaited
        )
        return True

    def _awaited(self, here):
        """With a choice: return the addresses that the thread has read since it last stood here with the same
        variables, if its block has done nothing since then that others can observe. Until one of them is
        written, the loop repeats itself. None if the thread was not here, or one of them has been written."""
        scheduler, (effects, polls) = self.block.scheduler, self.polls
        if effects != self.block.effects:
            polls = {}
            self.polls = self.block.effects, polls
        exact = not scheduler.choice.takes_turns
        poll = here, *state_of(sys._getframe(2), exact)
        if exact:
            poll += tuple(
                tuple(state_of(t.gr_frame, True)) for t in self.block.threads if t.worker and t is not self
            )
        since = []
        if poll in polls:
            since = list(itertools.dropwhile(lambda seen: seen[0] != poll, polls.items()))
            del polls[poll]
        polls[poll] = scheduler.writes.get(here)
        if any(scheduler.writes.get(address) != writes for (address, *_), writes in since):
            if scheduler.choice.polled_in_vain():
                scheduler.hub.switch()
            return None
        return {address for (address, *_), _ in since}

    def tell(self, what, name):
        """Tell the timeline, where one is recorded: begin_phase, end_phase or mark, of this `name`."""
        if self.block.machine.timeline is not None:
            getattr(self.block.machine.timeline, what)(self, name)

    def sleep(self):
        """The others go first, once: this thread may poll something in a loop, with ordinary loads."""
        self.at_turn = True
        self.block.scheduler.spin(self, lambda: "its turn after nanosleep")
        self.at_turn = False

    def store(self, array, index, value, scope="sys", semantic="release", check=None):
        """A release or relaxed store that others may wait for. ``check(self, array, index)`` sees what it
        replaces, and may raise."""
        self.turn("write", address_of(array, index))
        if check is not None:
            check(self, array, index)
        self.write(array, index, value)

    def store_line(self, line, words, check=None):
        """Store all of `line` at once, relaxed. Others wait for its last word; `check` as of `store` sees
        it."""
        last = address_of(line, line.size - 1)
        self.turn("write", last)
        if check is not None:
            check(self, line, line.size - 1)
        np.asarray(line)[:] = words
        self.block.machine.written(last)

    def write(self, array, index, value):
        machine = self.block.machine
        with machine.lock:
            array[index] = value
        key = address_of(array, index)
        machine.writers.note(key, machine.writers.by(self), value)
        machine.written(key)

    def atomic(self, array, index, function, scope="gpu", semantic="relaxed"):
        """``array[index] = function(array[index])`` in one step. -> the old value. No `function`: a load.

        One that leaves the value as it was may be a poll, as in a spin lock: see `look`. It stores nothing,
        so that an ordinary store of another process at the same time is not lost.
        """
        key = address_of(array, index)
        self.turn()
        old, changed = self.update(array, index, key, function)
        self.updated(key, old, changed)
        return old

    def update(self, array, index, key, function):
        """-> (the old value, whether it has changed)"""
        with self.block.machine.lock:
            old = array[index]
            new = old if function is None else function(old)
            changed = new != old
            if changed:
                array[index] = new
                changed = array[index] != old  # it may have wrapped
                writers = self.block.machine.writers
                writers.note(key, writers.by(self), array[index])
        self.block.scheduler.effect(self, "write" if changed else "read", key)
        return old, changed

    def updated(self, key, old, changed):
        """Tell those who wait for the word at `key`."""
        timeline = self.block.machine.timeline
        if changed:
            if timeline is not None:
                timeline.polled(self, key, False)
            self.block.machine.written(key)
        else:
            spun = self.look(key, old)
            if timeline is not None:
                timeline.polled(self, key, spun)

    def threadfence(self, scope):
        """Memory is sequentially consistent here."""

    def fence_proxy(self):
        """The thread's later asynchronous copies see in global memory what it sees. Only a thread that is
        checked keeps that."""

    # -- messages
    def put(self, dst, src, rank, nbi=False, signal=None, value=0, op="set", word=False):
        pe = self.members.pe(rank)
        self.turn()
        self.block.machine.network.put(self, dst, src, pe, nbi, signal, value, op, word)

    def get(self, dst, src, rank, nbi=False, word=False):
        pe = self.members.pe(rank)
        self.turn()
        self.block.machine.network.get(self, dst, src, pe, nbi, word)

    def signal(self, signal, value, op, rank):
        pe = self.members.pe(rank)
        self.turn()
        self.block.machine.network.signal(self, signal, value, op, pe)

    def atomic_on(self, array, rank, function):
        """array[0] = function(array[0]) on `rank`; nobody waits for it."""
        pe = self.members.pe(rank)
        self.turn()
        self.block.machine.network.atomic(self, array, pe, function)

    def fence(self):
        self.turn()
        self.block.machine.network.fence(self)

    def quiet(self):
        self.block.machine.network.quiet(self)

    # -- kernels before on the stream
    def griddepcontrol_wait(self):
        """They have ended: a kernel never begins earlier here."""

    # -- synchronizing with other threads
    def syncthreads(self):
        block = self.block
        parked = block.parked
        if len(parked) + 1 == block.alive:
            block.release()
        else:
            parked.append(self)
            block.park()

    def syncwarp(self):
        self.together("warp")

    def together(self, scope, function=None):
        """A barrier of all threads of the warp or block; the last to arrive calls `function`. -> its result,
        for all of them."""
        if scope == "block" and function is None:
            return self.syncthreads()
        if scope == "thread":
            return function() if function else None
        return self.rendezvous(scope, None, lambda values: function() if function else None)

    def rendezvous(self, scope, value, function, mask=0xFFFFFFFF, what=None):
        """A barrier, `what`, of the threads of its block, or of the lanes `mask` of its warp, each with a
        `value`. Return what ``function(values by thread_id)`` returns in the last to arrive."""
        return self.block.meeting(self, scope, mask, what).join(self, value, function)

    def grid_barrier(self):
        """A barrier of all threads of the grid."""
        self.block.effects += 1
        self.block.launch.check_grid_barrier()
        self.block.launch.rendezvous.join(self, None, lambda values: None)

    def cluster_sync(self):
        """A barrier of all threads of the cluster."""
        self.block.effects += 1
        clusters.sync(self, sys._getframe(1))

    # -- all ranks
    def team(self, team):
        return self.members.team(team)

    def barrier(self, team, scope):
        self.quiet()
        self.sync(team, scope, "a barrier")

    def sync(self, team, scope, call="a sync"):
        self.together(scope, lambda: self.block.machine.collectives.barrier_of(self, self.team(team), call))

    def barrier_all(self, scope):
        self.barrier(0, scope)

    def sync_all(self, scope):
        self.sync(0, scope)

    def collective(self, name, team, dst, src, scope, **options):
        self.together(
            scope,
            lambda: getattr(self.block.machine.collectives, name)(self, self.team(team), dst, src, **options),
        )


def converted(value, dtype):
    """`value`, an integer, as an element of `dtype`."""
    if isinstance(value, (float, np.floating)):
        raise TypeError(f"value is {shown(value)}; it must be an integer")
    return value if 0 <= value <= 0x7FFFFFFF else wrap(value, dtype)


_SIGN = {"eq": "==", "ne": "!=", "gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def address_of(array, index):
    """The address of ``array[index]``; IndexError when there is no such element."""
    if array.ndim != 1:
        raise ValueError(f"the array has shape {array.shape}; it must be 1-D. Pass a row or a slice of it")
    if not 0 <= index < array.shape[0]:
        raise IndexError(f"index {index} is out of bounds for size {array.shape[0]}")
    return address(array) + index * array.strides[0]


def group_thread(scope, name, *arguments, meets=True) -> Any:
    """As `current_thread`, for a call that all threads of a block, warp or warpgroup (`scope`) make, with the
    same `arguments`. `meets`: whether there is a barrier inside."""
    try:
        thread = current().thread
    except AttributeError:
        thread = current_thread(name)  # says where it may be called
    block, i, frame = thread.block, thread.thread_id, _getframe(2)
    call = block.only
    # Mostly it is as the thread before.
    if call is not None and call.next == i and i & 31 and i > 7 and call.left > 1:
        if frame.f_lasti == call.at and frame.f_code is call.code and arguments[call.n_arrays :] == call.rest:
            call.next = i + 1
            call.left -= 1
            return thread
    block.enters(thread, scope, name, arguments, meets, frame)
    return thread


def current_thread(name) -> Any:
    """The emulated thread that is running, for primitive `name`."""
    try:
        return current().thread
    except AttributeError:
        raise RuntimeError(
            f"{name}() runs inside a kernel: call it from a @cuda.jit function launched with "
            "kernel[grid, block](...), on a GPU or in an emulated world (shmemkit.init(backend='emulator') "
            "or shmemkit.emu.run)"
        ) from None
