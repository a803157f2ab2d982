"""The one World that all GPU tests of a process share."""

import functools

import pytest
import recorded

import shmemkit as sk


@functools.cache
def world():
    """The World on GPUs: initialized by the first test that asks, finalized at exit. Skips without a GPU.

    All ranks run the same tests in the same order: mpirun -n 4 python -m pytest -m gpu
    """
    from shmemkit.runtime.world import choose_backend

    backend, reason = choose_backend()
    if backend != "nvshmem":
        pytest.skip(f"needs a GPU and NVSHMEM: {reason}")
    made = sk.init("nvshmem")
    recorded.begin(made)
    return made
