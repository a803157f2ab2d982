"""All-reduce in one shot, by LL: each rank sends all that it has to all others. For small
messages, where not all ranks are connected by NVLink, or are many.

``shmemkit.kernels.ll_combined`` has the protocol and the kernel: all ranks get x.
"""

from shmemkit.kernels import ll_combined


class OneShot(ll_combined.LLCombined):
    """The method "one_shot" of ``AllReduce``."""

    name, personalized = "all_reduce one_shot", False


GPU_KERNELS = ll_combined.gpu_kernels("one_shot_all_reduce", False)
