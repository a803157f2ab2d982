"""Emulated tensor maps and the copies that take them (``shmemkit.device.tma``).

A copy is under way until nothing else can happen, or the schedule says so: a load's bytes come then, and its
place holds bytes 0xFF until then; a store reads its tile then, and writes later. What is changed meanwhile is
reported, and a tile that threads have stored without `fence_proxy_async`.
"""

import ctypes
import functools
from collections import defaultdict

import ml_dtypes
import numpy as np

from . import mbarriers
from .arrays import address
from .clusters import blocks_of, there
from .errors import EmulatorError
from .network import Message
from .race_report import line_of
from .shadow import Tracked, kernel_site, untracked

_MAGIC = 0x736D6B5F746D6170
_PIECE = 16  # bytes that are moved as one by the swizzle
_DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}


class Async:
    """What the threads of a block have asked of the TMA and the tensor cores, and what those may not see
    yet."""

    def __init__(self):
        self.unfenced = defaultdict(set)  # thread -> addresses that it has stored to, without a fence since
        self.stores = defaultdict(list)  # thread -> stores since its last group
        self.groups = defaultdict(list)  # thread -> groups of stores that are not written, the oldest first
        self.described = set()  # (thread, address of a tensor map that it has acquired)
        self.products = defaultdict(list)  # warpgroup -> products under way


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


class Snapshot:
    """Bytes that must not change until they are read."""

    def __init__(self, view, what):
        self.view, self.before, self.what, self.site = view, view.copy(), what, site()

    def read(self):
        if not np.array_equal(self.view, self.before):
            raise EmulatorError(
                f"shared memory was overwritten while {self.what}, asked for at {self.site}, reads it"
            )
        return self.view


# ---- swizzled rows


def swizzle(rows, row_bytes):
    """Which piece of each row holds piece p: (rows, pieces)."""
    at = np.arange(rows)[:, None] * row_bytes + np.arange(0, row_bytes, _PIECE)
    return swizzled(at, row_bytes) % row_bytes // _PIECE


def plain(tile, rows, row_bytes):
    """-> the bytes (rows, row_bytes) of a swizzled tile, in order."""
    pieces = tile[: rows * row_bytes].reshape(rows, -1, _PIECE)
    return pieces[np.arange(rows)[:, None], swizzle(rows, row_bytes)].reshape(rows, row_bytes)


def put_swizzled(tile, matrix):
    """The bytes `matrix` (rows, row_bytes) to a tile."""
    rows, row_bytes = matrix.shape
    pieces = tile[: rows * row_bytes].reshape(rows, -1, _PIECE)
    pieces[np.arange(rows)[:, None], swizzle(rows, row_bytes)] = matrix.reshape(rows, -1, _PIECE)


def tile_bytes(tile, n_bytes, alignment, what):
    """The first `n_bytes` of a tile in shared memory, which begins at a multiple of `alignment`, as plain
    uint8."""
    view = np.asarray(tile).reshape(-1).view(np.uint8)
    if view.size < n_bytes:
        raise IndexError(f"{what}: a tile of {n_bytes} bytes is needed, given {view.size}")
    if address(view) % alignment:
        raise EmulatorError(
            f"{what}: the tile must begin at a multiple of {alignment} bytes of shared memory"
        )
    return view[:n_bytes]


def store_fragment(thread, tile, row_bytes, i, part, dtype):
    """A thread stores its 8 accumulators of columns 16 i to 16 i + 15 to a swizzled tile of 16 rows."""
    view = tile_bytes(tile, 16 * row_bytes, 8 * row_bytes, "fragment_store")
    elements = np.array(part, np.float32).astype(_DTYPES[dtype])
    at = _of_fragment(thread.lane, row_bytes, i, elements.itemsize)
    view.view(elements.dtype)[at] = elements
    first = address(view)
    thread.block.asynchronous.unfenced[thread.thread_id].update(first + elements.itemsize * at)


@functools.cache
def _of_fragment(lane, row_bytes, i, itemsize):
    """-> which elements of the tile those are."""
    j = np.arange(8)
    row, column = lane // 4 + j // 2 % 2 * 8, 16 * i + lane % 4 * 2 + j // 4 * 8 + j % 2
    at = row * row_bytes + column * itemsize
    return swizzled(at, row_bytes) // itemsize


def swizzled(at, row_bytes):
    """Where byte `at` of a tile, or several, is: bits of the row change the 16-byte piece of it."""
    return at ^ (at >> 7 << 4 & row_bytes - _PIECE)


def packed_rows(piece, i, dtype):
    """The i-th 8 accumulators of each lane of a warp: bytes (lane, those of one half, in memory order)."""
    size = np.dtype(_DTYPES[dtype]).itemsize
    n_bytes = 32 * 8 * size
    view = tile_bytes(piece, (i + 1) * n_bytes, 16, "packed accumulators")[i * n_bytes :]
    return view.reshape(size // 2, 32, 16)


def store_packed(thread, piece, i, part, dtype):
    place = packed_rows(piece, i, dtype)[:, thread.lane]
    with np.errstate(all="ignore"):
        place[:] = np.array(part, np.float32).astype(_DTYPES[dtype]).view(np.uint8).reshape(place.shape)
    unfenced = thread.block.asynchronous.unfenced[thread.thread_id]
    unfenced.update(address(half) for half in place)


def packed(thread, piece, i, dtype):
    place = packed_rows(piece, i, dtype)[:, thread.lane]
    return place.reshape(-1).view(_DTYPES[dtype]).astype(np.float32)


def fence(thread):
    thread.block.asynchronous.unfenced.pop(thread.thread_id, None)


# ---- tensor maps


class Described:
    """A tensor map that was read."""

    def __init__(self, tensor_map):
        words = [int(w) for w in np.asarray(tensor_map)[:9]]
        if words[0] != _MAGIC:
            raise EmulatorError(
                "a tensor map is needed, what shmemkit.device.tensor_map returned on the host"
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
        raise EmulatorError(f"{what}: this thread has not called tensormap_acquire")
    return Described(tensor_map)


# ---- loads


def load(thread, tile, tensor_map, x, y, barriers, i, blocks):
    what = "tma_load" if blocks is None else "tma_load_multicast"
    box = _described(thread, tensor_map, what)
    here, me = tile_bytes(tile, box.n_bytes, 8 * box.row_bytes, what), thread.block
    key = address(barriers) + 8 * int(i)
    if not 0 <= i < barriers.size:
        raise IndexError(f"{what}: mbarrier {i} of {barriers.size}")
    targets = (
        [me.in_cluster] if blocks is None else [b for b in range(len(blocks_of(me))) if int(blocks) >> b & 1]
    )
    x, y = int(x), int(y)
    thread.turn()
    _reads(thread, box, x, y)
    for number in targets:
        owner, at, barrier = me, address(here), key
        if number != me.in_cluster:
            owner, at = there(me, at, number)
            _, barrier = there(me, key, number)
        mbarriers.found(thread, owner, barrier, i)
        memory = np.frombuffer((ctypes.c_uint8 * box.n_bytes).from_address(at), np.uint8)
        memory[:] = 0xFF

        def arrive(_, owner=owner, memory=memory, barrier=barrier):
            matrix = np.zeros((box.box[0], box.row_bytes), np.uint8)
            inside, of_box = box.clipped(x, y)
            matrix[of_box] = box.matrix()[inside]
            put_swizzled(memory, matrix)
            mbarriers.complete(owner, barrier, box.n_bytes)

        under_way(thread, arrive)


def bulk_load(thread, tile, src, barriers, i):
    n_bytes, block, key = src.nbytes, thread.block, address(barriers) + 8 * int(i)
    there = tile_bytes(tile, n_bytes, 16, "bulk_load")
    _check_bulk("bulk_load", src)
    if not 0 <= i < barriers.size:
        raise IndexError(f"bulk_load: mbarrier {i} of {barriers.size}")
    thread.turn()
    mbarriers.found(thread, block, key, i)
    if isinstance(src, Tracked):  # as `_reads`
        src.touch("read", thread.proxy, (thread.moment or thread.now(), *kernel_site()))
    here = np.asarray(untracked(src)).reshape(-1).view(np.uint8)
    there[:] = 0xFF

    def arrive(_):
        there[:] = here
        mbarriers.complete(block, key, n_bytes)

    under_way(thread, arrive)


def _check_bulk(what, array):
    if address(array) % 16 or array.nbytes % 16 or not array.nbytes:
        raise EmulatorError(
            f"{what}: multiples of 16 bytes, at multiples of 16, are moved; given {array.nbytes} bytes at "
            f"address {address(array):#x}"
        )


def _reads(thread, box, x, y):
    """Where races are looked for: a load reads symmetric memory as its thread knew it at its last
    `fence_proxy_async_global`, or when the kernel began."""
    region, rows = _symmetric(thread, box, x, y)
    if region is not None:
        access = (thread.moment or thread.now(), *kernel_site())
        for row in rows:
            region.read(address(row) - region.base, row.size, thread.proxy, access)


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
    """The two steps of a store: of `view`, in shared memory, which ``write(bytes)`` brings to its place."""

    def __init__(self, thread, what, view, write):
        source, block = Snapshot(view, what), thread.block
        key = _key(thread)

        def begin(_):
            if not block.alive:
                raise EmulatorError(
                    f"a block has ended before its {what}, at {source.site}, has read its tile"
                )
            self.bytes = source.read().copy()
            block.scheduler.wake(key)

        def end(_):
            write(self.bytes, source.site)
            block.scheduler.wake(key)

        self.read = under_way(thread, begin)
        self.written = under_way(thread, end, [self.read])


def _key(thread):
    return "stores", id(thread.block), thread.thread_id


def store(thread, tensor_map, x, y, tile):
    box, x, y = _described(thread, tensor_map, "tma_store"), int(x), int(y)
    view = tile_bytes(tile, box.n_bytes, 8 * box.row_bytes, "tma_store")

    def write(tile, site):
        inside, of_box = box.clipped(x, y)
        if inside[0].stop > inside[0].start and (inside[1].stop - inside[1].start) % _PIECE:
            raise EmulatorError(
                f"the tma_store asked for at {site} writes beyond the end of rows of "
                f"{box.columns * box.itemsize} bytes: the TMA writes whole {_PIECE} bytes"
            )
        box.matrix()[inside] = plain(tile, box.box[0], box.row_bytes)[of_box]

    _writes(thread, box, x, y)
    _store(thread, "tma_store", view, write)


def bulk_store(thread, dst, tile):
    view = tile_bytes(tile, dst.nbytes, 16, "bulk_store")
    _check_bulk("bulk_store", dst)
    there = np.asarray(untracked(dst)).reshape(-1).view(np.uint8)

    def write(tile, site):
        there[:] = tile

    thread.touch("write", dst)
    _store(thread, "bulk_store", view, write)


def _store(thread, what, view, write):
    first = address(view)
    for other, stored in thread.block.asynchronous.unfenced.items():
        if any(first <= at < first + view.size for at in stored):
            raise EmulatorError(
                f"{what}: thread {other} has stored to the tile, without fence_proxy_async since"
            )
    thread.turn()
    thread.block.asynchronous.stores[thread.thread_id].append(_Store(thread, what, view, write))


def commit(thread):
    asynchronous, me = thread.block.asynchronous, thread.thread_id
    asynchronous.groups[me].append(asynchronous.stores.pop(me, []))


def wait_group(thread, n, step):
    """Until all but the last `n` groups have done `step`, "read" or "written"."""
    groups = thread.block.asynchronous.groups[thread.thread_id]
    waited = groups[: len(groups) - n]
    thread.wait_until(
        _key(thread),
        lambda: all(getattr(s, step).done for group in waited for s in group),
        lambda: f"its bulk stores to be {step}",
    )
    if step == "written":
        del groups[: len(waited)]
