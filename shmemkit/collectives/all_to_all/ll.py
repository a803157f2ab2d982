"""All-to-all by LL. The fastest for small messages.

``shmemkit.collectives.ll`` has the protocol and the kernels: each rank gets its segment of x.
"""

from .. import ll


class LL(ll.LL):
    """The method "ll" of ``AllToAll``."""

    name, personalized = "all_to_all ll", True


GPU_KERNELS = ll.gpu_kernels(True, "all_to_all")
