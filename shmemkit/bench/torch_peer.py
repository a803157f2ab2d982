"""PyTorch, where it is installed: NCCL through torch.distributed, PyTorch's symmetric memory, and products
that it overlaps with collectives.
"""

import contextlib
import socket
import sys
from collections.abc import Callable
from typing import Any

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


def leave():
    """Leave PyTorch's process group, if there is one."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


class TorchCall(Contender):
    """What they have in common: one process group, with a communicator of its own besides that of
    ``nccl.Nccl``; calls on the World's stream; and CUDA graphs of PyTorch's, because its calls allocate and
    keep events.

    ValueError where PyTorch cannot be used. A subclass has `method`, `out`, prepare() and run();
    `distributed` is False if it needs no process group.
    """

    method: str
    distributed, kept = True, False  # kept: the process group is for others, too, to the program's end
    prepare: Callable
    run: Callable
    _torch: Any = None
    _case: Any = None
    _x: Any = None

    def start(self, case):
        if self.world.backend.name == "emulator":
            raise ValueError("what PyTorch is compared for needs GPUs")
        try:
            import torch
            import torch.distributed
        except ImportError as error:
            raise ValueError(f"PyTorch is not installed ({error}): pip install torch") from error
        self._torch, self._case = torch, case
        with refusing():
            if self.distributed and not torch.distributed.is_initialized():
                self._connect()
            self._stream = stream_of(torch, self.world)
            with torch.cuda.stream(self._stream):
                self.prepare()

    def call(self):
        with refusing(), self._torch.cuda.stream(self._stream):
            self.run()

    def capture(self, iters):
        cuda = self._torch.cuda
        graph = cuda.CUDAGraph()
        with refusing(), cuda.graph(graph, stream=self._stream):
            for _ in range(iters):
                self.run()

        def replay():
            with cuda.stream(self._stream):
                graph.replay()

        return replay

    def stop(self):
        self._x = self._case = None

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
    out = None

    def prepare(self):
        self.out = self._case.output()
        self._x, self._out = (self._torch.from_dlpack(a.view("uint8")) for a in (self._case.x, self.out))

    def run(self):
        self._case.torch(self._torch.distributed, self._x, self._out)

    def stop(self):
        super().stop()
        self.out = self._out = None


class _TorchSymmetric(TorchCall):
    """Of a symmetric input of PyTorch's, without multicast. A subclass has `op`, which it is compared for,
    and result_of(ops, x, group) -> the tensor with the result."""

    op: str
    result_of: Callable
    _result: Any = None

    @property
    def out(self):
        if self._result is None:
            return None
        return self.world.xp.from_dlpack(self._result.view(self._torch.uint8))

    def prepare(self):
        if self._case.op != self.op:
            raise ValueError(f"it is compared for {self.op} only")
        import torch.distributed._symmetric_memory as symmetric

        torch, x = self._torch, self._case.x
        self._group = torch.distributed.group.WORLD.group_name
        device = torch.device("cuda", torch.cuda.current_device())
        self._x = symmetric.empty(x.size, dtype=getattr(torch, x.dtype.name), device=device)
        symmetric.rendezvous(self._x, self._group)
        self._fill()

    def run(self):
        self._result = self.result_of(self._torch.ops, self._x, self._group)

    def repeat(self, replay):
        with self._torch.cuda.stream(self._stream):
            self._fill()
        replay()

    def stop(self):
        super().stop()
        self._result = None

    def _fill(self):
        bits = self._torch.from_dlpack(self._case.x.view("uint8"))
        self._x.view(self._torch.uint8).copy_(bits)


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
    """``torch.ops.symm_mem.two_shot_all_reduce_``, which works in place: calls in a row add up what is there,
    so that single ones are checked."""

    method, op = "torch symm_mem two_shot", "all_reduce"

    def result_of(self, ops, x, group):
        return ops.symm_mem.two_shot_all_reduce_(x, "sum", group)

    def repeat(self, replay):
        super().repeat(self.call)


class _TorchFused(TorchCall):
    """A product and a collective in one, the output is PyTorch's. Not in a graph, which it cannot be captured
    in. A subclass has fused(ops, x, b, group) -> the tensor with the result."""

    fused: Callable
    _b: Any = None
    _result: Any = None

    @property
    def out(self):
        if self._result is None:
            return None
        words = self._result.view(self._torch.int16)
        return self.world.xp.from_dlpack(words).view(self._case.dtype)

    def prepare(self):
        import torch.distributed._symmetric_memory as symmetric

        self._group = self._torch.distributed.group.WORLD.group_name
        symmetric.enable_symm_mem_for_group(self._group)
        self._x, self._b = (tensor_of(self._torch, array) for array in (self._case.x, self._case.b))

    def run(self):
        self._result = self.fused(self._torch.ops.symm_mem, self._x, self._b, self._group)

    def capture(self, iters):
        def replay():
            for _ in range(iters):
                self.call()

        return replay

    def stop(self):
        super().stop()
        self._b = self._result = None


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
