"""Push all-gather where the memory of some ranks is not mapped here: the network transport reaches those
(``collectives.network``).

Scratch   scratch[buffer, k, b], on every rank: part b of rank k's segment. Only rank k writes it. The
          network reads the part of the own segment
Signals   full[buffer, k, b], on every rank: the last epoch whose part b of rank k is there. Only rank k
          sets it
Epochs    epochs[y, b], local: of block (b, y); the epoch selects the buffer. Device-resident, so graph-safe

  block (b, 0):   1. copy part b of x to the own scratch
                  2. put it to each far rank
                  3. copy part b of x to the output
  block (b, y), with peer = me + y modulo the ranks:
     near peer:   1. copy part b of x to the scratch of the peer, syncthreads
                  2. set its full signal there                         release, sys
     any peer:    3. wait for its part b here                          acquire, sys, also of the network
                  4. copy it to the output
  all:               add 1 to the epoch

No race: the double-buffer lemma and the put lemma (docs/protocols.md), for part b. No deadlock: senders wait
for nobody.
"""

from numba import cuda, types

from shmemkit.device import copy_block, notify, num_ranks, rank, span, symm_at, wait_block

from ..chunked_transfer import argument_types, part_of_block
from ..network import end_epoch, put, wait_for
from ..transports import rank_after


@cuda.jit
def push_all_gather_network(x, out, in_place, part, near, scratch, full, epochs):
    """Gather the `x` of all ranks in `out`, by rank.

    x, out    uint8, 1-D: x.size bytes, and n_ranks times as many
    in_place  whether x is the own part of out
    part      elements of a part: gridDim.x of them are x, or more
    near      uint8 (n_ranks,): 1 for the ranks whose memory is mapped here
    scratch   uint8 (2, n_ranks, parts at most, elements of a part at most), symmetric
    full      uint64 (2, n_ranks, parts at most), symmetric, zeros at first
    epochs    uint64 (n_ranks, parts at most), zeros at first
    grid      (parts, n_ranks)
    """
    me, b, y = rank(), cuda.blockIdx.x, cuda.blockIdx.y
    peer = rank_after(me, y)
    begin, length = part_of_block(part, x.size)
    epoch = epochs[y, b] + 1
    buffer = epoch & 1
    source, mine = span(x, begin, length), span(out, peer * x.size + begin, length)
    theirs = span(scratch[buffer, peer, b], 0, length)  # y = 0: the own one
    if y == 0:
        copy_block(theirs, source)
        for other in range(num_ranks()):
            if near[other] == 0:
                put(theirs, theirs, full[buffer, me, b:], epoch, other)
    elif near[peer] != 0:
        copy_block(span(symm_at(scratch, peer)[buffer, me, b], 0, length), source)
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            notify(full[buffer, me, b:], peer, epoch, "set", "sys")
        wait_block(full[buffer, peer, b:], 1, "sys", "acquire", epoch)
    else:
        wait_for(full[buffer, peer, b:], epoch)
    if y > 0 or not in_place:
        copy_block(mine, theirs if y > 0 else source)
    end_epoch(epochs, (y, b), epoch)


_others = {"near": types.Array(types.uint8, 1, "C"), "full": types.Array(types.uint64, 3, "C")}
_types = argument_types(push_all_gather_network, **_others)
GPU_KERNELS = {"push_all_gather_network": (push_all_gather_network, _types)}
