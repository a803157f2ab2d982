"""All-reduce in one shot, by LL128: each rank sends its whole array to all others. The fastest method for
small messages.

``shmemkit.collectives.ll128`` has the protocol and the kernel: all ranks get the whole x, and combine what
they receive.
"""

from .. import ll128


class OneShotLL128(ll128.LL128):
    """The method "one_shot_ll128" of ``AllReduce``."""

    name, personalized, whole = "all_reduce one_shot_ll128", False, True


GPU_KERNELS = ll128.gpu_kernels("one_shot_all_reduce", False, True)
