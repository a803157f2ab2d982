"""Reduce-scatter by pieces that say themselves that they have arrived, with no byte more than the data have.

``collectives.lamport`` has the protocol and the kernel: each rank gets its segment of x, and combines
what comes.
"""

from .. import lamport


class Lamport(lamport.Lamport):
    """The method "lamport" of ``ReduceScatter``."""

    name, personalized = "reduce_scatter lamport", True


GPU_KERNELS = lamport.gpu_kernels("reduce_scatter", True, True)
