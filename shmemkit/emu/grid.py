"""A kernel launch: its grid of blocks and their threads, all alive at once."""

import ctypes
import enum
import gc
import itertools
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from shmemkit.compiler.numba_internals import ArgHint
from shmemkit.support.arrays import as_array
from shmemkit.support.garbage_collection import uncollected
from shmemkit.support.settings import shown

from .arithmetic import number
from .async_proxy import SharedArray, is_used_by
from .cuda_integers import from_scalar, sized
from .device_arrays import address, uninitialised
from .errors import EmulatorError, OutOfBoundsError
from .multicast_memory import Multicast
from .participation import Part, Participation
from .rendezvous import Rendezvous
from .report import out_of_bounds, where, who
from .tensor_maps import Async
from .thread import Thread
from .vector_clock import STEP
from .watchdog import of_launches
from .workers import running

MANY = 1000  # threads, at which the collector does not look while they run


class Dim3:
    """A 3-component vector, as threadIdx and gridDim."""

    __slots__ = ("x", "y", "z")

    def __init__(self, x, y, z):
        self.x, self.y, self.z = x, y, z

    def __iter__(self):
        return iter((self.x, self.y, self.z))

    def __repr__(self):
        return f"({self.x}, {self.y}, {self.z})"


def _indices(size):
    """Every index below `size`, x fastest."""
    return [Dim3(x, y, z) for z, y, x in itertools.product(range(size.z), range(size.y), range(size.x))]


def _dynamic(n_bytes):
    """Dynamic shared memory: at the same offset in each block, modulo 1024, as on a GPU; not at a multiple of
    more than 128."""
    whole = uninitialised(n_bytes + 1024, np.uint8)
    first = (128 - address(whole)) % 1024
    return whole[first : first + n_bytes]


def _memory_of(record):
    """The memory of a NumPy record, which the kernel may change, as an array of one element."""
    at = record.__array_interface__["data"][0]
    memory = (ctypes.c_char * record.dtype.itemsize).from_address(at)
    memory.owner = record  # it lives as long
    return np.ndarray((1,), record.dtype, memory)


class Block(Participation):
    """A block of threads on a PE."""

    thread = Thread  # the class of its threads

    def __init__(self, launch, index, number):
        self.launch, self.blockIdx = launch, index
        self.number, self.in_cluster = number, number % launch.cluster
        self.machine, self.scheduler, self.pe = launch.machine, launch.machine.scheduler, launch.pe
        self.gridDim, self.blockDim = launch.grid, launch.block
        self.n_threads = self.alive = launch.block.x * launch.block.y * launch.block.z
        self.parked, self.park = [], self.scheduler.park  # in syncthreads
        self.effects = 0  # of its threads, so far, on memory and others, if the scheduler has a choice
        self.shared = {}  # call site -> shared array
        self.rendezvous = {}  # what is done there (and the warp) -> Rendezvous
        self.async_copies = {}  # thread number -> its AsyncCopies
        self.mbarriers = {}  # address -> Mbarrier
        self.asynchronous = Async()
        # Live lanes of each warp.
        self.warps = [(1 << min(32, self.n_threads - first)) - 1 for first in range(0, self.n_threads, 32)]
        Participation.__init__(self)
        self.threads = [self.thread(self, index, i) for i, index in enumerate(launch.thread_indices)]

    def release(self):
        """All live threads are in syncthreads: they go on."""
        if self.open:
            self.check_calls()
        if self.machine.timeline is not None:
            here = running()  # it came last, or a thread that is not here has ended
            self.machine.timeline.met([*self.parked, here] if here.block is self else self.parked)
        self.scheduler.ready.extend(self.parked)
        self.parked.clear()

    def meeting(self, thread, scope, mask=0xFFFFFFFF, what=None):
        """The Rendezvous of the threads of `thread`'s block, or of the lanes `mask` of its warp, for the
        operation `what`."""
        first = thread.thread_id & ~31
        orders, what = what is None, what or ("syncwarp" if scope == "warp" else "a block operation")
        key = (first, mask, what) if scope == "warp" else what
        rendezvous = self.rendezvous.get(key)
        if rendezvous is None:
            if scope == "warp":
                rendezvous = Part(self, first, mask, what, orders)
            else:
                rendezvous = Rendezvous(self.scheduler, lambda: self.alive, what)
            self.rendezvous[key] = rendezvous
        return rendezvous

    def leave(self, thread):
        """`thread` has ended."""
        self.scheduler.progress += 1
        self.alive -= 1
        if self.machine.timeline is not None:
            self.machine.timeline.thread_ends(thread)
        needed = self.loses(thread)
        if needed is not None:
            self.launch.fail(thread, needed)
            return
        if self.parked and len(self.parked) == self.alive:
            self.release()
        if self.rendezvous:
            for rendezvous in self.rendezvous.values():
                rendezvous.left()
        if not self.alive and (left := self.asynchronous.in_use()):
            self.launch.fail(thread, EmulatorError(f"a block has ended before {left}"))
        launch = self.launch
        launch.alive -= 1
        if not self.alive or launch.rendezvous.round.values:
            launch.left(thread)


class Shape(NamedTuple):
    """How a kernel is launched: `grid` blocks of `block` threads, each block with `shared` bytes of dynamic
    shared memory; `pdl` as in ``shmemkit.bind``, `cluster` the blocks of one, along x. `members`: whose ranks
    the kernel speaks of, default those of the World."""

    grid: tuple[int, int, int] = (1, 1, 1)
    block: tuple[int, int, int] = (1, 1, 1)
    shared: int = 0
    pdl: bool = False
    cluster: int = 1
    members: Any = None


ONE_THREAD = Shape()


class Launch:
    """`kernel[grid, block, stream, shared](*arguments)` on PE `pe`; `function` is the kernel as plain
    Python."""

    def __init__(self, stream, name, function, parameters, arguments, shape=ONE_THREAD):
        self._call = stream, name, function, parameters, arguments, shape
        self.pdl, self.cluster, self.dynamic_shared = shape.pdl, shape.cluster, shape.shared
        self.stream = stream  # a graph may run it on another one
        self.machine, self.pe = stream.machine, stream.pe
        self.members = shape.members or self.machine.members[self.pe]
        self.name, self.function = name, function
        self.grid, self.block = Dim3(*shape.grid), Dim3(*shape.block)
        self.is_sized = function.__dict__.get("__is_sized__", False)
        self.arguments = list(map(self._argument, arguments, parameters))
        named = zip(parameters, self.arguments, strict=True)
        self.arrays = {name: a for name, a in named if isinstance(a, np.ndarray)}
        self.peers = {id(a): {} for a in self.arrays.values()}  # views on other PEs, made once
        self.alive = self.enqueued_at = 0
        self.started = self.done = self.frozen = False

    def again(self, _):
        """The same launch, to be run once more (by a graph)."""
        return Launch(*self._call)

    def start(self):
        """Make every thread of the grid runnable."""
        scheduler = self.machine.scheduler
        of_launches.watch(scheduler)
        if self.machine.races is not None:
            self.machine.races.kernel_started(self)
        if self.machine.timeline is not None:
            self.machine.timeline.kernel_starts(self)
        self.thread_indices = _indices(self.block)
        indices = _indices(self.grid)
        self.n_blocks, n_threads = len(indices), len(self.thread_indices)
        self.fit, self.limit = self.machine.gpu.fit(n_threads, self.dynamic_shared, self.cluster)
        self.blocks, self.to_start, self.ended = [], deque(enumerate(indices)), 0
        self.alive = self.n_blocks * n_threads
        # What others have frozen would thaw, too. (To count it takes long.)
        if self.alive >= MANY and not (any(la.frozen for la in scheduler.launches) or gc.get_freeze_count()):
            gc.freeze()
            self.frozen = True
        self.rendezvous = Rendezvous(scheduler, lambda: self.alive, "a grid barrier")
        scheduler.launches[self] = None
        self.start_blocks()

    def start_blocks(self, after=None):
        """Start what there is room for, whole clusters in order; `after`: the thread that ended last."""
        with uncollected():
            while self.to_start and len(self.blocks) - self.ended + self.cluster <= max(
                self.fit, self.cluster
            ):
                for _ in range(self.cluster):
                    number, index = self.to_start.popleft()
                    block = self.machine.block(self, index, number)
                    self.blocks.append(block)
                    if after is not None and self.machine.races is not None:
                        steps = {key: n for key, n in after.clock.items() if key >= STEP}
                        for thread in block.threads if steps else ():
                            thread.learn(steps)
                    if self.machine.timeline is not None:
                        self.machine.timeline.block_starts(block, after)
                    self.machine.scheduler.ready.extend(block.threads)

    def not_resident(self):
        """What of the grid does not fit on the GPU."""
        gpu = self.machine.gpu
        return (
            f"{self.fit} of the {self.n_blocks} blocks of {self.name} fit on an {gpu.name} at "
            f"once ({self.limit}; a block has {len(self.thread_indices)} threads and "
            f"{self.dynamic_shared} bytes of dynamic shared memory). Launch fewer or smaller blocks that "
            "loop, or name another GPU (SHMEMKIT_EMULATED_GPU)"
        )

    def left(self, thread):
        """`thread` has ended, the last of its block, or while others are in a barrier of the grid."""
        if not thread.block.alive:
            self.ended += 1
            if self.to_start:
                self.start_blocks(thread)
        if self.alive:
            if self.rendezvous.round.values:
                text = (
                    f"grid barrier: {who(thread)} has returned without calling it. All threads of all blocks "
                    "must call it"
                )
                self.fail(thread, EmulatorError(text))
        else:
            self.done = True
            self.thaw()
            self.machine.scheduler.launches.pop(self, None)
            for block in self.blocks:
                block.asynchronous.finish(self.machine.network)
                block.threads.clear()  # no cycle is left: their memory goes at once
            if self.machine.races is not None:
                self.machine.races.kernel_ended(self)
                # The record of its accesses may keep the launch, but not the memory of its arguments.
                self.arguments.clear()
                self.arrays.clear()
                self.peers.clear()
                self._call = None
            self.stream.advance()

    def let_go(self):
        """It was ended: no cycle is left, and who keeps the error keeps little else."""
        for block in self.blocks:
            for thread in block.threads:
                thread.let_go()
            block.threads.clear()
            block.parked.clear()
            block.shared.clear()
            block.rendezvous.clear()
            block.waiting.clear()
            block.barrier = None
        self.arguments.clear()
        self.arrays.clear()
        self.peers.clear()

    def check_grid_barrier(self):
        """A thread comes to a barrier of the grid."""
        if self.n_blocks > self.fit:
            raise EmulatorError(
                f"grid barrier: not all blocks of the grid run at once: {self.not_resident()}"
            )
        if self.alive < self.n_blocks * len(self.thread_indices):
            raise EmulatorError(
                "grid barrier: some threads have returned without calling it. All threads of all blocks must "
                "call it"
            )

    def thaw(self):
        """It is over: its memory may be collected, if a reference has remained."""
        if self.frozen:
            self.frozen = False
            gc.unfreeze()

    def fail(self, thread, error):
        """`thread` raised: the first such error ends the run, and says where."""
        scheduler = self.machine.scheduler
        if scheduler.failure is not None:
            return
        place = f"{where(thread, error.__traceback__)} in kernel {self.name}"
        details = out_of_bounds(self, error) if isinstance(error, IndexError) else None
        if details:
            failure = OutOfBoundsError(f"{details}\n  {place}")
        elif isinstance(error, EmulatorError):
            failure = error
        else:
            failure = EmulatorError(f"{type(error).__name__}: {error}\n  {place}")
        failure.__cause__ = error
        scheduler.failure = failure

    def shared_array(self, block, site, shape, dtype):
        """One array per call site and block; an empty shape names the dynamic shared memory of the launch."""
        shape = tuple(shape) if isinstance(shape, (tuple, list)) else (shape,)
        if site not in block.shared:
            if 0 in shape:
                if "dynamic" not in block.shared:
                    block.shared["dynamic"] = self._shared(_dynamic(self.dynamic_shared))
                usable = self.dynamic_shared // dtype.itemsize * dtype.itemsize
                block.shared[site] = block.shared["dynamic"][:usable].view(dtype)
            else:
                block.shared[site] = self._shared(uninitialised(shape, dtype))
        return block.shared[site]

    def _seen(self, array):
        return self.machine.seen(array, self.is_sized)

    def _shared(self, array):
        """Likewise, shared memory, whose stores are noted if the asynchronous proxy may read it."""
        if not array.size or not is_used_by(self.function):
            return self._seen(array)
        array = np.ndarray.view(array, SharedArray)
        if self.machine.races is not None:
            array = self.machine.races.tracked(array)
            array.region.simple = None  # no store takes the short way
        return array

    def _argument(self, value, name):
        """A launch argument as the kernel sees it."""
        if isinstance(value, ArgHint):
            value = value.value
        if isinstance(value, (np.ndarray, Multicast)):
            memory = value.local if isinstance(value, Multicast) else value
            self.machine.refuse_freed(self.pe, memory, f"kernel {self.name} is launched with")
        if isinstance(value, np.ndarray):
            return self._seen(value)
        if isinstance(value, Multicast):
            return value
        if isinstance(value, np.void):
            return self._seen(_memory_of(value))[0]
        if isinstance(value, np.generic):
            return sized(value) if self.is_sized else from_scalar(value)
        if isinstance(value, tuple):
            elements = [self._argument(v, name) for v in value]
            return type(value)(*elements) if hasattr(value, "_fields") else tuple(elements)
        if isinstance(value, (bool, int, float, complex, enum.Enum)) or value is None:
            return number(value)
        if hasattr(value, "__dlpack__") or hasattr(value, "__array_interface__"):
            return self._argument(as_array(f"kernel {self.name}", name, value, np), name)
        raise TypeError(
            f"kernel {self.name}: {name} is {shown(value)}; it must be an array, a number, an enum member "
            "or a tuple of those"
        )
