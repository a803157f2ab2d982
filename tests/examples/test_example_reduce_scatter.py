"""examples/09_reduce_scatter.py and 10_reduce_scatter_2d.py: they print what they say, their kernels compile,
and all that they do is needed."""

import re
import runpy
import textwrap
from pathlib import Path

import pytest
from emulated import emulate
from fast import slow
from numba.cuda import types
from ptx import AMPERE, HOPPER, compile_ptx, resources

EXAMPLES = Path(__file__).parents[2] / "examples"
INSIDE, OVER = EXAMPLES / "09_reduce_scatter.py", EXAMPLES / "10_reduce_scatter_2d.py"
HARD = ["--races", "--delivery", "unordered"]


@pytest.fixture(autouse=True)
def no_nodes(monkeypatch):
    monkeypatch.delenv("SHMEMKIT_LOCAL_SIZE", raising=False)


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], *slow(HARD)])
@pytest.mark.parametrize("program", [INSIDE, OVER], ids=["inside", "over"])
def test_it_prints_what_it_says(capsys, program, options):
    expected = re.search(r"emulator it prints\n\n(.*?)\n\n", program.read_text(), re.S)[1]
    assert emulate(["-n", "4", *options, str(program)]) == 0
    assert capsys.readouterr().out.splitlines() == textwrap.dedent(expected).splitlines()


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "n, size, parts", [(1, 37, 2), (2, 37, 2), *slow((3, 37, 3), (5, 9, 1)), (2, 0, 2), (2, 1, 3)]
)
def test_ranks_and_sizes_inside_a_node(capsys, n, size, parts):
    assert emulate(["-n", str(n), *HARD, str(INSIDE), "--size", str(size), "--parts", str(parts)]) == 0
    assert capsys.readouterr().out.count("passed") == 2


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "n, local_size, size, parts",
    [
        (1, 1, 9, 2),
        (3, 3, 9, 2),
        (2, 1, 37, 2),
        (3, 1, 9, 2),
        *slow((4, 2, 0, 1), (4, 2, 1, 3), (6, 2, 9, 1)),
    ],
)
def test_nodes_and_sizes(capsys, n, local_size, size, parts):
    options = ["-n", str(n), "--local-size", str(local_size), *HARD]
    assert emulate([*options, str(OVER), "--size", str(size), "--parts", str(parts)]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{n // local_size} nodes of {local_size} ranks") and out.count("passed") == 2


STORED, READ = "cuda.syncthreads()  # all threads have stored", "cuda.syncthreads()  # all threads have read"
NEEDED = {  # name: (program, what is changed, what the emulator says)
    "one buffer": (INSIDE, {"buffer = call & 1": "buffer = 0"}, "race on scratch"),
    "stored": (INSIDE, {STORED: ""}, "race on scratch"),
    "read": (INSIDE, {READ: "#"}, "race on calls"),
    "wait": (INSIDE, {'wait_block(arrived[peer, b:], 1, "sys", "acquire", call)': ""}, "race on scratch"),
    "call": (INSIDE, {"calls[b] = call": "pass"}, "race on scratch"),
    "one buffer, over": (OVER, {"buffer = call & 1": "buffer = 0"}, "race on (staged|inbox|outbox)"),
    "stored, over": (OVER, {STORED: ""}, "race on staged"),
    "read, over": (OVER, {READ: "#"}, "race on calls"),
    "wait for neighbours": (
        OVER,
        {'wait_block(arrived[to, k, b:], 1, "sys", "acquire", call)': ""},
        "race on staged",
    ),
    "wait for nodes": (OVER, {"signal_wait_until(got[buffer, m, b:], GE, call)": "pass"}, "race on inbox"),
    "barrier behind that": (
        OVER,
        {"GE, call)\n                cuda.syncthreads()": "GE, call)"},
        "race on inbox",
    ),
    "a signal for each buffer": (OVER, {"got[buffer, ": "got[0, "}, "race on inbox|deadlock"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("program", "changes", "message"), NEEDED.values(), ids=NEEDED)
def test_all_of_it_is_needed(tmp_path, capsys, program, changes, message):
    text = program.read_text()
    for found, put in changes.items():
        assert found in text, found
        text = text.replace(found, put)
    changed = tmp_path / "changed.py"
    # Few threads: then it takes few schedules until one is a call ahead of another.
    changed.write_text(re.sub(r"(bind\(.*), 128,", r"\1, 2,", text))
    n = 1 if READ in changes else 2 if program is INSIDE else 4  # other ranks bring barriers with them
    assert emulate(["-n", str(n), *HARD, "--explore", "20", str(changed), "--size", "3", "--parts", "1"]) != 0
    printed = "".join(capsys.readouterr())
    assert re.search(message, printed), printed


@pytest.mark.parametrize("cc", [HOPPER, AMPERE], ids=["sm_90a", "sm_80"])
@pytest.mark.parametrize("program", [INSIDE, OVER], ids=["inside", "over"])
def test_its_kernel_compiles(program, cc):
    f32, u64, i64 = types.float32, types.uint64, types.int64
    name, dimensions = {
        INSIDE: ("reduce_scatter", ((f32, 2), (f32, 1), None, (f32, 3), (u64, 2), (i64, 1))),
        OVER: (
            "reduce_scatter_2d",
            ((f32, 2), (f32, 1), None, (f32, 4), (u64, 3), (f32, 3), (f32, 3), (u64, 3), (i64, 2)),
        ),
    }[program]
    if program is OVER:
        pytest.importorskip("nvshmem", reason="needs nvshmem4py")
    kernel = runpy.run_path(str(program), run_name="example")[name]
    arguments = (types.int64 if of is None else types.Array(*of, "C") for of in dimensions)
    ptx = compile_ptx(kernel, tuple(arguments), cc)
    assert resources(ptx, cc).spills == 0 and "NRT_" not in ptx
