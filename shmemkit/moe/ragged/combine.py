"""Combine of many tokens: each rank adds up its experts' rows of a token, and sends the sum to the token's
rank, which adds up the sums of all ranks. One kernel, after ``meet`` (plan.py).

Sums      sums[k, t], on every rank: what the experts of rank k have for token t here: the sum of their rows
          times their weights, in the order of the token's experts, in float32, rounded to the dtype. Written
          by rank k only
Signals   full[k, g], on every rank: the last epoch that the sums of rank k for group g of this rank's tokens
          are here of; set by rank k only. They are those of ``send_rows``: each call has its own epoch
Routes    routes, factors, codes and others, as dispatch has left them

  blocks that send, for each group of tokens of all ranks, these in turn:
          1. of each token that has experts here, a warp: add up their rows; store the sum to sums[me, t] on
             the token's rank; syncthreads
          2. set full[me, g] there to the epoch                    release, sys: publishes the block's stores
  blocks that receive, for each group of this rank's tokens:
          3. wait for full[k, g] of all ranks k                    acquire, sys
          4. of each token, a warp: add up the sums of the ranks that have experts of it, in the order of the
             ranks, in float32; store the result, rounded, to `out`; zeros where there are none

So one row comes back from a rank, and the bits are the same in every run.

No race: a rank writes to others after `meet` only, so after their last combine has ended.

No deadlock: blocks that send wait for no rank. All blocks are co-resident.
"""

import functools

from numba import cuda, float32, int32, int64, uint32

from shmemkit.device import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    load_vec16,
    notify,
    num_ranks,
    rank,
    span,
    store_vec16,
    symm_at,
    wait,
)
from shmemkit.device.cuda.weighted_sums import weighted_sum
from shmemkit.device.swizzle import quotient

from ..routing import ALL, NONE, peer_at, without_first
from .dispatch import route_of

SENDING = 0.66  # of the blocks


@functools.cache
def combine_kernel(dtype):
    """-> the kernel for rows of `dtype`, a name as "float16"."""
    zero, add, result = weighted_sum(dtype)

    @cuda.jit(device=True)
    def send(here, row, share, lane, y, words, to, first):
        """Step 1, of a token: lane j has the `row` of the j-th expert, and its weight; two rows at once."""
        w = int64(0)
        while w < words:
            total, left, at = zero(), here, min(words - 1, w + lane)
            while left:
                j0 = cuda.ffs(left) - 1
                left = without_first(left)
                j1 = cuda.ffs(left) - 1 if left else j0
                row0 = int64(cuda.shfl_sync(ALL, row, j0)) * words
                row1 = int64(cuda.shfl_sync(ALL, row, j1)) * words
                share0, share1 = cuda.shfl_sync(ALL, share, j0), cuda.shfl_sync(ALL, share, j1)
                a, b = load_vec16(y, row0 + at), load_vec16(y, row1 + at)
                total = add(total, a, share0)
                if left:
                    total = add(total, b, share1)
                    left = without_first(left)
            if w + lane < words:
                store_vec16(to, first + w + lane, result(total))
            w += 32

    @cuda.jit(device=True)
    def receive(t, owner, lane, words, max_tokens, sums, out):
        """Step 4, of a token: lane j has the `owner` of its j-th expert."""
        w = int64(0)
        while w < words:
            total, at = zero(), min(words - 1, w + lane)
            for k in range(num_ranks()):
                if cuda.any_sync(ALL, owner == k):
                    total = add(total, load_vec16(sums, (k * max_tokens + t) * words + at), float32(1))
            if w + lane < words:
                store_vec16(out, t * words + w + lane, result(total))
            w += 32

    @cuda.jit(max_registers=64)
    def sum_rows(
        y,
        out,
        words,
        top_k,
        max_tokens,
        per_block,
        reciprocal,
        senders,
        weighted,
        codes,
        base,
        place,
        tokens_of,
        routes,
        factors,
        sums,
        full,
        epochs,
    ):
        """Add up the rows of the experts for each token.

        y         complex128 (max_rows * words,): as ``send_rows`` has its `rows`
        out       complex128 (tokens * words,)
        weighted  whether rows are multiplied by their weights, or by 1
        sums      complex128 (n_ranks * max_tokens * words,), symmetric
        others, and grid   as of ``send_rows``
        """
        griddepcontrol_wait()
        b, n, me, lane = cuda.blockIdx.x, num_ranks(), rank(), cuda.laneid
        warp, group, i = int64(cuda.threadIdx.x >> 5), int64(cuda.blockDim.x >> 5), int64(cuda.threadIdx.x)
        epoch, n_groups = int64(epochs[0]), quotient(full.size, n)
        if b < senders:
            most = int64(0)
            for k in range(n):
                most = max(most, int64(tokens_of[k]))
            q = int64(b)
            while q < n * quotient(most + group - 1, group):
                g = quotient(q, n)
                k = int64(peer_at(q - g * n + 1)) if n > 1 else int64(0)
                t = g * group + warp
                if t < tokens_of[k]:  # 1
                    row, share, at = int32(NONE), float32(1), (k * max_tokens + t) * top_k + lane
                    if lane < top_k:
                        row = routes[at]
                        if weighted:
                            share = factors[at]
                    here = uint32(cuda.ballot_sync(ALL, row >= 0))
                    if here:
                        first = (me * max_tokens + t) * words
                        send(here, row, share, lane, y, words, symm_at(sums, k), first)
                cuda.syncthreads()
                if i == 0 and g * group < tokens_of[k]:
                    notify(span(full, me * n_groups + g, 1), k, epoch, "set", "sys")  # 2
                q += senders
        else:
            # After a capture, `out` may be of another dispatch: nothing is written behind its end.
            tokens, g = min(int64(tokens_of[me]), quotient(out.size, words)), int64(b - senders)
            while g * group < tokens:
                k = i
                while k < n:
                    wait(span(full, k * n_groups + g, 1), 1, "sys", "acquire", epoch)  # 3
                    k += cuda.blockDim.x
                cuda.syncthreads()
                t = g * group + warp
                if t < tokens:  # 4
                    _, owner = route_of(t, lane, top_k, per_block, reciprocal, codes, base, place)
                    receive(t, owner, lane, words, max_tokens, sums, out)
                g += cuda.gridDim.x - senders
        cuda.syncthreads()
        griddepcontrol_launch_dependents()

    return sum_rows


GPU_KERNELS = {f"sum_rows[{dtype}]": combine_kernel(dtype) for dtype in ("float16", "bfloat16", "float32")}
