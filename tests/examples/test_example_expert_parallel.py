"""examples/05_expert_parallel.py: it prints what it says, and its kernel compiles."""

import re
import runpy
import textwrap
from pathlib import Path

import pytest
from emulated import emulate
from fast import slow
from numba.cuda import types
from ptx import AMPERE, HOPPER, compile_ptx, resources

PROGRAM = Path(__file__).parents[2] / "examples" / "05_expert_parallel.py"
HARD = ["--races", "--delivery", "unordered"]


@pytest.mark.parametrize("options", slow([], HARD))
def test_it_prints_what_it_says(capsys, options):
    expected = re.search(r"emulator it prints\n\n(.*?)\n\n", PROGRAM.read_text(), re.S)[1]
    assert emulate(["-n", "4", *options, str(PROGRAM)]) == 0
    assert capsys.readouterr().out.splitlines() == textwrap.dedent(expected).splitlines()


@pytest.mark.every(2)
@pytest.mark.parametrize(
    "n, tokens, hidden, experts, topk", [(1, 5, 4, 3, 3), (2, 1, 8, 1, 1), *slow((3, 7, 12, 2, 5))]
)
def test_ranks_and_sizes(capsys, n, tokens, hidden, experts, topk):
    sizes = {"tokens": tokens, "hidden": hidden, "experts": experts, "topk": topk}
    options = [part for name, size in sizes.items() for part in (f"--{name}", str(size))]
    assert emulate(["-n", str(n), *HARD, str(PROGRAM), *options]) == 0
    assert "passed" in capsys.readouterr().out


@pytest.mark.parametrize("cc", [HOPPER, AMPERE], ids=["sm_90a", "sm_80"])
def test_its_kernel_compiles(cc):
    kernel = runpy.run_path(str(PROGRAM), run_name="example")["run_experts"]
    arrays = ((types.float32, 3), (types.int32, 1), (types.float32, 1))
    ptx = compile_ptx(kernel, tuple(types.Array(dtype, ndim, "C") for dtype, ndim in arrays), cc)
    needed = resources(ptx, cc)
    assert (needed.spills, needed.stack) == (0, 0) and "NRT_" not in ptx
