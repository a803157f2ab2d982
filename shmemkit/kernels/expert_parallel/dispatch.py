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
          1. for each of its share of all experts: count my tokens that go there, and store the number in the
             lines of the expert's rank, with the flag
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
That the next launch begins early (PDL) changes neither: its blocks come when all of this one have waited
(after 6), and touch nothing until these have ended. So an object keeps at most half of each multiprocessor,
THREADS threads of 64 registers, while it waits for other ranks, and another one, on another stream, the other
half: whichever comes first on each GPU, both go on.
"""

from numba import cuda, int32, types, uint32

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
GROUP = 4  # tokens of a block that are received, or returned, together
ROWS = MAX_RANKS * GROUP
NONE = -1
THREADS = 512  # half of those that a multiprocessor has 64 registers for: so two objects fit at once


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
def together(n, top_k):
    """How many tokens are a group: all their experts have places in shared memory."""
    group = 1
    while group < GROUP and (group + 1) * n * top_k <= PLACES:
        group += 1
    return group


@cuda.jit(device=True)
def group_size(t, tokens, group):
    """How many of the tokens t, t + gridDim.x, ... of a group there are."""
    size = 0
    while size < group and t + size * cuda.gridDim.x < tokens:
        size += 1
    return size


@cuda.jit(device=True)
def row_bits(words):
    """1 << row_bits threads share a row of so many words: enough for one each, where the block has them."""
    bits = 0
    while 1 << bits < words and 2 << bits <= cuda.blockDim.x:
        bits += 1
    return bits


@cuda.jit(device=True)
def width_of(top_k):
    """Pairs of a token and its k-th expert are numbered t << width | k: so many bits has k."""
    width = 0
    while 1 << width < top_k:
        width += 1
    return width


@cuda.jit(device=True)
def _named_before(experts, t, k):
    """Whether token t has its k-th expert among those before, too: then it does not count again."""
    j = 0
    while j < k and experts[t, j] != experts[t, k]:
        j += 1
    return j < k


@cuda.jit(device=True)
def _announce(experts, each, n_local, lines, call):
    """Step 1: one pass over all my tokens."""
    found = cuda.shared.array(MAX_EXPERTS, int32)
    i, threads = cuda.threadIdx.x, cuda.blockDim.x
    tokens, top_k = experts.shape
    first = cuda.blockIdx.x * each
    last = min(first + each, n_local * num_ranks())
    if first >= last:
        return
    e = i
    while e < last - first:
        found[e] = 0
        e += threads
    cuda.syncthreads()
    q, width = i, width_of(top_k)
    while q < tokens << width:
        t, k = q >> width, q & (1 << width) - 1
        if k < top_k:
            expert = experts[t, k]
            if first <= expert and expert < last and not _named_before(experts, t, k):
                cuda.atomic.add(found, expert - first, 1)
        q += threads
    cuda.syncthreads()
    e = i
    while e < last - first:
        owner, local = divided(first + e, n_local)
        ll_store(symm_at(lines, owner)[call & 1], rank() * n_local + local, found[e], call)
        e += threads


@cuda.jit(device=True)
def _count(experts, until, wanted, found):
    """Add to found[j] how many of the first `until` tokens have the expert wanted[j], one of top_k or NONE:
    in shared memory, by the block, between syncthreads."""
    top_k = experts.shape[1]
    q, width = cuda.threadIdx.x, width_of(top_k)
    while q < until << width:
        t, k = q >> width, q & (1 << width) - 1
        if k < top_k and experts[t, k] >= 0:
            j = 0
            while j < top_k:
                if wanted[j] == experts[t, k] and not _named_before(experts, t, k):
                    cuda.atomic.add(found, j, 1)
                j += 1
        q += cuda.blockDim.x


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
        _count(experts, t, wanted, found)
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
def _load(z, n_rows, w, half, x, staged, places, top_k, of_token, of_rank):
    """Word `w`, 16 bytes, of row `z` of the group: zeros where no expert here has it."""
    if z < n_rows and places[z * top_k] >= 0:
        t, k = of_token[z], of_rank[z]
        return load_vec16(x[t] if k == rank() else staged[half, k, t], 16 * w)
    nothing = uint32(0)
    return nothing, nothing, nothing, nothing


@cuda.jit(device=True)
def _store(z, n_rows, w, word, rows, places, top_k):
    """Store what `_load` has loaded to all experts here that have the row."""
    if z < n_rows:
        j = z * top_k
        while j < (z + 1) * top_k and places[j] >= 0:
            store_vec16(rows[places[j]], 16 * w, word)
            j += 1


@cuda.jit(device=True)
def _receive(
    t,
    first,
    last,
    group,
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
    """Steps 5 and 7: of a group of tokens from `t` on, the rows of the ranks `first` after me up to the one
    before `last` after me, numbered by token and rank."""
    places = cuda.shared.array(PLACES, int32)
    of_token, of_rank = cuda.shared.array(ROWS, int32), cuda.shared.array(ROWS, int32)
    max_tokens, top_k = routes.shape[1:]
    i, threads, capacity = cuda.threadIdx.x, cuda.blockDim.x, num_ranks() * max_tokens
    n_rows, width = group_size(t, max_tokens, group) * (last - first), width_of(top_k)
    cuda.syncthreads()  # of the group before, all is done
    q = i
    while q < n_rows << width:
        z, j = q >> width, q & (1 << width) - 1
        if j < top_k:
            g, y = divided(z, last - first)
            k, token = peer_at(first + y), t + g * cuda.gridDim.x
            code = codes[half, k, token, j]
            place = _place(code[0], k, came, n_local, capacity)
            places[z * top_k + j] = routes[k, token, j] = place
            shares[k, token, j] = code[1]
            if j == 0:
                of_token[z], of_rank[z] = token, k
        q += threads
    cuda.syncthreads()
    words = x.shape[1] >> 4
    bits = row_bits(words)
    step, w = threads >> bits, i & (1 << bits) - 1
    while w < words and i >> bits < step:
        z = i >> bits
        while z < n_rows:  # four loads at once
            of_group = half, x, staged, places, top_k, of_token, of_rank
            word0 = _load(z, n_rows, w, *of_group)
            word1 = _load(z + step, n_rows, w, *of_group)
            word2 = _load(z + 2 * step, n_rows, w, *of_group)
            word3 = _load(z + 3 * step, n_rows, w, *of_group)
            _store(z, n_rows, w, word0, rows, places, top_k)
            _store(z + step, n_rows, w, word1, rows, places, top_k)
            _store(z + 2 * step, n_rows, w, word2, rows, places, top_k)
            _store(z + 3 * step, n_rows, w, word3, rows, places, top_k)
            z += 4 * step
        w += 1 << bits
    bits = row_bits(scales.shape[1])
    step, w = threads >> bits, i & (1 << bits) - 1
    while w < scales.shape[1] and i >> bits < step:
        z = i >> bits
        while z < n_rows:
            j = z * top_k
            if places[j] >= 0:
                token, k = of_token[z], of_rank[z]
                scale = scales[token, w] if k == rank() else staged_scales[half, k, token, w]
                while j < (z + 1) * top_k and places[j] >= 0:
                    row_scales[places[j], w] = scale
                    j += 1
            z += step
        w += 1 << bits


@cuda.jit(max_registers=64)  # see THREADS
def expert_dispatch(
    x,
    experts,
    weights,
    scales,
    rows,
    row_scales,
    counts,
    each,
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
    each           how many experts a block counts: times the blocks, n_experts at least
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
    group = together(n, experts.shape[1])
    griddepcontrol_wait()
    call = calls[b] + 1
    half = call & 1
    _announce(experts, each, n_local, lines, call)  # 1
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
            *(t, 0, 1, group, half, x, scales, came, staged, staged_scales, codes),
            *(rows, row_scales, n_local, routes, shares),
        )
        t += group * cuda.gridDim.x
    y = i + 1
    while y < n:  # 6
        wait(arrived[peer_at(y), b:], 1, "sys", "acquire", call)
        y += threads
    cuda.syncthreads()
    griddepcontrol_launch_dependents()
    t = b
    while t < max_tokens:  # 7
        _receive(
            *(t, 1, n, group, half, x, scales, came, staged, staged_scales, codes),
            *(rows, row_scales, n_local, routes, shares),
        )
        t += group * cuda.gridDim.x
    if i == 0:
        calls[b] = call


class Dispatch(Method):
    """Launches it, and owns its memory and what it leaves for ``Combine``: routes, shares and sent; `blocks`
    is the grid of both."""

    threads = THREADS

    def prepare(self, sizes):
        world, n, xp = self.world, self.world.n_ranks, self.world.xp
        world.check_reach("expert_parallel")
        tokens, experts, top_k = sizes.max_tokens, sizes.n_local, sizes.top_k
        multiprocessors = min(world.host_allgather(world.backend.multiprocessors))
        self.blocks = min(tokens, multiprocessors)
        self.each = -(-sizes.n_experts // self.blocks)
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
            *(expert_dispatch, self.blocks, *arrays, self.each, *self.symmetric, self.calls, *left),
            pdl=True,
        )


def _array(dtype, ndim):
    return types.Array(dtype, ndim, "C")


_signature = (
    _array(types.int32, 2),
    _array(types.float32, 2),
    _array(types.uint8, 2),
    _array(types.float32, 2),
    _array(types.int32, 1),
    types.int64,
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
