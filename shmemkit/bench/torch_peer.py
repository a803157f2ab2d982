"""PyTorch's symmetric memory, where it is installed: its all-gather without multicast, by copy engines."""

import contextlib
import os
import socket

os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")


class TorchSymmetric:
    """``torch.ops.symm_mem._low_contention_all_gather`` of a symmetric input; the output is PyTorch's.

    ValueError where PyTorch, or its symmetric memory, cannot be used.
    """

    method = "torch symm_mem"

    def __init__(self, world):
        self.world, self._group, self._result = world, None, None

    @property
    def out(self):
        return None if self._result is None else self.world.xp.from_dlpack(self._result)

    def start(self, case):
        if self.world.backend.name == "emulator":
            raise ValueError("PyTorch's symmetric memory needs GPUs")
        try:
            import torch
            import torch.distributed._symmetric_memory as symmetric
        except ImportError as error:
            raise ValueError(f"PyTorch is not installed ({error})") from error
        self._torch, self._case = torch, case
        with _refusing():
            if self._group is None:
                self._group = self._connect()
            self._stream = torch.cuda.ExternalStream(self.world.stream.ptr)
            with torch.cuda.stream(self._stream):
                device = torch.device("cuda", torch.cuda.current_device())
                self._x = symmetric.empty(case.x.nbytes, dtype=torch.uint8, device=device)
                symmetric.rendezvous(self._x, self._group)
            self.changed()

    def changed(self):
        with self._torch.cuda.stream(self._stream):
            self._x.copy_(self._torch.from_dlpack(self._case.x.view("uint8")))

    def gather(self):
        with _refusing(), self._torch.cuda.stream(self._stream):
            self._call()

    def capture(self, iters):
        """In a graph of PyTorch's: the call allocates."""
        cuda = self._torch.cuda
        graph = cuda.CUDAGraph()
        with _refusing(), cuda.graph(graph, stream=self._stream):
            for _ in range(iters):
                self._call()

        def replay():
            with cuda.stream(self._stream):
                graph.replay()

        return replay

    def stop(self):
        self._x = self._result = self._case = None

    def close(self):
        if self._group is not None:
            self._torch.distributed.destroy_process_group()

    def _call(self):
        ops = self._torch.ops
        gathered = ops.symm_mem._low_contention_all_gather(self._x, self._group)
        self._result = ops._c10d_functional.wait_tensor(gathered)

    def _connect(self):
        import torch.distributed as dist

        world, place = self.world, None
        if world.rank == 0:
            with socket.socket() as probe:
                probe.bind(("", 0))
                place = f"{socket.gethostname()}:{probe.getsockname()[1]}"
        place = world.comm.bcast(place, root=0)
        self._torch.cuda.set_device(world.xp.cuda.Device().id)
        dist.init_process_group(
            "nccl", init_method=f"tcp://{place}", rank=world.rank, world_size=world.n_ranks
        )
        return dist.group.WORLD.group_name


@contextlib.contextmanager
def _refusing():
    """Whatever PyTorch raises is a reason not to compare with it: a row, not a crash."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{type(error).__name__}: {str(error)[:200]}") from error
