"""Reduce-scatter by Lamport packets, which carry no byte but data.

``collectives.lamport`` has the protocol and the kernel: each rank gets its segment of x, and combines
what it receives.
"""

from .. import lamport


class Lamport(lamport.Lamport):
    """The method "lamport" of ``ReduceScatter``."""

    name, personalized = "reduce_scatter lamport", True


GPU_KERNELS = lamport.gpu_kernels("reduce_scatter", True, True)
