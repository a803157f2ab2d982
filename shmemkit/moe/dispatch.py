"""Dispatch: each token's row goes to the ranks of its experts, and there to each of them. One kernel.

Experts   rank r has the experts r * n_local .. (r + 1) * n_local - 1. A token has top_k of them; a number
          that is no expert's, as -1, is none. Where a rank has several of a token's experts, the row goes
          there once
Rows      row_lines[half, k, t], on every rank: the row of token t of rank k, as tiles of LL128
          (``device.packets.ll128_tiles``), which say themselves that they have arrived; scale_lines[half, k,
          t]: its scales, two to a unit of LL (``device.packets.ll``). Written by rank k only, over NVLink
Headers   headers[half, k, t], and count_lines[half, k], on every rank: what rank k has to say about its
          tokens (``expert_counts.py``), also by LL. Written by rank k only
Counters  calls[b], local: how many calls block b has taken part in, the same for all blocks; it gives the
          flag of lines and units, and the half. In device memory, so that a replayed graph counts on

Blocks of two kinds work at the same time, so that rows are placed while others are under way; on each rank
there may be as many as it likes:

  those that send, a token after the other, a warp for its tiles w, w + warps, ...:
          1. load the tiles; store them to row_lines[half, me, t] of each other rank that has experts of the
             token, with the flag; likewise the scales
  those that receive:
          2. count how many of my tokens go to which expert; store the headers of my tokens to all ranks, mine
             too, and to each other rank the counts of its experts, and how many tokens there are
          3. poll the counts and numbers of tokens of all other ranks, and add up what comes before each; one
             block writes the sums of each expert to `counts`
          4. for each token of all ranks, these in turn: poll the header, which gives the rows of the experts
             here; if there are some, a warp for the tiles w, w + warps, ...: poll them, or if it is my token
             load them from x, and store them to all these rows; likewise the scales

The row of token t of rank k lies behind those that the ranks before k send to the expert (from the counts)
and those of k's tokens before t (from the header): so all rows of an expert lie one after another, by rank
and token, the same in every run. What ``combine.py`` needs stays in local arrays: tokens[k], how many rank k
has; routes[k, t, j], the row, of all experts, that the j-th expert has for token t of rank k, or -1 if it is
not here; shares[k, t, j], its weight; owners[t, j], the rank of the j-th expert of my token t, or -1.

No race, although nobody acknowledges: I write half h of anything on rank k again two calls later. In the
launch between, my blocks that receive have had rank k's counts, which it sends when its launch before has
ended (after griddepcontrol_wait), and had read what half h held. For this, each rank sends counts to each
other, also those of no tokens. routes and the others are read by later launches of this rank only.

No deadlock: steps 1 and 2, all that others wait for, wait for nothing; all blocks are resident. That the next
launch begins early (PDL) changes neither: its blocks come when all of this one have waited for all that they
need, and touch nothing until these have ended. So an object keeps at most half of each multiprocessor, BLOCKS
of THREADS with 64 registers, while it waits for other ranks, and so two objects fit at once.
"""

from numba import cuda, int32, types, uint32, uint64

from shmemkit.collectives.method import Method
from shmemkit.device import (
    TILE_BYTES,
    TILE_WORDS,
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    ll128_load_some,
    ll128_store_tile,
    ll_load,
    ll_store,
    load_tile,
    num_ranks,
    rank,
    span,
    store_tile,
    symm_at,
)

from .expert_counts import announce, gather_counts, stride_of
from .routing import (
    ALL,
    MAX_EXPERTS,
    MOST_COUNTS,
    NONE,
    THREADS,
    divide_blocks,
    divided,
    owner_of,
    peer_at,
    reciprocal_of,
    unit_of,
    without_first,
)

SENDING = 0.25  # of the blocks


@cuda.jit(device=True)
def _pair(scales, t, q):
    """Scales 2 * q and 2 * q + 1 of row `t`; what the last one lacks is 0."""
    value = uint64(scales[t, 2 * q])
    if 2 * q + 1 < scales.shape[1]:
        value |= uint64(scales[t, 2 * q + 1]) << uint64(32)
    return value


@cuda.jit(device=True)
def _load_row(row, w, warps):
    """My words of the tiles w, w + warps, ... of a row; four loads at once. What is beyond the end is
    undefined."""
    return (
        load_tile(row, w),
        load_tile(row, w + warps),
        load_tile(row, w + 2 * warps),
        load_tile(row, w + 3 * warps),
    )


@cuda.jit(device=True)
def _send(s, step, call, x, experts, scales, words, tiles, shape, row_lines, scale_lines, owners):
    """Step 1, of the tokens s, s + step, ..."""
    max_tokens, n_experts, reciprocal = shape
    tokens, top_k = experts.shape
    half, me, n, i = call & 1, rank(), num_ranks(), cuda.threadIdx.x
    warp, warps, lane = int32(i >> 5), int32(cuda.blockDim.x >> 5), cuda.laneid
    pairs = (scales.shape[1] + 1) >> 1
    t = int32(s)
    while t < tokens:
        row, w, owner = span(x, t * words, words), warp, int32(NONE)
        a, b, c, d = _load_row(row, w, warps)
        if lane < top_k:
            owner = owner_of(experts[t, lane], n_experts, reciprocal)
        while w < tiles:
            at, y = unit_of(half, me, t, max_tokens, tiles, w), int32(1)
            while y < n:
                k = peer_at(y)
                if cuda.any_sync(ALL, owner == k):
                    ll128_store_tile(row_lines, at, a, call, k)
                    if int32(w + warps) < tiles:
                        ll128_store_tile(row_lines, int32(at + warps), b, call, k)
                    if int32(w + 2 * warps) < tiles:
                        ll128_store_tile(row_lines, int32(at + 2 * warps), c, call, k)
                    if int32(w + 3 * warps) < tiles:
                        ll128_store_tile(row_lines, int32(at + 3 * warps), d, call, k)
                y = int32(y + 1)
            w = int32(w + 4 * warps)
            if w < tiles:
                a, b, c, d = _load_row(row, w, warps)
        if warp == 0 and lane < top_k:
            owners[t, lane] = owner
        y = 1
        while y < n and pairs:
            k = peer_at(y)
            if cuda.any_sync(ALL, owner == k):
                q, there = i, symm_at(scale_lines, k)
                while q < pairs:
                    unit = unit_of(half, me, t, max_tokens, pairs, q)
                    ll_store(there, unit, _pair(scales, t, q), call)
                    q += cuda.blockDim.x
            y += 1
        t = int32(t + step)


@cuda.jit(device=True)
def _place(code, k, came, n_local, capacity):
    """The row, of all experts, of a token of rank k with this code, or NONE."""
    local, row = int32((code >> 16) - rank() * n_local), code & 0xFFFF
    if code < 0 or local < 0 or local >= n_local:
        return int32(NONE)
    row += came[uint32(k * stride_of(n_local) + local)]
    # When the time of a wait is up (docs/timeouts.md), the counts may be anything.
    return int32(local * capacity + row) if 0 <= row and row < capacity else int32(NONE)


@cuda.jit(device=True)
def _receive(
    k, t, call, here, place, x, scales, rows, row_scales, words, tiles, shape, row_lines, scale_lines
):
    """Step 4, of a token of rank `k`: bit j of `here` says that the j-th expert is, and `place` of lane j
    which row it has for the token."""
    max_tokens, _, _ = shape
    half, warp, warps = call & 1, int32(cuda.threadIdx.x >> 5), int32(cuda.blockDim.x >> 5)
    first, w = unit_of(half, k, t, max_tokens, tiles, 0), warp
    while w < tiles:
        if k == rank():
            a, b, c, d = _load_row(span(x, t * words, words), w, warps)
        else:
            at, last = int32(first + w), int32(first + tiles - 1)
            some = (
                at,
                min(last, int32(at + warps)),
                min(last, int32(at + 2 * warps)),
                min(last, int32(at + 3 * warps)),
            )
            a, b, c, d = ll128_load_some(row_lines, some, call)
        left = here
        while left:
            row = span(rows, cuda.shfl_sync(ALL, place, cuda.ffs(left) - 1) * words, words)
            store_tile(row, w, a)
            if int32(w + warps) < tiles:
                store_tile(row, w + warps, b)
            if int32(w + 2 * warps) < tiles:
                store_tile(row, w + 2 * warps, c)
            if int32(w + 3 * warps) < tiles:
                store_tile(row, w + 3 * warps, d)
            left = without_first(left)
        w = int32(w + 4 * warps)
    pairs, q0 = (scales.shape[1] + 1) >> 1, 32 * warp
    while q0 < pairs:
        q, value = q0 + cuda.laneid, uint64(0)
        if q < pairs:
            if k == rank():
                value = _pair(scales, t, q)
            else:
                value = ll_load(scale_lines, unit_of(half, k, t, max_tokens, pairs, q), call)
        left = here
        while left:
            row = cuda.shfl_sync(ALL, place, cuda.ffs(left) - 1)
            if q < pairs:
                row_scales[row, 2 * q] = uint32(value)
            if 2 * q + 1 < scales.shape[1]:
                row_scales[row, 2 * q + 1] = uint32(value >> uint64(32))
            left = without_first(left)
        q0 += 32 * warps


@cuda.jit(max_registers=64)  # see THREADS
def expert_dispatch(
    x,
    experts,
    weights,
    scales,
    rows,
    row_scales,
    counts,
    words,
    tiles,
    reciprocal,
    senders,
    row_lines,
    scale_lines,
    headers,
    count_lines,
    calls,
    tokens,
    routes,
    shares,
    owners,
):
    """Send the rows of `x` to their experts.

    x            complex128 (tokens * words,): words of 16 bytes; max_tokens at most
    experts      int32 or int64 (tokens, top_k)
    weights      int32 (tokens, top_k): the bits of float32
    scales       uint32 (tokens, n_scales), likewise, also 0 of them
    rows         complex128 (n_local * n_ranks * max_tokens * words,)
    row_scales   uint32 (n_local * n_ranks * max_tokens, n_scales)
    counts       int32 (n_local,): how many rows each expert has
    words        of 16 bytes, in a row
    tiles        of 480 bytes, in a row, the last one perhaps not full
    reciprocal   of n_local, as of ``routing.reciprocal_of``
    senders      how many blocks send; the others receive, one at least
    row_lines    uint64 (2 * n_ranks * max_tokens * tiles * 64,), symmetric, zeros at first
    scale_lines  uint64 (2 * n_ranks * max_tokens * n_scales, or one more if that is odd,), likewise
    headers      uint64 (2 * n_ranks * max_tokens * top_k * 2,), likewise
    count_lines  uint64 (2 * n_ranks * (n_local + 1, or one more if that is odd),), likewise
    calls        uint32 (blocks,), zeros at first
    tokens       int32 (n_ranks,)
    routes       int32 (n_ranks, max_tokens, top_k)
    shares       likewise
    owners       int32 (max_tokens, top_k)
    grid         the same number of blocks always, one-dimensional, as the blocks are, of whole warps
    """
    before, came = cuda.shared.array(MAX_EXPERTS, int32), cuda.shared.array(MOST_COUNTS, int32)
    b, n, n_local = cuda.blockIdx.x, num_ranks(), int32(counts.size)
    max_tokens, top_k, lane = int32(routes.shape[1]), int32(routes.shape[2]), cuda.laneid
    words, tiles, senders = int32(words), int32(tiles), int32(senders)
    capacity, shape = int32(n * max_tokens), (max_tokens, int32(n * n_local), int32(reciprocal))
    griddepcontrol_wait()
    call = calls[b] + 1
    half = call & 1
    if b < senders:  # 1
        _send(
            *(b, senders, call, x, experts, scales, words, tiles, shape),
            *(row_lines, scale_lines, owners),
        )
    else:
        r, step = int32(b - senders), int32(cuda.gridDim.x - senders)
        announce(  # 2
            *(r, step, call, experts, weights, n_local, max_tokens),
            *(headers, count_lines, before),
        )
        gather_counts(  # 3
            *(r == 0, call, max_tokens, count_lines, before, experts.shape[0], came, counts, tokens)
        )
        most, k, stride = int32(0), int32(0), stride_of(n_local)
        while k < n:
            most = max(most, came[uint32(k * stride + n_local)])
            k = int32(k + 1)
        t, y = divided(r, n)
        more, ranks = divided(step, n)
        while t < most:  # 4
            k = peer_at(y)
            if t < came[uint32(k * stride + n_local)]:
                place = int32(NONE)
                if lane < top_k:
                    header = ll_load(headers, unit_of(half, k, t, max_tokens, top_k, lane), call)
                    place = _place(int32(uint32(header)), k, came, n_local, capacity)
                    if cuda.threadIdx.x < 32:
                        routes[k, t, lane] = place
                        shares[k, t, lane] = int32(uint32(header >> uint64(32)))
                here = uint32(cuda.ballot_sync(ALL, place >= 0))
                if here:
                    _receive(
                        *(k, t, call, here, place, x, scales, rows, row_scales, words, tiles, shape),
                        *(row_lines, scale_lines),
                    )
            t, y = int32(t + more), int32(y + ranks)
            if y >= n:
                t, y = int32(t + 1), int32(y - n)
    cuda.syncthreads()
    griddepcontrol_launch_dependents()
    if cuda.threadIdx.x == 0:
        calls[b] = call


class Dispatch(Method):
    """Launches it, and owns its memory and what it leaves for ``Combine``: tokens, routes, shares and
    owners."""

    threads = THREADS

    def prepare(self, sizes):
        world, n, xp = self.world, self.world.n_ranks, self.world.xp
        world.check_reach("expert_parallel", nvlink=True)
        most, experts, top_k, n_scales = sizes.max_tokens, sizes.n_local, sizes.top_k, sizes.n_scales
        words, tiles = sizes.row // 16, -(-sizes.row // TILE_BYTES)
        senders, self.blocks = divide_blocks(world, SENDING, most, n * most)

        def lines(name, units):
            return self.zeros((2 * n * units,), "uint64", f"expert_parallel.dispatch.{name}")

        self.sizes = words, tiles, reciprocal_of(experts), senders
        self.symmetric = (
            lines("rows", most * tiles * TILE_WORDS),
            lines("scales", max(1, most * (n_scales + 1 >> 1)) * 2),
            lines("headers", most * top_k * 2),
            lines("counts", (experts + 2 & ~1)),
        )
        self.calls = xp.zeros(self.blocks, "uint32")
        self.tokens = xp.zeros(n, "int32")
        self.routes, self.shares = (xp.full((n, most, top_k), NONE, "int32") for _ in range(2))
        self.owners = xp.full((most, top_k), NONE, "int32")
        row, scales = xp.empty(0, "complex128"), xp.empty((0, n_scales), "uint32")
        for dtype in ("int32", "int64"):
            named = xp.empty((0, top_k), dtype), xp.empty((0, top_k), "int32")
            self.bind(row, *named, scales, row, scales, xp.empty(experts, "int32"))

    def bind(self, *arrays):
        """x, experts, weights, scales, rows, row_scales, counts"""
        left = self.calls, self.tokens, self.routes, self.shares, self.owners
        args = *arrays, *self.sizes, *self.symmetric, *left
        return self.launch(expert_dispatch, self.blocks, *args, pdl=True)


def _array(dtype, ndim):
    return types.Array(dtype, ndim, "C")


_lines, _table = _array(types.uint64, 1), _array(types.int32, 2)
GPU_KERNELS = {
    f"expert_dispatch[{experts}]": (
        expert_dispatch,
        (
            *(_array(types.complex128, 1), _array(experts, 2), _table, _array(types.uint32, 2)),
            *(_array(types.complex128, 1), _array(types.uint32, 2), _array(types.int32, 1)),
            *[types.int64] * 4,
            *[_lines] * 4,
            *(_array(types.uint32, 1), _array(types.int32, 1)),
            *(_array(types.int32, 3), _array(types.int32, 3), _table),
        ),
    )
    for experts in (types.int32, types.int64)
}
