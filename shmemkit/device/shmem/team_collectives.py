"""OpenSHMEM's collectives from inside a kernel, through NVSHMEM: over NVLink or the network.

Every rank of the team calls the same function with the same team, sizes and dtype, in the same order: one
thread of the rank, or all threads of one warp (`_warp`) or block (`_block`). All arrays are symmetric and
contiguous. When it returns, this rank's `dst` is complete and its `src` may be overwritten. It does not say
whether other ranks have finished: call `sync` or `barrier` before you write an array that others may still
read.

A rank gets data from all ranks of the team; in a broadcast, from the root alone. What those ranks did before
their calls comes before what this rank does after its own. No collective completes a put.
"""

from __future__ import annotations

from typing import get_args

from shmemkit.compiler.ptx import (
    TypingError,
    data_address,
    gpu,
    gpu_moved,
    pointer_address,
    types,
    unsigned_view,
    void_pointer,
)
from shmemkit.typing import Array, TeamOp

from ..argument_checks import check_array, check_contiguous, check_integer, described, literal_choice
from ..emulator import current_thread, group_thread, multicast_memory
from .groups import ENTER, called_by, called_by_a_thread
from .nvshmem_functions import nvshmem, to_team

__all__ = [
    "alltoall",
    "alltoall_block",
    "alltoall_warp",
    "ask_smem",
    "broadcast",
    "broadcast_block",
    "broadcast_warp",
    "fcollect",
    "fcollect_block",
    "fcollect_warp",
    "get_multicast_array",
    "give_smem",
    "reduce",
    "reduce_block",
    "reduce_warp",
    "reducescatter",
    "reducescatter_block",
    "reducescatter_warp",
    "release_smem",
]

_FLOAT_OPS = ("sum", "prod", "min", "max")
_INTEGER_OPS = get_args(TeamOp)
_FLOATS = (types.float16, types.float32, types.float64)


_CALLERS = "all threads of one {} per rank"


def _copying(kind, name, group):
    """The family of ``fcollect(team, dst, src)``. On the GPU it is NVSHMEM's function of that name. Elements
    move as unsigned integers of their size, so that every dtype has a function."""
    enter = ENTER[group]

    def collective(team, dst_array, src_array):
        thread = enter(group, name, team, dst_array, src_array)
        thread.collective(kind, team, dst_array, src_array, group)

    def on_gpu(team, dst_array, src_array):
        check_contiguous(name, dst_array=dst_array, src_array=src_array)
        check_integer(name, team=team)
        call = nvshmem(name)
        team_of = to_team()

        def impl(team, dst_array, src_array):
            call(team_of(team), unsigned_view(dst_array), unsigned_view(src_array))

        return impl

    return collective, on_gpu


def _rooted(kind, name, group):
    """Likewise that of ``broadcast(team, dst, src, root=0)``."""
    enter = ENTER[group]

    def collective(team, dst_array, src_array, root=0):
        thread = enter(group, name, team, dst_array, src_array, root)
        thread.collective(kind, team, dst_array, src_array, group, root=root)

    def on_gpu(team, dst_array, src_array, root=0):
        check_contiguous(name, dst_array=dst_array, src_array=src_array)
        check_integer(name, team=team)
        call = nvshmem(name)
        team_of = to_team()

        def impl(team, dst_array, src_array, root=0):
            call(team_of(team), unsigned_view(dst_array), unsigned_view(src_array), types.int32(root))

        return impl

    return collective, on_gpu


def _reducing(kind, name, group):
    """Likewise that of ``reduce(team, dst, src, op)``."""
    enter = ENTER[group]

    def collective(team, dst_array, src_array, op):
        thread = enter(group, name, team, dst_array, src_array, op)
        thread.collective(kind, team, dst_array, src_array, group, op=op)

    def on_gpu(team, dst_array, src_array, op):
        check_contiguous(name, dst_array=dst_array, src_array=src_array)
        check_integer(name, team=team)
        dtype = dst_array.dtype
        if not (isinstance(dtype, types.Integer) or dtype in _FLOATS):
            raise TypingError(
                f"{name}(): dst_array is {described(dst_array)}; it must be of integers, float16, float32 or "
                "float64"
            )
        ops = _INTEGER_OPS if isinstance(dtype, types.Integer) else _FLOAT_OPS
        operation = literal_choice(name, "op", op, ops)
        call = nvshmem(name)
        team_of = to_team()
        return lambda team, dst_array, src_array, op: call(team_of(team), dst_array, src_array, operation)

    return collective, on_gpu


# ---- broadcast


@called_by_a_thread(_rooted, _CALLERS)
def broadcast(team: int, dst_array: Array, src_array: Array, root: int = 0) -> None:
    """Copy `src_array` of the team's rank number `root` to `dst_array` of all its ranks.

    team                   Teams.TEAM_WORLD, ...
    dst_array, src_array   of one dtype, any dtype and shape; ``min`` of their sizes is copied
    root                   number in the team

    One thread per rank. The root may write all `dst_array`s as soon as it has entered. What ranks read there
    before must come before that: `sync` between them.
    """


broadcast_warp = called_by("warp", broadcast)
"""`broadcast` by all threads of one warp per rank."""
broadcast_block = called_by("block", broadcast)
"""`broadcast` by all threads of one block per rank."""


# ---- fcollect


@called_by_a_thread(_copying, _CALLERS)
def fcollect(team: int, dst_array: Array, src_array: Array) -> None:
    """Gather: `src_array` of the team's rank number k becomes part k of every rank's `dst_array`.

    team                   Teams.TEAM_WORLD, ...
    dst_array, src_array   of one dtype, any dtype and shape; dst_array has team_n_pes(team) times
                           src_array's elements

    One thread per rank.
    """


fcollect_warp = called_by("warp", fcollect)
"""`fcollect` by all threads of one warp per rank."""
fcollect_block = called_by("block", fcollect)
"""`fcollect` by all threads of one block per rank."""


# ---- alltoall


@called_by_a_thread(_copying, _CALLERS)
def alltoall(team: int, dst_array: Array, src_array: Array) -> None:
    """Part k of `src_array` goes to rank number k of the team, into this rank's part of its `dst_array`.

    team                   Teams.TEAM_WORLD, ...
    dst_array, src_array   of one dtype and size, any dtype and shape, of team_n_pes(team) equal parts

    One thread per rank.
    """


alltoall_warp = called_by("warp", alltoall)
"""`alltoall` by all threads of one warp per rank."""
alltoall_block = called_by("block", alltoall)
"""`alltoall` by all threads of one block per rank."""


# ---- reduce


@called_by_a_thread(_reducing, _CALLERS)
def reduce(team: int, dst_array: Array, src_array: Array, op: TeamOp) -> None:
    """Combine the team's `src_array`s element by element, into every rank's `dst_array`.

    team                   Teams.TEAM_WORLD, ...
    dst_array, src_array   of one dtype and size: integers of 8 to 64 bits, float16, float32, float64
    op                     "sum", "prod", "min", "max", for integers also "and", "or", "xor"; a literal

    One thread per rank.
    """


reduce_warp = called_by("warp", reduce)
"""`reduce` by all threads of one warp per rank."""
reduce_block = called_by("block", reduce)
"""`reduce` by all threads of one block per rank."""


# ---- reducescatter


@called_by_a_thread(_reducing, _CALLERS)
def reducescatter(team: int, dst_array: Array, src_array: Array, op: TeamOp) -> None:
    """Combine the team's `src_array`s element by element; part k goes to `dst_array` of rank number k.

    team                   Teams.TEAM_WORLD, ...
    dst_array, src_array   of one dtype: integers of 8 to 64 bits, float16, float32, float64; src_array has
                           team_n_pes(team) times dst_array's elements
    op                     "sum", "prod", "min", "max", for integers also "and", "or", "xor"; a literal

    One thread per rank.
    """


reducescatter_warp = called_by("warp", reducescatter)
"""`reducescatter` by all threads of one warp per rank."""
reducescatter_block = called_by("block", reducescatter)
"""`reducescatter` by all threads of one block per rank."""


# ---- multicast and shared memory


def get_multicast_array(team: int, arr: Array) -> Array:
    """The multicast view of `arr`, for the functions that begin with multimem_.

    A store to it goes to all ranks of `team`, and a load combines theirs. ``World.multicast_view`` makes one,
    too, and raises an error that says why there is none.

    arr   symmetric, any dtype and shape
    ->    an array of the same type and shape

    Any thread. It needs NVLink SHARP (NVLS) and an environment that allows it; otherwise the address is null.
    On the emulator the ranks of a node have it, and no other team.
    """
    thread = current_thread("get_multicast_array")
    return multicast_memory.view(thread, team, arr)


@gpu_moved(get_multicast_array)
def _(team, arr):
    check_integer("get_multicast_array", team=team)
    check_array("get_multicast_array", "arr", arr, contiguous=False)
    call = nvshmem("mc_ptr")
    team_of = to_team()

    def impl(team, arr):
        return types.uint64(pointer_address(call(team_of(team), void_pointer(arr))) - data_address(arr))

    return impl


def ask_smem(flag: int) -> int:
    """Bytes of dynamic shared memory that NVSHMEM can use for its own transfers. Any thread.

    flag   SmemAmount.SMEM_RECOMMENDED, SMEM_MINIMUM or SMEM_BARRIERS_ONLY; the emulator needs none
    """
    current_thread("ask_smem")
    return 0


@gpu(ask_smem)
def _(flag):
    check_integer("ask_smem", flag=flag)
    call = nvshmem("ask_smem")
    return lambda flag: call(types.int64(flag))


def give_smem(smem: Array) -> None:
    """Lend NVSHMEM the dynamic shared array `smem` until `release_smem`; contiguous, 16-byte aligned, a whole
    allocation of at least ``ask_smem(SmemAmount.SMEM_MINIMUM)`` bytes. All threads of every block.
    """
    group_thread("block", "give_smem", smem, meets=False)


@gpu(give_smem)
def _(smem):
    check_contiguous("give_smem", smem=smem)
    call = nvshmem("give_smem")
    return lambda smem: call(smem)


def release_smem() -> None:
    """Take back what `give_smem` lent. All threads of every block, before the kernel ends."""
    group_thread("block", "release_smem", meets=False)


@gpu(release_smem)
def _():
    call = nvshmem("release_smem")
    return lambda: call()
