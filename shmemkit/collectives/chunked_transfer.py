"""How blocks send their parts of segments to other ranks in announced steps, and receive them: what push
methods share. A signal says how much of a part is there:

    value + s       s steps of it
    value + STEPS   all of it, with the last one

so that those who wait for a step wait for "at least", and need not know of how many the sender makes it.
"""

from numba import cuda

from shmemkit.device import copy_block, notify, num_ranks, rank, span, symm_at, wait_block

from .block_barrier import notify_all

CHUNKS = 32  # of a part, at most


def chunk_of(part, least):
    """-> bytes of a step of a part of so many, `least` or more, a multiple of 8192."""
    return max(least, -(-part // CHUNKS) + 8191 & -8192)


@cuda.jit(device=True)
def put(dst, src, signal, value, chunk, peer):
    """Copy `src` to rank `peer`'s `dst`, by a block, and announce each step, of `step` elements, in signal[0]
    there: release, sys. A part without elements is announced, too."""
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
    """``put`` to all others, one after the other, the next rank first: elements begin .. begin + size - 1 of
    segment k of `x`, which begins with element k * stride, to rank k.

    So at any time a rank sends to one other and receives from one other. What comes last is announced in
    steps, for those who take it meanwhile; what comes before it, as a whole, since to announce costs the
    block the time in which its stores arrive; and parts of one step all at once, at the end.
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
    """Copy `src` to `dst`, all of it, by a block, as it comes by ``put``: acquire, sys."""
    begin = 0
    while True:
        value += 1
        wait_block(signal, 1, "sys", "acquire", value)
        length = min(chunk, dst.size - begin)
        copy_block(span(dst, begin, length), span(src, begin, length))
        begin += length
        if begin >= dst.size:
            break
