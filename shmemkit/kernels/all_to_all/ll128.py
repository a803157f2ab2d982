"""All-to-all by LL128. The fastest for small and middling messages.

``shmemkit.kernels.ll128`` has the protocol and the kernel: each rank gets its segment of x.
"""

from shmemkit.kernels import ll128


class LL128(ll128.LL128):
    """The method "ll128" of ``AllToAll``."""

    name, personalized = "all_to_all ll128", True


GPU_KERNELS = ll128.gpu_kernels("all_to_all", True, False)
