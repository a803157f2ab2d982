"""The all-gathers and all-to-alls of several nodes, and LL words sent by NVSHMEM, as PTX."""

import re

import pytest
from kernel_types import listed
from numba.core.errors import TypingError
from numba.cuda import types
from ptx import compile_ptx, instructions

from shmemkit.collectives.all_gather import ll_2d, push_2d
from shmemkit.collectives.all_to_all import push_2d as exchange_2d
from shmemkit.device import ll_put_block, ll_put_warp


@pytest.mark.parametrize("module", [ll_2d, push_2d, exchange_2d], ids=["ll_2d", "push_2d", "exchange_2d"])
def test_no_division(module):
    """Nor a detour through floating point, which a wrong mix of integer types takes."""
    pytest.importorskip("nvshmem", reason="needs nvshmem4py")
    for kernel, argument_types, _ in listed(module).values():
        slow = [i for i in instructions(compile_ptx(kernel, argument_types)) if re.match(r"div|rem|.*f64", i)]
        assert slow == []


@pytest.mark.parametrize("form, put", [("warp", ll_put_warp), ("block", ll_put_block)])
def test_words_on_the_gpu(form, put):
    pytest.importorskip("nvshmem", reason="needs nvshmem4py")

    def kernel(lines, source, n_words):
        put(lines, source, n_words, 1)

    words = types.Array(types.uint64, 1, "C")
    ptx = compile_ptx(kernel, (words, words, types.int64))
    assert f"uint64_put_nbi_{form}" in ptx
    with pytest.raises(TypingError, match="it must be a contiguous 1-D array of uint64"):
        compile_ptx(kernel, (words, types.Array(types.uint32, 1, "C"), types.int64))
