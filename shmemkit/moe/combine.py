"""Combine: the experts' rows go back to the ranks of the tokens, which add them up. One kernel.

Experts   those of the last dispatch (``dispatch.py``). It has left the number of tokens of each rank, the
          routes and weights of their rows here, and the owners of this rank's tokens' experts
Rows      slots[buffer, k, t], on every rank: what the experts of rank k have for token t here, as tiles of
          LL128. It is the sum of their rows times their weights, in the order of the token's experts, in
          float32, rounded to the dtype. Written by rank k only, over NVLink
Barrier   barrier[buffer, k], on every rank: a unit of LL without data, which says that rank k has started the
          epoch. Written by rank k only
Epochs    epochs[b], local: of block b, the same for all blocks; the epoch is the flag, and selects the
          buffer. Device-resident, so graph-safe

Blocks of two kinds work at the same time; each rank may have as many as it likes:

  those that send:
          1. one of them: store to barrier[buffer, me] on all other ranks
          2. for each token of all ranks, these in turn, that has experts here, a warp for the tiles w, w +
             warps, ...: add up the experts' rows, and store the sum to slots[buffer, me, t] on the token's
             rank, with the flag, also if it is this rank
  those that receive:
          3. for each tile of each of the rank's tokens, a warp: poll it in slots[buffer, k, t] of the ranks k
             that have experts of the token; add up, in the order of the ranks, in float32; store the result,
             rounded, to `out`; zeros where there are none
          4. one of them: poll barrier[buffer, k] of all other ranks

A rank returns one row, not one for each expert: for a token with 8 experts on 4 ranks, half of the bytes. The
cost is one more rounding, of each rank's sum. A token's result depends on no other token and not on its rank;
the bits are the same in every run.

No race, without credits: the double-buffer lemma (docs/protocols.md). Here the packet of the epoch between is
the barrier of step 4, which a rank sends after its previous launch has ended (after griddepcontrol_wait).
Each rank sends it to each other, even without rows; so `combine` may run several times after one dispatch.
out may be where x was, but not where y is: other blocks may still read y.

No deadlock: blocks that send wait for no rank; all blocks are co-resident. The early start of the next launch
(PDL) changes neither, as in ``dispatch.py``.

The machine code must keep (docs/machine_code.md): whole line, whole warp.
"""

import functools

from numba import cuda, float32, int32, uint32

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
from shmemkit.device.cuda.weighted_sums import four_words, two_words, weighted_sum
from shmemkit.operations.method import Method

from .routing import ALL, NONE, THREADS, divide_blocks, divided, peer_at, unit_of, without_first

SENDING = 0.66  # of the blocks


@cuda.jit(device=True)
def _next_of(owner, k):
    """The first rank from `k` on that is the `owner` of some lane, or num_ranks()."""
    k = int32(k)
    while k < num_ranks() and not cuda.any_sync(ALL, owner == k):
        k = int32(k + 1)
    return k


@functools.cache
def combine_kernel(dtype):
    """-> the kernel for rows of `dtype`, a name as "float16"."""
    zero, add, result = weighted_sum(dtype)

    @cuda.jit(device=True)
    def send(first, k, epoch, route, share, y, words, tiles, slots):
        """Step 2, of a token of rank `k`: lane j has the `route` to the j-th expert's row, and its weight;
        two tiles of two rows at once."""
        w, warps = int32(cuda.threadIdx.x >> 5), int32(cuda.blockDim.x >> 5)
        here = uint32(cuda.ballot_sync(ALL, route >= 0))
        while here and w < tiles:
            total0, total1, left, w1 = zero(), zero(), here, int32(w + warps)
            while left:
                j0 = cuda.ffs(left) - 1
                left = without_first(left)
                j1 = cuda.ffs(left) - 1 if left else j0
                row0 = span(y, cuda.shfl_sync(ALL, route, j0) * words, words)
                row1 = span(y, cuda.shfl_sync(ALL, route, j1) * words, words)
                share0, share1 = cuda.shfl_sync(ALL, share, j0), cuda.shfl_sync(ALL, share, j1)
                a0, a1 = load_tile(row0, w), load_tile(row0, w1)
                b0, b1 = load_tile(row1, w), load_tile(row1, w1)
                total0, total1 = add(total0, four_words(a0), share0), add(total1, four_words(a1), share0)
                if left:
                    total0, total1 = add(total0, four_words(b0), share1), add(total1, four_words(b1), share1)
                    left = without_first(left)
            ll128_store_tile(slots, int32(first + w), two_words(result(total0)), epoch, k)
            if w1 < tiles:
                ll128_store_tile(slots, int32(first + w1), two_words(result(total1)), epoch, k)
            w = int32(w1 + warps)

    @cuda.jit(device=True)
    def receive(t, w, epoch, owner, max_tokens, tiles, slots):
        """Step 3 -> this lane's words of tile `w` of token `t`; lane j has the owner of its j-th expert; four
        ranks at once."""
        buffer, total, k, n = epoch & 1, zero(), _next_of(owner, 0), num_ranks()
        while k < n:
            k1 = _next_of(owner, k + 1)
            k2 = _next_of(owner, k1 + 1)
            k3 = _next_of(owner, k2 + 1)
            some = (
                unit_of(buffer, k, t, max_tokens, tiles, w),
                unit_of(buffer, k1 if k1 < n else k, t, max_tokens, tiles, w),
                unit_of(buffer, k2 if k2 < n else k, t, max_tokens, tiles, w),
                unit_of(buffer, k3 if k3 < n else k, t, max_tokens, tiles, w),
            )
            a, b, c, d = ll128_load_some(slots, some, epoch)
            total = add(total, four_words(a), float32(1))
            if k1 < n:
                total = add(total, four_words(b), float32(1))
            if k2 < n:
                total = add(total, four_words(c), float32(1))
            if k3 < n:
                total = add(total, four_words(d), float32(1))
            k = _next_of(owner, k3 + 1)
        return two_words(result(total))

    @cuda.jit(max_registers=64)  # see THREADS
    def expert_combine(
        y, out, words, tiles, chunks, senders, tokens, routes, shares, owners, slots, barrier, epochs
    ):
        """Add up the rows of the experts for each token.

        y        complex128 (n_local * n_ranks * max_tokens * words,): as ``expert_dispatch`` has its `rows`
        out      complex128 (tokens * words,)
        words    of 16 bytes, in a row
        tiles    of 480 bytes, in a row, the last one perhaps not full
        chunks   of a row, each a tile for each warp
        senders  how many blocks send; the others receive, one at least
        tokens   int32 (n_ranks,), as ``expert_dispatch`` leaves them, like the next ones
        routes   int32 (n_ranks, max_tokens, top_k)
        shares   float32, likewise
        owners   int32 (max_tokens, top_k)
        slots    uint64 (2 * n_ranks * max_tokens * tiles * 64,), symmetric, zeros at first
        barrier  uint64 (2 * n_ranks * 2,), likewise
        epochs   uint32 (blocks,), zeros at first
        grid     the same number of blocks always, one-dimensional, as the blocks are, of whole warps
        """
        b, i, threads, lane = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x, cuda.laneid
        n, max_tokens, top_k = num_ranks(), int32(routes.shape[1]), int32(routes.shape[2])
        words, tiles, chunks, senders = int32(words), int32(tiles), int32(chunks), int32(senders)
        griddepcontrol_wait()
        epoch = epochs[b] + 1
        buffer = epoch & 1
        if b < senders:
            distance = i + 1
            while b == 0 and distance < n:  # 1
                ll_store(symm_at(barrier, peer_at(distance)), buffer * n + rank(), 0, epoch)
                distance += threads
            most, k = int32(0), 0
            while k < n:
                most = max(most, tokens[k])
                k += 1
            t, distance = divided(b, n)
            more, ranks = divided(senders, n)
            while t < most:  # 2
                k = peer_at(distance + 1)
                if t < tokens[k]:
                    route, share = int32(NONE), float32(0)
                    if lane < top_k:
                        route, share = routes[k, t, lane], shares[k, t, lane]
                    first = unit_of(buffer, rank(), t, max_tokens, tiles, 0)
                    send(first, k, epoch, route, share, y, words, tiles, slots)
                t, distance = int32(t + more), int32(distance + ranks)
                if distance >= n:
                    t, distance = int32(t + 1), int32(distance - n)
        else:
            r, step, known = int32(b - senders), int32(cuda.gridDim.x - senders), tokens[rank()]
            t, chunk = divided(r, chunks)
            more, further = divided(step, chunks)
            while t * words < out.size:  # 3
                w = int32(chunk * (threads >> 5) + (i >> 5))
                if w < tiles:
                    owner = owners[t, lane] if lane < top_k and t < known else int32(NONE)
                    result_words = receive(t, w, epoch, owner, max_tokens, tiles, slots)
                    store_tile(span(out, t * words, words), w, result_words)
                t, chunk = int32(t + more), int32(chunk + further)
                if chunk >= chunks:
                    t, chunk = int32(t + 1), int32(chunk - chunks)
            distance = i + 1
            while r == 0 and distance < n:  # 4
                ll_load(barrier, buffer * n + peer_at(distance), epoch)
                distance += threads
        cuda.syncthreads()
        griddepcontrol_launch_dependents()
        if i == 0:
            epochs[b] = epoch

    return expert_combine


class Combine(Method):
    """Launches it, and owns its memory; after ``Dispatch``, its `source`, which lives as long."""

    threads = THREADS

    def prepare(self, sizes, source):
        world, n, most = self.world, self.world.n_ranks, sizes.max_tokens
        row = sizes.hidden * sizes.dtype.itemsize
        words, tiles = row // 16, -(-row // TILE_BYTES)
        chunks = -(-tiles // (self.threads // 32))
        senders, self.blocks = divide_blocks(self, SENDING, n * most, chunks * most)
        self.kernel, self.sizes = combine_kernel(sizes.dtype.name), (words, tiles, chunks, senders)
        name = "expert_parallel.combine"
        slots = self.zeros((2 * n * most * tiles * TILE_WORDS,), "uint64", f"{name}.rows")
        barrier = self.zeros((2 * n * 2,), "uint64", f"{name}.barrier")
        left = source.tokens, source.routes, source.shares.view("float32"), source.owners
        self.rest = *left, slots, barrier, world.xp.zeros(self.blocks, "uint32")
        nothing = world.xp.empty(0, "complex128")
        self.bind(nothing, nothing)

    def bind(self, y, out):
        return self.launch(self.kernel, self.blocks, y, out, *self.sizes, *self.rest, pdl=True)


GPU_KERNELS = {
    f"expert_combine[{dtype}]": combine_kernel(dtype) for dtype in ("float16", "bfloat16", "float32")
}
