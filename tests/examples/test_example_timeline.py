"""examples/12_timeline.py: it runs, and its timeline shows what it says."""

from pathlib import Path

import pytest
from emulated import emulate
from fast import slow
from numba.cuda import types
from ptx import HOPPER, compile_ptx, resources
from timeline_files import check_timeline

from shmemkit.support import trace_file

PROGRAM = Path(__file__).parents[2] / "examples" / "12_timeline.py"


@pytest.mark.parametrize("n, slots", [(2, 2), (2, 1), *slow((1, 2), (5, 3))])
def test_it_runs(tmp_path, capsys, n, slots):
    path = tmp_path / "timeline.json"
    options = ["--slots", str(slots), "--out", str(path)]
    assert emulate(["-n", str(n), "--races", "--delivery", "unordered", str(PROGRAM), *options]) == 0
    assert capsys.readouterr().out.splitlines() == [f"rank {r}: the sums are right" for r in range(n)]
    data = trace_file.load(path)
    check_timeline(data)
    totals = {(t.rank, t.name): t for t in trace_file.totals(data)}
    for r in range(n):
        assert totals[r, "send"].count == 12 and totals[r, "add"].count == 12  # 6 chunks, 2 warps
        assert totals[r, "wait_block"].count == 12  # one thread of a block waits


def test_more_slots_wait_less(tmp_path, capsys):
    waiting = []
    for slots in (1, 2):
        path = tmp_path / f"{slots}.json"
        assert emulate(["-n", "2", str(PROGRAM), "--slots", str(slots), "--out", str(path)]) == 0
        data = trace_file.load(path)
        kernels = [e for e in data["traceEvents"] if e["name"] == "send_and_add"]
        waiting.append(max(e["ts"] + e["dur"] for e in kernels) - min(e["ts"] for e in kernels))
    assert waiting[1] < waiting[0]
    capsys.readouterr()


def test_its_kernel_compiles():
    import runpy

    kernel = runpy.run_path(str(PROGRAM))["send_and_add"]
    f32, u64 = types.float32, types.uint64
    arrays = [types.Array(t, n, "C") for t, n in ((f32, 2), (f32, 2), (u64, 1), (u64, 1), (f32, 1))]
    needed = resources(compile_ptx(kernel, (*arrays, types.int64), HOPPER), HOPPER)
    assert (needed.spills, needed.stack) == (0, 0)
