"""Reduce-scatter by LL: each rank sends all others their segments. For small messages, where not all ranks
are connected by NVLink, or are many.

``shmemkit.collectives.ll_reduction`` has the protocol and the kernel: each rank gets its segment of x.
"""

from .. import ll_reduction


class LL(ll_reduction.LLCombined):
    """The method "ll" of ``ReduceScatter``."""

    name, personalized = "reduce_scatter ll", True


GPU_KERNELS = ll_reduction.gpu_kernels("reduce_scatter", True)
