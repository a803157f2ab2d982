"""Every kernel of collectives, gemm, moe and attention compiles for Hopper and Ampere without spills, and
without local memory unless it calls NVSHMEM, whose functions take the addresses of their arguments.

A module lists all of its kernels with argument types that users would pass:

    GPU_KERNELS = {"queue float32": (queue_kernel, "void(float32[:,::1], uint64[::1], int64)"), ...}

the types as a numba signature in a string, or as a tuple of numba types. What needs a newer GPU says so: a
kernel by a third entry, such as (9, 0), a module by MINIMUM_CC = (9, 0). Of a kernel that is listed for
several types, as "ring[sum,float16]" and others, Ampere gets the first one.
"""

import importlib
import pkgutil
import re

import pytest
from numba import types
from numba.core.errors import TypingError
from numba.cuda.core.sigutils import normalize_signature
from numba.cuda.dispatcher import CUDADispatcher
from ptx import AMPERE, HOPPER, compile_ptx, needs_compiler, resources

from shmemkit.gemm.simt import simt_kernel

SPILLING = (  # within their max_registers: what fits on a multiprocessor is worth more to them
    r"moe.dispatch-.*",
    r"(moe.combine|moe.ragged.(dispatch|combine)|collectives.reduce_scatter.push_2d)-.*-sm_80",
    r"collectives.reduce_scatter.push_2d-.*\[(avg,float16,uint8|avg,float64,uint64)\]-sm_90a",
)
KNOWN = (  # to spill here. Linked, wide tiles of float8 take registers of other warps: test_ptx_linked.py
    r"gemm.block_scales-(128x256|128x192)-.*",
    r"gemm.grouped.sm90-128x256 float8-.*",
    r"attention.flash_decode-.*-sm_80",  # 255 registers are too few by some
)


def listed():
    rooms = [
        importlib.import_module(f"shmemkit.{room}") for room in ("collectives", "gemm", "moe", "attention")
    ]
    inside = [
        info.name for room in rooms for info in pkgutil.walk_packages(room.__path__, f"{room.__name__}.")
    ]
    found = []
    for module in rooms + [importlib.import_module(name) for name in inside]:
        table = getattr(module, "GPU_KERNELS", {})
        short = module.__name__.removeprefix("shmemkit.")
        of_module = getattr(module, "MINIMUM_CC", (8, 0))
        for cc, arch in ((HOPPER, "sm_90a"), (AMPERE, "sm_80")):
            able = {name: entry for name, entry in table.items() if cc[:2] >= (*entry[2:], of_module)[0]}
            found += [
                pytest.param(*able[name][:2], cc, id=f"{short}-{name}-{arch}")
                for name in (able if cc == HOPPER else first_of_each(able))
            ]
        tested = [kernel for kernel, *_ in table.values()]
        for name, value in vars(module).items():
            if isinstance(value, CUDADispatcher) and value not in tested and is_kernel(value, module):
                found.append(pytest.param(None, None, None, id=f"{short}-{name}-is-not-in-GPU_KERNELS"))
    return found


def first_of_each(names):
    """Of those that are alike up to their brackets."""
    return {name.partition("[")[0]: name for name in reversed(names)}.values()


def is_kernel(value, module):
    """Whether it is a kernel, not a device function, of this very module."""
    return value.py_func.__module__ == module.__name__ and not value.targetoptions.get("device")


@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "argument_types", "cc"), listed())
def test_no_spills_and_no_local_memory(request, kernel, argument_types, cc):
    assert kernel is not None, "a kernel is listed in GPU_KERNELS of its module"
    needs_compiler()
    if isinstance(argument_types, str):
        argument_types, _ = normalize_signature(argument_types)
    try:
        ptx = compile_ptx(kernel, argument_types, cc)
    except TypingError as error:
        if "needs nvshmem4py" in str(error):
            pytest.skip("needs nvshmem4py")
        raise
    name, limit = request.node.callspec.id, kernel.targetoptions.get("max_registers")
    needed = resources(ptx, cc, None if re.fullmatch("|".join(SPILLING), name) else limit)
    if re.fullmatch("|".join(KNOWN), name):
        assert needed.spills, "it does not spill any more"
        return
    assert needed.spills == 0, needed
    if "nvshmem" not in ptx:
        assert needed.stack == 0, needed
        assert ".local" not in ptx
    assert "NRT_" not in ptx and "shmemkit_timeline" not in ptx


@pytest.mark.parametrize("dtypes", [("uint8", "int32"), ("uint64", "int64"), ("int64", "uint64")], ids=str)
def test_products_of_integers_and_their_bias_are_integers(dtypes):
    """numba's sum of signed and unsigned ones is a float64."""
    operand, result = (getattr(types, dtype) for dtype in dtypes)
    arrays = operand[:, ::1], operand[:, ::1], result[:, ::1], result[::1]
    ptx = compile_ptx(simt_kernel(*dtypes, True, False, dtypes[1], "relu"), arrays)
    assert ".f64" not in ptx
