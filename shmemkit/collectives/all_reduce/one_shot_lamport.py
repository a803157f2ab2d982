"""All-reduce in one shot, by Lamport packets: each rank sends its whole array to all others.

``shmemkit.collectives.lamport`` has the protocol and the kernel: all ranks get the whole x, and combine what
they receive.
"""

from .. import lamport


class OneShotLamport(lamport.Lamport):
    """The method "one_shot_lamport" of ``AllReduce``."""

    name, personalized, whole = "all_reduce one_shot_lamport", False, True


GPU_KERNELS = lamport.gpu_kernels("one_shot_all_reduce", False, True)
