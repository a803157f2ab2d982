"""What dispatch and combine share: their limits, their grid, and who has which expert."""

from numba import cuda, int32, uint32

from shmemkit.device import num_ranks, rank

MAX_TOP_K = 32  # a warp looks at all experts of a token at once
MAX_RANKS = 72
MAX_EXPERTS = 1024
MAX_UNITS = 1 << 31  # in an array, of LL or LL128
MAX_TOKENS = 1 << 16  # of a rank: how many come before one has 16 bits
MOST_COUNTS = MAX_EXPERTS + 2 * MAX_RANKS
NONE = -1
ALL = 0xFFFFFFFF  # threads of a warp
THREADS = 256  # with 64 registers each, four blocks fit on a multiprocessor
BLOCKS = 2  # for each multiprocessor: half of what fits, so that two objects fit at once
SHIFT = 20


def reciprocal_of(n_local):
    """For `owner_of`."""
    return -(-(1 << SHIFT) // n_local)


def divide_blocks(method, part, sending, receiving, blocks=BLOCKS):
    """-> (blocks that send, all blocks): the fraction `part` of all possible blocks, `blocks` for each
    multiprocessor, sends, the others receive, but never more than there is work for; within the budget of the
    `method`, of 2 at least."""
    method.within(2, 2)
    most = method.within(max(2, blocks * method.world.backend.multiprocessors))
    senders = min(sending, max(1, int(part * most)))
    return senders, senders + min(receiving, most - senders)


@cuda.jit(device=True)
def owner_of(expert, n_experts, reciprocal):
    """The rank that has the expert, NONE of a number that is no expert's: expert // n_local, by a
    multiplication, which is exact for numbers up to MAX_EXPERTS."""
    if expert < 0 or expert >= n_experts:
        return int32(NONE)
    return int32(int32(expert) * int32(reciprocal) >> SHIFT)


@cuda.jit(device=True)
def divided(number, by):
    """(number // by, number % by), for small quotients: a division takes long."""
    quotient, rest = int32(0), int32(number)
    while rest >= by:
        quotient, rest = int32(quotient + 1), int32(rest - by)
    return quotient, rest


@cuda.jit(device=True)
def peer_at(distance):
    """The rank `distance` after this one."""
    peer = int32(rank() + distance)
    return peer if peer < num_ranks() else int32(peer - num_ranks())


@cuda.jit(device=True)
def unit_of(buffer, k, t, max_tokens, units, i):
    """The number of unit, or tile, `i` of [buffer, k, t], where a token has so many: less than MAX_UNITS."""
    return int32(((buffer * num_ranks() + k) * max_tokens + t) * units + i)


@cuda.jit(device=True)
def without_first(bits):
    """An uint32 without its lowest bit that is set."""
    return uint32(bits & (bits - uint32(1)))
