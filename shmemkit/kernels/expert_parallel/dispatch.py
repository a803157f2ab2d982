"""Dispatch: each token's row goes to the ranks of its experts, and there to each of them. One kernel.

Experts   rank r has the experts r * n_local .. (r + 1) * n_local - 1. A token has top_k of them; a number
          that is no expert's, as -1, is none. Where a rank has several of a token's experts, the row goes
          there once
Blocks    block b has the tokens b, b + gridDim.x, ... of all ranks: it sends those of this rank, and receives
          those of the others. All launches on all ranks have the same grid
Staged    staged[half, k, t], staged_scales[half, k, t], codes[half, k, t], on every rank: the row of token t
          of rank k, its scales, and its experts here, one after another: codes[..., j, 0] is expert << 16 |
          how many of rank k's tokens before t go to that expert too, codes[..., j, 1] the bits of its weight.
          Below 0 is none, and so are all behind. Written by rank k only
Lines     lines[half], on every rank: how many tokens of rank k go to expert e here, packed by LL
          (``shmemkit.device.ll``), in unit k * n_local + e. Written by rank k only
Signals   arrived[k, b], on every rank: the number of the last call of which all that block b of rank k has
          for me is staged here (only rank k sets it)
Counters  calls[b], local: how many calls block b has taken part in, so that it gives the number of a call,
          and the half. In device memory, so that a replayed graph counts on

  block b:
          1. for each expert e = b, b + gridDim.x, ... of all ranks: count my tokens that go there, and store
             the number in the lines of its rank, with the flag
          2. for each of its tokens t, also those that this call has not (they have no experts): store row and
             scales in staged[half, me, t] of all other ranks that have experts of it; count the tokens before
             it that have the same experts, and store the codes on all ranks, mine too; syncthreads
          3. set arrived[me, b] on all other ranks to the number of this call    release, sys: publishes 2
          4. poll all counts in lines[half] here; block 0 writes the sums of each expert to `counts`
          5. of its own tokens: copy the row to each of their experts here
          6. wait until arrived[k, b] here is at least the number, for all k     acquire, sys: sees 2 of k
          7. likewise of the other ranks' tokens, from staged[half, k]

The row of token t of rank k lies behind those that the ranks before k send to the expert (from the lines)
and those of k's tokens before t (from the code): so all rows of an expert lie one after another, by rank and
token, the same in every run. What ``combine.py`` needs stays in local arrays: routes[k, t, j], the row, of
all experts, that the j-th one here has for token t of rank k, or -1 from some j on; shares[k, t, j], its
weight; sent[t, k], how many experts of my token t rank k has.

No race on what is staged, nor on the lines, although nobody acknowledges: rank k writes half h of both two
calls later. In the launch between, all of k's blocks have waited for my blocks' arrived of that call, which
mine set when my launch before had ended (griddepcontrol_wait), and had read what half h held. For this, each
block signals to each rank, also where it has nothing to send. routes, shares and sent are read by later
launches of this rank only. The flags of a line only grow (until those of LL begin again after 2**32 calls).

No deadlock: a block does all that others wait for, steps 1 to 3, before it waits; all blocks are resident.
That the next launch begins early (PDL) changes neither: its blocks come when all of this one are resident,
and touch nothing until these have ended.
"""

from numba import cuda, int32, types

from shmemkit.device import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ll_load,
    ll_store,
    load_vec16,
    notify,
    num_ranks,
    rank,
    store_vec16,
    symm_at,
    wait,
)
from shmemkit.kernels.method import Method

MAX_TOP_K = 32
MAX_RANKS = 72
MAX_EXPERTS = 1024
MAX_TOKENS = 1 << 16  # of a rank: how many come before one has 16 bits
PLACES = MAX_RANKS * MAX_TOP_K
NONE = -1


@cuda.jit(device=True)
def divided(number, by):
    """(number // by, number % by), for small quotients: a division takes long."""
    quotient = 0
    while number >= by:
        number -= by
        quotient += 1
    return quotient, number


@cuda.jit(device=True)
def peer_at(distance):
    """The rank so far after me."""
    peer = rank() + distance
    return peer if peer < num_ranks() else peer - num_ranks()


@cuda.jit(device=True)
def _count(experts, until, wanted, size, found):
    """Add to found[j] how many of the first `until` tokens have the expert wanted[j], j < `size`: in shared
    memory, by the block, between syncthreads."""
    t = cuda.threadIdx.x
    while t < until:
        held, k = 0, 0
        while k < experts.shape[1]:
            expert, j = experts[t, k], 0
            while j < size:
                if wanted[j] == expert:
                    held |= 1 << j
                j += 1
            k += 1
        j = 0
        while j < size:
            if held >> j & 1:
                cuda.atomic.add(found, j, 1)
            j += 1
        t += cuda.blockDim.x


@cuda.jit(device=True)
def _announce(experts, n_local, lines, call):
    """Step 1."""
    wanted, found = cuda.shared.array(1, int32), cuda.shared.array(1, int32)
    expert = cuda.blockIdx.x
    while expert < n_local * num_ranks():
        if cuda.threadIdx.x == 0:
            wanted[0], found[0] = expert, 0
        cuda.syncthreads()
        _count(experts, experts.shape[0], wanted, 1, found)
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            owner, local = divided(expert, n_local)
            ll_store(symm_at(lines, owner)[call & 1], rank() * n_local + local, found[0], call)
        expert += cuda.gridDim.x


@cuda.jit(device=True)
def _send(t, half, x, experts, weights, scales, n_local, staged, staged_scales, codes, sent):
    """Step 2, of token `t`."""
    wanted, found = cuda.shared.array(MAX_TOP_K, int32), cuda.shared.array(MAX_TOP_K, int32)
    owner, local = cuda.shared.array(MAX_TOP_K, int32), cuda.shared.array(MAX_TOP_K, int32)
    share = cuda.shared.array(MAX_TOP_K, int32)
    needed = cuda.shared.array(MAX_RANKS, int32)
    me, n, i, threads = rank(), num_ranks(), cuda.threadIdx.x, cuda.blockDim.x
    tokens, top_k = experts.shape
    cuda.syncthreads()  # of the token before, all is done
    j = i
    while j < top_k:
        owner[j], wanted[j], found[j] = NONE, NONE, 0
        if t < tokens:
            expert = experts[t, j]
            if 0 <= expert and expert < n_local * n:
                owner[j], local[j] = divided(expert, n_local)
                wanted[j], share[j] = expert, weights[t, j]
        j += threads
    cuda.syncthreads()
    k = i
    while k < n:
        count, j = 0, 0
        while j < top_k:
            if owner[j] == k:
                count += 1
            j += 1
        needed[k] = sent[t, k] = count
        k += threads
    cuda.syncthreads()
    if t < tokens:
        w = 16 * i
        while w < x.shape[1]:
            words, y = load_vec16(x[t], w), 1
            while y < n:
                peer = peer_at(y)
                if needed[peer]:
                    store_vec16(symm_at(staged, peer)[half, me, t], w, words)
                y += 1
            w += 16 * threads
        s = i
        while s < scales.shape[1]:
            scale, y = scales[t, s], 1
            while y < n:
                peer = peer_at(y)
                if needed[peer]:
                    symm_at(staged_scales, peer)[half, me, t, s] = scale
                y += 1
            s += threads
        _count(experts, t, wanted, top_k, found)
    cuda.syncthreads()
    k = i
    while k < n:
        there, m, j = symm_at(codes, k)[half, me, t], 0, 0
        while j < top_k:
            if owner[j] == k:
                there[m, 0], there[m, 1] = local[j] << 16 | found[j], share[j]
                m += 1
            j += 1
        while m < top_k:
            there[m, 0] = NONE
            m += 1
        k += threads


@cuda.jit(device=True)
def _gather_counts(lines, call, n_local, came, counts):
    """Step 4: the counts of all ranks, to `came` in shared memory."""
    q = cuda.threadIdx.x
    while q < num_ranks() * n_local:
        came[q] = ll_load(lines[call & 1], q, call)
        q += cuda.blockDim.x
    cuda.syncthreads()
    if cuda.blockIdx.x == 0:
        expert = cuda.threadIdx.x
        while expert < n_local:
            total, k = 0, 0
            while k < num_ranks():
                total += came[k * n_local + expert]
                k += 1
            counts[expert] = total
            expert += cuda.blockDim.x


@cuda.jit(device=True)
def _place(code, k, came, n_local, capacity):
    """The row, of all experts, of a token of rank k with this code, or NONE."""
    if code < 0:
        return NONE
    expert, row, before = code >> 16, code & MAX_TOKENS - 1, 0
    while before < k:
        row += came[before * n_local + expert]
        before += 1
    # When the time of a wait is up (docs/timeouts.md), the counts may be anything.
    return expert * capacity + row if 0 <= row < capacity and expert < n_local else NONE


@cuda.jit(device=True)
def _receive(
    t,
    first,
    last,
    half,
    x,
    scales,
    came,
    staged,
    staged_scales,
    codes,
    rows,
    row_scales,
    n_local,
    routes,
    shares,
):
    """Steps 5 and 7: token `t` of the ranks `first` after me up to the one before `last` after me."""
    places = cuda.shared.array(PLACES, int32)
    top_k, row, i, threads = routes.shape[2], x.shape[1], cuda.threadIdx.x, cuda.blockDim.x
    capacity = num_ranks() * routes.shape[1]
    cuda.syncthreads()  # of the token before, all is done
    q = i
    while q < (last - first) * top_k:
        y, j = divided(q, top_k)
        k = peer_at(first + y)
        code = codes[half, k, t, j]
        place = _place(code[0], k, came, n_local, capacity)
        places[q] = routes[k, t, j] = place
        shares[k, t, j] = code[1]
        q += threads
    cuda.syncthreads()
    q, words = i, row >> 4
    while q < (last - first) * words:
        y, w = divided(q, words)
        j = y * top_k
        if places[j] >= 0:
            k = peer_at(first + y)
            source = x[t] if k == rank() else staged[half, k, t]
            word = load_vec16(source, 16 * w)
            while j < (y + 1) * top_k and places[j] >= 0:
                store_vec16(rows[places[j]], 16 * w, word)
                j += 1
        q += threads
    q = i
    while q < (last - first) * scales.shape[1]:
        y, s = divided(q, scales.shape[1])
        j = y * top_k
        if places[j] >= 0:
            k = peer_at(first + y)
            scale = scales[t, s] if k == rank() else staged_scales[half, k, t, s]
            while j < (y + 1) * top_k and places[j] >= 0:
                row_scales[places[j], s] = scale
                j += 1
        q += threads


@cuda.jit(max_registers=64)  # 1024 threads
def expert_dispatch(
    x,
    experts,
    weights,
    scales,
    rows,
    row_scales,
    counts,
    staged,
    staged_scales,
    codes,
    lines,
    arrived,
    calls,
    routes,
    shares,
    sent,
):
    """Send the rows of `x` to their experts.

    x              uint8 (tokens, bytes of a row), a multiple of 16, as their addresses; max_tokens at most
    experts        int32 or int64 (tokens, top_k)
    weights        int32 (tokens, top_k): the bits of float32
    scales         float32 (tokens, n_scales), also 0 of them
    rows           uint8 (n_local * n_ranks * max_tokens, bytes of a row)
    row_scales     float32 (n_local * n_ranks * max_tokens, n_scales)
    counts         int32 (n_local,): how many rows each expert has
    staged         uint8 (2, n_ranks, max_tokens, bytes of a row), symmetric
    staged_scales  float32 (2, n_ranks, max_tokens, n_scales, or 1 without), likewise
    codes          int32 (2, n_ranks, max_tokens, top_k, 2), likewise
    lines          uint64 (2, 2 * n_ranks * n_local), symmetric, zeros at first
    arrived        uint64 (n_ranks, blocks), likewise
    calls          uint64 (blocks,), zeros at first
    routes         int32 (n_ranks, max_tokens, top_k)
    shares         likewise
    sent           int32 (max_tokens, n_ranks)
    grid           the same number of blocks always, one-dimensional, as the blocks are
    """
    came = cuda.shared.array(MAX_EXPERTS, int32)
    b, i, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    me, n, max_tokens, n_local = rank(), num_ranks(), sent.shape[0], counts.size
    griddepcontrol_wait()
    griddepcontrol_launch_dependents()
    call = calls[b] + 1
    half = call & 1
    _announce(experts, n_local, lines, call)  # 1
    t = b
    while t < max_tokens:  # 2
        _send(t, half, x, experts, weights, scales, n_local, staged, staged_scales, codes, sent)
        t += cuda.gridDim.x
    cuda.syncthreads()
    y = i + 1
    while y < n:  # 3
        notify(arrived[me, b:], peer_at(y), call, "set", "sys")
        y += threads
    _gather_counts(lines, call, n_local, came, counts)  # 4
    t = b
    while t < max_tokens:  # 5
        _receive(
            *(t, 0, 1, half, x, scales, came, staged, staged_scales, codes),
            *(rows, row_scales, n_local, routes, shares),
        )
        t += cuda.gridDim.x
    y = i + 1
    while y < n:  # 6
        wait(arrived[peer_at(y), b:], 1, "sys", "acquire", call)
        y += threads
    t = b
    while t < max_tokens:  # 7, which begins with syncthreads
        _receive(
            *(t, 1, n, half, x, scales, came, staged, staged_scales, codes),
            *(rows, row_scales, n_local, routes, shares),
        )
        t += cuda.gridDim.x
    if i == 0:
        calls[b] = call


class Dispatch(Method):
    """Launches it, and owns its memory and what it leaves for ``Combine``: routes, shares and sent; `blocks`
    is the grid of both."""

    threads = 1024

    def prepare(self, sizes):
        world, n, xp = self.world, self.world.n_ranks, self.world.xp
        world.check_reach("expert_parallel")
        tokens, experts, top_k = sizes.max_tokens, sizes.n_local, sizes.top_k
        self.blocks = min(tokens, *world.host_allgather(world.backend.multiprocessors))
        row, n_scales = sizes.row, sizes.n_scales

        def named(name):
            return f"expert_parallel.dispatch.{name}"

        self.symmetric = (
            self.empty((2, n, tokens, row), "uint8", named("staged")),
            self.empty((2, n, tokens, max(1, n_scales)), "float32", named("scales")),
            self.empty((2, n, tokens, top_k, 2), "int32", named("codes")),
            self.zeros((2, 2 * n * experts), "uint64", named("lines")),
            self.zeros((n, self.blocks), "uint64", named("arrived")),
        )
        self.calls = xp.zeros(self.blocks, "uint64")
        self.routes, self.shares = (xp.full((n, tokens, top_k), NONE, "int32") for _ in range(2))
        self.sent = xp.zeros((tokens, n), "int32")
        rows = xp.empty((0, row), "uint8"), xp.empty((0, n_scales), "float32"), xp.empty(experts, "int32")
        for dtype in ("int32", "int64"):
            x, weights, scales = rows[0], xp.empty((0, top_k), "int32"), rows[1]
            self.bind(x, xp.empty((0, top_k), dtype), weights, scales, *rows)

    def bind(self, *arrays):
        """x, experts, weights, scales, rows, row_scales, counts"""
        left = self.routes, self.shares, self.sent
        return self.launch(
            expert_dispatch, self.blocks, *arrays, *self.symmetric, self.calls, *left, pdl=True
        )


def _array(dtype, ndim):
    return types.Array(dtype, ndim, "C")


_signature = (
    _array(types.int32, 2),
    _array(types.float32, 2),
    _array(types.uint8, 2),
    _array(types.float32, 2),
    _array(types.int32, 1),
    _array(types.uint8, 4),
    _array(types.float32, 4),
    _array(types.int32, 5),
    _array(types.uint64, 2),
    _array(types.uint64, 2),
    _array(types.uint64, 1),
    _array(types.int32, 3),
    _array(types.int32, 3),
    _array(types.int32, 2),
)
GPU_KERNELS = {
    f"expert_dispatch[{experts}]": (
        expert_dispatch,
        (_array(types.uint8, 2), _array(experts, 2), *_signature),
    )
    for experts in (types.int32, types.int64)
}
