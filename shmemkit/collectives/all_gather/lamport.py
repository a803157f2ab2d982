"""All-gather by Lamport packets, with no byte more than the data have.

``shmemkit.collectives.lamport`` has the protocol and the kernel: all ranks get x.
"""

from .. import lamport


class Lamport(lamport.Lamport):
    """The method "lamport" of ``AllGather``."""

    name, personalized = "all_gather lamport", False


GPU_KERNELS = lamport.gpu_kernels("all_gather", False, False)
