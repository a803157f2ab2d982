"""Copies by the tensor memory accelerator (TMA) of Hopper and later. One thread drives them, through
shared memory, in overlapping chunks. They use the links better than stores of threads do, with a warp
instead of a block.

PTX ISA: cp.async.bulk, mbarrier, "Async proxy".

The machine code must keep (docs/machine_code.md): one elected thread.
"""

from __future__ import annotations

import functools

from numba import cuda

from shmemkit.compiler.ptx import (
    asm,
    data_address,
    gpu,
    gpu_function,
    itemsize,
    load_bytes,
    store_bytes,
    types,
)
from shmemkit.typing import Array

from ..argument_checks import WORDS, check_contiguous, check_emulated_words, check_integer, check_words
from ..cuda.copies import copy_on_gpu, copy_share
from ..cuda.thread_index import warp_thread, warp_threads
from ..emulator import group_thread
from .ordered_access import symm_at
from .signals import notify

__all__ = ["BULK_WORDS", "bulk_copy_warp", "bulk_put_warp"]

STAGES = 4
CHUNK = 8192  # bytes
LAG = 16  # chunks under way that are not announced yet: to wait for fewer would leave the link idle
BULK_WORDS = STAGES * CHUNK // 8 + STAGES + 1  # uint64: the chunks at a multiple of 16, mbarriers


def bulk_copy_warp(dst: Array, src: Array, buffer: Array) -> None:
    """Copy `src` to `dst` by the TMA, driven by a warp.

    dst, src   contiguous arrays of one dtype, any dtype and shape, in global memory (this rank's or
               `symm_at`); not overlapping. ``min(dst.size, src.size)`` elements are copied, in memory order.
               Where their addresses differ modulo 16, the warp copies them by itself, slowly
    buffer     shared memory of this warp alone: ``cuda.shared.array(BULK_WORDS, uint64)``

    All threads of the warp call it with the same arguments; GPUs of compute capability 9.0 and later. It
    reads what the warp's first thread has seen before, by an acquire too; when it returns, all of `dst` is
    written, as if by each thread: one thread's `notify` or `st_release` publishes it.
    """
    thread = group_thread("warp", "bulk_copy_warp", dst, src, buffer)
    _check_buffer("bulk_copy_warp", buffer)
    copy_share("bulk_copy_warp", thread, dst, src, thread.lane, thread.warp_size())
    thread.syncwarp()


def bulk_put_warp(
    dst: Array, src: Array, buffer: Array, signal: Array, value: int, step: int, peer: int
) -> None:
    """`bulk_copy_warp` to `dst` on rank `peer`, which is told how far it is.

    dst      symmetric; `peer` is one that `symm_at` reaches
    signal   as of `notify`: signal[0] on `peer` is set to ``value + 1`` when the first `step` elements are
             there, to ``value + 2`` after as many more, and at last to ``value`` plus the number of steps
             (at least one)
    step     elements, a multiple of 8192 bytes; not more than `dst` and `src` have is a step too

    Each is set as by `notify` of scope "sys", while the copy goes on. Values may be left out when it is ahead
    of them: wait for "at least". Otherwise as `bulk_copy_warp`.
    """
    thread = group_thread("warp", "bulk_put_warp", dst, src, buffer, signal, value, step, peer)
    _check_buffer("bulk_put_warp", buffer)
    if step < 1 or step * src.itemsize % CHUNK:
        raise ValueError(
            f"bulk_put_warp(): step is {step} elements, {step * src.itemsize} bytes; it must be a positive "
            f"multiple of {CHUNK} bytes"
        )
    there, n, begin = thread.peer(dst, peer), min(dst.size, src.size), 0
    while begin < n or begin == 0:
        until = min(begin + step, n)
        here = src[begin:until]
        copy_share("bulk_put_warp", thread, there[begin:until], here, thread.lane, thread.warp_size())
        thread.syncwarp()
        value += 1
        if thread.lane == 0:
            notify(signal, peer, value, "set", "sys")
        begin += step


def _check_buffer(primitive, buffer):
    """In the emulator."""
    check_emulated_words(primitive, "buffer", buffer, WORDS)
    if buffer.size < BULK_WORDS:
        raise ValueError(
            f"{primitive}(): buffer has {buffer.size} elements; it must have BULK_WORDS, {BULK_WORDS}, or "
            "more"
        )


@gpu(bulk_copy_warp)
def _(dst, src, buffer):
    check_contiguous("bulk_copy_warp", dst=dst, src=src)
    check_words("bulk_copy_warp", "buffer", buffer, WORDS)
    copy = _copying("bulk_copy_warp", dst, src, _tell_nobody)
    return lambda dst, src, buffer: copy(dst, src, buffer, buffer, 0, 1, types.int64(1) << 62, 0)


@gpu(bulk_put_warp)
def _(dst, src, buffer, signal, value, step, peer):
    check_contiguous("bulk_put_warp", dst=dst, src=src)
    check_words("bulk_put_warp", "buffer", buffer, WORDS)
    check_integer("bulk_put_warp", value=value, step=step, peer=peer)
    size = itemsize(dst.dtype)
    copy = _copying("bulk_put_warp", dst, src, _tell)

    def impl(dst, src, buffer, signal, value, step, peer):
        last, covered = types.int64(value) + 1, types.int64(step)
        while covered < min(dst.size, src.size):
            covered += step
            last += 1
        copy(symm_at(dst, peer), src, buffer, signal, value, last, step * size, peer)

    return impl


@gpu_function
def _tell(signal, peer, value):
    notify(signal, peer, value, "set", "sys")


@gpu_function
def _tell_nobody(signal, peer, value):
    pass


def _copying(primitive, dst, src, tell):
    """``copy(dst, src, buffer, signal, value, last, step, peer)``, by a warp, for arrays of these types.

    ``tell(signal, peer, v)`` is called by one thread when `step` bytes are there, with v one more than
    `value`, and so on until all is there, with `last`.
    """
    size = itemsize(dst.dtype)
    slow = copy_on_gpu(primitive, dst, src)
    pipeline = _pipeline(tell)
    load, store = load_bytes(1), store_bytes(1)

    @gpu_function
    def copy(dst, src, buffer, signal, value, last, step, peer):
        lane = warp_thread()
        if (data_address(dst) ^ data_address(src)) & 15 == 0:
            n_bytes = min(dst.size, src.size) * size
            head = min(-data_address(dst) & 15, n_bytes)
            whole = (n_bytes - head) & -16
            if lane == 1:
                for i in range(head):
                    store(dst, i, load(src, i))
                for i in range(head + whole, n_bytes):
                    store(dst, i, load(src, i))
            cuda.syncwarp()  # they are published with the rest
            if lane == 0:
                to, at, room = data_address(dst) + head, data_address(src) + head, data_address(buffer)
                pipeline(to, at, whole, room, signal, value, last, step, peer)
        else:
            slow(dst, src, lane, warp_threads())
            cuda.syncwarp()
            if lane == 0:
                tell(signal, peer, last)
        cuda.syncwarp()

    return copy


_shared_address = asm(
    "{ .reg .b64 a; cvta.to.shared.u64 a, $1; cvt.u32.u64 $0, a; }", types.uint32, (types.int64,)
)
_init = asm("mbarrier.init.shared::cta.b64 [$0], 1;", types.void, (types.uint32,))
_end = asm("mbarrier.inval.shared::cta.b64 [$0];", types.void, (types.uint32,))
_fence = asm("fence.proxy.async;")
_load = asm(
    "{ mbarrier.arrive.expect_tx.shared::cta.b64 _, [$3], $2; "
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], $2, [$3]; }",
    types.void,
    (types.uint32, types.int64, types.uint32, types.uint32),
)
_loaded = asm(
    "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; selp.u32 $0, 1, 0, p; }",
    types.uint32,
    (types.uint32, types.uint32),
)
_store = asm(
    "{ cp.async.bulk.global.shared::cta.bulk_group [$0], [$1], $2; cp.async.bulk.commit_group; }",
    types.void,
    (types.int64, types.uint32, types.uint32),
)
_all_but_one_read = asm("cp.async.bulk.wait_group.read 1;")
_all_written = asm("cp.async.bulk.wait_group 0;")
_older_written = asm(f"cp.async.bulk.wait_group {LAG};")


@functools.cache
def _pipeline(tell):
    @gpu_function
    def pipeline(dst, src, n_bytes, buffer, signal, value, last, step, peer):
        """By one thread: `n_bytes`, a multiple of 16, between global addresses that are multiples of 16."""
        chunks = _shared_address(buffer + 15 & -16)
        barriers = chunks + types.uint32(STAGES * CHUNK)
        for i in range(STAGES):
            _init(barriers + types.uint32(8 * i))
        _fence()  # the mbarriers, and what was acquired, for the asynchronous proxy
        asked = types.int64(0)  # bytes whose loads are under way or done
        stage = types.uint32(0)
        while stage < STAGES - 1 and asked < n_bytes:
            length = min(n_bytes - asked, CHUNK)
            chunk, barrier = chunks + stage * types.uint32(CHUNK), barriers + types.uint32(8) * stage
            _load(chunk, src + asked, length, barrier)
            asked += CHUNK
            stage += types.uint32(1)
        done, told = types.int64(0), types.int64(value)  # stores under way or done; what the peer knows
        stage, parity, free = types.uint32(0), types.uint32(0), types.uint32(STAGES - 1)
        told_at = step + LAG * CHUNK
        while done < n_bytes:
            chunk, barrier = chunks + stage * types.uint32(CHUNK), barriers + types.uint32(8) * stage
            while _loaded(barrier, parity) == 0:
                pass
            _store(dst + done, chunk, min(n_bytes - done, CHUNK))
            done += CHUNK
            if asked < n_bytes:
                _all_but_one_read()  # so the stage before this one may be loaded again
                length = min(n_bytes - asked, CHUNK)
                chunk, barrier = chunks + free * types.uint32(CHUNK), barriers + types.uint32(8) * free
                _load(chunk, src + asked, length, barrier)
                asked += CHUNK
            if done >= told_at and told + 1 < last:
                _older_written()  # all but the last LAG chunks
                told += 1
                told_at += step
                tell(signal, peer, told)
            free = stage
            stage += types.uint32(1)
            if stage == STAGES:
                stage = types.uint32(0)
                parity ^= types.uint32(1)
        _all_written()
        for i in range(STAGES):
            _end(barriers + types.uint32(8 * i))
        tell(signal, peer, last)

    return pipeline
