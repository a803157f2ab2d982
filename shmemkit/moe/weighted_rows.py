"""The rows of a token's experts, times their weights, are added up, and travel to the rank that has the
token; there the sums of all ranks are added up. One kernel, all in float32, in the order of j, then of the
ranks.

Results go through in chunks of columns, so that a chunk travels while the next one is added up.

y         (pairs, N): y[t * topk + j], what the j-th expert of token t has computed; local. Its rows, and
          those of Staged, are filled up to a multiple of 16 bytes
Staged    staged[buffer, k], on every rank: the sums of rank k for the rank's tokens, rounded. Written by rank
          k only; its own are there, too
Signals   full[k, c], on every rank: the last epoch of which chunk c of staged[k] is here; set by rank k only
Sent      sent[k, c], local: how many groups of tokens of rank k are written, of chunk c; 0 in between
Epochs    epochs[0], local: the epoch selects the buffer. Device-resident, so graph-safe

  all blocks:     send(0), send(1), add(0), send(2), add(1), .., add(n_chunks - 1)

  send(c), for each group of tokens, those of the next rank first:
          1. add up its rows; store the sums to staged[buffer, me] of the tokens' rank; syncthreads
          2. one thread: add one to sent[k, c]. Who finds all other groups written sets full[me, c] there to
             the epoch                    release, sys: publishes what the blocks have stored (cumulativity)
  add(c):
          3. wait for full[k, c] of all ranks k                                          acquire, sys
          4. add up the sums of the ranks, and store them to out

No race: the double-buffer lemma (docs/protocols.md). Each rank sends each chunk to each other in every epoch.

No deadlock: ascending-order progress, by steps. All blocks take the steps in this order, and each rank's
send(c) comes before any add(c).
"""

import functools
from typing import Any, NamedTuple

from numba import cuda, float32, int64, types, uint32

from shmemkit.device import load_vec16, span, store_vec16, wait
from shmemkit.device.cuda.weighted_sums import weighted_sum
from shmemkit.device.shmem.ordered_access import peer_at
from shmemkit.device.shmem.signals import notify_at
from shmemkit.device.swizzle import quotient
from shmemkit.gemm import gpu_of
from shmemkit.gemm.epilogue import inline
from shmemkit.gemm.last_block import is_last_block
from shmemkit.operations.method import Method
from shmemkit.runtime.launch import bind

TOKENS = 16  # of a group, at most
CHUNKS = 8  # at most
PART = 1 << 23  # bytes of results that are worth a chunk
UNIT = 16  # bytes


class Sums(NamedTuple):
    """What the steps get.

    y, row_bytes     uint8; bytes from row to row, also of `staged`
    out, out_bytes   uint16; bytes of a row
    weights, ids     of the pairs: float32, int32 or int64; expert numbers from 0 to n_experts - 1 count
    tokens, group    of a rank, and of them
    chunk_bytes      of a row
    staged, room     uint8 (2 * n_ranks * room,), symmetric
    full             uint64 (n_ranks * CHUNKS,), symmetric; sent: int32, as many, zeros
    offsets          as of `peer_at`
    """

    y: Any
    row_bytes: Any
    out: Any
    out_bytes: Any
    weights: Any
    ids: Any
    n_experts: Any
    topk: Any
    tokens: Any
    group: Any
    chunk_bytes: Any
    staged: Any
    room: Any
    full: Any
    sent: Any
    offsets: Any
    me: Any
    n_ranks: Any
    epoch: Any


@functools.cache
def summing(dtype):
    """-> ``sum_of(t, at, sums)``: 16 bytes of token t's sum, from `at` on: four loads at once"""
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

    return sum_of


@functools.cache
def sum_rows_kernel(dtype):
    """-> the kernel for results of `dtype`"""
    sum_of = summing(dtype)
    zero, add, result = weighted_sum(dtype)

    @inline
    def send(c, sums):
        begin, groups = c * sums.chunk_bytes, quotient(sums.tokens + sums.group - 1, sums.group)
        units = min(sums.chunk_bytes, sums.row_bytes - begin) >> 4
        slot = ((sums.epoch & 1) * sums.n_ranks + sums.me) * sums.room + begin
        i = int64(cuda.blockIdx.x)
        while i < sums.n_ranks * groups:
            turn = quotient(i, groups)
            owner, first = sums.me + 1 + turn, (i - turn * groups) * sums.group
            if owner >= sums.n_ranks:
                owner -= sums.n_ranks
            there, count = peer_at(sums.staged, sums.offsets, owner), min(sums.group, sums.tokens - first)
            u = int64(cuda.threadIdx.x)
            while u < count * units:
                token = quotient(u, units)
                at, token = 16 * (u - token * units), first + token
                words = sum_of(owner * sums.tokens + token, begin + at, sums)
                store_vec16(there, slot + token * sums.row_bytes + at, words)  # 1
                u += cuda.blockDim.x
            cuda.syncthreads()
            if cuda.threadIdx.x == 0:
                cuda.threadfence()
                if cuda.atomic.add(sums.sent, owner * CHUNKS + c, 1) == groups - 1:
                    cuda.threadfence()
                    sums.sent[owner * CHUNKS + c] = 0
                    notify_at(sums.full, sums.me * CHUNKS + c, sums.offsets, owner, sums.epoch)  # 2
            i += cuda.gridDim.x

    @inline
    def store_words(out, i, left, words):
        """Store those of 8 elements that are left of the row, to out[i] and behind it."""
        for word in words:
            if left > 0:
                out[i] = types.uint16(word)
            if left > 1:
                out[i + 1] = types.uint16(word >> types.uint32(16))
            i += 2
            left -= 2

    @inline
    def store(sums, row, at, words):
        if sums.out_bytes == sums.row_bytes:
            store_vec16(sums.out, row + at >> 1, words)
        else:
            store_words(sums.out, row + at >> 1, sums.out_bytes - at >> 1, words)

    @inline
    def add_ranks(c, sums):
        begin, k = c * sums.chunk_bytes, int64(cuda.threadIdx.x)
        units = min(sums.chunk_bytes, sums.row_bytes - begin) >> 4
        while k < sums.n_ranks:
            wait(span(sums.full, k * CHUNKS + c, 1), 1, "sys", "acquire", sums.epoch)  # 3
            k += cuda.blockDim.x
        cuda.syncthreads()
        u = cuda.grid(1)
        while u < sums.tokens * units:
            token = quotient(u, units)
            at = begin + 16 * (u - token * units)
            total, slot = zero(), (sums.epoch & 1) * sums.n_ranks * sums.room + token * sums.row_bytes + at
            for _ in range(sums.n_ranks):
                total = add(total, load_vec16(sums.staged, slot), float32(1))
                slot += sums.room
            store(sums, token * sums.out_bytes, at, result(total))  # 4
            u += cuda.gridsize(1)

    @cuda.jit(launch_bounds=(1024, 1))
    def sum_rows(given, epochs, ended):
        """given   Sums, up to the epoch
        epochs     int64 (1,), local; ended: int32 (1,), local, 0 between calls
        grid       all blocks must be resident
        """
        epoch = epochs[0] + 1
        sums, c = Sums(*(*given, epoch)), int64(0)  # pyright: ignore[reportCallIssue]
        while c * sums.chunk_bytes < sums.row_bytes + sums.chunk_bytes:
            if c * sums.chunk_bytes < sums.row_bytes:
                send(c, sums)
            if c > 0:
                add_ranks(c - 1, sums)
            c += 1
        if cuda.threadIdx.x == 0 and is_last_block(ended):  # all have read the epoch
            epochs[0] = epoch

    return sum_rows


# ---- on the host


def pitch_of(n):
    """How many elements are from row to row of n, so that each begins at a multiple of 16 bytes."""
    return n + 7 & -8


class SumRows(Method):
    """Sums of rows over experts and ranks, of up to `max_tokens` tokens of all ranks, of `max_n` columns.
    Collective; the ranks must reach each other's memory."""

    name, threads = "grouped_rs sums", 1024

    def prepare(self, max_tokens, max_n):
        world = self.world
        world.check_reach("gathered")
        n_ranks, xp = world.n_ranks, world.xp
        self.blocks = self.within(gpu_of(world).multiprocessors)
        self.room = -(-max_tokens // n_ranks) * pitch_of(max_n) * 2 + 127 & -128
        self.staged = self.empty((2 * n_ranks * self.room,), "uint8", self.array_name("staged"))
        self.full = self.zeros((n_ranks * CHUNKS,), "uint64", self.array_name("full"))
        self.offsets = self.offsets_of(self.full, range(n_ranks))
        self.sent = xp.zeros(n_ranks * CHUNKS, "int32")
        self.epochs, self.ended = xp.zeros(1, "int64"), xp.zeros(1, "int32")

    def bind(self, y, weights, index, out, chunks=None):
        """-> run(stream): y is 1-D, of `out`'s dtype, in rows of `pitch_of` N; `chunks`: None if chosen"""
        world, (tokens, n) = self.world, out.shape
        row_bytes = 2 * pitch_of(n)
        units = row_bytes // UNIT
        chunks = min(chunks or -(-out.nbytes * world.n_ranks // PART), CHUNKS)
        group = min(TOKENS, max(1, tokens * world.n_ranks // self.blocks))
        given = (
            *(y.view("uint8"), row_bytes, out.reshape(-1).view("uint16"), 2 * n),
            *(weights.reshape(-1), index.ids, index.n_experts, index.topk),
            *(tokens, group, UNIT * -(-units // chunks)),
            *(self.staged, self.room, self.full, self.sent, self.offsets, world.rank, world.n_ranks),
        )
        arguments = given, self.epochs, self.ended
        kernel = sum_rows_kernel(out.dtype.name)
        return bind(kernel, self.blocks, self.threads, arguments, co_resident=True, group=world)


GPU_KERNELS = {dtype: sum_rows_kernel(dtype) for dtype in ("bfloat16", "float16")}
