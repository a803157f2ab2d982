"""The rows of a token's experts, times their weights, are added up, and travel to the rank that has the
token; there the sums of all ranks are added up. All in float32, in the order of j, then of the ranks.

Results go through in `n_chunks` chunks of columns, so that those of a chunk travel while the next chunk is
computed (``gemm_reduce_scatter.py``).

y         (pairs, N): y[t * topk + j], what the j-th expert of token t has computed; local
Staged    staged[buffer, k], on every rank: the sums of rank k for the rank's tokens, rounded. Written by rank
          k only; its own are there, too
Signals   full[k, c], on every rank: the last epoch of which chunk c of staged[k] is here; set by rank k only
Sent      sent[k, c], local: how many groups of TOKENS tokens of rank k are written, of chunk c; 0 in between
Epochs    epochs[0], local: the epoch selects the buffer. Device-resident, so graph-safe

  The steps, in this order:   send(0), send(1), add(0), send(2), add(1), .., add(n_chunks - 1)

  send(c), by all blocks, for each group of tokens, those of the next rank first:
          1. wait until y has chunk c, if it is not known to be there
          2. add up its rows; store the sums to staged[buffer, me] of the tokens' rank; syncthreads
          3. one thread: add one to sent[k, c]. Who finds all other groups written sets full[me, c] there to
             the epoch                    release, sys: publishes what the blocks have stored (cumulativity)
  add(c), by all blocks:
          4. wait for full[k, c] of all ranks k                                          acquire, sys
          5. add up the sums of the ranks, and store them to out

No race: the double-buffer lemma (docs/protocols.md). Each rank sends each chunk to each other in every epoch.

No deadlock: ascending-order progress, by steps. All blocks take the steps in this order, and each rank's
send(c) comes before any add(c). Step 1 waits for blocks that wait for no rank.
"""

import functools
from typing import Any, NamedTuple

from numba import cuda, float32, int64, uint32

from shmemkit.device import load_vec16, span, store_vec16, wait
from shmemkit.device.cuda.weighted_sums import weighted_sum
from shmemkit.device.shmem.ordered_access import peer_at
from shmemkit.device.shmem.signals import notify_at
from shmemkit.device.swizzle import quotient
from shmemkit.gemm.epilogue import inline

TOKENS = 16  # of a group
CHUNKS = 8  # at most


class Sums(NamedTuple):
    """What the steps get.

    y, out               uint8, of rows of row_bytes
    weights, ids         of the pairs: float32, int32 or int64; expert numbers from 0 to n_experts - 1 count
    tokens               of a rank
    chunk_bytes          of a row
    columns, n_columns   of tiles: of a chunk, and of all
    staged, room         uint8 (2 * n_ranks * room,), symmetric
    full                 uint64 (n_ranks * CHUNKS,), symmetric; sent: int32, as many, zeros
    offsets              as of `peer_at`
    y_full, target       uint64: y_full[c] is `target` times the chunk's columns of tiles when y has chunk c
    """

    y: Any
    out: Any
    row_bytes: Any
    weights: Any
    ids: Any
    n_experts: Any
    topk: Any
    tokens: Any
    chunk_bytes: Any
    y_full: Any
    columns: Any
    n_columns: Any
    staged: Any
    room: Any
    full: Any
    sent: Any
    offsets: Any
    me: Any
    n_ranks: Any
    epoch: Any
    target: Any


@inline
def columns_of(c, columns, n_columns):
    """How many columns of tiles chunk c has."""
    return min(columns, n_columns - c * columns)


@functools.cache
def steps_of(dtype):
    """-> ``run(begin, end, awaits, block, blocks, sums)``: the steps from number `begin` to `end`, by one of
    so many blocks; `awaits`: whether chunks of y may still be computed"""
    zero, add, result = weighted_sum(dtype)

    @inline
    def load(p, j, at, sums):
        """-> whether the pair has an expert, its weight, and its 16 bytes from `at` on"""
        if j < sums.topk:
            expert = int64(sums.ids[p + j])
            if 0 <= expert and expert < sums.n_experts:
                return True, sums.weights[p + j], load_vec16(sums.y, (p + j) * sums.row_bytes + at)
        return False, float32(0), (uint32(0), uint32(0), uint32(0), uint32(0))

    @inline
    def sum_of(t, at, sums):
        """16 bytes of token t's sum, from `at` on: four loads at once."""
        total, p, j = zero(), t * sums.topk, int64(0)
        while j < sums.topk:
            there0, weight0, words0 = load(p, j, at, sums)
            there1, weight1, words1 = load(p, j + 1, at, sums)
            there2, weight2, words2 = load(p, j + 2, at, sums)
            there3, weight3, words3 = load(p, j + 3, at, sums)
            if there0:
                total = add(total, words0, weight0)
            if there1:
                total = add(total, words1, weight1)
            if there2:
                total = add(total, words2, weight2)
            if there3:
                total = add(total, words3, weight3)
            j += 4
        return result(total)

    @inline
    def send(c, awaits, block, blocks, sums):
        begin, groups = c * sums.chunk_bytes, quotient(sums.tokens + TOKENS - 1, TOKENS)
        units = min(sums.chunk_bytes, sums.row_bytes - begin) >> 4
        slot = ((sums.epoch & 1) * sums.n_ranks + sums.me) * sums.room + begin
        if awaits:
            if cuda.threadIdx.x == 0:
                target = sums.target * columns_of(c, sums.columns, sums.n_columns)
                wait(span(sums.y_full, c, 1), 1, "gpu", "acquire", target)  # 1
            cuda.syncthreads()
        i = int64(block)
        while i < sums.n_ranks * groups:
            turn = quotient(i, groups)
            owner, first = sums.me + 1 + turn, (i - turn * groups) * TOKENS
            if owner >= sums.n_ranks:
                owner -= sums.n_ranks
            there, count = peer_at(sums.staged, sums.offsets, owner), min(TOKENS, sums.tokens - first)
            u = int64(cuda.threadIdx.x)
            while u < count * units:
                token = quotient(u, units)
                at, token = 16 * (u - token * units), first + token
                words = sum_of(owner * sums.tokens + token, begin + at, sums)
                store_vec16(there, slot + token * sums.row_bytes + at, words)  # 2
                u += cuda.blockDim.x
            cuda.syncthreads()
            if cuda.threadIdx.x == 0:
                cuda.threadfence()
                if cuda.atomic.add(sums.sent, owner * CHUNKS + c, 1) == groups - 1:
                    cuda.threadfence()
                    sums.sent[owner * CHUNKS + c] = 0
                    notify_at(sums.full, sums.me * CHUNKS + c, sums.offsets, owner, sums.epoch)  # 3
            i += blocks

    @inline
    def add_ranks(c, block, blocks, sums):
        begin, k = c * sums.chunk_bytes, int64(cuda.threadIdx.x)
        units = min(sums.chunk_bytes, sums.row_bytes - begin) >> 4
        while k < sums.n_ranks:
            wait(span(sums.full, k * CHUNKS + c, 1), 1, "sys", "acquire", sums.epoch)  # 4
            k += cuda.blockDim.x
        cuda.syncthreads()
        u = int64(block) * cuda.blockDim.x + cuda.threadIdx.x
        while u < sums.tokens * units:
            token = quotient(u, units)
            at = token * sums.row_bytes + begin + 16 * (u - token * units)
            total, slot = zero(), (sums.epoch & 1) * sums.n_ranks * sums.room + at
            for _ in range(sums.n_ranks):
                total = add(total, load_vec16(sums.staged, slot), float32(1))
                slot += sums.room
            store_vec16(sums.out, at, result(total))  # 5
            u += blocks * cuda.blockDim.x

    @inline
    def run(begin, end, awaits, block, blocks, sums):
        last = 2 * quotient(sums.n_columns + sums.columns - 1, sums.columns) - 1
        step = begin
        while step < end:
            if step == last or (step > 0 and step & 1 == 0):
                add_ranks((step + 1 >> 1) - 1, block, blocks, sums)
            else:
                send(step + 1 >> 1, awaits, block, blocks, sums)
            step += 1

    return run
