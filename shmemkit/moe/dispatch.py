"""Dispatch: each token's row goes to the ranks of its experts, and there to each of these experts. One
kernel.

Experts   rank r has the experts r * n_local .. (r + 1) * n_local - 1. A token has top_k of them. A number
          that is no expert's, as -1, is none. Where a rank has several of a token's experts, it receives the
          row once
Rows      row_slots[buffer, k, t], on every rank: the row of token t of rank k, as tiles of LL128, whose
          packets carry flags (``device.packets.ll128``). scale_slots[buffer, k, t]: its scales, two to
          a unit of LL (``device.packets.ll``). Written by rank k only, over NVLink
Headers   headers[buffer, k, t] and count_slots[buffer, k], on every rank: what rank k says about its tokens
          (``expert_counts.py``), also by LL. Written by rank k only
Epochs    epochs[b], local: of block b, the same for all blocks; the epoch is the flag, and selects the
          buffer. Device-resident, so graph-safe

Blocks of two kinds work at the same time, so rows are stored while others are on the way. Each rank may have
as many blocks as it likes:

  those that send, one token after another, a warp for its tiles w, w + warps, ...:
          1. load the tiles; store them to row_slots[buffer, me, t] of each other rank that has experts of the
             token, with the flag; likewise the scales
  those that receive:
          2. count the rank's tokens of each expert; store the headers of its tokens to all ranks, also to
             itself, and to each other rank the counts of that rank's experts, and the number of tokens
          3. poll the counts and numbers of tokens of all other ranks, and add up the counts before each rank;
             one block writes the sums of each expert to `counts`
          4. for each token of all ranks, these in turn: poll the header, which gives the rows of the experts
             here; if there are any, a warp for the tiles w, w + warps, ...: poll them, or load them from x if
             the token is this rank's, and store them to all these rows; likewise the scales

The row of token t of rank k follows those that the ranks before k send to the expert (from the counts), and
those of k's tokens before t (from the header). So the rows of an expert are contiguous, by rank and token,
the same in every run. Local arrays keep what ``combine.py`` needs: tokens[k], the number of tokens of rank k;
routes[k, t, j], the row, of all experts, that the j-th expert has for token t of rank k, or -1 if that expert
is not here; shares[k, t, j], its weight; owners[t, j], the rank of the j-th expert of this rank's token t, or
-1.

No race, without credits: the double-buffer lemma (docs/protocols.md). The packet of the epoch between is rank
k's counts, which it sends after its previous launch has ended (after griddepcontrol_wait). Each rank sends
counts to each other, even if it has no tokens. Only later launches of this rank read routes and the other
local arrays.

No deadlock: steps 1 and 2 send all that other ranks wait for, and wait for no rank; all blocks are
co-resident. The early start of the next launch (PDL) changes neither: its blocks start after all blocks of
this launch have ended their waits, and access no memory before this launch has ended. An object keeps at most
half of each multiprocessor while it waits for other ranks: BLOCKS of THREADS with 64 registers. So two
objects fit at once.

The machine code must keep (docs/machine_code.md): whole line, whole packet, whole warp.
"""

from numba import cuda, int32, uint32, uint64

from shmemkit.device import (
    TILE_BYTES,
    TILE_WORDS,
    begin_phase,
    end_phase,
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
from shmemkit.operations.method import Method
from shmemkit.support.arrays import new_array

from .calls import words_of
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
    """This lane's words of the tiles w, w + warps, ... of a row; four loads at once. What is beyond the end
    is undefined."""
    return (
        load_tile(row, w),
        load_tile(row, w + warps),
        load_tile(row, w + 2 * warps),
        load_tile(row, w + 3 * warps),
    )


@cuda.jit(device=True)
def _send(s, step, epoch, x, experts, scales, words, tiles, shape, row_slots, scale_slots, owners):
    """Step 1, of the tokens s, s + step, ..."""
    max_tokens, n_experts, reciprocal = shape
    tokens, top_k = experts.shape
    buffer, me, n, i = epoch & 1, rank(), num_ranks(), cuda.threadIdx.x
    warp, warps, lane = int32(i >> 5), int32(cuda.blockDim.x >> 5), cuda.laneid
    pairs = (scales.shape[1] + 1) >> 1
    t = int32(s)
    begin_phase("send")
    while t < tokens:
        row, w, owner = span(x, t * words, words), warp, int32(NONE)
        a, b, c, d = _load_row(row, w, warps)
        if lane < top_k:
            owner = owner_of(experts[t, lane], n_experts, reciprocal)
        while w < tiles:
            at, y = unit_of(buffer, me, t, max_tokens, tiles, w), int32(1)
            while y < n:
                k = peer_at(y)
                if cuda.any_sync(ALL, owner == k):
                    ll128_store_tile(row_slots, at, a, epoch, k)
                    if int32(w + warps) < tiles:
                        ll128_store_tile(row_slots, int32(at + warps), b, epoch, k)
                    if int32(w + 2 * warps) < tiles:
                        ll128_store_tile(row_slots, int32(at + 2 * warps), c, epoch, k)
                    if int32(w + 3 * warps) < tiles:
                        ll128_store_tile(row_slots, int32(at + 3 * warps), d, epoch, k)
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
                q, there = i, symm_at(scale_slots, k)
                while q < pairs:
                    unit = unit_of(buffer, me, t, max_tokens, pairs, q)
                    ll_store(there, unit, _pair(scales, t, q), epoch)
                    q += cuda.blockDim.x
            y += 1
        t = int32(t + step)
    end_phase("send")


@cuda.jit(device=True)
def _route(code, k, offsets, n_local, capacity):
    """The row, of all experts, of a token of rank k with this code, or NONE."""
    local, row = int32((code >> 16) - rank() * n_local), code & 0xFFFF
    if code < 0 or local < 0 or local >= n_local:
        return int32(NONE)
    row += offsets[uint32(k * stride_of(n_local) + local)]
    # When the time of a wait is up (docs/timeouts.md), the counts may be anything.
    return int32(local * capacity + row) if 0 <= row and row < capacity else int32(NONE)


@cuda.jit(device=True)
def _receive(
    k, t, epoch, here, route, x, scales, rows, row_scales, words, tiles, shape, row_slots, scale_slots
):
    """Step 4, of a token of rank `k`: bit j of `here` says that the j-th expert is here; `route` of lane j,
    which row that has for the token."""
    max_tokens, _, _ = shape
    buffer, warp, warps = epoch & 1, int32(cuda.threadIdx.x >> 5), int32(cuda.blockDim.x >> 5)
    first, w = unit_of(buffer, k, t, max_tokens, tiles, 0), warp
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
            a, b, c, d = ll128_load_some(row_slots, some, epoch)
        left = here
        while left:
            row = span(rows, cuda.shfl_sync(ALL, route, cuda.ffs(left) - 1) * words, words)
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
                value = ll_load(scale_slots, unit_of(buffer, k, t, max_tokens, pairs, q), epoch)
        left = here
        while left:
            row = cuda.shfl_sync(ALL, route, cuda.ffs(left) - 1)
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
    row_slots,
    scale_slots,
    headers,
    count_slots,
    epochs,
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
    row_slots    uint64 (2 * n_ranks * max_tokens * tiles * 64,), symmetric, zeros at first
    scale_slots  uint64 (2 * n_ranks * max_tokens * n_scales, or one more if that is odd,), likewise
    headers      uint64 (2 * n_ranks * max_tokens * top_k * 2,), likewise
    count_slots  uint64 (2 * n_ranks * (n_local + 1, or one more if that is odd),), likewise
    epochs       uint32 (blocks,), zeros at first
    tokens       int32 (n_ranks,)
    routes       int32 (n_ranks, max_tokens, top_k)
    shares       likewise
    owners       int32 (max_tokens, top_k)
    grid         the same number of blocks always, one-dimensional, as the blocks are, of whole warps
    """
    before, offsets = cuda.shared.array(MAX_EXPERTS, int32), cuda.shared.array(MOST_COUNTS, int32)
    b, n, n_local = cuda.blockIdx.x, num_ranks(), int32(counts.size)
    max_tokens, top_k, lane = int32(routes.shape[1]), int32(routes.shape[2]), cuda.laneid
    words, tiles, senders = int32(words), int32(tiles), int32(senders)
    capacity, shape = int32(n * max_tokens), (max_tokens, int32(n * n_local), int32(reciprocal))
    griddepcontrol_wait()
    epoch = epochs[b] + 1
    buffer = epoch & 1
    if b < senders:  # 1
        _send(
            *(b, senders, epoch, x, experts, scales, words, tiles, shape),
            *(row_slots, scale_slots, owners),
        )
    else:
        r, step = int32(b - senders), int32(cuda.gridDim.x - senders)
        announce(  # 2
            *(r, step, epoch, experts, weights, n_local, max_tokens),
            *(headers, count_slots, before),
        )
        gather_counts(  # 3
            *(r == 0, epoch, max_tokens, count_slots, before, experts.shape[0], offsets, counts, tokens)
        )
        most, k, stride = int32(0), int32(0), stride_of(n_local)
        while k < n:
            most = max(most, offsets[uint32(k * stride + n_local)])
            k = int32(k + 1)
        t, y = divided(r, n)
        more, ranks = divided(step, n)
        while t < most:  # 4
            k = peer_at(y)
            if t < offsets[uint32(k * stride + n_local)]:
                route = int32(NONE)
                if lane < top_k:
                    header = ll_load(headers, unit_of(buffer, k, t, max_tokens, top_k, lane), epoch)
                    route = _route(int32(uint32(header)), k, offsets, n_local, capacity)
                    if cuda.threadIdx.x < 32:
                        routes[k, t, lane] = route
                        shares[k, t, lane] = int32(uint32(header >> uint64(32)))
                here = uint32(cuda.ballot_sync(ALL, route >= 0))
                if here:
                    _receive(
                        *(k, t, epoch, here, route, x, scales, rows, row_scales, words, tiles, shape),
                        *(row_slots, scale_slots),
                    )
            t, y = int32(t + more), int32(y + ranks)
            if y >= n:
                t, y = int32(t + 1), int32(y - n)
    cuda.syncthreads()
    griddepcontrol_launch_dependents()
    if cuda.threadIdx.x == 0:
        epochs[b] = epoch


class Dispatch(Method):
    """Launches it, and owns its memory, what it returns (rows, scales, counts), and what it leaves for
    ``Combine``: tokens, routes, shares and owners."""

    threads = THREADS

    def prepare(self, sizes):
        world, n, xp = self.world, self.world.n_ranks, self.world.xp
        world.check_reach("expert_parallel", nvlink=True)
        most, experts, topk, n_scales = sizes.max_tokens, sizes.n_local, sizes.topk, sizes.n_scales
        words, tiles = sizes.row // 16, -(-sizes.row // TILE_BYTES)
        senders, self.blocks = divide_blocks(self, SENDING, most, n * most)

        def slots(name, units):
            return self.zeros((2 * n * units,), "uint64", f"expert_parallel.dispatch.{name}")

        self.sizes = words, tiles, reciprocal_of(experts), senders
        self.symmetric = (
            slots("rows", most * tiles * TILE_WORDS),
            slots("scales", max(1, most * (n_scales + 1 >> 1)) * 2),
            slots("headers", most * topk * 2),
            slots("counts", (experts + 2 & ~1)),
        )
        self.epochs = xp.zeros(self.blocks, "uint32")
        self.tokens = xp.zeros(n, "int32")
        self.routes, self.shares = (xp.full((n, most, topk), NONE, "int32") for _ in range(2))
        self.owners = xp.full((most, topk), NONE, "int32")
        self.rows = new_array(xp, (experts, n * most, sizes.hidden), sizes.dispatch_dtype)
        self.scales = xp.empty((experts * n * most, n_scales), "float32")
        self.counts, self.ones = xp.zeros(experts, "int32"), xp.ones((most, topk), "float32")
        for dtype in ("int32", "int64"):
            ids = xp.empty((0, topk), dtype)
            self.bind(xp.empty(0, "complex128"), xp.empty((0, n_scales), "uint32"), ids, self.ones[:0])

    def bind(self, x, scales, topk_ids, weights):
        """x as words, scales as uint32 -> run(stream)"""
        received = words_of(self.rows), self.scales.view("uint32"), self.counts
        arrays = x, topk_ids, weights.view("int32"), scales, *received
        left = self.epochs, self.tokens, self.routes, self.shares, self.owners
        args = *arrays, *self.sizes, *self.symmetric, *left
        return self.launch(expert_dispatch, self.blocks, *args, pdl=True)


GPU_KERNELS = {
    f"expert_dispatch[{kind}]": (expert_dispatch, {"experts": kind}) for kind in ("int32", "int64")
}
