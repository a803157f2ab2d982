"""LL, the low-latency protocol: each word carries its own flag.

A word of 8 bytes holds 4 bytes of data and a flag of 4. No store or load over NVLink or PCIe divides such
a word. The receiver polls the words until each has the expected flag. There is no signal, no fence and no
second trip, for twice the bytes. The flag must differ from what the words hold: usually it is the epoch,
the number of the call, which sender and receiver count alike. (The emulator raises ValueError if a word
holds the flag already.) Accesses are of 16 bytes, two words at a time.

Where loads and stores do not reach, `ll_put_warp` sends packed words. A network divides a message, too,
but none of its aligned words of 8 bytes. (NVSHMEM's own collectives by LL rely on the same.)

The accesses are relaxed, of scope "sys": they order nothing but themselves. A word may be rewritten only
after its receiver has read it. The kernel's protocol must provide for this, mostly by two buffers: see
docs/protocols.md.

NCCL has the same protocol under the same name; "Demystifying NCCL" (arXiv 2507.04786) describes it.

The machine code must keep (docs/machine_code.md): whole packet.
"""

from __future__ import annotations

import functools

import numpy as np

from shmemkit.compiler.ptx import (
    asm,
    data_address,
    element_address,
    gpu,
    gpu_function,
    itemsize,
    load_bytes,
    store_bytes,
    types,
)
from shmemkit.typing import Array

from ..argument_checks import check_array, check_emulated_array, check_emulated_integer, check_integer
from ..cuda.thread_index import block_thread, block_threads, warp_thread, warp_threads
from ..emulator import address, current_thread, from_scalar, group_thread
from ..shmem import bounded_waits
from ..shmem.ordered_access import load
from ..shmem.rma import put_nbi_block, put_nbi_warp
from .packet_checks import check_emulated_lines, check_lines, check_reuse

__all__ = [
    "ll_load",
    "ll_pack_block",
    "ll_pack_warp",
    "ll_put_block",
    "ll_put_warp",
    "ll_recv_block",
    "ll_recv_pack_block",
    "ll_recv_pack_warp",
    "ll_recv_warp",
    "ll_store",
    "ll_words",
]


def ll_words(n_bytes: int) -> int:
    """How many uint64 words `n_bytes` bytes take: two for 8 bytes. For hosts and kernels."""
    return (n_bytes + 7) // 8 * 2


@gpu(ll_words)
def _(n_bytes):
    check_integer("ll_words", n_bytes=n_bytes)
    return lambda n_bytes: (n_bytes + 7) // 8 * 2


def ll_store(lines: Array, i: int, value: int, flag: int) -> None:
    """Store 8 bytes of data with the flag, by one thread: what `ll_pack_block` does with its unit `i`.

    lines   as of `ll_pack_block`, on a peer (`symm_at`) or this rank: words 2 * i and 2 * i + 1 are written
    value   uint64
    flag    32 bits, other than what the words hold now

    Relaxed, of scope "sys": it orders nothing.
    """
    thread = current_thread("ll_store")
    check_emulated_integer("ll_store", i=i, value=value, flag=flag)
    check_emulated_lines("ll_store", lines, 16, 2 * int(i) + 2)
    check = unlike("ll_store", flag)
    for k, half in enumerate((int(value) & 0xFFFFFFFF, int(value) >> 32 & 0xFFFFFFFF)):
        thread.store(lines, 2 * int(i) + k, flagged(half, flag), "sys", "relaxed", check)


def ll_load(lines: Array, i: int, flag: int) -> int:
    """Wait for unit `i` of `lines`, of this rank, by one thread. -> its 8 bytes of data, uint64

    It orders nothing. When the wait expires (docs/timeouts.md), the data are undefined.
    """
    thread = current_thread("ll_load")
    check_emulated_integer("ll_load", i=i, flag=flag)
    check_emulated_lines("ll_load", lines, 16, 2 * int(i) + 2)
    low, high = (awaited(thread, lines, 2 * int(i) + k, flag) for k in (0, 1))
    return from_scalar(np.uint64(high << 32 | low))


def ll_pack_block(lines: Array, src: Array, flag: int) -> None:
    """Store `src` to `lines` with the flag, the work shared by the threads of the block.

    lines   uint64, 1-D, contiguous, at a multiple of 16 bytes, ``ll_words(bytes of src)`` of them or more:
            on a peer (`symm_at`), or this rank
    src     contiguous, any dtype, shape and alignment
    flag    32 bits, other than what the words hold now

    All threads of the block call it with the same arguments; it orders nothing and has no barrier. Unordered
    with earlier stores, also: publish those by other means.
    """
    _pack("block", "ll_pack_block", lines, src, flag)


def ll_pack_warp(lines: Array, src: Array, flag: int) -> None:
    """`ll_pack_block` by the threads of a warp."""
    _pack("warp", "ll_pack_warp", lines, src, flag)


def ll_recv_block(dst: Array, lines: Array, flag: int) -> None:
    """Wait for the data in `lines`, and store it to `dst`, the work shared by the threads of the block.

    dst     contiguous, any dtype, shape and alignment; its size says how many bytes
    lines   of this rank: where the sender has called ``ll_pack_block(lines, src, flag)``, with a `src` of as
            many bytes

    All threads of the block call it. Each has stored its share when it returns: ``cuda.syncthreads()`` before
    others use `dst`.
    """
    _recv("block", "ll_recv_block", dst, lines, flag)


def ll_recv_warp(dst: Array, lines: Array, flag: int) -> None:
    """`ll_recv_block` by the threads of a warp."""
    _recv("warp", "ll_recv_warp", dst, lines, flag)


def ll_recv_pack_block(there: Array, lines: Array, n_words: int, flag: int) -> None:
    """Wait for `n_words` words in `lines`, and store them to `there` as they are, with the flag: to pass them
    on to another rank. `n_words` is even. Otherwise as `ll_recv_block`."""
    _forward("block", "ll_recv_pack_block", there, lines, n_words, flag)


def ll_recv_pack_warp(there: Array, lines: Array, n_words: int, flag: int) -> None:
    """`ll_recv_pack_block` by the threads of a warp."""
    _forward("warp", "ll_recv_pack_warp", there, lines, n_words, flag)


def ll_put_block(lines: Array, source: Array, n_words: int, pe: int) -> None:
    """Send `n_words` packed words of `source` to `lines` on rank `pe`, through NVSHMEM: over NVLink or the
    network, which divides no word.

    lines     symmetric, uint64, 1-D, contiguous, at a multiple of 16 bytes; on rank `pe` they are meant
    source    likewise, of this rank, where this block has called `ll_pack_block`; often the same part of
              `lines`
    n_words   even: ``ll_words(bytes)``

    All threads of the block call it with the same arguments; what they stored before is sent, as in
    `put_nbi_block`. It returns at once and orders nothing. The words may arrive at any time, in any order.
    `source` is read as late as that: it may be written again after `quiet`, or when something says that rank
    `pe` has received all of these words.
    """
    thread = group_thread("block", "ll_put_block", lines, source, n_words, pe)
    thread.together("block", lambda: _put("ll_put_block", thread, lines, source, n_words, pe))


def ll_put_warp(lines: Array, source: Array, n_words: int, pe: int) -> None:
    """`ll_put_block` by the threads of a warp."""
    thread = group_thread("warp", "ll_put_warp", lines, source, n_words, pe)
    thread.together("warp", lambda: _put("ll_put_warp", thread, lines, source, n_words, pe))


# ---- in the emulator: each thread has a share of neighbouring units of 8 bytes, two words


def sharing(group, name, *given):
    """-> the calling thread, one of a `group`, "warp" or "block", that all call with what is given;
    ``share(n)``: which of `n` units are its."""
    thread = group_thread(group, name, *given, meets=False)
    i, threads = (
        (thread.thread_id, thread.n_threads) if group == "block" else (thread.lane, thread.warp_size())
    )
    return thread, lambda n: range(n * i // threads, n * (i + 1) // threads)


def _pack(group, name, lines, src, flag):
    thread, share = sharing(group, name, lines, src, flag)
    check_emulated(name, lines, flag, "src", src)
    n = src.nbytes
    units = share((n + 7) // 8)
    if units:
        data = np.zeros(2 * len(units), np.uint32)
        part = thread.bytes_of("read", src, 8 * units.start, min(n, 8 * units.stop))
        data.view(np.uint8)[: part.size] = part
        check = unlike(name, flag)
        for i, word in enumerate(data.tolist(), 2 * units.start):
            thread.store(lines, i, flagged(word, flag), "sys", "relaxed", check)


def _recv(group, name, dst, lines, flag):
    thread, share = sharing(group, name, dst, lines, flag)
    check_emulated(name, lines, flag, "dst", dst)
    n = dst.nbytes
    units = share((n + 7) // 8)
    if units:
        words = range(2 * units.start, 2 * units.stop)
        data = np.array([awaited(thread, lines, i, flag) for i in words], np.uint32).view(np.uint8)
        part = thread.bytes_of("write", dst, 8 * units.start, min(n, 8 * units.stop))
        part[:] = data[: part.size]


def _forward(group, name, there, lines, n_words, flag):
    thread, share = sharing(group, name, there, lines, n_words, flag)
    check_emulated_integer(name, n_words=n_words, flag=flag)
    check = unlike(name, flag, there, lines)
    for unit in share(n_words // 2):
        for i in (2 * unit, 2 * unit + 1):
            thread.store(there, i, flagged(awaited(thread, lines, i, flag), flag), "sys", "relaxed", check)


def _put(name, thread, lines, source, n_words, pe):
    check_emulated_lines(name, lines, 16, n_words)
    check_emulated_lines(name, source, 16, n_words, name="source")
    if n_words % 2 or n_words < 0:
        raise ValueError(f"{name}(): n_words is {n_words}; it must be even, and 0 or more")
    thread.peer(source, thread.rank)  # it is symmetric
    if n_words:
        thread.put(lines[:n_words], source[:n_words], pe, nbi=True, word=True)


def unlike(name, flag, there=None, lines=None):
    """The check of the words that `flag` replaces; None where the words of `lines` replace themselves."""
    if there is not None and address(there) == address(lines):
        return None
    return check_reuse(name, int(flag) & 0xFFFFFFFF, lambda word: word >> 32)


def flagged(data, flag):
    """The word that holds both."""
    return (int(flag) & 0xFFFFFFFF) << 32 | data


def awaited(thread, lines, i, flag):
    """The data of word `i`, when it has the flag."""
    flag = int(flag) & 0xFFFFFFFF
    why, shown = f"to hold the flag {flag}", lambda word: f"the flag {word >> 32}"
    word = thread.wait_word(lines, i, lambda word: word >> 32 == flag, why, shown)
    return int(word) & 0xFFFFFFFF


def check_emulated(name, lines, flag, what, data):
    check_emulated_integer(name, flag=flag)
    check_emulated_array(name, what, data)
    check_emulated_lines(name, lines, 16, ll_words(data.nbytes), data)


# ---- on the GPU: unit i, of bytes 8 * i to 8 * i + 7, belongs to thread i modulo their number

_stopped = bounded_waits.stopped
_store_line = asm(
    "{ .reg .b64 a, b; mov.b64 a, {$1, $3}; mov.b64 b, {$2, $3}; "
    "st.relaxed.sys.global.v2.b64 [$0], {a, b}; }",
    types.void,
    (types.uint64, types.uint32, types.uint32, types.uint32),
)
_load_line = asm(
    "{ .reg .b64 a, b; ld.relaxed.sys.global.v2.b64 {a, b}, [$4]; "
    "mov.b64 {$0, $1}, a; mov.b64 {$2, $3}, b; }",
    types.UniTuple(types.uint32, 4),
    (types.uint64,),
)
_load_word = load(types.uint64, "relaxed", "sys")


@functools.cache
def words_of(width):
    """``load(array, offset) -> two uint32`` and ``store(array, offset, low, high)`` of 8 bytes, by accesses
    of `width` bytes."""
    load_one, store_one = load_bytes(width), store_bytes(width)
    bits = 8 * width

    @gpu_function
    def load(array, offset):
        value = types.uint64(0)
        for k in range(8 // width):
            value |= types.uint64(load_one(array, offset + k * width)) << types.uint64(k * bits)
        return types.uint32(value), types.uint32(value >> types.uint64(32))

    @gpu_function
    def store(array, offset, low, high):
        value = types.uint64(high) << types.uint64(32) | low
        for k in range(8 // width):
            store_one(array, offset + k * width, value >> types.uint64(k * bits))

    return load, store


@functools.cache
def packing(width, store_line):
    """``pack(src, address, n_bytes, flag, thread, threads)``, which stores the share of `thread` by
    ``store_line(address, low, high, flag)``, and loads `width` bytes at a time."""
    load, _ = words_of(width)
    load_byte = load_bytes(1)

    @gpu_function
    def pack(src, address, n_bytes, flag, thread, threads):
        n = n_bytes >> 3
        i = thread
        while i < n:
            low, high = load(src, 8 * i)
            store_line(address + types.uint64(16 * i), low, high, flag)
            i += threads
        rest = n_bytes & 7
        if rest and i == n:
            value = types.uint64(0)
            for k in range(rest):
                value |= types.uint64(load_byte(src, 8 * n + k)) << types.uint64(8 * k)
            high = types.uint32(value >> types.uint64(32))
            store_line(address + types.uint64(16 * n), types.uint32(value), high, flag)

    return pack


@functools.cache
def _receiving(arrived, width):
    _, store = words_of(width)
    store_byte = store_bytes(1)

    @gpu_function
    def recv(dst, address, n_bytes, flag, thread, threads):
        n = n_bytes >> 3
        i = thread
        while i < n:
            line = arrived(address + types.uint64(16 * i), flag)
            store(dst, 8 * i, line[0], line[2])
            i += threads
        rest = n_bytes & 7
        if rest and i == n:
            line = arrived(address + types.uint64(16 * n), flag)
            value = types.uint64(line[2]) << types.uint64(32) | line[0]
            for k in range(rest):
                store_byte(dst, 8 * n + k, value >> types.uint64(8 * k))

    return recv


@gpu_function
def _load_flag(address):
    return types.uint32(_load_word(address) >> types.uint64(32))


@functools.cache
def arriving(primitive, armed, recorded):
    """``arrived(address, flag)``: the two words of a line, when both have the flag; in an armed kernel what
    is there when its time is up."""
    poll = bounded_waits.bounded(primitive, types.uint32, _load_flag, "eq")

    @gpu_function
    def arrived(address, flag):
        line = _load_line(address)
        while line[1] != flag or line[3] != flag:
            if armed:
                seen = poll(address if line[1] != flag else address + types.uint64(8), flag)
            line = _load_line(address)
            if armed:
                if seen != flag:
                    break
        return line

    return arrived


def by_alignment(make, size, most=8):
    """``transfer(data, ...)``: what ``make(width)`` gives for accesses to an array, of elements of `size`
    bytes, of the width that suits its address: 1, 2, 4, .. or `most` bytes."""
    unit = min(size & -size, 8)
    chosen = make(unit)
    for width in (2, 4, 8, 16):
        if unit < width <= most:
            chosen = _either(width, make(width), chosen)
    return chosen


def _either(width, wide, narrow):
    @gpu_function
    def transfer(data, *given):
        if data_address(data) & (width - 1) == 0:
            wide(data, *given)
        else:
            narrow(data, *given)

    return transfer


def _transfer(primitive, make, data, lines):
    """``transfer(data, lines, flag, thread, threads)`` for arrays of these types, `by_alignment`."""
    check_array(primitive, "the data", data)
    check_lines(primitive, lines)
    size = itemsize(data.dtype)
    share = by_alignment(make, size)

    @gpu_function
    def transfer(data, lines, flag, thread, threads):
        share(data, element_address(lines, 0), data.size * size, types.uint32(flag), thread, threads)

    return transfer


def implement_pack(pack, store_line, thread, threads):
    """``pack(lines, src, flag)`` on the GPU, by ``store_line(address, low, high, flag)``, for a warp or a
    block: `thread` is one's number among its `threads`."""
    make = functools.partial(packing, store_line=store_line)

    @gpu(pack)
    def _(lines, src, flag):
        check_integer(pack.__name__, flag=flag)
        transfer, armed = _transfer(pack.__name__, make, src, lines), bounded_waits.armed()

        def impl(lines, src, flag):
            if not (armed and _stopped()):
                transfer(src, lines, flag, thread(), threads())

        return impl


def _implement_recv(recv, thread, threads):
    """``recv(dst, lines, flag)`` likewise."""

    @gpu(recv)
    def _(dst, lines, flag):
        check_integer(recv.__name__, flag=flag)
        make = functools.partial(
            _receiving, arriving(recv.__name__, bounded_waits.armed(), bounded_waits.recording())
        )
        transfer = _transfer(recv.__name__, make, dst, lines)
        return lambda dst, lines, flag: transfer(dst, lines, flag, thread(), threads())


def implement_forward(forward, store_line, thread, threads):
    """``forward(there, lines, n_words, flag)`` likewise."""

    @gpu_function
    def store_unless_stopped(address, low, high, flag):
        if not _stopped():
            store_line(address, low, high, flag)

    @gpu(forward)
    def _(there, lines, n_words, flag):
        check_integer(forward.__name__, n_words=n_words, flag=flag)
        check_lines(forward.__name__, there, lines)
        arrived = arriving(forward.__name__, bounded_waits.armed(), bounded_waits.recording())
        store = store_unless_stopped if bounded_waits.armed() else store_line

        def impl(there, lines, n_words, flag):
            source, target = element_address(lines, 0), element_address(there, 0)
            expected = types.uint32(flag)
            i, step = thread(), threads()
            while i < n_words >> 1:  # the length of a range would be a 64-bit division
                line = arrived(source + types.uint64(16 * i), expected)
                store(target + types.uint64(16 * i), line[0], line[2], expected)
                i += step

        return impl


def _implement_put(put, put_nbi, stopped):
    name = put.__name__

    @gpu(put)
    def _(lines, source, n_words, pe):
        check_integer(name, n_words=n_words, pe=pe)
        check_lines(name, lines, source)

        def impl(lines, source, n_words, pe):
            put_nbi(lines[:n_words], source[:n_words], pe)

        def impl_unless_stopped(lines, source, n_words, pe):
            if not stopped():
                put_nbi(lines[:n_words], source[:n_words], pe)

        return impl_unless_stopped if bounded_waits.armed() else impl


@gpu(ll_store)
def _(lines, i, value, flag):
    check_integer("ll_store", i=i, value=value, flag=flag)
    check_lines("ll_store", lines)
    armed = bounded_waits.armed()

    def impl(lines, i, value, flag):
        if not (armed and _stopped()):
            low, high = types.uint32(value), types.uint32(types.uint64(value) >> types.uint64(32))
            _store_line(element_address(lines, 2 * i), low, high, types.uint32(flag))

    return impl


@gpu(ll_load)
def _(lines, i, flag):
    check_integer("ll_load", i=i, flag=flag)
    check_lines("ll_load", lines)
    arrived = arriving("ll_load", bounded_waits.armed(), bounded_waits.recording())

    def impl(lines, i, flag):
        line = arrived(element_address(lines, 2 * i), types.uint32(flag))
        return types.uint64(line[2]) << types.uint64(32) | types.uint64(line[0])

    return impl


implement_pack(ll_pack_block, _store_line, block_thread, block_threads)
implement_pack(ll_pack_warp, _store_line, warp_thread, warp_threads)
_implement_recv(ll_recv_block, block_thread, block_threads)
_implement_recv(ll_recv_warp, warp_thread, warp_threads)
implement_forward(ll_recv_pack_block, _store_line, block_thread, block_threads)
implement_forward(ll_recv_pack_warp, _store_line, warp_thread, warp_threads)
_implement_put(ll_put_block, put_nbi_block, bounded_waits.block_stopped)
_implement_put(ll_put_warp, put_nbi_warp, bounded_waits.warp_stopped)
