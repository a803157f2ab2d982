"""How kernels move a part of an array, by the threads of a block or, on Hopper and later, by the TMA, driven
by the block's first warp: device functions of the same arguments, for kernels that are made with either.

    copy(dst, src)                             as ``copy_block``; syncthreads afterwards
    put(dst, src, signal, value, step, peer)   to rank `peer`, in announced steps, as ``bulk_put_warp``
"""

from numba import cuda, uint64

from shmemkit.device import BULK_WORDS, bulk_copy_warp, bulk_put_warp, copy_block, notify, symm_at


@cuda.jit(device=True)
def copy_by_tma(dst, src):
    buffer = cuda.shared.array(BULK_WORDS, uint64)
    if cuda.threadIdx.x < 32:
        bulk_copy_warp(dst, src, buffer)


@cuda.jit(device=True)
def put_by_tma(dst, src, signal, value, step, peer):
    buffer = cuda.shared.array(BULK_WORDS, uint64)
    if cuda.threadIdx.x < 32:
        bulk_put_warp(dst, src, buffer, signal, value, step, peer)


@cuda.jit(device=True)
def copy_by_threads(dst, src):
    copy_block(dst, src)


@cuda.jit(device=True)
def put_by_threads(dst, src, signal, value, step, peer):
    there, begin = symm_at(dst, peer), 0
    while True:
        copy_block(there[begin : begin + step], src[begin : begin + step])
        cuda.syncthreads()
        value += 1
        if cuda.threadIdx.x == 0:
            notify(signal, peer, value, "set", "sys")
        begin += step
        if begin >= src.size:  # a part without elements is announced, too
            break
