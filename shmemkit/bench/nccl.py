"""NCCL, through CuPy's own bindings: what a user would take otherwise.

NVLink multicast stays off (NCCL_NVLS_ENABLE=0) unless the environment says otherwise: what is compared here
does not use it either. The JSON file has what the environment said.
"""

import gc
import os

from .measure import Contender
from .results import NCCL

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")


class Nccl(Contender):
    """The case's call, into private memory. ValueError from ``start`` where there is no NCCL."""

    method, _comm = NCCL, None

    def start(self, case):
        if self._comm is None:
            self._comm = self._connect()
        super().start(case)

    def call(self):
        address, case = self.world.backend.address, self._case
        case.nccl(self._comm, self._nccl, address(case.x), address(self.out), self.world.stream.ptr)

    def close(self):
        if self._comm is not None:
            gc.collect()  # NCCL waits for graphs that have captured its calls
            self._comm.destroy()

    def _connect(self):
        if self.world.backend.name == "emulator":
            raise ValueError("NCCL needs GPUs")
        from cupy.cuda import nccl

        if not nccl.available:
            raise ValueError(
                "CuPy finds no NCCL. Install the one of CuPy's CUDA version: pip install "
                "nvidia-nccl-cu13, or -cu12"
            )
        self._nccl = nccl
        number = self.world.comm.bcast(nccl.get_unique_id() if self.world.rank == 0 else None, root=0)
        try:
            return nccl.NcclCommunicator(self.world.n_ranks, number, self.world.rank)
        except nccl.NcclError as error:
            raise ValueError(f"NCCL: {error}") from error
