"""All-reduce in one shot, by LL: each rank sends its whole array to all others. For small messages, on ranks
that NVLink does not connect, or on many.

``shmemkit.collectives.ll_reduction`` has the protocol and the kernel: all ranks get the whole x.
"""

from .. import ll_reduction


class OneShot(ll_reduction.LLCombined):
    """The method "one_shot" of ``AllReduce``."""

    name, personalized = "all_reduce one_shot", False


GPU_KERNELS = ll_reduction.gpu_kernels("one_shot_all_reduce", False)
