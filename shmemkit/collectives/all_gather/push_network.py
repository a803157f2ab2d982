"""Push all-gather where the memory of some ranks is not mapped here: those are reached by NVSHMEM.

Scratch   scratch[buffer, k, b], on every rank: part b of rank k's segment. Only rank k writes it. The
          network reads the part of the own segment
Signals   full[buffer, k, b], on every rank: the last epoch whose part b of rank k is there. Only rank k
          sets it
Epochs    epochs[y, b], local: of block (b, y); the epoch selects the buffer. Device-resident, so graph-safe

  block (b, 0):   1. copy part b of x to the own scratch, syncthreads
                  2. put it, and its signal, to each far rank          the signal follows the data
                  3. copy part b of x to the output
  block (b, y), with peer = me + y modulo the ranks:
     near peer:   1. copy part b of x to the scratch of the peer, syncthreads
                  2. set its full signal there                         release, sys
     any peer:    3. wait for its part b here                          acquire, sys, also of the network
                  4. copy it to the output
  all:               add 1 to the epoch

No race: the double-buffer lemma (docs/protocols.md), for part b. The launch that made a put could not end
before the put had arrived. So the rank's own scratch may be written again without quiet, and no two puts
with one signal are under way at once. The network may swap puts of neighbouring epochs: hence a signal for
each buffer.

No deadlock: senders wait for nobody, and all blocks are resident.
"""

from numba import cuda, types

from shmemkit.device import (
    ComparisonType,
    SignalOp,
    copy_block,
    notify,
    num_ranks,
    put_signal_nbi_block,
    rank,
    signal_wait_until,
    symm_at,
    wait_block,
)

SET, GE = SignalOp.SIGNAL_SET, ComparisonType.CMP_GE


@cuda.jit
def push_all_gather_network(x, out, in_place, part, near, scratch, full, epochs):
    """Gather the `x` of all ranks in `out`, by rank.

    x, out    uint8, 1-D: x.size bytes, and n_ranks times as many
    in_place  whether x is the own part of out
    part      elements of a part: gridDim.x of them are x
    near      uint8 (n_ranks,): 1 for the ranks whose memory is mapped here
    scratch   uint8 (2, n_ranks, parts at most, elements of a part at most), symmetric
    full   uint64 (2, n_ranks, parts at most), symmetric, zeros at first
    epochs     uint64 (n_ranks, parts at most), zeros at first
    grid      (parts, n_ranks)
    """
    me, n, b, y = rank(), num_ranks(), cuda.blockIdx.x, cuda.blockIdx.y
    peer = me + y
    if peer >= n:
        peer -= n
    begin, end = min(b * part, x.size), min((b + 1) * part, x.size)
    epoch = epochs[y, b] + 1
    buffer, length = epoch & 1, end - begin
    mine = out[peer * x.size + begin : peer * x.size + end]
    if y == 0:
        source = scratch[buffer, me, b, :length]
        copy_block(source, x[begin:end])
        for other in range(n):
            if near[other] == 0:  # such a put begins with a barrier of the block
                put_signal_nbi_block(source, source, full[buffer, me, b:], epoch, SET, other)
        if not in_place:
            copy_block(mine, x[begin:end])
    else:
        if near[peer] != 0:
            copy_block(symm_at(scratch, peer)[buffer, me, b, :length], x[begin:end])
            cuda.syncthreads()
            if cuda.threadIdx.x == 0:
                notify(full[buffer, me, b:], peer, epoch, "set", "sys")
            wait_block(full[buffer, peer, b:], 1, "sys", "acquire", epoch)
        else:
            if cuda.threadIdx.x == 0:
                signal_wait_until(full[buffer, peer, b:], GE, epoch)
            cuda.syncthreads()
        copy_block(mine, scratch[buffer, peer, b, :length])
    cuda.syncthreads()  # all threads have read the counter
    if cuda.threadIdx.x == 0:
        epochs[y, b] = epoch


_bytes, _flags = types.Array(types.uint8, 1, "C"), types.Array(types.uint8, 1, "C")
_signature = (
    *(_bytes, _bytes, types.boolean, types.int64, _flags, types.Array(types.uint8, 4, "C")),
    *(types.Array(types.uint64, 3, "C"), types.Array(types.uint64, 2, "C")),
)
GPU_KERNELS = {"push_all_gather_network": (push_all_gather_network, _signature)}
