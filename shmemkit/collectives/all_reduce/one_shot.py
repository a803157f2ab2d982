"""All-reduce in one shot, by LL: each rank sends all that it has to all others. For small
messages, where not all ranks are connected by NVLink, or are many.

``shmemkit.collectives.ll_reduction`` has the protocol and the kernel: all ranks get x.
"""

from .. import ll_reduction


class OneShot(ll_reduction.LLCombined):
    """The method "one_shot" of ``AllReduce``."""

    name, personalized = "all_reduce one_shot", False


GPU_KERNELS = ll_reduction.gpu_kernels("one_shot_all_reduce", False)
