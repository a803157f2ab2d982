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


def _copying(primitive):
    """Decorator: NVSHMEM's function of the same name is the GPU implementation of ``primitive(team, dst,
    src)``.

    Elements move as unsigned integers of their size, so that every dtype has a function.
    """
    name = primitive.__name__

    @gpu(primitive)
    def _(team, dst_array, src_array):
        check_contiguous(name, dst_array=dst_array, src_array=src_array)
        check_integer(name, team=team)
        call = nvshmem(name)
        team_of = to_team()

        def impl(team, dst_array, src_array):
            call(team_of(team), unsigned_view(dst_array), unsigned_view(src_array))

        return impl

    return primitive


def _rooted(primitive):
    """Decorator: the same for ``primitive(team, dst, src, root=0)``."""
    name = primitive.__name__

    @gpu(primitive)
    def _(team, dst_array, src_array, root=0):
        check_contiguous(name, dst_array=dst_array, src_array=src_array)
        check_integer(name, team=team)
        call = nvshmem(name)
        team_of = to_team()

        def impl(team, dst_array, src_array, root=0):
            call(team_of(team), unsigned_view(dst_array), unsigned_view(src_array), types.int32(root))

        return impl

    return primitive


def _reducing(primitive):
    """Decorator: the same for ``primitive(team, dst, src, op)``."""
    name = primitive.__name__

    @gpu(primitive)
    def _(team, dst_array, src_array, op):
        check_contiguous(name, dst_array=dst_array, src_array=src_array)
        check_integer(name, team=team)
        dtype = dst_array.dtype
        if not (isinstance(dtype, types.Integer) or dtype in _FLOATS):
            raise TypingError(
                f"{name}(): dst_array is {described(dst_array)}; it must be of integers, float16, float32 or "
                "float64"
            )
        operation = literal_choice(
            name, "op", op, _INTEGER_OPS if isinstance(dtype, types.Integer) else _FLOAT_OPS
        )
        call = nvshmem(name)
        team_of = to_team()

        def impl(team, dst_array, src_array, op):
            call(team_of(team), dst_array, src_array, operation)

        return impl

    return primitive


# ---- broadcast


@_rooted
def broadcast(team: int, dst_array: Array, src_array: Array, root: int = 0) -> None:
    """Copy `src_array` of the team's rank number `root` to `dst_array` of all its ranks.

    team                   Teams.TEAM_WORLD, ...
    dst_array, src_array   of one dtype, any dtype and shape; ``min`` of their sizes is copied
    root                   number in the team

    One thread per rank. The root may write all `dst_array`s as soon as it has entered. What ranks read there
    before must come before that: `sync` between them.
    """
    current_thread("broadcast").collective("broadcast", team, dst_array, src_array, "thread", root=root)


@_rooted
def broadcast_warp(team: int, dst_array: Array, src_array: Array, root: int = 0) -> None:
    """`broadcast` by all threads of one warp per rank."""
    group_thread("warp", "broadcast_warp", team, dst_array, src_array, root).collective(
        "broadcast", team, dst_array, src_array, "warp", root=root
    )


@_rooted
def broadcast_block(team: int, dst_array: Array, src_array: Array, root: int = 0) -> None:
    """`broadcast` by all threads of one block per rank."""
    group_thread("block", "broadcast_block", team, dst_array, src_array, root).collective(
        "broadcast", team, dst_array, src_array, "block", root=root
    )


# ---- fcollect


@_copying
def fcollect(team: int, dst_array: Array, src_array: Array) -> None:
    """Gather: `src_array` of the team's rank number k becomes part k of every rank's `dst_array`.

    team                   Teams.TEAM_WORLD, ...
    dst_array, src_array   of one dtype, any dtype and shape; dst_array has team_n_pes(team) times
                           src_array's elements

    One thread per rank.
    """
    current_thread("fcollect").collective("fcollect", team, dst_array, src_array, "thread")


@_copying
def fcollect_warp(team: int, dst_array: Array, src_array: Array) -> None:
    """`fcollect` by all threads of one warp per rank."""
    group_thread("warp", "fcollect_warp", team, dst_array, src_array).collective(
        "fcollect", team, dst_array, src_array, "warp"
    )


@_copying
def fcollect_block(team: int, dst_array: Array, src_array: Array) -> None:
    """`fcollect` by all threads of one block per rank."""
    group_thread("block", "fcollect_block", team, dst_array, src_array).collective(
        "fcollect", team, dst_array, src_array, "block"
    )


# ---- alltoall


@_copying
def alltoall(team: int, dst_array: Array, src_array: Array) -> None:
    """Part k of `src_array` goes to rank number k of the team, into this rank's part of its `dst_array`.

    team                   Teams.TEAM_WORLD, ...
    dst_array, src_array   of one dtype and size, any dtype and shape, of team_n_pes(team) equal parts

    One thread per rank.
    """
    current_thread("alltoall").collective("alltoall", team, dst_array, src_array, "thread")


@_copying
def alltoall_warp(team: int, dst_array: Array, src_array: Array) -> None:
    """`alltoall` by all threads of one warp per rank."""
    group_thread("warp", "alltoall_warp", team, dst_array, src_array).collective(
        "alltoall", team, dst_array, src_array, "warp"
    )


@_copying
def alltoall_block(team: int, dst_array: Array, src_array: Array) -> None:
    """`alltoall` by all threads of one block per rank."""
    group_thread("block", "alltoall_block", team, dst_array, src_array).collective(
        "alltoall", team, dst_array, src_array, "block"
    )


# ---- reduce


@_reducing
def reduce(
    team: int,
    dst_array: Array,
    src_array: Array,
    op: TeamOp,
) -> None:
    """Combine the team's `src_array`s element by element, into every rank's `dst_array`.

    team                   Teams.TEAM_WORLD, ...
    dst_array, src_array   of one dtype and size: integers of 8 to 64 bits, float16, float32, float64
    op                     "sum", "prod", "min", "max", for integers also "and", "or", "xor"; a literal

    One thread per rank.
    """
    current_thread("reduce").collective("reduce", team, dst_array, src_array, "thread", op=op)


@_reducing
def reduce_warp(
    team: int,
    dst_array: Array,
    src_array: Array,
    op: TeamOp,
) -> None:
    """`reduce` by all threads of one warp per rank."""
    group_thread("warp", "reduce_warp", team, dst_array, src_array, op).collective(
        "reduce", team, dst_array, src_array, "warp", op=op
    )


@_reducing
def reduce_block(
    team: int,
    dst_array: Array,
    src_array: Array,
    op: TeamOp,
) -> None:
    """`reduce` by all threads of one block per rank."""
    group_thread("block", "reduce_block", team, dst_array, src_array, op).collective(
        "reduce", team, dst_array, src_array, "block", op=op
    )


# ---- reducescatter


@_reducing
def reducescatter(
    team: int,
    dst_array: Array,
    src_array: Array,
    op: TeamOp,
) -> None:
    """Combine the team's `src_array`s element by element; part k goes to `dst_array` of rank number k.

    team                   Teams.TEAM_WORLD, ...
    dst_array, src_array   of one dtype: integers of 8 to 64 bits, float16, float32, float64; src_array has
                           team_n_pes(team) times dst_array's elements
    op                     "sum", "prod", "min", "max", for integers also "and", "or", "xor"; a literal

    One thread per rank.
    """
    current_thread("reducescatter").collective("reducescatter", team, dst_array, src_array, "thread", op=op)


@_reducing
def reducescatter_warp(
    team: int,
    dst_array: Array,
    src_array: Array,
    op: TeamOp,
) -> None:
    """`reducescatter` by all threads of one warp per rank."""
    group_thread("warp", "reducescatter_warp", team, dst_array, src_array, op).collective(
        "reducescatter", team, dst_array, src_array, "warp", op=op
    )


@_reducing
def reducescatter_block(
    team: int,
    dst_array: Array,
    src_array: Array,
    op: TeamOp,
) -> None:
    """`reducescatter` by all threads of one block per rank."""
    group_thread("block", "reducescatter_block", team, dst_array, src_array, op).collective(
        "reducescatter", team, dst_array, src_array, "block", op=op
    )


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

    def impl(flag):
        return call(types.int64(flag))

    return impl


def give_smem(smem: Array) -> None:
    """Lend NVSHMEM the dynamic shared array `smem` until `release_smem`; contiguous, 16-byte aligned, a whole
    allocation of at least ``ask_smem(SmemAmount.SMEM_MINIMUM)`` bytes. All threads of every block.
    """
    group_thread("block", "give_smem", smem, meets=False)


@gpu(give_smem)
def _(smem):
    check_contiguous("give_smem", smem=smem)
    call = nvshmem("give_smem")

    def impl(smem):
        call(smem)

    return impl


def release_smem() -> None:
    """Take back what `give_smem` lent. All threads of every block, before the kernel ends."""
    group_thread("block", "release_smem", meets=False)


@gpu(release_smem)
def _():
    call = nvshmem("release_smem")

    def impl():
        call()

    return impl
