"""Dispatch of many tokens: rows go straight to where the experts take them. One kernel, after ``meet``
(plan.py), which has found each row's place.

Rows      rows, scales, on every rank: its receive buffer. Other ranks write a token's row to the place of its
          first expert there, once. The rank itself copies it to the token's other experts there, and the rows
          of its own tokens to all of their experts there
Routes    routes[k, t, j], on every rank: the row of the j-th expert of rank k's token t, or NONE if that is
          not here; factors[k, t, j]: its weight. Written by rank k, and by `copy_routes`
Groups    of tokens, as many as a block has warps. A warp moves a token's row
Signals   full[k, g], on every rank: the last epoch that group g of rank k's tokens is here of; set by k only

  blocks that send, one group after another:
          1. of each token, a warp: store its routes and weights to all ranks, its row and scales to each
             other rank that has experts of it; syncthreads
          2. set full[me, g] on all ranks to the epoch             release, sys: publishes the block's stores
  blocks that receive:
          3. of each own token, a warp: copy its row and scales to its experts here
          4. for each group of other ranks: wait for full          acquire, sys
          5. of each token, a warp: copy its row and scales from its first expert's place to its other
             experts' here; store the weights of its rows

A row goes over NVLink once for each far rank. The fan-out of one group overlaps with the transfer of others.

No race: a rank writes to others after `meet` only, so after all earlier work on their streams. What a warp
reads in step 5 the sender's step 2 has published. Experts of a token have different rows, so no two warps
write the same one.

No deadlock: blocks that send wait for no rank. All blocks are co-resident.
"""

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
from shmemkit.device.swizzle import quotient

from ..routing import ALL, NONE, owner_of, peer_at, without_first

SENDING = 0.35  # of the blocks


@cuda.jit(device=True)
def route_of(t, lane, top_k, per_block, reciprocal, codes, base, place):
    """-> the row of this rank's token `t` at its `lane`-th expert, and that one's rank; NONE without one"""
    row, owner, n_experts = int32(NONE), int32(NONE), int64(place.size)
    if lane < top_k:
        code = codes[t * top_k + lane]
        if code >= 0:
            expert = code >> 16
            at = place[expert]
            if at >= 0:
                row = int32(at + base[quotient(t, per_block) * n_experts + expert] + (code & 0xFFFF))
                owner = owner_of(expert, n_experts, reciprocal)
    return row, owner


@cuda.jit(device=True)
def _load_four(x, first, w, words):
    """This lane's words w, w + 32, ..; four loads at once. What is beyond the end is some of the row."""
    last = first + words - 1
    at = first + w
    return (
        load_vec16(x, min(last, at)),
        load_vec16(x, min(last, at + 32)),
        load_vec16(x, min(last, at + 64)),
        load_vec16(x, min(last, at + 96)),
    )


@cuda.jit(device=True)
def _store_four(x, first, w, words, four):
    a, b, c, d = four
    if w < words:
        store_vec16(x, first + w, a)
    if w + 32 < words:
        store_vec16(x, first + w + 32, b)
    if w + 64 < words:
        store_vec16(x, first + w + 64, c)
    if w + 96 < words:
        store_vec16(x, first + w + 96, d)


@cuda.jit(device=True)
def _send(
    t, route, lane, top_k, max_tokens, x, scales, words, n_scales, shares, rows, row_scales, routes, factors
):
    """Step 1, of token `t`, by a warp."""
    row, owner = route
    n, me = num_ranks(), rank()
    if lane < top_k:
        share, at = shares[t * top_k + lane], (me * max_tokens + t) * top_k + lane
        for k in range(n):
            symm_at(routes, k)[at] = row if owner == k else int32(NONE)
            symm_at(factors, k)[at] = share
    w = int64(0)
    while w < words:
        four = _load_four(x, t * words, w + lane, words)
        for distance in range(1, n):
            k = peer_at(distance)
            here = uint32(cuda.ballot_sync(ALL, owner == k))
            if here:
                first = int64(cuda.shfl_sync(ALL, row, cuda.ffs(here) - 1)) * words
                _store_four(symm_at(rows, k), first, w + lane, words, four)
        w += 128
    for distance in range(1, n if n_scales else 1):
        k = peer_at(distance)
        here = uint32(cuda.ballot_sync(ALL, owner == k))
        if here:
            first = int64(cuda.shfl_sync(ALL, row, cuda.ffs(here) - 1)) * n_scales
            _copy_scales(scales, t * n_scales, symm_at(row_scales, k), first, lane, n_scales)


@cuda.jit(device=True)
def _copy_scales(scales, at, to, first, lane, n_scales):
    q = lane
    while q < n_scales:
        to[first + q] = scales[at + q]
        q += 32


@cuda.jit(device=True)
def _fan_out(x, scales, at, left, row, lane, words, n_scales, rows, row_scales):
    """Copy row `at` of x, and its scales, to those of the lanes whose bits are in `left`."""
    w = int64(0)
    while w < words and left:
        four, rest = _load_four(x, at * words, w + lane, words), left
        while rest:
            first = int64(cuda.shfl_sync(ALL, row, cuda.ffs(rest) - 1)) * words
            _store_four(rows, first, w + lane, words, four)
            rest = without_first(rest)
        w += 128
    while left and n_scales:
        first = int64(cuda.shfl_sync(ALL, row, cuda.ffs(left) - 1)) * n_scales
        _copy_scales(scales, at * n_scales, row_scales, first, lane, n_scales)
        left = without_first(left)


@cuda.jit(device=True)
def _weight_of(here, row, share, lane):
    """-> the weight of this lane's row, and whether no lane before has the same row. Where a token names an
    expert several times, it is the sum of the weights"""
    total, leads = float32(0), row >= 0
    while here:
        j = cuda.ffs(here) - 1
        weight = cuda.shfl_sync(ALL, share, j)
        if cuda.shfl_sync(ALL, row, j) == row:
            total += weight
            leads = leads and lane <= j
        here = without_first(here)
    return total, leads


@cuda.jit(max_registers=64)
def send_rows(
    x,
    scales,
    rows,
    row_scales,
    row_weights,
    words,
    n_scales,
    top_k,
    max_tokens,
    per_block,
    reciprocal,
    senders,
    codes,
    shares,
    base,
    place,
    tokens_of,
    routes,
    factors,
    full,
    epochs,
):
    """Send the rows of `x` to their experts.

    x            complex128 (tokens * words,): words of 16 bytes
    scales       uint32 (tokens * n_scales,)
    rows         complex128 (max_rows * words,), symmetric
    row_scales   uint32 (max_rows * n_scales,), likewise
    row_weights  float32 (max_rows,)
    words        of 16 bytes, in a row
    per_block    tokens of a block of ``route_tokens``
    reciprocal   as of ``routing.owner_of``
    senders      how many blocks send; the others receive, one at least
    codes .. tokens_of   as of plan.py
    routes       int32 (n_ranks * max_tokens * top_k,), symmetric; factors: float32, likewise
    full         uint64 (n_ranks * max_tokens,), symmetric, zeros at first; a group has one
    epochs       uint64 (1,), of ``meet``
    grid         one-dimensional, as the blocks are, of whole warps, as many on all ranks
    """
    griddepcontrol_wait()
    b, n, me, lane = cuda.blockIdx.x, num_ranks(), rank(), cuda.laneid
    warp, group, i = int64(cuda.threadIdx.x >> 5), int64(cuda.blockDim.x >> 5), int64(cuda.threadIdx.x)
    epoch, tokens, n_groups = int64(epochs[0]), int64(tokens_of[me]), quotient(full.size, n)
    if b < senders:
        g = int64(b)
        while g * group < tokens:
            t = g * group + warp
            if t < tokens:  # 1
                route = route_of(t, lane, top_k, per_block, reciprocal, codes, base, place)
                _send(
                    *(t, route, lane, top_k, max_tokens, x, scales, words, n_scales, shares),
                    *(rows, row_scales, routes, factors),
                )
            cuda.syncthreads()
            k = i
            while k < n:
                notify(span(full, me * n_groups + g, 1), k, epoch, "set", "sys")  # 2
                k += cuda.blockDim.x
            g += senders
    else:
        r, step = int64(b - senders), int64(cuda.gridDim.x - senders)
        t = r * group + warp
        while t < tokens:  # 3
            row, owner = route_of(t, lane, top_k, per_block, reciprocal, codes, base, place)
            row = row if owner == me else int32(NONE)
            share = shares[t * top_k + lane] if lane < top_k else float32(0)
            weight, leads = _weight_of(uint32(cuda.ballot_sync(ALL, row >= 0)), row, share, lane)
            if leads:
                row_weights[row] = weight
            here = uint32(cuda.ballot_sync(ALL, leads))
            _fan_out(x, scales, t, here, row, lane, words, n_scales, rows, row_scales)
            t += step * group
        most = int64(0)
        for k in range(n):
            most = max(most, int64(tokens_of[k]))
        q, others = r, int64(n - 1)
        while q < others * quotient(most + group - 1, group):
            g = quotient(q, others)
            k = int64(peer_at(q - g * others + 1))
            t = g * group + warp
            if g * group < tokens_of[k]:
                if i == 0:
                    wait(span(full, k * n_groups + g, 1), 1, "sys", "acquire", epoch)  # 4
                cuda.syncthreads()
                if t < tokens_of[k]:  # 5
                    row, share, at = int32(NONE), float32(0), (k * max_tokens + t) * top_k + lane
                    if lane < top_k:
                        row, share = routes[at], factors[at]
                    weight, leads = _weight_of(uint32(cuda.ballot_sync(ALL, row >= 0)), row, share, lane)
                    if leads:
                        row_weights[row] = weight
                    here = uint32(cuda.ballot_sync(ALL, leads))
                    if here:
                        first = int64(cuda.shfl_sync(ALL, row, cuda.ffs(here) - 1))
                        left = without_first(here)
                        _fan_out(rows, row_scales, first, left, row, lane, words, n_scales, rows, row_scales)
            q += step
    cuda.syncthreads()
    griddepcontrol_launch_dependents()


GPU_KERNELS = {"send_rows": send_rows}
