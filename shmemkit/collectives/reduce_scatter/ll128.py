"""Reduce-scatter by LL128. The fastest for small and middling messages.

``shmemkit.collectives.ll128`` has the protocol and the kernel: each rank gets its segment of x, and combines
what it receives.
"""

from .. import ll128


class LL128(ll128.LL128):
    """The method "ll128" of ``ReduceScatter``."""

    name, personalized = "reduce_scatter ll128", True


GPU_KERNELS = ll128.gpu_kernels("reduce_scatter", True, True)
