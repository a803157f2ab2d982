"""Copies by the tensor memory accelerator (TMA) of Hopper and later: one thread drives them, through shared
memory, in pieces that overlap. They use the links better than stores of threads do (packets are larger), with
a warp instead of a block.

PTX ISA: cp.async.bulk, mbarrier, "Async proxy".
"""

from numba import cuda

from shmemkit.emu.thread import current_thread

from .checks import check_contiguous, check_words
from .copies import copy_on_gpu, copy_share
from .ptx import asm, data_address, gpu, gpu_function, itemsize, load_bytes, store_bytes, types
from .threads import warp_thread, warp_threads

__all__ = ["BULK_WORDS", "bulk_copy_warp"]

STAGES = 4
PIECE = 8192  # bytes
BULK_WORDS = STAGES * PIECE // 8 + STAGES + 1  # uint64: the pieces at a multiple of 16, mbarriers


def bulk_copy_warp(dst, src, buffer):
    """Copy `src` to `dst` by the TMA, driven by a warp.

    dst, src   contiguous arrays of one dtype, any dtype and shape, in global memory (mine or `symm_at`); not
               overlapping. ``min(dst.size, src.size)`` elements are copied, in memory order. Where their
               addresses differ modulo 16, the warp copies them by itself, slowly
    buffer     shared memory of this warp alone: ``cuda.shared.array(BULK_WORDS, uint64)``

    All threads of the warp call it with the same arguments; GPUs of compute capability 9.0 and later. It
    reads what the warp's first thread has seen before, by an acquire too; when it returns, all of `dst` is
    written, as if by each thread: one thread's `notify` or `st_release` publishes it.
    """
    thread = current_thread("bulk_copy_warp")
    if buffer.size < BULK_WORDS or buffer.dtype != "uint64":
        raise ValueError(
            f"bulk_copy_warp: buffer must be uint64 of {BULK_WORDS} elements (BULK_WORDS), given "
            f"{buffer.dtype} {buffer.shape}"
        )
    copy_share(dst, src, thread.lane, thread.warp_size())
    thread.syncwarp()


@gpu(bulk_copy_warp)
def _(dst, src, buffer):
    check_contiguous("bulk_copy_warp", dst=dst, src=src)
    check_words("bulk_copy_warp", "buffer", buffer, (types.uint64,))
    size = itemsize(dst.dtype)
    slow = copy_on_gpu("bulk_copy_warp", dst, src)
    load, store = load_bytes(1), store_bytes(1)

    def impl(dst, src, buffer):
        lane = warp_thread()
        if (data_address(dst) ^ data_address(src)) & 15 == 0:
            n_bytes = min(dst.size, src.size) * size
            head = min(-data_address(dst) & 15, n_bytes)
            whole = (n_bytes - head) & -16
            if lane == 0:
                _pipeline(data_address(dst) + head, data_address(src) + head, whole, data_address(buffer))
            elif lane == 1:
                for i in range(head):
                    store(dst, i, load(src, i))
                for i in range(head + whole, n_bytes):
                    store(dst, i, load(src, i))
        else:
            slow(dst, src, lane, warp_threads())
        cuda.syncwarp()

    return impl


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


@gpu_function
def _pipeline(dst, src, n_bytes, buffer):
    """By one thread: `n_bytes`, a multiple of 16, between global addresses that are multiples of 16."""
    pieces = _shared_address(buffer + 15 & -16)
    barriers = pieces + types.uint32(STAGES * PIECE)
    for i in range(STAGES):
        _init(barriers + types.uint32(8 * i))
    _fence()  # the mbarriers, and what was acquired, for the asynchronous proxy
    asked = types.int64(0)  # bytes whose loads are under way or done
    stage = types.uint32(0)
    while stage < STAGES - 1 and asked < n_bytes:
        length = min(n_bytes - asked, PIECE)
        _load(pieces + stage * types.uint32(PIECE), src + asked, length, barriers + types.uint32(8) * stage)
        asked += PIECE
        stage += types.uint32(1)
    done = types.int64(0)
    stage, parity, free = types.uint32(0), types.uint32(0), types.uint32(STAGES - 1)
    while done < n_bytes:
        while _loaded(barriers + types.uint32(8) * stage, parity) == 0:
            pass
        _store(dst + done, pieces + stage * types.uint32(PIECE), min(n_bytes - done, PIECE))
        done += PIECE
        if asked < n_bytes:
            _all_but_one_read()  # so the stage before this one may be loaded again
            length = min(n_bytes - asked, PIECE)
            _load(pieces + free * types.uint32(PIECE), src + asked, length, barriers + types.uint32(8) * free)
            asked += PIECE
        free = stage
        stage += types.uint32(1)
        if stage == STAGES:
            stage = types.uint32(0)
            parity ^= types.uint32(1)
    _all_written()
    for i in range(STAGES):
        _end(barriers + types.uint32(8 * i))
