"""Every kernel of shmemkit.kernels compiles for Hopper and Ampere without spills and without local memory.

A module of shmemkit.kernels lists all of its kernels with argument types that users would pass:

    GPU_KERNELS = {"queue float32": (queue_kernel, "void(float32[:,::1], uint64[::1], int64)"), ...}

the types as a numba signature in a string, or as a tuple of numba types.
"""

import importlib
import pkgutil

import pytest
from numba.cuda.core.sigutils import normalize_signature
from numba.cuda.dispatcher import CUDADispatcher
from ptx import AMPERE, HOPPER, compile_ptx, resources


def listed():
    kernels = importlib.import_module("shmemkit.kernels")
    found = []
    for info in pkgutil.walk_packages(kernels.__path__, "shmemkit.kernels."):
        module = importlib.import_module(info.name)
        table = getattr(module, "GPU_KERNELS", {})
        short = info.name.removeprefix("shmemkit.kernels.")
        found += [pytest.param(*entry, id=f"{short}-{name}") for name, entry in table.items()]
        tested = [kernel for kernel, _ in table.values()]
        for name, value in vars(module).items():
            if isinstance(value, CUDADispatcher) and value not in tested and is_kernel(value, module):
                found.append(pytest.param(None, None, id=f"{short}-{name}-is-not-in-GPU_KERNELS"))
    return found


def is_kernel(value, module):
    """Whether it is a kernel, not a device function, of this very module."""
    return value.py_func.__module__ == module.__name__ and not value.targetoptions.get("device")


@pytest.mark.parametrize("cc", [HOPPER, AMPERE], ids=["sm_90a", "sm_80"])
@pytest.mark.parametrize(("kernel", "argument_types"), listed())
def test_no_spills_and_no_local_memory(kernel, argument_types, cc):
    assert kernel is not None, "a kernel of shmemkit.kernels is listed in GPU_KERNELS of its module"
    if isinstance(argument_types, str):
        argument_types, _ = normalize_signature(argument_types)
    ptx = compile_ptx(kernel, argument_types, cc)
    needed = resources(ptx, cc)
    assert (needed.spills, needed.stack) == (0, 0), needed
    assert ".local" not in ptx
    assert "NRT_" not in ptx
