"""Reduce-scatter by LL: each rank sends all others their segments. For small messages, where not all ranks
are connected by NVLink, or are many.

``shmemkit.kernels.ll_combined`` has the protocol and the kernel: each rank gets its segment of x.
"""

from shmemkit.kernels import ll_combined


class LL(ll_combined.LLCombined):
    """The method "ll" of ``ReduceScatter``."""

    name, personalized = "reduce_scatter ll", True


GPU_KERNELS = ll_combined.gpu_kernels("reduce_scatter", True)
