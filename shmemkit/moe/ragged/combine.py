"""Combine of many tokens: each rank adds up its experts' rows of a token, and sends the sum to the token's
rank, which adds up the sums of all ranks. One kernel, after ``meet`` (plan.py).

Sums      sums[k, t], on every rank: what the experts of rank k have for token t here: the sum of their rows
          times their weights, in the order of the token's experts, in float32, rounded to the dtype. Written
          by rank k only
Signals   full[k, t], on every rank: the last epoch that sums[k, t] is here of; set by rank k only. In the
          memory of those of ``send_rows``: each call has its own epoch
Routes    routes, factors, codes and others, as dispatch has left them

Units are token 0 of each rank, this one's last, then token 1 of each, and so on. Warps take them in turn:

          1. if the token has experts here: add up their rows; store the sum to sums[me, t] on its rank
          2. if that is another rank: syncwarp; set full[me, t] there to the epoch
                                                           release, sys: publishes the warp's stores
  and if it is this rank:
          3. wait for full[k, t] of each other rank k that has experts of it; syncwarp     acquire, sys
          4. add up the sums of the ranks that have experts of it, in the order of the ranks, in float32;
             store the result, rounded, to `out`; zeros where there are none

So one row comes back from a rank, and the bits are the same in every run. Some warps send while others add
up, from the first unit to the last: links and memory are busy at the same time.

Memory answers after about 1 us, so a GPU reads at its full rate only with some MB under way, which is more
than registers hold. So rows come by asynchronous copies, SLOTS - 1 groups of them ahead of what is added up.
Each lane has a ring in shared memory for what it adds up itself: no other thread reads it.

No race: a rank writes to others after `meet` only, so after their last combine has ended. In step 4 a lane
reads of this rank's sum what it has stored itself in step 1. It reads a slot of its ring before it begins the
next copy there.

No deadlock: ascending-order progress (docs/protocols.md). A rank sends token t of the others in units before
that of its own token t, and sending waits for no rank. All blocks are co-resident.
"""

import functools

from numba import cuda, float32, int32, int64, uint8, uint32

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
from shmemkit.device.cuda.mma import cp_async, cp_async_commit, cp_async_wait
from shmemkit.device.cuda.unroll import for_each, tuple_of
from shmemkit.device.cuda.weighted_sums import weighted_sum
from shmemkit.device.swizzle import quotient

from ..routing import ALL, NONE, peer_at, without_first
from .dispatch import route_of

# A lane adds up two columns of 16 bytes at once: they share what a row costs besides, and the totals of more
# take too many of its 64 registers. A ring has five slots for them: a block of 512 threads has up to 64 KB
# under way, an H200 8 MB, and two objects fit on a multiprocessor, also of an A100.
COLUMNS, SLOTS = 2, 5
RING = SLOTS * COLUMNS * 16  # bytes of a lane's


@functools.cache
def combine_kernel(dtype):
    """-> the kernel for rows of `dtype`, a name as "float16"."""
    zero, add, result = weighted_sum(dtype)
    width, last, slot_bytes, ring_bytes = 32 * COLUMNS, SLOTS - 1, 512 * COLUMNS, 32 * RING
    but_first = SLOTS - 2

    @cuda.jit(device=True)
    def copy_column(c, _, arguments):
        x, at, left, ring, slot = arguments
        cp_async(ring, int32(slot + 512 * c), x, at + 32 * c, 16 if 32 * c < left else 0, 16)

    @cuda.jit(device=True)
    def zero_column(c, arguments):
        return zero()

    @cuda.jit(device=True)
    def load_column(c, arguments):
        ring, slot = arguments
        return load_vec16(ring, slot + 512 * c)

    @cuda.jit(device=True)
    def add_column(c, arguments):
        totals, pieces, share = arguments
        return add(totals[c], pieces[c], share)

    @cuda.jit(device=True)
    def store_column(c, total, arguments):
        to, at, left = arguments
        if 32 * c < left:
            store_vec16(to, at + 32 * c, result(total))

    columns = (0,) * COLUMNS
    copy_columns, store_columns = for_each(COLUMNS, copy_column), for_each(COLUMNS, store_column)
    zeros, load_columns = tuple_of(COLUMNS, zero_column), tuple_of(COLUMNS, load_column)
    add_columns = tuple_of(COLUMNS, add_column)

    @cuda.jit(device=True)
    def ask(x, words, row, count, i, w, ring, slot):
        """Begin to copy this lane's columns from word `w` on of the i-th row. -> (i, w) of the next ones"""
        if w < words:
            lane = int32(cuda.laneid)
            at = int64(cuda.shfl_sync(ALL, row, i)) * int64(words) + int64(int32(w + lane))
            copy_columns(columns, (x, at, int32(words - w - lane), ring, slot))
            i = int32(i + 1)
            if i == count:
                i, w = int32(0), int32(w + width)
        cp_async_commit()
        return i, w

    @cuda.jit(device=True)
    def sum_up(x, words, row, share, count, to, first, ring):
        """Store from to[first] on the sum of the rows of x that the lanes before `count`, one at least, have,
        times their shares."""
        lane, begin = int32(cuda.laneid), int32((cuda.threadIdx.x >> 5) * ring_bytes + cuda.laneid * 16)
        i, j, w, v, totals = int32(0), int32(0), int32(0), int32(0), zeros(())
        end, slot = int32(begin + ring_bytes), begin
        for k in range(last):
            j, v = ask(x, words, row, count, j, v, ring, int32(begin + k * slot_bytes))
        free = int32(begin + last * slot_bytes)
        while w < words:
            cp_async_wait(but_first)
            pieces = load_columns((ring, slot))
            j, v = ask(x, words, row, count, j, v, ring, free)
            totals = add_columns((totals, pieces, cuda.shfl_sync(ALL, share, i)))
            free, slot, i = slot, int32(slot + slot_bytes), int32(i + 1)
            if slot == end:
                slot = begin
            if i == count:
                store_columns(totals, (to, first + int64(int32(w + lane)), int32(words - w - lane)))
                i, w, totals = int32(0), int32(w + width), zeros(())

    @cuda.jit(device=True)
    def rows_here(row, share, lane):
        """-> how many lanes have a row; these rows, and their shares, in the first lanes"""
        left, count, source = uint32(cuda.ballot_sync(ALL, row >= 0)), int32(0), int32(0)
        while left:
            if lane == count:
                source = int32(cuda.ffs(left) - 1)
            left, count = without_first(left), int32(count + 1)
        return count, cuda.shfl_sync(ALL, row, source), cuda.shfl_sync(ALL, share, source)

    @cuda.jit(device=True)
    def rows_of_ranks(t, owner, lane, max_tokens):
        """-> how many ranks have experts of this rank's token `t`; their rows of `sums`, in lane order"""
        count, row = int32(0), int32(0)
        for k in range(num_ranks()):
            if cuda.any_sync(ALL, owner == k):
                if lane == count:
                    row = int32(k * max_tokens + t)
                count = int32(count + 1)
        return count, row

    @cuda.jit(max_registers=64)
    def sum_rows(
        y,
        out,
        words,
        top_k,
        max_tokens,
        per_block,
        reciprocal,
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
        full      uint64 (n_ranks * max_tokens,), symmetric, zeros at first
        others, and grid   as of ``send_rows``
        shared memory      RING bytes for each thread
        """
        ring = cuda.shared.array(0, uint8, alignment=16)
        griddepcontrol_wait()
        n, me, lane, size = num_ranks(), rank(), cuda.laneid, int32(words)
        epoch, warps, most = int64(epochs[0]), int32(cuda.gridsize(1) >> 5), int32(0)
        for k in range(n):
            most = max(most, tokens_of[k])
        # In each round a warp has the next turn: else, with a multiple of n warps, some would never send.
        first, turn = int32(0), int32(cuda.grid(1) >> 5)
        while first < n * most:
            t = int32(quotient(first + turn, n))
            k = peer_at(first + turn - t * n + 1) if n > 1 else int32(0)
            first, turn = int32(first + warps), int32(turn + 1 if turn + 1 < warps else 0)
            if t < tokens_of[k]:
                row, share, at = int32(NONE), float32(1), (int64(k) * max_tokens + t) * top_k + lane
                if lane < top_k:
                    row = routes[at]
                    if weighted:
                        share = factors[at]
                count, row, share = rows_here(row, share, lane)
                if count:
                    at = (int64(me) * max_tokens + t) * words
                    sum_up(y, size, row, share, count, symm_at(sums, k), at, ring)  # 1
                    if k != me:
                        cuda.syncwarp()
                        if lane == 0:
                            notify(span(full, me * max_tokens + t, 1), k, epoch, "set", "sys")  # 2
                # After a capture, `out` may be of another dispatch: nothing is written behind its end.
                if k == me and int64(t) * words < out.size:
                    _, owner = route_of(t, lane, top_k, per_block, reciprocal, codes, base, place)
                    if owner >= 0 and owner != me:
                        wait(span(full, owner * max_tokens + t, 1), 1, "sys", "acquire", epoch)  # 3
                    cuda.syncwarp()
                    count, row = rows_of_ranks(t, owner, lane, max_tokens)
                    if count:
                        sum_up(sums, size, row, float32(1), count, out, int64(t) * words, ring)  # 4
                    w = int32(lane)
                    while not count and w < size:
                        store_vec16(out, int64(t) * words + w, result(zero()))
                        w = int32(w + 32)
        cuda.syncthreads()
        griddepcontrol_launch_dependents()

    return sum_rows


GPU_KERNELS = {f"sum_rows[{dtype}]": combine_kernel(dtype) for dtype in ("float16", "bfloat16", "float32")}
