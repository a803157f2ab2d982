"""Reduce-scatter by LL: each rank sends all others their segments. For small messages, on ranks that NVLink
does not connect, or on many.

``shmemkit.collectives.ll_reduction`` has the protocol and the kernel: each rank gets its segment of x.
"""

from .. import ll_reduction


class LL(ll_reduction.LLCombined):
    """The method "ll" of ``ReduceScatter``."""

    name, personalized = "reduce_scatter ll", True


GPU_KERNELS = ll_reduction.gpu_kernels("reduce_scatter", True)
