"""examples/04_ring_all_reduce.py: it prints what it says, its kernel compiles, and all that it does is
needed."""

import re
import runpy
import textwrap
from pathlib import Path

import pytest
from emulated import emulate
from fast import slow
from numba.cuda import types
from ptx import AMPERE, HOPPER, compile_ptx, resources

PROGRAM = Path(__file__).parents[2] / "examples" / "04_ring_all_reduce.py"
HARD = ["--races", "--delivery", "unordered"]


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], *slow(HARD)])
def test_it_prints_what_it_says(capsys, options):
    expected = re.search(r"emulator it prints\n\n(.*?)\n\n", PROGRAM.read_text(), re.S)[1]
    assert emulate(["-n", "4", *options, str(PROGRAM)]) == 0
    assert capsys.readouterr().out.splitlines() == textwrap.dedent(expected).splitlines()


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "n, size, chunk, blocks",
    [
        *[(1, 37, 5, 2), (2, 37, 5, 2), (3, 37, 5, 3), (4, 37, 40, 2), (2, 0, 5, 2), (2, 1, 5, 2)],
        *slow((8, 9, 2, 1)),
    ],
)
def test_ranks_and_sizes(capsys, n, size, chunk, blocks):
    options = ["--size", str(size), "--chunk", str(chunk), "--blocks", str(blocks)]
    assert emulate(["-n", str(n), *HARD, str(PROGRAM), *options]) == 0
    assert capsys.readouterr().out.count("passed") == 2


ONE_SIGNAL = {  # for all chunks: each of them adds 1
    "{0}[c:], call, SET": "{0}, 1, SignalOp.SIGNAL_ADD",
    "{0}[c:], GE, call": "{0}, GE, (call - 1) * 3 + c + 1",
}


NEEDED = {  # name: what is changed, what the emulator says
    "one signal, reduce": (
        {k.format("reduced"): v.format("reduced") for k, v in ONE_SIGNAL.items()},
        "race on partial",
    ),
    "one signal, broadcast": (
        {k.format("done"): v.format("done") for k, v in ONE_SIGNAL.items()},
        "race on total",
    ),
    "one signal for both phases": ({"done[c:]": "reduced[c:]"}, "wrong elements|race on"),
    "wait, reduce": ({"signal_wait_until(reduced[c:], GE, call)": "pass"}, "race on partial"),
    "wait, broadcast": ({"signal_wait_until(done[c:], GE, call)": "pass"}, "race on total"),
    "barrier, reduce": ({"call)\n            cuda.syncthreads()\n": "call)\n"}, "race on partial"),
    "barrier, broadcast": ({"call)\n        cuda.syncthreads()\n": "call)\n"}, "race on total"),
    "number of the call": ({"calls[c] += 1": "pass"}, "race on"),
    "two buffers": ({"partial, total, reduced, done, xp": "partial, partial, reduced, done, xp"}, "race on"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "message"), NEEDED.values(), ids=NEEDED)
def test_all_of_it_is_needed(tmp_path, capsys, changes, message):
    program = PROGRAM.read_text()
    for found, put in changes.items():
        assert found in program, found
        program = program.replace(found, put)
    changed = tmp_path / "changed.py"
    changed.write_text(program.replace("options.blocks, 64,", "options.blocks, 2,"))
    options = ["--size", "6", "--chunk", "2", "--blocks", "1"]
    assert emulate(["-n", "3", *HARD, "--explore", "20", str(changed), *options]) != 0
    printed = "".join(capsys.readouterr())
    assert re.search(message, printed), printed


@pytest.mark.parametrize("cc", [HOPPER, AMPERE], ids=["sm_90a", "sm_80"])
def test_its_kernel_compiles(cc):
    pytest.importorskip("nvshmem", reason="needs nvshmem4py")

    def array(dtype):
        return types.Array(dtype, 1, "C")

    f32, u64 = array(types.float32), array(types.uint64)
    kernel = runpy.run_path(str(PROGRAM), run_name="example")["ring_all_reduce"]
    ptx = compile_ptx(kernel, (f32, f32, types.int64, f32, f32, u64, u64, array(types.int64)), cc)
    assert resources(ptx, cc).spills == 0 and "NRT_" not in ptx
