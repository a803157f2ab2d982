"""examples/06_swizzled_gemm.py: it prints what it says, it draws, and its orders compile."""

import re
import runpy
import textwrap
from pathlib import Path

import pytest
from emulated import emulate
from fast import full, slow
from kernel_types import types_of
from numba import cuda
from ptx import HOPPER, compile_ptx, resources

from shmemkit.gemm.sm90 import Kinds, Tile, gemm_kernel, table_entry

PROGRAM = Path(__file__).parents[2] / "examples" / "06_swizzled_gemm.py"


@pytest.mark.parametrize(
    "options",
    [
        ["-n", "1", str(PROGRAM), "--size", "33"],
        *slow(["-n", "2", "--races", str(PROGRAM), "--size", "65"]),
        *full(["-n", "1", str(PROGRAM)]),
    ],
)
def test_it_prints_what_it_says(capsys, options):
    """Once, also on several ranks."""
    expected = re.search(r"emulator it prints\n\n(.*?)\n\n", PROGRAM.read_text(), re.S)[1]
    assert emulate(options) == 0
    assert capsys.readouterr().out.splitlines() == textwrap.dedent(expected).splitlines()


@pytest.mark.slow
def test_other_ranks_and_a_drawing(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "orders.png"
    options = ["--ranks", "3", "--rank", "0", "--size", "72", "--plot", str(path)]
    assert emulate(["-n", "1", str(PROGRAM), *options]) == 0
    assert "passed" in capsys.readouterr().out and path.stat().st_size > 1000


@pytest.mark.parametrize("name", ["row_major", *slow("reduce_scatter")])
def test_its_orders_compile(name):
    order = runpy.run_path(str(PROGRAM), run_name="example")["orders"](1, 4, 16)[name]
    kinds = Kinds("float16", "k", "mn", "float16")
    kernel = gemm_kernel(Tile(128, 256), kinds, cuda.jit(device=True)(order))
    assert resources(compile_ptx(kernel, types_of(*table_entry(kernel, kinds))), HOPPER).spills == 0
