"""``bench expert_parallel``: what it measures, and that what it compares with does the same."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from fast import slow
from numba.cuda import types
from ptx import AMPERE, HOPPER, compile_ptx, resources

import shmemkit as sk
from shmemkit.bench.__main__ import main, parse
from shmemkit.bench.expert_parallel import OPS, Data, ExpertCase, Steps, row_sums

pytest.importorskip("rich")
SMALL = ["expert_parallel", "--tokens", "5", "--hidden", "16", "--experts", "6", "--top-k", "4"]


@pytest.mark.parametrize("n", [1, *slow(3)])
def test_it_runs(n, tmp_path):
    path = tmp_path / "f.json"
    assert sk.emu.run(main, n, ([*SMALL, "--json", str(path)],)) == [0] * n
    rows = json.loads(path.read_text())["rows"]
    names = ["nccl", "nccl, once per rank", "ExpertParallel"]
    assert [(row["op"], row["method"]) for row in rows] == [(op, name) for op in OPS for name in names]
    for row in rows:
        assert row["bytes"] == 5 * 4 * 16 * 2
        if row["method"] == "ExpertParallel":
            assert "note" not in row and row["us"] > 0
        else:
            assert row["note"] == "refused: NCCL needs GPUs"


@pytest.mark.slow
@pytest.mark.parametrize("rows, status", [(40, 0), (18, 1)])
def test_rows_in_one_buffer(rows, status):
    arguments = [*SMALL, "--max-rows", str(rows), "--vs", ""]
    if status:
        with pytest.raises(SystemExit, match="--max-rows is 18; a rank receives .* rows here"):
            sk.emu.run(main, 2, (arguments,))
    else:
        assert sk.emu.run(main, 2, (arguments,)) == [0, 0]


@pytest.mark.slow
def test_wrong_results_are_found(monkeypatch, capsys):
    class OneWrong(sk.ExpertParallel):
        def combine(self, y, out=None):
            out = super().combine(y, out)
            self.world.synchronize()
            out[3, 7] += 1
            return out

    monkeypatch.setattr(sk, "ExpertParallel", OneWrong)
    assert sk.emu.run(main, 2, ([*SMALL, "--vs", ""],)) == [1, 1]
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.count("wrong: on rank 0 1 of 5 rows") == 2


@pytest.mark.each_value
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", [1, 3])
def test_the_steps_with_an_all_to_all_do_the_same(pes, n, op, once):

    def steps():
        world = sk.init()
        data = Data(
            world, SimpleNamespace(tokens=5, hidden=8, experts=6, top_k=4, dtype="bfloat16", max_rows=None)
        )
        case = ExpertCase(op, data)
        case.make()
        out = case.output()
        exchange_rows = sk.AllToAllV(world, 16 * 6 * 5 * n)
        sent = []

        def exchange(rows, counts, out, out_counts):
            got = np.zeros(n, "int64")
            exchange_rows(rows[: sum(counts)], np.array(counts), out[: sum(out_counts)], got)
            world.synchronize()
            assert got.tolist() == out_counts
            sent.append(sum(counts))

        enqueue = Steps(case, out, once, exchange, threads=1)
        for _ in range(2):
            case.spoil(out)
            enqueue()
            assert case.check(out) == ""
            case.flip()
        assert case.check(out).startswith("wrong")
        owners = data.experts // data.n_local
        rows = sum(len(set(of.tolist())) for of in owners[world.rank]) if once else 20
        assert op == "expert_combine" or sent[0] == rows

    pes(n).run(steps)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--experts", "7"], "--experts is 7; it must be a multiple of 2"),
        (["--top-k", "7"], "--top-k is 7; it must be 1 to 6"),
        (["--hidden", "9"], "--hidden is 9; its rows must have a multiple of 16 bytes"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(SystemExit, match=message):
        sk.emu.run(main, 2, ([*SMALL, *arguments],))


def test_defaults(monkeypatch):
    options = parse(["expert_parallel"])  # on the emulator
    assert (options.tokens, options.hidden, options.experts, options.top_k) == (4, 64, 8, 2)
    monkeypatch.setenv("SHMEMKIT_BACKEND", "nvshmem")
    options = parse(["expert_parallel"])
    assert (options.tokens, options.hidden, options.experts, options.top_k) == (128, 7168, 32, 8)
    assert options.dtype == "bfloat16" and options.vs == ["nccl", "nccl_once"]


@pytest.mark.parametrize("cc", [HOPPER, AMPERE], ids=["sm_90a", "sm_80"])
def test_its_kernel_compiles(cc):
    def array(dtype, ndim):
        return types.Array(dtype, ndim, "C")

    rows, tables = array(types.uint8, 2), (array(types.int32, 1), array(types.int32, 2))
    ptx = compile_ptx(row_sums("bfloat16"), (rows, rows, *tables, array(types.float32, 2)), cc)
    needed = resources(ptx, cc)
    assert (needed.spills, needed.stack) == (0, 0) and "NRT_" not in ptx
