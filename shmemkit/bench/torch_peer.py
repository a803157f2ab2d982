"""PyTorch, where it is installed: NCCL through torch.distributed, and PyTorch's symmetric memory."""

import contextlib
import os
import socket

from .results import TORCH_NCCL

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


class TorchCall:
    """What the two have in common: one process group, with a communicator of its own beside that of
    ``nccl.Nccl``; calls on the World's stream; and CUDA graphs of PyTorch's, because its calls allocate and
    keep events.

    ValueError where PyTorch cannot be used. A subclass has `method`, `out`, prepare(), run() and repeat().
    """

    def __init__(self, world):
        self.world, self._torch, self._case, self._x = world, None, None, None

    def start(self, case):
        if self.world.backend.name == "emulator":
            raise ValueError("PyTorch's collectives need GPUs")
        try:
            import torch
            import torch.distributed
        except ImportError as error:
            raise ValueError(f"PyTorch is not installed ({error})") from error
        self._torch, self._case = torch, case
        with _refusing():
            if not torch.distributed.is_initialized():
                self._connect()
            self._stream = torch.cuda.ExternalStream(self.world.stream.ptr)
            with torch.cuda.stream(self._stream):
                self.prepare()

    def call(self):
        with _refusing(), self._torch.cuda.stream(self._stream):
            self.run()

    def capture(self, iters):
        cuda = self._torch.cuda
        graph = cuda.CUDAGraph()
        with _refusing(), cuda.graph(graph, stream=self._stream):
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
        if self._torch is None:
            return
        distributed = self._torch.distributed
        if distributed.is_available() and distributed.is_initialized():
            distributed.destroy_process_group()

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

    def repeat(self, replay):
        replay()  # PyTorch's tensor is the same memory

    def stop(self):
        super().stop()
        self.out = self._out = None


class _TorchSymmetric(TorchCall):
    """Of a symmetric input of PyTorch's, without multicast. A subclass has `op`, which it is compared for,
    and result_of(ops, x, group) -> the tensor with the result."""

    _result = None

    @property
    def out(self):
        if self._result is None:
            return None
        return self.world.xp.from_dlpack(self._result.view(self._torch.uint8))

    def prepare(self):
        if self._case.op != self.op:
            raise ValueError(f"compared for {self.op} only")
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


@contextlib.contextmanager
def _refusing():
    """Whatever PyTorch raises is a reason not to compare with it: a row, not a crash."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {str(error)[:200]}") from error
