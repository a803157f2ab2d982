"""The Hopper products as they are loaded, linked: there `setmaxnreg` counts, which ptxas ignores where it
assembles what is linked later, and the loader of wide tiles has 40 registers."""

import re

import pytest
from ptx import disassembled, link

from shmemkit.gemm import block_scales, sm90
from shmemkit.gemm.all_gather import push
from shmemkit.gemm.all_gather import sm90 as ag_gemm
from shmemkit.gemm.grouped import sm90 as grouped


def moves_registers(name):
    """Whether a kernel of that name does, by its tile."""
    tile = re.match(r"(\d+)x(\d+)", name)
    return tile is not None and sm90.moves_registers(sm90.Tile(*map(int, tile.groups())))


KERNELS = [
    pytest.param(*entry[:2], moves_registers(name), id=f"{module.__name__.partition('.')[2]} {name}")
    for module in (sm90, block_scales, grouped, ag_gemm, push)
    for name, entry in module.GPU_KERNELS.items()
]


@pytest.mark.parametrize(("kernel", "types", "moves"), KERNELS)
def test_nothing_is_in_local_memory(kernel, types, moves):
    code = disassembled(link(kernel, types, lto=True))
    assert not re.findall(r"\b(?:STL|LDL).*", code)
    assert ("USETMAXREG" in code) == moves
