"""NCCL, through CuPy's own bindings: what a user would take otherwise.

NVLink multicast stays off (NCCL_NVLS_ENABLE=0) unless the environment says otherwise: what is compared here
does not use it either. The JSON file has what the environment said.
"""

import os

from .results import NCCL

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")


class Nccl:
    """The case's call, into private memory. ValueError from ``start`` where there is no NCCL."""

    method, capture = NCCL, None

    def __init__(self, world):
        self.world, self._comm, self.out = world, None, None

    def start(self, case):
        if self._comm is None:
            self._comm = self._connect()
        self._case, self._x, self.out = case, case.x, case.output()

    def call(self):
        x, out, stream = self._x.data.ptr, self.out.data.ptr, self.world.stream.ptr
        self._case.nccl(self._comm, self._nccl, x, out, stream)

    def repeat(self, replay):
        replay()

    def stop(self):
        self._case = self._x = self.out = None

    def close(self):
        if self._comm is not None:
            self._comm.destroy()

    def _connect(self):
        if self.world.backend.name == "emulator":
            raise ValueError("NCCL needs GPUs")
        from cupy.cuda import nccl

        if not nccl.available:
            raise ValueError(
                "CuPy finds no NCCL: pip install nvidia-nccl-cu13 (or nvidia-nccl-cu12), as CuPy's version"
            )
        self._nccl = nccl
        number = self.world.comm.bcast(nccl.get_unique_id() if self.world.rank == 0 else None, root=0)
        try:
            return nccl.NcclCommunicator(self.world.n_ranks, number, self.world.rank)
        except nccl.NcclError as error:
            raise ValueError(f"NCCL: {error}") from error
