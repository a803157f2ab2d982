"""The Hopper products as they are loaded, linked: there `setmaxnreg` counts, which ptxas ignores where it
assembles what is linked later, and the loader of wide tiles has 40 registers. And what flash decode has of
shared memory."""

import re
import struct

import pytest
from kernel_types import listed, types_of
from ptx import disassembled, link

from shmemkit.attention import flash_decode
from shmemkit.gemm import block_scales, sm90
from shmemkit.gemm.all_gather import push
from shmemkit.gemm.all_gather import sm90 as ag_gemm
from shmemkit.gemm.grouped import sm90 as grouped
from shmemkit.moe import gathered_rows


def moves_registers(name):
    """Whether a kernel of that name does, by its tile."""
    tile = re.match(r"(\d+)x(\d+)", name)
    return tile is not None and sm90.moves_registers(sm90.Tile(*map(int, tile.groups())))


KERNELS = [
    pytest.param(
        *entry[:2],
        moves_registers(name),
        id=f"{module.__name__.partition('.')[2]} {name}",
        marks=pytest.mark.slow if i else (),  # the first of a module has its widest tile
    )
    for module in (sm90, block_scales, grouped, ag_gemm, push, gathered_rows)
    for i, (name, entry) in enumerate(listed(module).items())
]


@pytest.mark.parametrize(("kernel", "types", "moves"), KERNELS)
def test_nothing_is_in_local_memory(kernel, types, moves):
    code = disassembled(link(kernel, types, lto=True))
    assert not re.findall(r"\b(?:STL|LDL).*", code)
    assert ("USETMAXREG" in code) == moves


RESERVED = 1024  # bytes of a block's shared memory, which the machine code counts with the kernel's


def shared_bytes(cubin):
    """Static ones, by the section of the machine code (ELF) that holds them."""
    (table,), (count, names) = struct.unpack_from("<Q", cubin, 40), struct.unpack_from("<HH", cubin, 60)
    sections = [struct.unpack_from("<IIQQQQ", cubin, table + 64 * i) for i in range(count)]
    of_names = sections[names][4]
    return sum(
        size
        for name, _, _, _, _, size in sections
        if cubin[of_names + name :].startswith(b".nv.shared.") and size
    )


@pytest.mark.parametrize("group", [8, 9, 16])
def test_flash_decode_fits_into_shared_memory(group):
    """Wide tiles do not where many heads of q share one of k. The launch would fail, on GPUs only."""
    tile = flash_decode.tile_of(group, 128)
    kernel = flash_decode.decode_kernel(2, 1, group, 128, "float16", "all_gather", tile)
    static = shared_bytes(link(kernel, types_of(kernel, {}), lto=True)) - RESERVED
    assert tile.static_bytes(group, 128) <= static <= 48 << 10
    assert static + tile.shared_bytes(128) <= flash_decode.HOPPER_BYTES
