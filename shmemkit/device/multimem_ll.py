"""LL (``ll.py``) to all GPUs of a node at once, by multimem stores (``multimem.py``).

A word must arrive in one piece. So each is a multimem store of its own, of 64 bits, which PTX keeps whole;
a vector of 16 bytes, two words, it takes for four stores of 4 bytes. The receiver polls its own memory, at
another address than the multicast one that was stored to: like any poll of such memory, NVIDIA's own
included, that relies on stores becoming visible there by and by, without a fence. The words say themselves
what has arrived; nothing else is known then.
"""

import functools

from shmemkit.emu import multicast
from shmemkit.emu.thread import current_thread

from . import deadline
from .checks import check_integer
from .ll import (
    _arrived,
    _arrived_or_late,
    _by_alignment,
    _check_emulated,
    _flagged,
    _poll,
    _share,
    _words_of,
    check_lines,
)
from .ptx import TypingError, asm, element_address, gpu, gpu_function, itemsize, load_bytes, types
from .threads import block_thread, block_threads, warp_thread, warp_threads

__all__ = [
    "multimem_ll_pack_block",
    "multimem_ll_pack_warp",
    "multimem_ll_recv_pack_block",
    "multimem_ll_recv_pack_warp",
]


def multimem_ll_pack_block(lines, src, flag):
    """Store `src` to `lines` of every GPU of the node, with the flag, the work shared by the threads of the
    block.

    lines   a multicast view of uint64, 1-D, contiguous, at a multiple of 16 bytes, ``ll_words(bytes of src)``
            of them or more
    src     contiguous, any dtype, shape and alignment
    flag    32 bits, other than what the words hold now

    All threads of the block call it with the same arguments; it orders nothing and has no barrier. Each rank
    of the node, this one too, receives with `ll_recv_block` from its own lines.
    """
    thread = current_thread("multimem_ll_pack_block")
    _pack("multimem_ll_pack_block", thread, lines, src, flag, thread.thread_id, thread.n_threads)


def multimem_ll_pack_warp(lines, src, flag):
    """`multimem_ll_pack_block` by the threads of a warp."""
    thread = current_thread("multimem_ll_pack_warp")
    _pack("multimem_ll_pack_warp", thread, lines, src, flag, thread.lane, thread.warp_size())


def multimem_ll_recv_pack_block(there, lines, n_words, flag):
    """Wait for `n_words` words in `lines`, and store them to `there` of every GPU of the node as they are,
    with the flag: to pass on what has come from another node.

    there     a multicast view of uint64, as `lines` of `multimem_ll_pack_block`; also of these very `lines`
    lines     of this rank, as those of `ll_recv_block`
    n_words   even

    All threads of the block call it.
    """
    thread = current_thread("multimem_ll_recv_pack_block")
    name, number, threads = "multimem_ll_recv_pack_block", thread.thread_id, thread.n_threads
    _forward(name, thread, there, lines, n_words, flag, number, threads)


def multimem_ll_recv_pack_warp(there, lines, n_words, flag):
    """`multimem_ll_recv_pack_block` by the threads of a warp."""
    thread = current_thread("multimem_ll_recv_pack_warp")
    name, number, threads = "multimem_ll_recv_pack_warp", thread.lane, thread.warp_size()
    _forward(name, thread, there, lines, n_words, flag, number, threads)


# ---- in the emulator


def _pack(name, thread, lines, src, flag, number, threads):
    arrays = multicast.replicas(thread, lines, name)
    _check_emulated(lines.local, src)
    n = src.nbytes
    for unit in _share((n + 7) // 8, number, threads):
        part = thread.bytes_of("read", src, 8 * unit, min(n, 8 * unit + 8)).tobytes()
        data = int.from_bytes(part, "little")
        _store_all(thread, arrays, 2 * unit, data & 0xFFFFFFFF, flag)
        _store_all(thread, arrays, 2 * unit + 1, data >> 32, flag)


def _forward(name, thread, there, lines, n_words, flag, number, threads):
    arrays = multicast.replicas(thread, there, name)
    for unit in _share(n_words // 2, number, threads):
        for i in (2 * unit, 2 * unit + 1):
            _store_all(thread, arrays, i, _poll(thread, lines, i, flag), flag)


def _store_all(thread, arrays, i, data, flag):
    for array in arrays:
        thread.store(array, i, _flagged(data, flag), "sys", "relaxed")


# ---- on the GPU: unit i, of bytes 8 * i to 8 * i + 7, belongs to thread i modulo their number

_store_line = asm(
    "{ .reg .b64 a, b; mov.b64 a, {$1, $3}; mov.b64 b, {$2, $3}; "
    "multimem.st.relaxed.sys.global.b64 [$0], a; multimem.st.relaxed.sys.global.b64 [$0+8], b; }",
    types.void,
    (types.uint64, types.uint32, types.uint32, types.uint32),
)


_stopped = deadline.stopped


@gpu_function
def _store_unless_stopped(address, low, high, flag):
    if not _stopped():
        _store_line(address, low, high, flag)


@functools.cache
def _packing(width):
    load, _ = _words_of(width)
    load_byte = load_bytes(1)

    @gpu_function
    def pack(src, address, n_bytes, flag, thread, threads):
        n = n_bytes >> 3
        i = thread
        while i < n:
            low, high = load(src, 8 * i)
            _store_line(address + types.uint64(16 * i), low, high, flag)
            i += threads
        rest = n_bytes & 7
        if rest and i == n:
            value = types.uint64(0)
            for k in range(rest):
                value |= types.uint64(load_byte(src, 8 * n + k)) << types.uint64(8 * k)
            high = types.uint32(value >> types.uint64(32))
            _store_line(address + types.uint64(16 * n), types.uint32(value), high, flag)

    return pack


def _implement(pack, forward, thread, threads):
    """On the GPU, for a warp or a block: `thread` is one's number among its `threads`."""

    @gpu(pack)
    def _(lines, src, flag):
        check_integer(pack.__name__, flag=flag)
        check_lines(pack.__name__, lines)
        if not (isinstance(src, types.Array) and src.layout == "C"):
            raise TypingError(f"{pack.__name__}(): src must be a contiguous array (layout C), given {src}")
        size = itemsize(src.dtype)
        transfer = _by_alignment(_packing, size)

        def impl(lines, src, flag):
            address = element_address(lines, 0)
            transfer(src, address, src.size * size, types.uint32(flag), thread(), threads())

        def impl_unless_stopped(lines, src, flag):
            if not _stopped():
                address = element_address(lines, 0)
                transfer(src, address, src.size * size, types.uint32(flag), thread(), threads())

        return impl_unless_stopped if deadline.armed() else impl

    @gpu(forward)
    def _(there, lines, n_words, flag):
        check_integer(forward.__name__, n_words=n_words, flag=flag)
        check_lines(forward.__name__, there, lines)
        arrived, store = _arrived, _store_line
        if deadline.armed():
            arrived, store = _arrived_or_late(forward.__name__), _store_unless_stopped

        def impl(there, lines, n_words, flag):
            source, target = element_address(lines, 0), element_address(there, 0)
            expected = types.uint32(flag)
            i, step = thread(), threads()
            while i < n_words >> 1:
                line = arrived(source + types.uint64(16 * i), expected)
                store(target + types.uint64(16 * i), line[0], line[2], expected)
                i += step

        return impl


_implement(multimem_ll_pack_block, multimem_ll_recv_pack_block, block_thread, block_threads)
_implement(multimem_ll_pack_warp, multimem_ll_recv_pack_warp, warp_thread, warp_threads)
