"""The types in shmemkit's signatures, also for your own: ``from shmemkit.typing import Array``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, SupportsIndex, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt


class SupportsDLPack(Protocol):
    """An array that shares its memory by DLPack: PyTorch's, JAX's, ..."""

    def __dlpack__(self, *, stream: Any = None) -> Any: ...
    def __dlpack_device__(self) -> tuple[Any, int]: ...


class SupportsCudaArrayInterface(Protocol):
    """An array on the GPU that shares its memory by the CUDA Array Interface."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class SupportsArrayInterface(Protocol):
    """An array in host memory, for the emulator."""

    @property
    def __array_interface__(self) -> dict[str, Any]: ...


class SupportsCudaStream(Protocol):
    """A stream of CuPy, Numba, cuda.core or PyTorch."""

    def __cuda_stream__(self) -> tuple[int, int]: ...


class Stream(SupportsCudaStream, Protocol):
    """``World.stream``: on GPUs CuPy's, which Numba and cuda.core take, too; the emulator's has these
    methods."""

    @property
    def ptr(self) -> int: ...
    @property
    def handle(self) -> Any: ...
    @property
    def done(self) -> bool: ...
    def synchronize(self) -> None: ...
    def record(self, event: Any = None) -> Any: ...
    def wait_event(self, event: Any) -> None: ...
    def begin_capture(self, mode: Any = None) -> None: ...
    def end_capture(self) -> Any: ...
    def is_capturing(self) -> bool: ...
    def use(self) -> Any: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, *_: object) -> None: ...


class Comm(Protocol):
    """What ``init(comm=)`` takes: an mpi4py communicator, or an object of your own with these three methods.

    It brings the ranks together: each calls ``allgather`` of a small object that can be pickled, and gets the
    list of all ranks' objects, by rank. From then on the ranks have connections of their own (sockets).
    """

    def Get_rank(self) -> int: ...
    def Get_size(self) -> int: ...
    def allgather(self, value: Any, /) -> list[Any]: ...


class Communicator(Comm, Protocol):
    """``World.comm``, and that of a group: mpi4py's, or an object with these of its methods. Values are
    objects that can be pickled. All but ``Get_rank``, ``Get_size`` and ``Abort`` are collective."""

    def bcast(self, value: Any, /, root: int = 0) -> Any: ...
    def gather(self, value: Any, /, root: int = 0) -> list[Any] | None: ...
    def barrier(self) -> None: ...
    def Split(self, color: int, key: int) -> Any: ...
    def Free(self) -> None: ...
    def Abort(self, status: int, /) -> Any: ...


if TYPE_CHECKING:  # neither CuPy nor PyTorch need be installed
    import cupy
    import torch

    Array: TypeAlias = np.ndarray | cupy.ndarray
    """What shmemkit makes: a CuPy array, on the emulator a NumPy array."""
    DType: TypeAlias = npt.DTypeLike | torch.dtype
    """A dtype of NumPy, ml_dtypes or PyTorch, or its name."""
    AnyStream: TypeAlias = SupportsCudaStream | torch.cuda.Stream | int
    """What calls take: a stream of CuPy, Numba, cuda.core or PyTorch, or its address."""
else:
    Array, DType, AnyStream = np.ndarray, npt.DTypeLike, SupportsCudaStream | int

AnyArray: TypeAlias = np.ndarray | SupportsDLPack | SupportsCudaArrayInterface | SupportsArrayInterface
"""What calls take: a CuPy array (on the emulator a NumPy array), a PyTorch tensor, or another array that
shares its memory."""

ArrayT = TypeVar("ArrayT", bound=AnyArray)
"""A new result is of its input's kind: a tensor for a tensor."""

Shape: TypeAlias = SupportsIndex | Sequence[SupportsIndex]
"""An integer, or a tuple of integers."""

# The words that arguments take, so that editors complete them. ``test_public_names.py`` compares these with
# what the library takes.
Backend: TypeAlias = Literal["auto", "nvshmem", "emulator"]
Op: TypeAlias = Literal["sum", "prod", "max", "min", "avg"]
TeamOp: TypeAlias = Literal["sum", "prod", "min", "max", "and", "or", "xor"]
Activation: TypeAlias = Literal["relu", "gelu", "silu"]
Delivery: TypeAlias = Literal["eager", "ordered", "unordered"]
Scope: TypeAlias = Literal["gpu", "sys"]
WaitSemantic: TypeAlias = Literal["acquire", "relaxed"]
SigOp: TypeAlias = Literal["set", "add"]
Comparison: TypeAlias = Literal["ge", "eq", "ne", "gt", "le", "lt"]
FenceScope: TypeAlias = Literal["block", "gpu", "sys"]
FenceSemantic: TypeAlias = Literal["seq_cst", "acq_rel"]
AttentionForm: TypeAlias = Literal["all_gather", "all_to_all"]
# Of collectives: docs/names.py writes them.
AllGatherMethod: TypeAlias = Literal[
    "auto",
    "ll",
    "ll128",
    "lamport",
    "pull",
    "push_1d",
    "ll_2d",
    "push_2d",
    "copy_push",
    "copy_pull",
    "copy_staged",
    "multimem",
    "ll_2d_multimem",
]
AllReduceMethod: TypeAlias = Literal[
    "auto",
    "one_shot",
    "one_shot_ll128",
    "one_shot_lamport",
    "two_shot_ll128",
    "push",
    "copy_engine",
    "ring",
    "double_tree",
    "multimem_one_shot",
    "multimem_two_shot",
]
AllToAllMethod: TypeAlias = Literal["auto", "ll", "ll128", "lamport", "push", "copy_engine", "push_2d"]
BroadcastMethod: TypeAlias = Literal["auto", "ll", "ll128", "lamport", "scatter", "push_2d"]
GatherMethod: TypeAlias = Literal["auto", "ll", "ll128", "push", "copy_engine", "push_2d"]
ReduceMethod: TypeAlias = Literal["auto", "ll", "ll128", "push", "copy_engine"]
ReduceScatterMethod: TypeAlias = Literal[
    "auto", "ll", "ll128", "lamport", "push", "ring", "copy_engine", "push_2d"
]
ScatterMethod: TypeAlias = Literal["auto", "ll", "ll128", "push"]
# Of others.
AllReduceRMSNormMethod: TypeAlias = Literal["auto", "one_shot", "two_shot"]
GemmMethod: TypeAlias = Literal["auto", "sm90", "sm80", "simt"]
GroupedGemmMethod: TypeAlias = Literal["auto", "sm90", "sm80"]
AllGatherGemmMethod: TypeAlias = Literal["auto", "push", "overlap", "overlap_2d", "sequential"]
AllGatherGroupedGemmMethod: TypeAlias = Literal["auto", "overlap", "sequential"]
GroupedGemmReduceScatterMethod: TypeAlias = Literal["auto", "gathered", "sequential"]
GemmReduceScatterMethod: TypeAlias = Literal[
    "auto", "ll128_overlap", "copy_engine", "fused", "fused_2d", "sequential"
]
GemmAllReduceMethod: TypeAlias = Literal[
    "auto", "one_shot", "two_shot", "two_shot_overlap", "copy_engine", "fused", "fused_2d", "sequential"
]
