"""PyTorch, where it is installed: NCCL through torch.distributed, PyTorch's symmetric memory, and products
that it overlaps with collectives.
"""

import contextlib
import socket
import sys
from collections.abc import Callable
from typing import Any

from shmemkit.runtime.symmetric_memory import as_dtype

from .measure import Contender
from .results import TORCH_AG_GEMM, TORCH_GEMM_RS, TORCH_NCCL


def stream_of(torch, world):
    """The World's stream, as PyTorch's."""
    return torch.cuda.ExternalStream(world.stream.ptr, device=world.xp.cuda.Device().id)


def tensor_of(torch, array):
    """The memory of a matrix of consecutive rows or columns, as PyTorch's."""
    by_row = array if array.flags.c_contiguous else array.T
    tensor = torch.from_dlpack(by_row.view(f"int{8 * array.itemsize}"))
    tensor = tensor.view(getattr(torch, array.dtype.name))
    return tensor if by_row is array else tensor.T


def array_of(xp, tensor):
    """The memory of a tensor, as CuPy's."""
    name = str(tensor.dtype).removeprefix("torch.")
    words = tensor.view(getattr(sys.modules["torch"], f"int{8 * tensor.itemsize}"))
    return xp.from_dlpack(words).view(as_dtype(name))


def transposed(torch, w):
    """(experts, N, K) -> the tensor (experts, K, N)"""
    return tensor_of(torch, w.reshape(-1, w.shape[2])).view(w.shape).transpose(1, 2)


def symmetric_empty(torch, *shape, **options):
    """-> (a tensor in PyTorch's symmetric memory, the name of the group of its ranks)"""
    import torch.distributed._symmetric_memory as symmetric

    group = torch.distributed.group.WORLD.group_name
    tensor = symmetric.empty(*shape, **options)
    symmetric.rendezvous(tensor, group)
    return tensor, group


def leave():
    """Leave PyTorch's process group, if there is one."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


class TorchCall(Contender):
    """What they have in common: one process group, with a communicator of its own besides that of
    ``nccl.Nccl``; calls on the World's stream; and CUDA graphs of PyTorch's, because its calls allocate and
    keep events.

    ValueError where PyTorch cannot be used. A subclass has `method`, and

    prepare(torch, case)  -> run: ``run()`` enqueues a call, and returns the tensor with the result, unless
                          that goes into a tensor of ``writes``
    fill                  ``prepare`` may set it: ``fill()`` takes over what has changed in the case's data
    in_place              a call changes what it reads: single ones are checked
    distributed           False if it needs no process group
    """

    method: str
    distributed, in_place = True, False
    kept = False  # the process group is for others, too, to the program's end
    prepare: Callable
    fill: Callable | None = None
    _torch: Any = None
    _run: Any = None
    _result: Any = None
    _out: Any = None

    def start(self, case):
        if self.world.backend.name == "emulator":
            raise ValueError("what PyTorch is compared for needs GPUs")
        try:
            import torch
            import torch.distributed
        except ImportError as error:
            raise ValueError(f"PyTorch is not installed ({error}): pip install torch") from error
        self._torch = torch
        with refusing():
            if self.distributed and not torch.distributed.is_initialized():
                self._connect()
            self._stream = stream_of(torch, self.world)
            with torch.cuda.stream(self._stream):
                self._run = self.prepare(torch, case)

    def writes(self, torch, case):
        """-> the tensor of an array for the result"""
        self._out = case.output()
        return tensor_of(torch, self._out)

    @property
    def out(self):
        if self._result is None:
            return self._out
        with self._torch.cuda.stream(self._stream):
            return array_of(self.world.xp, self.shown(self._result))

    def shown(self, result):
        """The result as ours is."""
        return result

    def call(self):
        with refusing(), self._torch.cuda.stream(self._stream):
            self._result = self._run()

    def capture(self, iters):
        cuda = self._torch.cuda
        graph = cuda.CUDAGraph()
        with refusing(), cuda.graph(graph, stream=self._stream):
            for _ in range(iters):
                self._result = self._run()

        def replay():
            with cuda.stream(self._stream):
                graph.replay()

        return replay

    def repeat(self, replay):
        if self.fill:
            with self._torch.cuda.stream(self._stream):
                self.fill()
        (self.call if self.in_place else replay)()

    def stop(self):
        self._run = self._result = self._out = self.fill = None

    def close(self):
        """Leave the process group; the first one that is closed does."""
        if self._torch is not None and not self.kept:
            leave()

    def _connect(self):
        cuda, world, port = self._torch.cuda, self.world, None
        if world.rank == 0:
            with socket.socket() as probe:
                probe.bind(("", 0))
                port = probe.getsockname()[1]
        hosts, ports = zip(*world.comm.allgather((socket.gethostname(), port)), strict=True)
        host = hosts[0] if len(set(hosts)) > 1 else "127.0.0.1"  # some hosts do not know their own name
        number = world.xp.cuda.Device().id
        cuda.set_device(number)
        self._torch.distributed.init_process_group(
            "nccl",
            init_method=f"tcp://{host}:{ports[0]}",
            rank=world.rank,
            world_size=world.n_ranks,
            device_id=self._torch.device("cuda", number),
        )


class TorchNccl(TorchCall):
    """The case's call of ``torch.distributed`` between the arrays that NCCL gets through CuPy."""

    method = TORCH_NCCL

    def prepare(self, torch, case):
        self._out = case.output()
        x, out = (torch.from_dlpack(array.view("uint8")) for array in (case.x, self._out))
        return lambda: case.torch(torch.distributed, x, out)


class _TorchSymmetric(TorchCall):
    """Of a symmetric input of PyTorch's, without multicast. A subclass has `op`, which it is compared for,
    and result_of(ops, x, group) -> the tensor with the result."""

    op: str
    result_of: Callable

    def prepare(self, torch, case):
        if case.op != self.op:
            raise ValueError(f"it is compared for {self.op} only")
        device = torch.device("cuda", torch.cuda.current_device())
        dtype = getattr(torch, case.x.dtype.name)
        x, group = symmetric_empty(torch, case.x.size, dtype=dtype, device=device)
        given = torch.from_dlpack(case.x.view("uint8"))
        self.fill = lambda: x.view(torch.uint8).copy_(given)
        self.fill()
        return lambda: self.result_of(torch.ops, x, group)


class TorchSymmetric(_TorchSymmetric):
    """``torch.ops.symm_mem._low_contention_all_gather``, by copy engines; the output is PyTorch's."""

    method, op = "torch symm_mem", "all_gather"

    def result_of(self, ops, x, group):
        gathered = ops.symm_mem._low_contention_all_gather(x, group)
        return ops._c10d_functional.wait_tensor(gathered)


class TorchOneShot(_TorchSymmetric):
    """``torch.ops.symm_mem.one_shot_all_reduce``; the output is PyTorch's."""

    method, op = "torch symm_mem one_shot", "all_reduce"

    def result_of(self, ops, x, group):
        return ops.symm_mem.one_shot_all_reduce(x, "sum", group)


class TorchTwoShot(_TorchSymmetric):
    """``torch.ops.symm_mem.two_shot_all_reduce_``: calls in a row add up what is there."""

    method, op, in_place = "torch symm_mem two_shot", "all_reduce", True

    def result_of(self, ops, x, group):
        return ops.symm_mem.two_shot_all_reduce_(x, "sum", group)


class _TorchFused(TorchCall):
    """A product and a collective in one, the output is PyTorch's. Not in a graph, which it cannot be captured
    in. A subclass has fused(ops, x, b, group) -> the tensor with the result."""

    fused: Callable

    def prepare(self, torch, case):
        import torch.distributed._symmetric_memory as symmetric

        group = torch.distributed.group.WORLD.group_name
        symmetric.enable_symm_mem_for_group(group)
        x, b = (tensor_of(torch, array) for array in (case.x, case.b))
        return lambda: self.fused(torch.ops.symm_mem, x, b, group)

    def capture(self, iters):
        def replay():
            for _ in range(iters):
                self.call()

        return replay


class TorchGatherProduct(_TorchFused):
    """``torch.ops.symm_mem.fused_all_gather_matmul``; nobody wants the gathered rows."""

    method = TORCH_AG_GEMM

    def fused(self, ops, x, b, group):
        _, (result,) = ops.fused_all_gather_matmul(x, [b], 0, group, return_A=False)
        return result


class TorchProductScatter(_TorchFused):
    """``torch.ops.symm_mem.fused_matmul_reduce_scatter``."""

    method = TORCH_GEMM_RS

    def fused(self, ops, x, b, group):
        return ops.fused_matmul_reduce_scatter(x, b, "sum", 0, group)


@contextlib.contextmanager
def refusing():
    """Whatever PyTorch raises is a reason not to compare with it: a row, not a crash."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {str(error)[:200]}") from error
