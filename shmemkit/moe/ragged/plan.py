"""Where each row goes, before rows travel: the ranks tell each other how many tokens go to each expert. So
each knows where its rows begin in every rank's receive buffer.

Rows      rank d's buffer has max_rows rows: those of its first expert, then those of the next one, without
          gaps. An expert's rows are sorted by the rank that sends them, then by token
Codes     codes[t, j], local: (expert << 16 | how many earlier tokens of its block go to that expert, too) of
          this rank's token t; or NONE where the j-th number is no expert's
Base      base[b, e], local: how many tokens of the blocks before b go to expert e
Place     place[e], local: the row of expert e's rank where this rank's rows for the expert begin. So the row
          of (t, j) is place[e] + base[b, e] + what codes[t, j] says
Counts    all_counts[buffer, k, e], on every rank: how many tokens of rank k go to expert e; at the end, how
          many tokens rank k has. Written by rank k only
Signals   met[k], on every rank: the last epoch that rank k has begun. Set by rank k only
Epochs    epochs[0], local: of dispatches and combines alike. Device-resident, so graph-safe

  ``route_tokens``, blocks of tokens:   1. count the tokens of each expert
  ``meet``, one block:                  2. base: prefix sums over the blocks; store the counts to all ranks
                                        3. set met[me] on all ranks to the epoch           release, sys
                                        4. wait for met[k] >= epoch of all ranks k         acquire, sys
                                        5. place: prefix sums over experts and ranks
  Where routes are known, as before combine, ``meet`` takes steps 3 and 4 alone.

Step 4 is a barrier: later launches of this rank may write what ranks have read or written in launches before
their step 3. All symmetric memory of the ragged kernels relies on it, and has one buffer. Only counts, which
are written before it, have two: the double-buffer lemma (docs/protocols.md); the packet of the epoch between
is met.

All ranks compute every rank's sum of rows from the same counts. If one exceeds max_rows, all find so: place
is NONE then, counts are 0, and nothing is sent. Each rank's host raises that.
"""

import functools

from numba import cuda, int32, int64, types

from shmemkit.compiler.ptx import gpu
from shmemkit.device import (
    griddepcontrol_launch_dependents,
    griddepcontrol_wait,
    notify,
    num_ranks,
    rank,
    span,
    symm_at,
    wait,
    world_rank,
)
from shmemkit.device.emulator import current_thread
from shmemkit.device.shmem.ordered_access import store
from shmemkit.device.swizzle import quotient
from shmemkit.gemm.grouped.expert_tiles import sums_up_to
from shmemkit.support import kernel_reports

from ..routing import ALL, MAX_EXPERTS, MAX_RANKS, NONE

IDS = 1024  # numbers of experts that a block looks at together
PLANNERS = 64  # blocks of ``route_tokens`` at most: ``meet`` adds up their counts


@cuda.jit
def route_tokens(experts, weights, top_k, n_experts, per_block, codes, shares, base):
    """experts     int32 or int64 (tokens * top_k,)
    weights     float32, likewise; they become `shares`
    per_block   tokens of a block
    codes       int32 (max_tokens * top_k,); shares: float32, likewise
    base        int32 (blocks * n_experts,): becomes each block's own counts
    grid        one-dimensional
    """
    ids, before = cuda.shared.array(IDS, int32), cuda.shared.array(MAX_EXPERTS, int32)
    b, i, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
    first = int64(b) * per_block * top_k
    end = min(first + per_block * top_k, experts.size)
    at_once = quotient(IDS, top_k) * top_k
    griddepcontrol_wait()
    e = i
    while e < n_experts:
        before[e] = 0
        e += threads
    while first < end:
        some = min(at_once, end - first)
        q = i
        while q < some:
            expert = experts[first + q]
            ids[q] = int32(expert) if 0 <= expert and expert < n_experts else int32(NONE)
            codes[first + q] = NONE
            shares[first + q] = weights[first + q]
            q += threads
        cuda.syncthreads()
        e = i
        while e < n_experts:  # an expert has a thread, which sees the tokens in their order
            count, last = before[e], int64(NONE)
            for q in range(some):
                if ids[q] == e:
                    token = quotient(q, top_k)
                    if token != last:  # an expert that a token names twice gets one row
                        count, last = int32(count + 1), token
                    codes[first + q] = e << 16 | (count - 1)
            before[e] = count
            e += threads
        cuda.syncthreads()
        first += some
    e = i
    while e < n_experts:
        base[b * n_experts + e] = before[e]
        e += threads
    cuda.syncthreads()
    griddepcontrol_launch_dependents()


@cuda.jit(device=True)
def _add_up_blocks(e, n_experts, base):
    """Turn the blocks' counts of expert `e` into sums of those before, eight at once. -> the sum of all"""
    total, q = int32(0), int64(e)
    while q < base.size:
        q1, q2, q3 = q + n_experts, q + 2 * n_experts, q + 3 * n_experts
        q4, q5, q6, q7 = q + 4 * n_experts, q + 5 * n_experts, q + 6 * n_experts, q + 7 * n_experts
        c0, c1, c2, c3 = base[q], _at(base, q1), _at(base, q2), _at(base, q3)
        c4, c5, c6, c7 = _at(base, q4), _at(base, q5), _at(base, q6), _at(base, q7)
        total = _advance(base, q, total, c0)
        total = _advance(base, q1, total, c1)
        total = _advance(base, q2, total, c2)
        total = _advance(base, q3, total, c3)
        total = _advance(base, q4, total, c4)
        total = _advance(base, q5, total, c5)
        total = _advance(base, q6, total, c6)
        total = _advance(base, q7, total, c7)
        q += 8 * n_experts
    return total


@cuda.jit(device=True)
def _at(base, q):
    return base[q] if q < base.size else int32(0)


@cuda.jit(device=True)
def _advance(base, q, total, count):
    if q < base.size:
        base[q] = total
    return int32(total + count)


@cuda.jit(device=True)
def _clamped(count, max_tokens):
    """When the time of a wait is up (docs/timeouts.md), counts may be anything."""
    return max(int32(0), min(int32(max_tokens), count))


@cuda.jit(max_registers=96)
def meet(
    routed, tokens, max_tokens, max_rows, base, place, tokens_of, counts, all_counts, met, epochs, report
):
    """routed      whether ``route_tokens`` has just run; otherwise routes stay as they are
    tokens      of this rank
    base        int32 (blocks * n_experts,)
    place       int32 (n_experts,); tokens_of: int32 (n_ranks,); counts: int32 (n_local,)
    all_counts  int32 (2 * n_ranks * (n_experts + 1),), symmetric
    met         uint64 (n_ranks,), symmetric, zeros at first
    epochs      uint64 (1,), zero at first
    report      as of ``report_rows``
    grid        one block, of a multiple of 32 threads
    """
    totals, needed = cuda.shared.array(MAX_EXPERTS, int32), cuda.shared.array(MAX_RANKS, int64)
    i, threads, lane = int64(cuda.threadIdx.x), cuda.blockDim.x, cuda.laneid
    n, me, n_experts, n_local = num_ranks(), rank(), int64(place.size), int64(counts.size)
    griddepcontrol_wait()
    epoch = int64(epochs[0]) + 1
    row = n_experts + 1
    first = (epoch & 1) * n * row
    if routed:
        e = i
        while e <= n_experts:  # 2
            number = int32(tokens)
            if e < n_experts:
                number = _add_up_blocks(e, n_experts, base)
            for k in range(n):
                symm_at(all_counts, k)[first + me * row + e] = number
            e += threads
    cuda.syncthreads()
    k = i
    while k < n:
        notify(span(met, me, 1), k, epoch, "set", "sys")  # 3
        k += threads
    k = i
    while k < n:
        wait(span(met, k, 1), 1, "sys", "acquire", epoch)  # 4
        k += threads
    cuda.syncthreads()
    if routed:  # 5
        e = i
        while e < n_experts:
            total = before = int32(0)
            for k in range(n):
                count = _clamped(all_counts[first + k * row + e], max_tokens)
                if k == me:
                    before = total
                total = int32(total + count)
            totals[e], place[e] = total, before
            e += threads
        cuda.syncthreads()
        d = i >> 5
        while d < n:
            rows, e0 = int64(0), int64(0)
            while e0 < n_local:
                e, total = d * n_local + e0 + lane, int64(0)
                if e0 + lane < n_local:
                    total = int64(totals[e])
                until = rows + sums_up_to(total, lane)
                if e0 + lane < n_local:
                    place[e] = int32(place[e] + until - total)
                rows = cuda.shfl_sync(ALL, until, 31)
                e0 += 32
            if lane == 0:
                needed[d] = rows
            d += threads >> 5
        cuda.syncthreads()
        most, which = int64(0), int64(0)
        for d in range(n):
            if needed[d] > most:
                most, which = needed[d], int64(d)
        fits = most <= max_rows
        e = i
        while e < n_experts:
            if not fits:
                place[e] = NONE
            if e < n_local:
                counts[e] = totals[me * n_local + e] if fits else int32(0)
            e += threads
        k = i
        while k < n:
            tokens_of[k] = _clamped(all_counts[first + k * row + n_experts], max_tokens)
            k += threads
        if i == 0 and not fits:
            report_rows(report, world_rank(which), most, max_rows)
    cuda.syncthreads()
    griddepcontrol_launch_dependents()
    if i == 0:
        epochs[0] = epoch


@cuda.jit
def copy_routes(local, shared, to_local, to_shared):
    """Copy what the ranks have agreed on: int32 arrays, 1-D. Any grid."""
    griddepcontrol_wait()
    i, threads = int64(cuda.grid(1)), cuda.gridsize(1)
    while i < max(local.size, shared.size):
        if i < local.size:
            to_local[i] = local[i]
        if i < shared.size:
            to_shared[i] = shared[i]
        i += threads
    cuda.syncthreads()
    griddepcontrol_launch_dependents()


# ---- more rows than there is room for


def report_rows(report, which, needed, max_rows):
    """In a kernel: rank `which` of the World would get more than `max_rows` rows. The host raises ValueError.

    report   address of a word of host memory, as of ``report_address``
    """
    current_thread("report_rows")
    raise ValueError(_explained(int(which), int(needed), int(max_rows)))


_publish = store(types.uint64, "sys")


@gpu(report_rows)
def _(report, which, needed, max_rows):
    def impl(report, which, needed, max_rows):
        address = types.uint64(report)
        _publish(address + types.uint64(8), types.uint64(which))
        _publish(address + types.uint64(16), types.uint64(needed))
        _publish(address + types.uint64(24), types.uint64(max_rows))
        _publish(address, types.uint64(1))

    return impl


def _explained(which, needed, max_rows):
    return (
        f"ExpertParallel: rank {which} would receive {needed} rows, more than max_rows={max_rows}. Nothing "
        "was sent, on any rank, and counts are 0. Make an ExpertParallel with larger max_rows"
    )


@functools.cache
def report_address():
    """-> the address for ``report_rows``, on GPUs: of a flag, the rank, its rows and max_rows."""
    return kernel_reports.words_for(3, _explained, kernel_reports.AFTER_WAITS)


GPU_KERNELS = {
    "route_tokens[int32]": (route_tokens, {"experts": "int32"}),
    "route_tokens[int64]": (route_tokens, {"experts": "int64"}),
    "meet": meet,
    "copy_routes": copy_routes,
}
