"""examples/02_all_gather.py: it prints what it says, its kernels compile, and all that they do is needed."""

import re
import runpy
import textwrap
from pathlib import Path

import pytest
from emulated import emulate
from fast import slow
from numba.cuda import types
from ptx import AMPERE, HOPPER, compile_ptx, resources

PROGRAM = Path(__file__).parents[2] / "examples" / "02_all_gather.py"


@pytest.mark.parametrize("options", slow([], ["--races", "--delivery", "unordered"]))
def test_it_prints_what_it_says(capsys, options):
    expected = re.search(r"emulator it prints\n\n(.*?)\n\n", PROGRAM.read_text(), re.S)[1]
    assert emulate(["-n", "4", *options, str(PROGRAM)]) == 0
    assert capsys.readouterr().out.splitlines() == textwrap.dedent(expected).splitlines()


@pytest.mark.every(3)
@pytest.mark.parametrize("n, size", [(1, 37), (2, 37), *slow((3, 37), (5, 37)), (2, 0), (2, 1)])
def test_ranks_and_sizes(capsys, n, size):
    options = ["--races", "--delivery", "unordered"]
    assert emulate(["-n", str(n), *options, str(PROGRAM), "--size", str(size)]) == 0
    assert capsys.readouterr().out.count("passed") == 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("found", "put", "message"),
    [
        ("buffer = call & 1", "buffer = 0", "race on inbox"),
        ("call & 1,", "0,", "waits for packets.* to hold the flag"),
        ("cuda.syncthreads()  # all threads have stored", "", "race on inbox"),
        ("cuda.syncthreads()  # all threads have read", "#", "race on calls"),
    ],
    ids=["one buffer", "one buffer of LL", "stored", "read"],
)
def test_all_of_it_is_needed(tmp_path, capsys, found, put, message):
    program = PROGRAM.read_text()
    assert found in program
    changed = tmp_path / "changed.py"
    # Few threads: then it takes few schedules until one is a call ahead of another.
    changed.write_text(program.replace(found, put).replace("n, 256,", "n, 2,"))
    options = ["--races", "--delivery", "unordered", "--explore", "20"]
    assert emulate(["-n", "2", *options, str(changed), "--size", "2"]) != 0
    printed = "".join(capsys.readouterr())
    assert re.search(message, printed), printed


@pytest.mark.parametrize("cc", [HOPPER, *slow((AMPERE,))], ids=["sm_90a", "sm_80"])
@pytest.mark.parametrize("name", ["push", "ll"])
def test_its_kernels_compile(name, cc):
    def array(dtype, ndim):
        return types.Array(dtype, ndim, "C")

    f32, u64 = types.float32, types.uint64
    buffers = {"push": (array(f32, 3), array(u64, 1)), "ll": (array(u64, 3),)}[name]
    kernel = runpy.run_path(str(PROGRAM), run_name="example")[name]
    ptx = compile_ptx(kernel, (array(f32, 1), array(f32, 2), *buffers, array(types.int64, 1)), cc)
    needed = resources(ptx, cc)
    assert (needed.spills, needed.stack) == (0, 0) and "NRT_" not in ptx
