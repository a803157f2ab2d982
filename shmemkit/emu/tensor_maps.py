"""Emulated tensor maps and the copies that take them (``shmemkit.device.cuda.tma``).

A copy is under way until nothing else can happen, or the schedule says so: a load's bytes arrive then, and
its destination holds bytes 0xFF until then; a store reads its tile then, and writes later. The emulator
reports bytes that change in between, and a tile that threads have stored without `fence_proxy_async`
(``async_proxy.py``). A block must not end before its loads have arrived and its stores have read.
"""

import ctypes
import functools
import itertools
from collections import defaultdict

import numpy as np

from shmemkit.support.dtypes import numpy_dtype

from . import mbarriers
from .async_proxy import unfenced, who_stored
from .clusters import blocks_of, there
from .device_arrays import address
from .errors import EmulatorError
from .network import Message
from .race_report import line_of
from .shadow_arrays import Tracked, kernel_site, untracked

_MAGIC = 0x736D6B5F746D6170
_UNIT = 16  # bytes that are moved as one by the swizzle


class Async:
    """What the threads of a block have asked of the TMA and the tensor cores, and what those may not see
    yet."""

    def __init__(self):
        self.unfenced = defaultdict(set)  # thread -> addresses that it has stored to, without a fence since
        self.loads = {}  # to this block, under way: Message -> what it is
        self.stores = defaultdict(list)  # thread -> stores since its last group
        self.groups = defaultdict(list)  # thread -> groups of stores that are not written, the oldest first
        self.described = set()  # (thread, address of a tensor map that it has acquired)
        self.products = defaultdict(list)  # warpgroup -> products under way

    def in_use(self):
        """What still uses the block's shared memory, and must not when it ends; None: nothing does."""
        for load in self.loads.values():
            return f"its {load}, has come"
        reading = (store for store in self._stores() if not store.read.done)
        return next((f"its {store.what}, has read its tile" for store in reading), None)

    def finish(self, network):
        """The kernel has ended: so what it has stored is there."""
        for store in self._stores():
            if store.read.done and not store.written.done:
                network.deliver(store.written)

    def _stores(self):
        """Those that are perhaps under way."""
        return itertools.chain(*self.stores.values(), *itertools.chain(*self.groups.values()))


def under_way(thread, arrive, after=()):
    """``arrive(None)`` happens when nothing else can, or the schedule says so, after the messages `after`. ->
    the message"""
    network = thread.block.machine.network
    message = Message(None, None, arrive)
    message.after = [m for m in after if not m.done]
    scheduler = network.machine.scheduler
    if scheduler.choice is not None:
        scheduler.choice.sent(message, thread)
    network.under_way.append(message)
    scheduler.progress += 1
    return message


def site():
    """Where the kernel is, for reports."""
    code, instruction = kernel_site()
    return f"{code.co_filename.rpartition('/')[2]}:{line_of(code, instruction)}" if code else "a kernel"


def asked_for(what):
    return f"{what}, asked for at {site()}"


def check_fenced(block, view, what):
    """`what` reads the bytes `view` of shared memory."""
    number = who_stored(block, view)
    if number is not None:
        raise EmulatorError(
            f"{asked_for(what)}: thread {number} has stored to the tile, without fence_proxy_async since"
        )


class Snapshot:
    """Bytes that must not change until they are read. `what` reads them, and where it was asked for."""

    def __init__(self, view, what):
        self.view, self.before, self.what = view, view.copy(), asked_for(what)

    def read(self):
        if not np.array_equal(self.view, self.before):
            raise EmulatorError(f"shared memory was overwritten while {self.what}, reads it")
        return self.view


# ---- swizzled rows


def swizzle(rows, row_bytes):
    """Which unit of each row holds unit p: (rows, units)."""
    at = np.arange(rows)[:, None] * row_bytes + np.arange(0, row_bytes, _UNIT)
    return swizzled(at, row_bytes) % row_bytes // _UNIT


def plain(tile, rows, row_bytes):
    """-> the bytes (rows, row_bytes) of a swizzled tile, in order."""
    units = tile[: rows * row_bytes].reshape(rows, -1, _UNIT)
    return units[np.arange(rows)[:, None], swizzle(rows, row_bytes)].reshape(rows, row_bytes)


def put_swizzled(tile, matrix):
    """The bytes `matrix` (rows, row_bytes) to a tile."""
    rows, row_bytes = matrix.shape
    units = tile[: rows * row_bytes].reshape(rows, -1, _UNIT)
    units[np.arange(rows)[:, None], swizzle(rows, row_bytes)] = matrix.reshape(rows, -1, _UNIT)


def tile_bytes(tile, n_bytes, alignment, what):
    """The first `n_bytes` of a tile in shared memory, which begins at a multiple of `alignment`, as plain
    uint8."""
    view = np.asarray(tile).reshape(-1).view(np.uint8)
    if view.size < n_bytes:
        raise IndexError(f"{what}: the tile has {view.size} bytes; it must have {n_bytes} or more")
    if address(view) % alignment:
        raise EmulatorError(
            f"{what}: the tile begins at address {address(view):#x}; it must begin at a multiple of "
            f"{alignment} bytes of shared memory"
        )
    return view[:n_bytes]


def store_fragment(thread, tile, row_bytes, i, part, dtype):
    """A thread stores its 8 accumulators of columns 16 i to 16 i + 15 to a swizzled tile of 16 rows."""
    view = tile_bytes(tile, 16 * row_bytes, 8 * row_bytes, "fragment_store")
    elements = np.array(part, np.float32).astype(numpy_dtype(dtype))
    at, offsets = _of_fragment(thread.lane, row_bytes, i, elements.itemsize)
    thread.touch_bytes("write", tile, offsets[::2], 2 * elements.itemsize)  # two side by side
    view.view(elements.dtype)[at] = elements
    first = address(view)
    unfenced(thread).update([first + offset for offset in offsets])


@functools.cache
def _of_fragment(lane, row_bytes, i, itemsize):
    """-> which elements of the tile those are, and at which bytes"""
    j = np.arange(8)
    row, column = lane // 4 + j // 2 % 2 * 8, 16 * i + lane % 4 * 2 + j // 4 * 8 + j % 2
    at = row * row_bytes + column * itemsize
    at = swizzled(at, row_bytes)
    return at // itemsize, at.tolist()


def swizzled(at, row_bytes):
    """Where byte `at` of a tile, or several, is: bits of the row change the 16-byte unit of it."""
    return at ^ (at >> 7 << 4 & row_bytes - _UNIT)


def packed_rows(tile, i, dtype):
    """The i-th 8 accumulators of each lane of a warp: bytes (lane, those of one half, in memory order)."""
    size = numpy_dtype(dtype).itemsize
    n_bytes = 32 * 8 * size
    view = tile_bytes(tile, (i + 1) * n_bytes, 16, "packed accumulators")[i * n_bytes :]
    return view.reshape(size // 2, 32, 16)


def store_packed(thread, tile, i, part, dtype):
    fragment = packed_rows(tile, i, dtype)[:, thread.lane]
    _note_packed(thread, "write", tile, i, fragment)
    with np.errstate(all="ignore"):
        fragment[:] = (
            np.array(part, np.float32).astype(numpy_dtype(dtype)).view(np.uint8).reshape(fragment.shape)
        )
    unfenced(thread).update(address(half) for half in fragment)


def _note_packed(thread, kind, tile, i, fragment):
    halves = np.arange(len(fragment) * i, len(fragment) * (i + 1))
    thread.touch_bytes(kind, tile, 16 * (32 * halves + thread.lane), 16)


def packed(thread, tile, i, dtype):
    fragment = packed_rows(tile, i, dtype)[:, thread.lane]
    _note_packed(thread, "read", tile, i, fragment)
    return fragment.reshape(-1).view(numpy_dtype(dtype)).astype(np.float32)


# ---- tensor maps


class Described:
    """A tensor map that was read."""

    def __init__(self, tensor_map):
        words = [int(w) for w in np.asarray(tensor_map)[:9]]
        if words[0] != _MAGIC:
            raise EmulatorError(
                "this is not a tensor map; it must be what shmemkit.device.tensor_map() returned on the host"
            )
        (_, self.address, self.rows, self.columns, self.pitch, self.itemsize, *self.box) = words[:8]
        self.row_bytes = self.box[1] * self.itemsize
        self.n_bytes = self.box[0] * self.row_bytes

    def matrix(self):
        """The bytes (rows, columns * itemsize) in global memory."""
        size = (self.rows - 1) * self.pitch + self.columns * self.itemsize
        memory = np.frombuffer((ctypes.c_uint8 * size).from_address(self.address), np.uint8)
        shape = self.rows, self.columns * self.itemsize
        return np.lib.stride_tricks.as_strided(memory, shape, (self.pitch, 1), writeable=True)

    def clipped(self, x, y):
        """The part of the box at column x, row y that is in the matrix: slices of the matrix and of the box,
        in rows and bytes."""
        y0, y1 = max(y, 0), max(min(y + self.box[0], self.rows), max(y, 0))
        x0, x1 = max(x, 0), max(min(x + self.box[1], self.columns), max(x, 0))
        size = self.itemsize
        inside = slice(y0, y1), slice(x0 * size, x1 * size)
        return inside, (slice(y0 - y, y1 - y), slice((x0 - x) * size, (x1 - x) * size))

    def coordinates(self, x, y, what):
        """-> x, y as int, of a box that the TMA moves."""
        x, y = int(x), int(y)
        if x * self.itemsize % _UNIT:
            raise EmulatorError(
                f"{what}: x is {x}; it must be a multiple of {_UNIT // self.itemsize}, so that the box "
                f"begins at a multiple of {_UNIT} bytes of its rows (a GPU stops with an illegal "
                "instruction)"
            )
        return x, y


def encode(array, box):
    """A tensor map: where the array is, and the box."""
    pitch = array.strides[0] if array.shape[0] > 1 else -(-array.shape[1] * array.itemsize // 16) * 16
    words = [_MAGIC, address(array), *array.shape, pitch, array.itemsize, *box]
    return np.array([*words, *[0] * (16 - len(words))], np.uint64)


def described(thread, tensor_map):
    Described(tensor_map)
    thread.block.asynchronous.described.add((thread.thread_id, address(tensor_map)))


def _described(thread, tensor_map, what):
    if (thread.thread_id, address(tensor_map)) not in thread.block.asynchronous.described:
        raise EmulatorError(f"{what}: this thread has not called tensormap_acquire(). Call it first")
    return Described(tensor_map)


# ---- loads


def load(thread, tile, tensor_map, x, y, barriers, i, blocks):
    what = "tma_load" if blocks is None else "tma_load_multicast"
    box = _described(thread, tensor_map, what)
    here, me = tile_bytes(tile, box.n_bytes, 8 * box.row_bytes, what), thread.block
    key = mbarriers.key_of(barriers, i)
    targets = (
        [me.in_cluster] if blocks is None else [b for b in range(len(blocks_of(me))) if int(blocks) >> b & 1]
    )
    x, y = box.coordinates(x, y, what)

    def bring(memory):
        matrix = np.zeros((box.box[0], box.row_bytes), np.uint8)
        inside, of_box = box.clipped(x, y)
        matrix[of_box] = box.matrix()[inside]
        put_swizzled(memory, matrix)

    thread.turn()
    for number in targets:
        owner, at, barrier = me, address(here), key
        if number != me.in_cluster:
            owner, at = there(me, at, number)
            _, barrier = there(me, key, number)
        reading = mbarriers.found(thread, owner, barrier, i).reading(thread, what)
        _reads(thread, box, x, y, reading)
        memory = np.frombuffer((ctypes.c_uint8 * box.n_bytes).from_address(at), np.uint8)
        _load(thread, what, owner, memory, barrier, bring)


def _load(thread, what, owner, memory, barrier, bring):
    """``bring(memory)`` stores to shared memory of block `owner`, whose mbarrier at address `barrier` is told
    then."""
    memory[:] = 0xFF
    what, loads = asked_for(what), owner.asynchronous.loads

    def arrive(_):
        del loads[message]
        if (memory != 0xFF).any():
            raise EmulatorError(f"shared memory was overwritten while {what}, writes it")
        bring(memory)
        mbarriers.complete(owner, barrier, memory.size)

    message = under_way(thread, arrive)
    loads[message] = what


def bulk_load(thread, tile, src, barriers, i):
    block, key = thread.block, mbarriers.key_of(barriers, i)
    there = tile_bytes(tile, src.nbytes, 16, "bulk_load")
    _check_bulk("bulk_load", src)
    thread.turn()
    reading = mbarriers.found(thread, block, key, i).reading(thread, "bulk_load")
    if isinstance(src, Tracked):  # as `_reads`
        src.region.read(src.first, src.nbytes, thread.proxy, (reading, *kernel_site()), thread.clock)
    here = np.asarray(untracked(src)).reshape(-1).view(np.uint8)
    _load(thread, "bulk_load", block, there, key, lambda memory: np.copyto(memory, here))


def _check_bulk(what, array):
    if address(array) % 16 or array.nbytes % 16 or not array.nbytes:
        raise EmulatorError(
            f"{what}: an array has {array.nbytes} bytes at address {address(array):#x}; both must be "
            "multiples of 16, and the size not 0"
        )


def _reads(thread, box, x, y, reading):
    """Where races are looked for: a load reads symmetric memory as its thread knew it at its last
    `fence_proxy_async_global`, or when the kernel began; and has read it at the moment `reading`."""
    region, rows = _symmetric(thread, box, x, y)
    if region is not None:
        access = (reading, *kernel_site())
        for row in rows:
            region.read(address(row) - region.base, row.size, thread.proxy, access, thread.clock)


def _writes(thread, box, x, y):
    """Likewise: a store writes it as its thread knows it."""
    region, rows = _symmetric(thread, box, x, y)
    if region is not None:
        access = (thread.moment or thread.now(), *kernel_site())
        for row in rows:
            region.write(address(row) - region.base, row.size, thread.clock, access)


def _symmetric(thread, box, x, y):
    """-> the Region of a box in symmetric memory, and its rows; None, if it is elsewhere, or nobody asks."""
    races = thread.block.machine.races
    if races is None:
        return None, ()
    rows = box.matrix()[box.clipped(x, y)[0]]
    return (races.region_of(rows) if rows.size else None), rows


# ---- stores


class _Store:
    """The two steps of a store of `view`, in shared memory: ``write(bytes)`` puts it into global memory."""

    def __init__(self, thread, what, view, write):
        source, block = Snapshot(view, what), thread.block
        self.what, key = source.what, _key(thread)

        def begin(_):
            self.bytes = source.read().copy()
            block.scheduler.wake(key)

        def end(_):
            write(self.bytes, self.what)
            block.scheduler.wake(key)

        self.read = under_way(thread, begin)
        self.written = under_way(thread, end, [self.read])


def _key(thread):
    return "stores", id(thread.block), thread.thread_id


def store(thread, tensor_map, x, y, tile):
    box = _described(thread, tensor_map, "tma_store")
    x, y = box.coordinates(x, y, "tma_store")
    view = tile_bytes(tile, box.n_bytes, 8 * box.row_bytes, "tma_store")

    def write(tile, what):
        inside, of_box = box.clipped(x, y)
        if inside[0].stop > inside[0].start and (inside[1].stop - inside[1].start) % _UNIT:
            raise EmulatorError(
                f"a {what}, writes beyond the end of rows of "
                f"{box.columns * box.itemsize} bytes: the TMA writes whole {_UNIT} bytes"
            )
        box.matrix()[inside] = plain(tile, box.box[0], box.row_bytes)[of_box]

    _writes(thread, box, x, y)
    _store(thread, "tma_store", view, write)


def bulk_store(thread, dst, tile):
    view = tile_bytes(tile, dst.nbytes, 16, "bulk_store")
    _check_bulk("bulk_store", dst)
    there = np.asarray(untracked(dst)).reshape(-1).view(np.uint8)

    def write(tile, what):
        there[:] = tile

    thread.touch("write", dst)
    _store(thread, "bulk_store", view, write)


def _store(thread, what, view, write):
    check_fenced(thread.block, view, what)
    thread.turn()
    thread.block.asynchronous.stores[thread.thread_id].append(_Store(thread, what, view, write))


def commit(thread):
    asynchronous, me = thread.block.asynchronous, thread.thread_id
    asynchronous.groups[me].append(asynchronous.stores.pop(me, []))


def wait_group(thread, n, step):
    """Until all but the last `n` groups have done `step`, "read" or "written"."""
    groups = thread.block.asynchronous.groups[thread.thread_id]
    waited = groups[: max(0, len(groups) - n)]
    thread.wait_until(
        _key(thread),
        lambda: all(getattr(s, step).done for group in waited for s in group),
        lambda: f"its bulk stores to be {step}",
    )
    if step == "written":
        del groups[: len(waited)]
