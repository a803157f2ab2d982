"""Every kernel of shmemkit.kernels compiles for Hopper and Ampere without spills and without local memory.

A module of shmemkit.kernels lists its kernels with argument types that users would pass:

    GPU_KERNELS = {"queue float32": (queue_kernel, "void(float32[:,::1], uint64[::1], int64)"), ...}

the types as a numba signature in a string, or as a tuple of numba types.
"""

import importlib
import pkgutil

import pytest
from numba.cuda.core.sigutils import normalize_signature
from ptx import AMPERE, HOPPER, compile_ptx, resources


def listed():
    try:
        kernels = importlib.import_module("shmemkit.kernels")
    except ModuleNotFoundError:
        return []
    found = []
    for module in pkgutil.iter_modules(kernels.__path__, "shmemkit.kernels."):
        table = getattr(importlib.import_module(module.name), "GPU_KERNELS", {})
        short = module.name.rsplit(".", 1)[1]
        found += [pytest.param(*entry, id=f"{short}-{name}") for name, entry in table.items()]
        if not table:
            found.append(pytest.param(None, None, id=f"{short}-lists-no-GPU_KERNELS"))
    return found


@pytest.mark.parametrize("cc", [HOPPER, AMPERE], ids=["sm_90a", "sm_80"])
@pytest.mark.parametrize(("kernel", "argument_types"), listed())
def test_no_spills_and_no_local_memory(kernel, argument_types, cc):
    assert kernel is not None, (
        "a module of shmemkit.kernels needs GPU_KERNELS = {name: (kernel, argument types)}"
    )
    if isinstance(argument_types, str):
        argument_types, _ = normalize_signature(argument_types)
    ptx = compile_ptx(kernel, argument_types, cc)
    needed = resources(ptx, cc)
    assert (needed.spills, needed.stack) == (0, 0), needed
    assert ".local" not in ptx
    assert "NRT_" not in ptx
