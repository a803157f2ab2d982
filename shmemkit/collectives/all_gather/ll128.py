"""All-gather by LL128. The fastest for small and middling messages.

``shmemkit.collectives.ll128`` has the protocol and the kernel: all ranks get x.
"""

from .. import ll128


class LL128(ll128.LL128):
    """The method "ll128" of ``AllGather``."""

    name, personalized = "all_gather ll128", False


GPU_KERNELS = ll128.gpu_kernels("all_gather", False, False)
