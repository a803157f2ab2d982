"""Combine: the experts' rows go back to the tokens' ranks, which add them up. One kernel.

Experts   those of the last dispatch (``dispatch.py``), which has left where the rows of each token are on
          each rank, and their weights
Blocks    block b has the tokens b, b + gridDim.x, ... of all ranks: it adds up what the experts here have for
          them, and what all ranks have for those of this rank. All launches on all ranks have the same grid
Staged    staged[half, k, t], on every rank: what the experts of rank k have for token t here: the sum of
          their rows times their weights, in the order of the token's experts, in float32, rounded to the
          dtype. Written by rank k only
Signals   arrived[k, b], on every rank: the number of the last call of which all that block b of rank k has
          for me is staged here (only rank k sets it)
Counters  calls[b], local: how many calls block b has taken part in, so that it gives the number of a call,
          and the half. In device memory, so that a replayed graph counts on

  block b:
          1. for each of its tokens t, of all ranks k, that has experts here: store the sum of their rows in
             staged[half, me, t] on rank k; syncthreads
          2. set arrived[me, b] on all other ranks to the number of this call    release, sys: publishes them
          3. wait until arrived[k, b] here is at least the number, for all k     acquire, sys: sees the sums
          4. for each of its tokens t of this rank: add up staged[half, k, t] of the ranks k that have experts
             of it, in their order, in float32, and store the result, rounded, to `out`

One row comes back from a rank, not one for each expert: for a token with 8 experts on 4 ranks, half of the
bytes. It costs a rounding, of what a rank adds up; the result is rounded, too. A token's result depends on no
other token, nor on the rank that it comes from; the bits are the same in every run.

No race, although nobody acknowledges: half h of what is staged is written again two calls later. In the call
between, the writer has waited for arrived of all blocks of its number, which these set when their launches
before had ended (griddepcontrol_wait), and had read what half h held. For this, each block signals to each
rank, also where it has nothing to send. No deadlock: a block sends all before it waits; all blocks are
resident. That the next launch begins early (PDL) changes neither, as in ``dispatch.py``. out may be where x
was, but not where y is: other blocks may still read that.
"""

import functools

from numba import cuda, float32, int32, types, uint32

from shmemkit.device import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    load_vec16,
    notify,
    num_ranks,
    rank,
    store_vec16,
    symm_at,
    wait,
)
from shmemkit.kernels.method import Method

from .dispatch import PLACES, divided, peer_at
from .weighted import weighted_sum


@functools.cache
def combine_kernel(dtype):
    """-> the kernel for rows of `dtype`, a name as "float16"."""
    zero, add, result = weighted_sum(dtype)

    @cuda.jit(device=True)
    def return_rows(t, half, y, routes, shares, staged):
        """Step 1, of token `t` of all ranks; the others' first."""
        places, weights = cuda.shared.array(PLACES, int32), cuda.shared.array(PLACES, float32)
        n, top_k, words = num_ranks(), routes.shape[2], y.shape[1] >> 4
        i, threads = cuda.threadIdx.x, cuda.blockDim.x
        cuda.syncthreads()  # of the token before, all is done
        q = i
        while q < n * top_k:
            distance, j = divided(q, top_k)
            k = peer_at(distance)
            places[q], weights[q] = routes[k, t, j], shares[k, t, j]
            q += threads
        cuda.syncthreads()
        q = i
        while q < n * words:
            distance, w = divided(q, words)
            distance = distance + 1 if distance + 1 < n else 0
            j = distance * top_k
            if places[j] >= 0:
                total = zero()
                while j < (distance + 1) * top_k and places[j] >= 0:
                    total = add(total, load_vec16(y[places[j]], 16 * w), weights[j])
                    j += 1
                there = symm_at(staged, peer_at(distance))[half, rank(), t]
                store_vec16(there, 16 * w, result(total))
            q += threads

    @cuda.jit(device=True)
    def sum_of(k, t, half, w, sent, staged):
        """16 bytes of what rank k has for token `t`: zeros, if nothing."""
        if k < num_ranks() and sent[t, k]:
            return load_vec16(staged[half, k, t], 16 * w)
        nothing = uint32(0)
        return nothing, nothing, nothing, nothing

    @cuda.jit(max_registers=64)  # 1024 threads
    def expert_combine(y, out, routes, shares, sent, staged, arrived, calls):
        """Add up the rows of the experts for each token.

        y        uint8 (n_local * n_ranks * max_tokens, bytes of a row): as ``expert_dispatch`` has its `rows`
        out      uint8 (tokens, bytes of a row)
        routes   int32 (n_ranks, max_tokens, top_k), as ``expert_dispatch`` leaves them, like shares and sent
        shares   float32, likewise
        sent     int32 (max_tokens, n_ranks)
        staged   uint8 (2, n_ranks, max_tokens, bytes of a row), symmetric
        arrived  uint64 (n_ranks, blocks), symmetric, zeros at first
        calls    uint64 (blocks,), zeros at first
        grid     the same number of blocks always, one-dimensional, as the blocks are
        """
        b, i, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
        me, n, words = rank(), num_ranks(), out.shape[1] >> 4
        griddepcontrol_wait()
        griddepcontrol_launch_dependents()
        call = calls[b] + 1
        half = call & 1
        t = b
        while t < sent.shape[0]:  # 1
            return_rows(t, half, y, routes, shares, staged)
            t += cuda.gridDim.x
        cuda.syncthreads()
        d = i + 1
        while d < n:  # 2 and 3
            notify(arrived[me, b:], peer_at(d), call, "set", "sys")
            d += threads
        d = i + 1
        while d < n:
            wait(arrived[peer_at(d), b:], 1, "sys", "acquire", call)
            d += threads
        cuda.syncthreads()
        t = b
        while t < out.shape[0]:  # 4
            w = i
            while w < words:
                total, k = zero(), 0
                while k < n:  # four loads at once
                    parts = (
                        sum_of(k, t, half, w, sent, staged),
                        sum_of(k + 1, t, half, w, sent, staged),
                        sum_of(k + 2, t, half, w, sent, staged),
                        sum_of(k + 3, t, half, w, sent, staged),
                    )
                    for part in parts:
                        total = add(total, part, float32(1))
                    k += 4
                store_vec16(out[t], 16 * w, result(total))
                w += threads
            t += cuda.gridDim.x
        if i == 0:
            calls[b] = call

    return expert_combine


class Combine(Method):
    """Launches it, and owns its memory; after ``Dispatch``, its `source`, which lives as long."""

    threads = 1024

    def prepare(self, sizes, source):
        world, n = self.world, self.world.n_ranks
        self.kernel, self.blocks = combine_kernel(sizes.dtype.name), source.blocks
        row = sizes.hidden * sizes.dtype.itemsize
        staged = self.empty((2, n, sizes.max_tokens, row), "uint8", "expert_parallel.combine.staged")
        arrived = self.zeros((n, self.blocks), "uint64", "expert_parallel.combine.arrived")
        left = source.routes, source.shares.view("float32"), source.sent
        self.rest = *left, staged, arrived, world.xp.zeros(self.blocks, "uint64")
        nothing = world.xp.empty((0, row), "uint8")
        self.bind(nothing, nothing)

    def bind(self, y, out):
        return self.launch(self.kernel, self.blocks, y, out, *self.rest, pdl=True)


def _array(dtype, ndim):
    return types.Array(dtype, ndim, "C")


_rows, _integers, _signals = (
    _array(types.uint8, 2),
    _array(types.int32, 3),
    _array(types.uint64, 2),
)
GPU_KERNELS = {
    f"expert_combine[{dtype}]": (
        combine_kernel(dtype),
        (
            *(_rows, _rows, _integers, _array(types.float32, 3), _array(types.int32, 2)),
            *(_array(types.uint8, 4), _signals, _array(types.uint64, 1)),
        ),
    )
    for dtype in ("float16", "bfloat16", "float32")
}
