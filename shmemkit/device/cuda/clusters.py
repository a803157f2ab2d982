"""Clusters: blocks that run on neighbouring multiprocessors at the same time, and reach each other's shared
memory. Hopper and later; for launches with ``bind(cluster=...)``.

PTX ISA: "Cluster of Cooperative Thread Arrays", barrier.cluster.
"""

from __future__ import annotations

from shmemkit.compiler.ptx import asm, gpu, types

from ..emulator import current_thread

__all__ = ["cluster_block", "cluster_sync"]


def cluster_block() -> int:
    """Return the number of this thread's block in its cluster, a uint32: 0 in a launch without clusters."""
    return current_thread("cluster_block").block.in_cluster


def cluster_sync() -> None:
    """Barrier of all threads of all blocks of the cluster: ``syncthreads`` for the cluster.

    Threads of a warp call it together. A block must not end while others use its shared memory: call it last.
    """
    current_thread("cluster_sync").cluster_sync()


_block = asm("mov.u32 $0, %cluster_ctarank;", types.uint32, pure=True)
_sync = asm("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;")


@gpu(cluster_block)
def _():
    return lambda: _block()


@gpu(cluster_sync)
def _():
    return lambda: _sync()
