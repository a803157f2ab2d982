"""The names of Triton-distributed's ``triton_dist.language``, for kernels in Numba.

    from shmemkit.compat import triton_distributed as dl

The parameters have that project's names (but for `symm_at`, ours: give its arguments by position) and
meaning, its defaults but for one (`notify`'s comm_scope), and a pointer plus an offset is a slice:
``signal_ptr + i`` is ``signal_ptr[i:]``. docs/triton_distributed.md has the names side by side.
"""

from typing import Literal

from numba import cuda

from shmemkit import device
from shmemkit.compiler.ptx import gpu
from shmemkit.device import consume_token, symm_at
from shmemkit.device.argument_checks import check_choice, literal_choice
from shmemkit.device.emulator import current_thread
from shmemkit.typing import Array, Scope, SigOp, WaitSemantic

__all__ = ["consume_token", "notify", "num_ranks", "rank", "symm_at", "wait"]

_SCOPES: dict[str, Scope] = {"gpu": "gpu", "intra_node": "sys"}
_COMM_SCOPES = tuple(_SCOPES)
_AXES = (-1,)


def wait(
    barrierPtrs: Array,
    numBarriers: int,
    scope: Scope,
    semantic: WaitSemantic,
    waitValue: int = 1,
) -> int:
    """Wait until each of ``barrierPtrs[0] .. barrierPtrs[numBarriers - 1]`` equals `waitValue`. -> a token

    barrierPtrs  the signals: 1-D, of uint64, int64, uint32 or int32; this rank's, or a peer's (`symm_at`)
    numBarriers  how many
    scope        "gpu" if the notifying threads run on this GPU, else "sys"; a literal
    semantic     "acquire": the calling thread's later accesses see what preceded the notify; or "relaxed"; a
                 literal
    waitValue    an integer. A value beyond it does not end the wait
    ->           the value read of the last signal, for `consume_token`

    Each calling thread waits for itself, so either all threads of a block call it, as a Triton program does,
    or one does and ``cuda.syncthreads()`` follows. It is ``shmemkit.device.wait`` with compare="eq", which
    has the rest.
    """
    return device.wait(barrierPtrs, numBarriers, scope, semantic, waitValue, "eq")


@gpu(wait)
def _(barrierPtrs, numBarriers, scope, semantic, waitValue=1):
    def impl(barrierPtrs, numBarriers, scope, semantic, waitValue=1):
        return device.wait(barrierPtrs, numBarriers, scope, semantic, waitValue, "eq")

    return impl


def notify(
    ptr: Array,
    rank: int,
    signal: int = 1,
    sig_op: SigOp = "set",
    comm_scope: Literal["gpu", "intra_node"] = "intra_node",
) -> None:
    """Thread 0 of the block sets the signal ``ptr[0]`` on `rank` to `signal`, or adds `signal` to it, as a
    release. Calls by other threads do nothing.

    ptr         symmetric, 1-D, of uint64, int64, uint32 or int32
    rank        the rank whose signal it is
    signal      an integer
    sig_op      "set" or "add"; a literal
    comm_scope  "intra_node" (default; Triton-distributed's is "inter_node"): a rank of this node. "gpu": this
                rank. A literal. "inter_node" is an error: `put_signal` and `signal_op` reach other nodes

    So all threads of a block may call it, as a Triton program does. It publishes what thread 0 did and saw
    before; for what the other threads did, ``cuda.syncthreads()`` comes first.
    """
    thread = current_thread("notify")
    check_choice("notify", "comm_scope", comm_scope, _COMM_SCOPES)
    if thread.thread_id == 0:
        device.notify(ptr, rank, signal, sig_op, _SCOPES[comm_scope])


@gpu(notify)
def _(ptr, rank, signal=1, sig_op="set", comm_scope="intra_node"):
    scope = _SCOPES[literal_choice("notify", "comm_scope", comm_scope, _COMM_SCOPES)]

    def impl(ptr, rank, signal=1, sig_op="set", comm_scope="intra_node"):
        if cuda.threadIdx.x + cuda.threadIdx.y + cuda.threadIdx.z == 0:
            device.notify(ptr, rank, signal, sig_op, scope)  # pyright: ignore[reportArgumentType]

    return impl


def rank(axis: int = -1) -> int:
    """This rank, 0 .. num_ranks() - 1. `axis` is -1: ranks have one dimension here."""
    check_choice("rank", "axis", axis, _AXES)
    return device.rank()


@gpu(rank)
def _(axis=-1):
    literal_choice("rank", "axis", axis, _AXES)
    return lambda axis=-1: device.rank()


def num_ranks(axis: int = -1) -> int:
    """How many ranks there are. `axis` is -1: ranks have one dimension here."""
    check_choice("num_ranks", "axis", axis, _AXES)
    return device.num_ranks()


@gpu(num_ranks)
def _(axis=-1):
    literal_choice("num_ranks", "axis", axis, _AXES)
    return lambda axis=-1: device.num_ranks()
