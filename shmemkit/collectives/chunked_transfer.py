"""Transfers of parts of segments between ranks, in chunks; the push methods share them. A full signal says
how much of a part is there. In an epoch whose base is `base`:

    base + s        the first s chunks
    base + CHUNKS   all of the part, with its last chunk

A receiver waits for "at least". So it need not know how many chunks the sender makes of a part.
"""

from numba import cuda

from shmemkit.device import copy_block, notify, num_ranks, rank, span, symm_at, wait_block

from .block_barrier import notify_all

CHUNKS = 32  # of a part, at most


def chunk_of(part, least):
    """-> bytes of a chunk of a part of so many, `least` or more, a multiple of 8192."""
    return max(least, -(-part // CHUNKS) + 8191 & -8192)


@cuda.jit(device=True)
def put(dst, src, signal, value, chunk, peer):
    """Copy `src` to rank `peer`'s `dst`, by a block, in chunks of `chunk` elements. Announce each in
    signal[0] there: release, sys. An empty part is announced, too."""
    there, begin, announced = symm_at(dst, peer), 0, value
    while True:
        length = min(chunk, src.size - begin)
        copy_block(span(there, begin, length), span(src, begin, length))
        begin += length
        announced = announced + 1 if begin < src.size else value + CHUNKS
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            notify(signal, peer, announced, "set", "sys")
        if begin >= src.size:
            break


@cuda.jit(device=True)
def put_to_all(dst, x, stride, begin, size, signal, value, chunk):
    """``put`` to all others, one after the other, the next rank first. Rank k gets elements begin .. begin +
    size - 1 of segment k of `x`, which begins with element k * stride.

    So a rank sends to one other and receives from one other at a time. The last part is announced in chunks,
    for a receiver that copies meanwhile. The parts before it are announced as a whole: an announcement costs
    the block the time in which its stores arrive. Parts of a single chunk are all announced at the end.
    """
    me, n = rank(), num_ranks()
    s = 1
    while s < n:
        peer = me + s if me + s < n else me + s - n
        its = span(x, peer * stride + begin, size)
        if size <= chunk:
            copy_block(span(symm_at(dst, peer), 0, size), its)
        else:
            put(dst, its, signal, value, chunk if s == n - 1 else size, peer)
        s += 1
    if size <= chunk:
        cuda.syncthreads()
        notify_all(signal, value + CHUNKS)


@cuda.jit(device=True)
def receive(dst, src, signal, value, chunk):
    """Copy all of `src` to `dst`, by a block, as ``put`` delivers it: acquire, sys."""
    begin = 0
    while True:
        value += 1
        wait_block(signal, 1, "sys", "acquire", value)
        length = min(chunk, dst.size - begin)
        copy_block(span(dst, begin, length), span(src, begin, length))
        begin += length
        if begin >= dst.size:
            break
