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
    num_ranks,
    rank,
    store_vec16,
    symm_at,
)
from shmemkit.kernels.meeting import meet
from shmemkit.kernels.method import Method

from .dispatch import PLACES, ROWS, THREADS, divided, group_size, peer_at, row_bits, together, width_of
from .weighted import weighted_sum


@functools.cache
def combine_kernel(dtype):
    """-> the kernel for rows of `dtype`, a name as "float16"."""
    zero, add, result = weighted_sum(dtype)

    @cuda.jit(device=True)
    def end_of(z, n_rows, places, top_k):
        """Row `z` of the group, of `n_rows`, is a sum of those at the places z * top_k up to this end."""
        end = z * top_k
        while z < n_rows and end < (z + 1) * top_k and places[end] >= 0:
            end += 1
        return end

    @cuda.jit(device=True)
    def row_of(j, end, w, y, places):
        """Word `w`, 16 bytes, of the row at place `j`, zeros from `end` on."""
        if j < end:
            return load_vec16(y[places[j]], 16 * w)
        nothing = uint32(0)
        return nothing, nothing, nothing, nothing

    @cuda.jit(device=True)
    def return_rows(t, group, half, y, routes, shares, staged):
        """Step 1, of a group of tokens from `t` on, of all ranks, numbered by token and rank; the others'
        first."""
        places, weights = cuda.shared.array(PLACES, int32), cuda.shared.array(PLACES, float32)
        of_token, of_rank = cuda.shared.array(ROWS, int32), cuda.shared.array(ROWS, int32)
        n, max_tokens, top_k = routes.shape
        i, threads, words = cuda.threadIdx.x, cuda.blockDim.x, y.shape[1] >> 4
        n_rows, width = group_size(t, max_tokens, group) * n, width_of(top_k)
        cuda.syncthreads()  # of the group before, all is done
        q = i
        while q < n_rows << width:
            z, j = q >> width, q & (1 << width) - 1
            if j < top_k:
                g, distance = divided(z, n)
                k, token = peer_at(distance + 1), t + g * cuda.gridDim.x
                places[z * top_k + j], weights[z * top_k + j] = routes[k, token, j], shares[k, token, j]
                if j == 0:
                    of_token[z], of_rank[z] = token, k
            q += threads
        cuda.syncthreads()
        bits = row_bits(words)
        step, w = threads >> bits, i & (1 << bits) - 1
        while w < words and i >> bits < step:
            z = i >> bits
            while z < n_rows:  # two rows of two experts at once
                j0, end0 = z * top_k, end_of(z, n_rows, places, top_k)
                j1, end1 = (z + step) * top_k, end_of(z + step, n_rows, places, top_k)
                some0, some1, total0, total1 = j0 < end0, j1 < end1, zero(), zero()
                while j0 < end0 or j1 < end1:
                    a0, b0 = row_of(j0, end0, w, y, places), row_of(j0 + 1, end0, w, y, places)
                    a1, b1 = row_of(j1, end1, w, y, places), row_of(j1 + 1, end1, w, y, places)
                    if j0 < end0:
                        total0 = add(total0, a0, weights[j0])
                    if j0 + 1 < end0:
                        total0 = add(total0, b0, weights[j0 + 1])
                    if j1 < end1:
                        total1 = add(total1, a1, weights[j1])
                    if j1 + 1 < end1:
                        total1 = add(total1, b1, weights[j1 + 1])
                    j0, j1 = j0 + 2, j1 + 2
                if some0:
                    there = symm_at(staged, of_rank[z])[half, rank(), of_token[z]]
                    store_vec16(there, 16 * w, result(total0))
                z += step
                if some1:
                    there = symm_at(staged, of_rank[z])[half, rank(), of_token[z]]
                    store_vec16(there, 16 * w, result(total1))
                z += step
            w += 1 << bits

    @cuda.jit(device=True)
    def sum_of(k, t, half, w, sent, staged):
        """16 bytes of what rank k has for token `t`: zeros, if nothing."""
        if k < num_ranks() and sent[t, k]:
            return load_vec16(staged[half, k, t], 16 * w)
        nothing = uint32(0)
        return nothing, nothing, nothing, nothing

    @cuda.jit(max_registers=64)  # see THREADS
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
        n, words = num_ranks(), out.shape[1] >> 4
        group = together(n, routes.shape[2])
        griddepcontrol_wait()
        call = calls[b] + 1
        half = call & 1
        t = b
        while t < sent.shape[0]:  # 1
            return_rows(t, group, half, y, routes, shares, staged)
            t += group * cuda.gridDim.x
        cuda.syncthreads()
        meet(arrived, b, call)  # 2 and 3
        cuda.syncthreads()
        griddepcontrol_launch_dependents()
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

    threads = THREADS

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
