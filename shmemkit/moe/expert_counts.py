"""How many tokens go to which expert: what dispatch tells the other ranks before they can place the rows.

Headers   for a token and j: (expert << 16 | the number of this rank's tokens before it that go there, too),
          or NONE; and the bits of its weight, in the upper half
Counts    for a rank: how many of this rank's tokens go to each of its experts, and how many tokens there are,
          two numbers in a unit

Both travel as units of LL (``shmemkit.device.packets.ll``): packets of 8 bytes with flags.

The machine code must keep (docs/machine_code.md): whole packet, whole warp.
"""

from numba import cuda, int32, uint32, uint64

from shmemkit.device import ll_load, ll_store, num_ranks, rank, symm_at

from .routing import ALL, NONE, peer_at, unit_of


@cuda.jit(device=True)
def _load(experts, q, until, width):
    """The expert of the pair q = t << width | j, or of another one where there is none."""
    return experts[min(q >> width, until - 1), min(q & (1 << width) - 1, experts.shape[1] - 1)]


@cuda.jit(device=True)
def _add(expert, q, experts, until, width, n_experts, before):
    """Count what `_load` has loaded, once for each token that names it: pairs of a token are neighbours in a
    warp."""
    lane, valid = cuda.laneid, q < until << width and q & (1 << width) - 1 < experts.shape[1]
    expert = int32(expert) if valid and 0 <= expert and expert < n_experts else int32(NONE)
    same = cuda.match_any_sync(ALL, int32(expert | (lane >> width) << 10))
    if expert >= 0 and lane == cuda.ffs(same) - 1:
        cuda.atomic.add(before, expert, 1)


@cuda.jit(device=True)
def _count(experts, first, until, width, n_experts, before):
    """Add to before[e] how many of the tokens `first` .. `until` - 1 go to expert e, by the block."""
    i, threads, end = cuda.threadIdx.x, cuda.blockDim.x, until << width
    q = (first << width) + i
    while q - (i & 31) < end:  # the same for a warp; four loads at once
        q1, q2, q3 = q + threads, q + 2 * threads, q + 3 * threads
        e0, e1 = _load(experts, q, until, width), _load(experts, q1, until, width)
        e2, e3 = _load(experts, q2, until, width), _load(experts, q3, until, width)
        _add(e0, q, experts, until, width, n_experts, before)
        _add(e1, q1, experts, until, width, n_experts, before)
        _add(e2, q2, experts, until, width, n_experts, before)
        _add(e3, q3, experts, until, width, n_experts, before)
        q += 4 * threads


@cuda.jit(device=True)
def _send_header(t, epoch, experts, weights, n_experts, max_tokens, headers, before):
    """Send the header of token `t` to all ranks, also to this one: a warp for each."""
    lane, warps, top_k = cuda.laneid, cuda.blockDim.x >> 5, experts.shape[1]
    if lane < top_k:
        code, expert = int32(NONE), experts[t, lane]
        if 0 <= expert and expert < n_experts:
            code = int32(int32(expert) << 16 | before[expert])
        value = uint64(uint32(weights[t, lane])) << uint64(32) | uint64(uint32(code))
        unit = unit_of(epoch & 1, rank(), t, max_tokens, top_k, lane)
        y = cuda.threadIdx.x >> 5
        while y < num_ranks():
            ll_store(symm_at(headers, peer_at(y)), unit, value, epoch)
            y += warps


@cuda.jit(device=True)
def announce(r, step, epoch, experts, weights, n_local, max_tokens, headers, count_slots, before):
    """Send the headers of this rank's tokens r, r + step, ..., and the counts, if no block has a larger r:
    one pass over all experts. before[e], in shared memory, then says how many of them go to expert e."""
    i, threads, me, n = cuda.threadIdx.x, cuda.blockDim.x, rank(), num_ranks()
    tokens, top_k = experts.shape
    n_experts, width = n * n_local, 0
    while 1 << width < top_k:
        width += 1
    e = i
    while e < n_experts:
        before[e] = 0
        e += threads
    cuda.syncthreads()
    first, t = 0, r
    while t < tokens:
        _count(experts, first, t, width, n_experts, before)
        cuda.syncthreads()
        _send_header(t, epoch, experts, weights, n_experts, max_tokens, headers, before)
        cuda.syncthreads()
        first, t = t, t + step
    _count(experts, first, tokens, width, n_experts, before)
    cuda.syncthreads()
    if r == step - 1:
        buffer, units, k = epoch & 1, stride_of(n_local) >> 1, i >> 5
        while k < n:
            u = cuda.laneid
            while k != me and u < units:
                low = uint64(_number(2 * u, k, n_local, tokens, before))
                high = uint64(_number(2 * u + 1, k, n_local, tokens, before))
                ll_store(
                    symm_at(count_slots, k),
                    *((buffer * n + me) * units + u, high << uint64(32) | low, epoch),
                )
                u += 32
            k += threads >> 5


@cuda.jit(device=True)
def stride_of(n_local):
    """How many numbers a rank gets: how many tokens go to each of its experts, how many there are, and 0 if
    that is odd."""
    return int32((n_local + 2) & ~1)


@cuda.jit(device=True)
def _number(e, k, n_local, tokens, before):
    """The e-th of rank `k`."""
    if e < n_local:
        return uint32(before[k * n_local + e])
    return uint32(tokens if e == n_local else 0)


@cuda.jit(device=True)
def gather_counts(leads, epoch, max_tokens, count_slots, before, mine, offsets, counts, tokens):
    """Wait for the counts of all other ranks; `before` and `mine` are those of this rank, and its
    number of tokens.

    offsets[k * stride + e], in shared memory, then says how many rows expert e here has of the ranks before
    k; at n_local, how many tokens rank k has. The block that `leads` stores the sums to `counts`, and the
    tokens to `tokens`."""
    i, threads, n, n_local = cuda.threadIdx.x, cuda.blockDim.x, num_ranks(), int32(counts.size)
    stride, me = stride_of(n_local), rank()
    q, units = i, n * (stride >> 1)
    while q < units:
        if 2 * q < me * stride or 2 * q >= (me + 1) * stride:
            two = ll_load(count_slots, (epoch & 1) * units + q, epoch)
            offsets[2 * q], offsets[2 * q + 1] = int32(uint32(two)), int32(uint32(two >> uint64(32)))
        q += threads
    e = i
    while e <= n_local:
        offsets[me * stride + e] = int32(_number(e, me, n_local, mine, before))
        e += threads
    cuda.syncthreads()
    e = i
    while e < n_local:
        total, k = int32(0), 0
        while k < n:
            count = offsets[k * stride + e]
            offsets[k * stride + e] = total
            total = int32(total + count)
            k += 1
        if leads:
            counts[e] = total
        e += threads
    k = i
    while k < n:  # when the time of a wait is up (docs/timeouts.md), they may be anything
        some = max(0, min(max_tokens, offsets[k * stride + n_local]))
        offsets[k * stride + n_local] = some
        if leads:
            tokens[k] = some
        k += threads
    cuda.syncthreads()
