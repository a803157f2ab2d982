"""All-gather by LL. The fastest for small messages.

``shmemkit.collectives.ll`` has the protocol and the kernels: all ranks get x.
"""

from .. import ll


class LL(ll.LL):
    """The method "ll" of ``AllGather``."""

    name, personalized = "all_gather ll", False


GPU_KERNELS = ll.gpu_kernels(False, "all_gather")
