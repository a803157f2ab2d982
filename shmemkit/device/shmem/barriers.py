"""Ranks, teams, and barriers: of ranks, and of a grid's blocks.

At a *barrier* of ranks, each caller first completes its puts (`quiet`), then waits for the other ranks. A
*sync* only waits for them. One thread calls the plain form; all threads of one warp or block call `_warp` and
`_block`. Each rank has one such caller.

What a caller did before the barrier precedes what all callers do after it. Nothing orders what two ranks do
between the same two barriers.

Wrong arguments are TypingError when a kernel is compiled, and TypeError or ValueError on the emulator.
"""

# pyright: reportOptionalMemberAccess=false, reportOptionalSubscript=false
# (arguments of kernels that are None are another overload)

from __future__ import annotations

import functools

from numba import cuda

from shmemkit.compiler.numba_internals import from_dtype
from shmemkit.compiler.ptx import TypingError, asm, element_address, gpu, gpu_function, types
from shmemkit.typing import Array

from ..argument_checks import check_emulated_integer, check_emulated_words, check_integer, check_words
from ..cuda.thread_index import block_thread, block_threads
from ..emulator import current_thread, group_thread
from . import bounded_waits
from .groups import ENTER, called_by, called_by_a_thread
from .nvshmem_functions import nvshmem, on_all, to_team
from .ordered_access import load, store
from .peers import my_rank, n_ranks, rank_in_world
from .signals import notify, wait

__all__ = [
    "barrier",
    "barrier_all",
    "barrier_all_block",
    "barrier_all_warp",
    "barrier_block",
    "barrier_warp",
    "grid_barrier",
    "my_pe",
    "n_pes",
    "num_ranks",
    "rank",
    "sync",
    "sync_all",
    "sync_all_block",
    "sync_all_warp",
    "sync_block",
    "sync_warp",
    "team_my_pe",
    "team_n_pes",
    "world_rank",
]


_GRID_STATES = (types.uint32, types.uint64)


# ---- who


def rank() -> int:
    """This rank, 0 .. num_ranks() - 1. Any thread; one load from constant memory."""
    return current_thread("rank").rank


@gpu(rank)
def _():
    return lambda: my_rank()


def num_ranks() -> int:
    """The number of ranks. Any thread; one load from constant memory."""
    return current_thread("num_ranks").n_ranks


@gpu(num_ranks)
def _():
    return lambda: n_ranks()


my_pe, n_pes = rank, num_ranks


def world_rank(rank: int) -> int:
    """The World's rank of `rank`, 0 .. num_ranks() - 1: another one only in a kernel that is bound for a
    group. Any thread; one load from constant memory.

    All other functions take the group's ranks there.
    """
    thread = current_thread("world_rank")
    check_emulated_integer("world_rank", rank=rank)
    return thread.members.pe(rank)


@gpu(world_rank)
def _(rank):
    check_integer("world_rank", rank=rank)
    return lambda rank: rank_in_world(rank)


def _of_team(name):
    """-> the typing function of ``primitive(team)``, which is NVSHMEM's function `name`"""

    def on_gpu(team):
        check_integer(name, team=team)
        call = nvshmem(name)
        team_of = to_team()
        return lambda team: call(team_of(team))

    return on_gpu


def team_my_pe(team: int) -> int:
    """This rank's number in `team` (Teams.TEAM_WORLD, ...), or -1 if it is not a member. Any thread."""
    thread = current_thread("team_my_pe")
    members = list(thread.team(team))
    return members.index(thread.pe) if thread.pe in members else -1


gpu(team_my_pe)(_of_team("team_my_pe"))


def team_n_pes(team: int) -> int:
    """The number of ranks in `team`. Any thread."""
    return len(current_thread("team_n_pes").team(team))


gpu(team_n_pes)(_of_team("team_n_pes"))


# ---- all ranks, through NVSHMEM


_CALLERS = "all threads of one {} per rank"


def _meeting_of_all(kind, name, group):
    """The family of ``barrier_all()``. On the GPU it is NVSHMEM's function of that name."""
    enter = ENTER[group]

    def barrier():
        getattr(enter(group, name), kind)(group)

    def on_gpu():
        call = on_all(name)
        return lambda: call()

    return barrier, on_gpu


def _meeting_of_team(kind, name, group):
    """Likewise that of ``barrier(team)``."""
    enter = ENTER[group]

    def barrier(team):
        getattr(enter(group, name, team), kind)(team, group)

    return barrier, _of_team(name)


@called_by_a_thread(_meeting_of_all, _CALLERS)
def barrier_all() -> None:
    """Barrier of all ranks, over NVLink or the network: their puts before it have been delivered.

    One thread per rank. It speaks for other threads of its block only if they met it at a ``syncthreads``
    before.
    """


barrier_all_warp = called_by("warp", barrier_all)
"""`barrier_all` by all threads of one warp per rank."""


def barrier_all_block(arrivals: Array | None = None, epoch: Array | None = None) -> None:
    """Barrier of all ranks, by all threads of one block per rank.

    Without arguments: OpenSHMEM's barrier, as `barrier_all`, over NVLink or the network.

    With arguments: directly over NVLink, in microseconds, for ranks whose memory is mapped here (as for
    `symm_at`):

    arrivals   symmetric, 1-D, at least num_ranks() zeros of uint64 (or int64, uint32, int32);
               arrivals[k] counts the arrivals of rank k
    epoch      local, 1-D, one zero of the same dtype: counts this rank's arrivals

    After it, every thread of these blocks sees what any thread of any of them did before it. Nothing is
    reset: the same arrays serve any number of calls (2**31 if they are of 32 bits), in any number of
    launches, if only this barrier uses them. It does not complete puts: call `quiet` first.
    """
    thread = group_thread("block", "barrier_all_block", arrivals, epoch)
    if arrivals is None and epoch is None:
        thread.barrier_all("block")
        return
    if arrivals is None or epoch is None:
        raise TypeError("barrier_all_block(): give both arrivals and epoch, or neither")
    check_emulated_words("barrier_all_block", "arrivals", arrivals)
    check_emulated_words("barrier_all_block", "epoch", epoch, (from_dtype(arrivals.dtype),))
    thread.syncthreads()
    target = epoch[:1].copy()[0] + 1
    peers = range(thread.thread_id, thread.n_ranks, thread.n_threads)
    for peer in peers:
        notify(arrivals[thread.rank :], peer, 1, "add", "sys")
    for peer in peers:
        wait(arrivals[peer:], 1, "sys", "acquire", target)
    thread.syncthreads()
    if thread.thread_id == 0:
        epoch[:1] = target


@gpu(barrier_all_block)
def _(arrivals=None, epoch=None):
    given = [a for a in (arrivals, epoch) if not isinstance(a, (types.Omitted, types.NoneType, type(None)))]
    if not given:
        call = on_all("barrier_all_block")
        return lambda arrivals=None, epoch=None: call()

    if len(given) == 1:
        raise TypingError("barrier_all_block(): arrivals or epoch is missing; give both or neither")
    check_words("barrier_all_block", "arrivals", arrivals)
    check_words("barrier_all_block", "epoch", epoch, (arrivals.dtype,))
    one = arrivals.dtype(1)
    dtype = arrivals.dtype
    arrival = wait
    if bounded_waits.armed():  # the same wait, which says where it is
        poll = bounded_waits.bounded("barrier_all_block", dtype, load(dtype, "acquire", "sys"), "ge")

        @gpu_function
        def arrival(signals, n, scope, semantic, value):
            poll(element_address(signals, 0), value)

    def impl(arrivals=None, epoch=None):
        # The first barrier: all of the block's stores come before each notify, and its last call's new epoch
        # is there.
        cuda.syncthreads()
        target = dtype(epoch[0] + one)
        me, n, threads = rank(), num_ranks(), block_threads()
        peer = block_thread()
        while peer < n:  # not range(): its length is a 64-bit division
            notify(arrivals[me:], peer, 1, "add", "sys")
            peer += threads
        peer = block_thread()
        while peer < n:
            arrival(arrivals[peer:], 1, "sys", "acquire", target)
            peer += threads
        cuda.syncthreads()
        if block_thread() == 0:
            epoch[0] = target

    return impl


@called_by_a_thread(_meeting_of_all, _CALLERS)
def sync_all() -> None:
    """Barrier of all ranks that completes their loads and stores before it, but not their puts.

    One thread per rank, as for `barrier_all`; over NVLink or the network."""


sync_all_warp = called_by("warp", sync_all)
"""`sync_all` by all threads of one warp per rank."""
sync_all_block = called_by("block", sync_all)
"""`sync_all` by all threads of one block per rank."""


# ---- a team's ranks, through NVSHMEM


@called_by_a_thread(_meeting_of_team, _CALLERS)
def barrier(team: int) -> None:
    """`barrier_all` of the ranks of `team`. One thread per rank."""


barrier_warp = called_by("warp", barrier)
"""`barrier` by all threads of one warp per rank."""
barrier_block = called_by("block", barrier)
"""`barrier` by all threads of one block per rank."""


@called_by_a_thread(_meeting_of_team, _CALLERS)
def sync(team: int) -> None:
    """`sync_all` of the ranks of `team`. One thread per rank."""


sync_warp = called_by("warp", sync)
"""`sync` by all threads of one warp per rank."""
sync_block = called_by("block", sync)
"""`sync` by all threads of one block per rank."""


# ---- the blocks of a grid


def grid_barrier(state: Array) -> None:
    """Barrier of all threads of this grid: after it, all of them see what each did before it.

    state   local, 1-D, at least 2 zeros of uint32 or uint64: the blocks that have arrived, and the barriers
            passed. It is ready for the next barrier afterwards, of this grid or of a later one of any size.
            Only one grid at a time may use it

    All threads of all blocks call it. All blocks must be on the GPU at once, or it never ends: launch with
    ``shmemkit.bind(..., co_resident=True)``. It orders memory at scope "gpu", and nothing for peers.
    """
    thread = group_thread("block", "grid_barrier", state)
    check_emulated_words("grid_barrier", "state", state, _GRID_STATES)
    if state.size < 2 or state[0] != 0:
        raise ValueError(f"grid_barrier(): state is {state.tolist()[:4]}; it must be two zeros at first")
    thread.grid_barrier()


@functools.cache
def _arrive(dtype):
    return asm(f"atom.add.acq_rel.gpu.global.u{dtype.bitwidth} $0, [$1], $2;", dtype, (types.uint64, dtype))


@functools.cache
def _reset(dtype):
    return asm(f"st.relaxed.gpu.global.u{dtype.bitwidth} [$0], $1;", types.void, (types.uint64, dtype))


@gpu(grid_barrier)
def _(state):
    check_words("grid_barrier", "state", state, _GRID_STATES)
    dtype = state.dtype
    arrive, reset = _arrive(dtype), _reset(dtype)
    look, acquire, release = load(dtype, "relaxed", "gpu"), load(dtype, "acquire", "gpu"), store(dtype, "gpu")
    if bounded_waits.armed():
        poll = bounded_waits.bounded_change(dtype, acquire)
    else:

        @gpu_function
        def poll(address, before, arrived, blocks):
            while acquire(address) == before:
                pass

    def impl(state):
        cuda.syncthreads()
        if block_thread() == 0:
            arrived, passed = element_address(state, 0), element_address(state, 1)
            # Read before this block arrives: without it, the word cannot change.
            before = look(passed)
            last = cuda.gridDim.x * cuda.gridDim.y * cuda.gridDim.z - 1
            if arrive(arrived, 1) == dtype(last):
                reset(arrived, 0)
                release(passed, dtype(before + dtype(1)))
            else:
                poll(passed, before, arrived, last + 1)
        cuda.syncthreads()

    return impl
