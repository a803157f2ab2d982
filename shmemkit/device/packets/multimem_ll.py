"""LL (``ll.py``) to all GPUs of a node at once, by multimem stores (``multimem.py``).

A word must arrive whole. So each word is a multimem store of its own, of 64 bits, which PTX keeps whole.
PTX divides a vector of 16 bytes, two words, into four stores of 4 bytes. The receiver polls its own
memory, at another address than the multicast one that was stored to. Like any poll of such memory,
NVIDIA's own included, this relies on stores that become visible there eventually, without a fence. The
flag vouches for its own word, and for nothing else.

The machine code must keep (docs/machine_code.md): whole packet.
"""

from __future__ import annotations

import functools

from shmemkit.compiler.ptx import asm, types
from shmemkit.typing import Array

from ..argument_checks import check_emulated_integer
from ..cuda.thread_index import block_thread, block_threads, warp_thread, warp_threads
from ..emulator import multicast_memory
from .ll import awaited, check_emulated, flagged, implement_forward, implement_pack, sharing, unlike

__all__ = [
    "multimem_ll_pack_block",
    "multimem_ll_pack_warp",
    "multimem_ll_recv_pack_block",
    "multimem_ll_recv_pack_warp",
]


def multimem_ll_pack_block(lines: Array, src: Array, flag: int) -> None:
    """Store `src` to `lines` of every GPU of the node, with the flag, the work shared by the threads of the
    block.

    lines   a multicast view of uint64, 1-D, contiguous, at a multiple of 16 bytes, ``ll_words(bytes of src)``
            of them or more
    src     contiguous, any dtype, shape and alignment
    flag    32 bits, other than what the words hold now, unless they hold the very same data, too

    All threads of the block call it with the same arguments; it orders nothing and has no barrier. Each rank
    of the node, this one too, receives with `ll_recv_block` from its own lines.
    """
    _pack("block", "multimem_ll_pack_block", lines, src, flag)


def multimem_ll_pack_warp(lines: Array, src: Array, flag: int) -> None:
    """`multimem_ll_pack_block` by the threads of a warp."""
    _pack("warp", "multimem_ll_pack_warp", lines, src, flag)


def multimem_ll_recv_pack_block(there: Array, lines: Array, n_words: int, flag: int) -> None:
    """Wait for `n_words` words in `lines`, and store them to `there` of every GPU of the node as they are,
    with the flag: to pass on what has come from another node.

    there     a multicast view of uint64, as `lines` of `multimem_ll_pack_block`; also of these very `lines`
    lines     of this rank, as those of `ll_recv_block`
    n_words   even

    All threads of the block call it.
    """
    _forward("block", "multimem_ll_recv_pack_block", there, lines, n_words, flag)


def multimem_ll_recv_pack_warp(there: Array, lines: Array, n_words: int, flag: int) -> None:
    """`multimem_ll_recv_pack_block` by the threads of a warp."""
    _forward("warp", "multimem_ll_recv_pack_warp", there, lines, n_words, flag)


# ---- in the emulator


def _pack(group, name, lines, src, flag):
    thread, share = sharing(group, name, lines, src, flag)
    arrays = multicast_memory.replicas(thread, lines, name)
    check_emulated(name, lines.local, flag, "src", src)
    checks = [unlike(name, flag)] * len(arrays)
    n = src.nbytes
    for unit in share((n + 7) // 8):
        part = thread.bytes_of("read", src, 8 * unit, min(n, 8 * unit + 8)).tobytes()
        data = int.from_bytes(part, "little")
        _store_all(thread, arrays, 2 * unit, data & 0xFFFFFFFF, flag, checks)
        _store_all(thread, arrays, 2 * unit + 1, data >> 32, flag, checks)


def _forward(group, name, there, lines, n_words, flag):
    thread, share = sharing(group, name, there, lines, n_words, flag)
    check_emulated_integer(name, n_words=n_words, flag=flag)
    arrays = multicast_memory.replicas(thread, there, name)
    checks = [unlike(name, flag, array, lines) for array in arrays]
    for unit in share(n_words // 2):
        for i in (2 * unit, 2 * unit + 1):
            _store_all(thread, arrays, i, awaited(thread, lines, i, flag), flag, checks)


def _store_all(thread, arrays, i, data, flag, checks):
    word = flagged(data, flag)
    for array, check in zip(arrays, checks, strict=True):
        unless_same = check and functools.partial(_check_unless_same, check, word)
        thread.store(array, i, word, "sys", "relaxed", unless_same)


def _check_unless_same(check, word, thread, array, index):
    """A word that is stored again as it is changes nothing for those who receive it."""
    if array[index] != word:
        check(thread, array, index)


# ---- on the GPU

_store_line = asm(
    "{ .reg .b64 a, b; mov.b64 a, {$1, $3}; mov.b64 b, {$2, $3}; "
    "multimem.st.relaxed.sys.global.b64 [$0], a; multimem.st.relaxed.sys.global.b64 [$0+8], b; }",
    types.void,
    (types.uint64, types.uint32, types.uint32, types.uint32),
)

implement_pack(multimem_ll_pack_block, _store_line, block_thread, block_threads)
implement_pack(multimem_ll_pack_warp, _store_line, warp_thread, warp_threads)
implement_forward(multimem_ll_recv_pack_block, _store_line, block_thread, block_threads)
implement_forward(multimem_ll_recv_pack_warp, _store_line, warp_thread, warp_threads)
