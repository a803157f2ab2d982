"""Every kernel of collectives, gemm, moe, attention and runtime compiles for Hopper and Ampere without
spills, and without local memory unless it calls NVSHMEM, whose functions take addresses of their arguments.

A module lists all of its kernels in GPU_KERNELS, as ``kernel_types.py`` says. What needs a newer GPU says so:
a kernel by a third entry, such as (9, 0), a module by MINIMUM_CC = (9, 0). Of a kernel that is listed for
several types, as "ring[sum,float16]" and others, Ampere gets the first one.
"""

import json
import re

import kernel_types
import pytest
from kernel_types import listed
from machine_code import kernels, modules
from numba import types
from numba.cuda.dispatcher import CUDADispatcher
from ptx import compile_ptx
from torn_lines import torn_line

from shmemkit.collectives.schedules import rows
from shmemkit.device.packets.transports import LL128
from shmemkit.gemm.simt import simt_kernel

SPILLING = (  # within their max_registers: what fits on a multiprocessor is worth more to them
    r"moe.dispatch-.*",
    r"(moe.combine|moe.ragged.(dispatch|combine)|collectives.reduce_scatter.push_2d)-.*-sm_80",
    r"collectives.reduce_scatter.push_2d-.*\[(avg,float16,uint8|(avg,float64|max,float32),uint64)\]-sm_90a",
)
KNOWN = (  # to spill here. Linked, wide tiles of float8 take registers of other warps: test_ptx_linked.py
    r"gemm.block_scales-(128x256|128x192)-.*",
    r"gemm.grouped.sm90-128x256 float8-.*",
    r"attention.flash_decode-.*-sm_80",  # 255 registers are too few by some
)


def test_every_kernel_is_listed():
    """in GPU_KERNELS of its module."""
    left_out = []
    for module in modules():
        tested = [kernel for kernel, *_ in listed(module).values()]
        for name, value in vars(module).items():
            if isinstance(value, CUDADispatcher) and value not in tested and is_kernel(value, module):
                left_out.append(f"{module.__name__}.{name}")
    assert not left_out


@pytest.mark.slow
def test_the_types_are_those_of_bound_calls():
    assert kernel_types.recorded() == json.loads(kernel_types.FILE.read_text()), (
        "record them again: python tests/kernel_types.py"
    )


def test_types_that_a_table_leaves_open():
    with pytest.raises(ValueError, match="rows_kernel.* with 3 kinds of arguments besides {}; say which"):
        kernel_types.types_of(rows.rows_kernel(LL128, True), {})
    with pytest.raises(ValueError, match="recorded with 0 kinds .* python tests/kernel_types.py"):
        kernel_types.types_of(torn_line, {})


def is_kernel(value, module):
    """Whether it is a kernel, not a device function, of this very module."""
    return value.py_func.__module__ == module.__name__ and not value.targetoptions.get("device")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in kernels() if not name.startswith("torn_lines")])
def test_no_spills_and_no_local_memory(code, name):
    kernel = code(name)
    needed = kernel.unlimited if re.fullmatch("|".join(SPILLING), name) else kernel.needed
    if re.fullmatch("|".join(KNOWN), name):
        assert needed.spills, "it does not spill any more"
        return
    assert needed.spills == 0, needed
    if "nvshmem" not in kernel.ptx:
        assert needed.stack == 0, needed
        assert ".local" not in kernel.ptx
    assert "NRT_" not in kernel.ptx and "shmemkit_timeline" not in kernel.ptx


@pytest.mark.parametrize("dtypes", [("uint8", "int32"), ("uint64", "int64"), ("int64", "uint64")], ids=str)
def test_products_of_integers_and_their_bias_are_integers(dtypes):
    """numba's sum of signed and unsigned ones is a float64."""
    operand, result = (getattr(types, dtype) for dtype in dtypes)
    arrays = operand[:, ::1], operand[:, ::1], result[:, ::1], result[::1]
    ptx = compile_ptx(simt_kernel(*dtypes, True, False, dtypes[1], "relu"), arrays)
    assert ".f64" not in ptx
