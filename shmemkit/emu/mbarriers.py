"""Emulated mbarriers (``shmemkit.device.cuda.mbarrier``).

Their state is beside their word in shared memory, which is not looked at. Mistakes that a GPU answers with
undefined behaviour raise: a barrier that was not made, or not fenced, or has more arrivals than it expects.
"""

from .clusters import there
from .device_arrays import address
from .errors import EmulatorError
from .vector_clock import NEVER, Moment


class Mbarrier:
    """`phase`: how many have ended."""

    __slots__ = ("count", "pending", "n_bytes", "phase", "fenced", "maker", "made", "key", "loading")

    def __init__(self, count, maker):
        self.count = self.pending = count
        self.n_bytes = self.phase = 0  # announced and not arrived, which may be negative; phases ended
        self.fenced, self.maker = False, maker
        self.made = self.loading = None  # Moments, where races are looked for: then; of loads of this phase
        if maker.block.machine.races is not None:
            self.made = maker.moment or maker.now()
            self.key = next(maker.block.mbarrier_keys)

    def reading(self, thread, what):
        """Return the Moment at which `what`, which `thread` asks for and which arrives here, has read its
        source: the end of this phase. None where races are not looked for."""
        if self.made is None:
            return None
        if self.loading is None or self.loading.of.thread is not thread:
            block, launch = self.maker.block, self.maker.block.launch
            when = self.key, self.phase + 1, launch.stream_key, launch.number
            self.loading = Moment(block.key, NEVER, *when, Load(thread, what))
        return self.loading


class Load:
    """What the TMA reads, asked for by `thread`."""

    __slots__ = ("thread", "pe", "what")

    def __init__(self, thread, what):
        self.thread, self.pe, self.what = thread, thread.pe, what

    # as Operations, for reports
    target = None
    block = property(lambda self: self.thread.block)


def init(thread, barriers, i, count):
    if count < 1:
        raise ValueError(f"mbarrier_init(): count is {count}; it must be 1 or more")
    thread.block.mbarriers[key_of(barriers, i)] = Mbarrier(int(count), thread)


def fence_init(thread):
    for barrier in thread.block.mbarriers.values():
        if barrier.maker is thread:
            barrier.fenced = True


def arrive(thread, barriers, i, block=None, n_bytes=0):
    """`thread` arrives at barriers[i] of its block, or of block number `block` of its cluster."""
    owner, key = thread.block, key_of(barriers, i)
    if block is not None and int(block) != owner.in_cluster:
        owner, key = there(owner, key, int(block))
    barrier = found(thread, owner, key, i)
    races = thread.block.machine.races
    if races is not None:
        races.released(thread, thread.moment or thread.now(), races.history(key, 0), "gpu", keep=True)
    thread.turn("add", key)
    barrier.n_bytes += int(n_bytes)
    barrier.pending -= 1
    if barrier.pending < 0:
        raise EmulatorError(f"mbarrier {i}: its phase expects {barrier.count} arrivals, and got more")
    _look(owner, key, barrier)


def complete(owner, key, n_bytes):
    """`n_bytes` have arrived for the barrier at address `key` of block `owner`."""
    barrier = owner.mbarriers[key]
    barrier.n_bytes -= n_bytes
    _look(owner, key, barrier)


def _look(owner, key, barrier):
    """Whether the phase ends."""
    if barrier.pending == 0 and barrier.n_bytes == 0:
        barrier.phase += 1
        barrier.pending = barrier.count
        if barrier.loading is not None:
            races, clocks = owner.machine.races, {("gpu", owner.pe, None): {barrier.key: barrier.phase}}
            races.wrote(races.history(key, 0), None, clocks, keep=True)
            barrier.loading = None
        owner.machine.written(key)


def wait(thread, barriers, i, parity):
    if parity not in (0, 1):
        raise ValueError(f"mbarrier_wait(): parity is {parity}; it must be 0 or 1")
    key = key_of(barriers, i)
    barrier = found(thread, thread.block, key, i)
    thread.wait_until(
        key,
        lambda: barrier.phase % 2 != parity,
        lambda: (
            f"phase {barrier.phase} of mbarrier {i}: {barrier.pending} arrivals and {barrier.n_bytes} bytes "
            "are to come"
        ),
    )
    thread.acquired(key)


def found(thread, owner, key, i):
    """The Mbarrier at address `key` of block `owner`, which asynchronous copies and `thread` may use."""
    barrier = owner.mbarriers.get(key)
    if barrier is None:
        raise EmulatorError(f"mbarrier {i} does not exist. Call mbarrier_init() first")
    if not barrier.fenced:
        raise EmulatorError(
            f"mbarrier {i}: the thread that made it must call fence_mbarrier_init() before others use it"
        )
    if barrier.made is not None and barrier.maker is not thread and not barrier.made.before(thread.clock):
        raise EmulatorError(
            f"mbarrier {i}: nothing orders its initialization before this call. Call cuda.syncthreads() "
            "between"
        )
    return barrier


def key_of(barriers, i):
    if not 0 <= i < barriers.size:
        raise IndexError(f"the mbarrier is number {i}; there are 0 to {barriers.size - 1}")
    return address(barriers) + 8 * int(i)
