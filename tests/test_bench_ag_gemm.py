"""``bench ag_gemm``: what it measures, compares and refuses, and that wrong results are found."""

import json

import pytest

import shmemkit as sk
from shmemkit.bench.__main__ import main, parse
from shmemkit.bench.results import CUBLAS, NCCL, NCCL_CUBLAS, Results, Row

pytest.importorskip("rich")
SMALL = ["ag_gemm", "--shapes", "24x32x16,8x16x8"]


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Notes are not broken into columns of a few letters."""
    monkeypatch.setenv("COLUMNS", "200")


def test_it_runs(tmp_path):
    path = tmp_path / "f.json"
    assert sk.emu.run(main, 2, ([*SMALL, "--json", str(path)],)) == [0, 0]
    rows = json.loads(path.read_text())["rows"]
    alone = [("Gemm", "product"), (CUBLAS, "product"), ("copies", "gathering"), (NCCL, "gathering")]
    both = ["torch fused_all_gather_matmul, no graph", NCCL_CUBLAS, "auto", "overlap", "sequential"]
    expected = [*alone, *((name, None) for name in both)]
    assert [(row["method"], row.get("alone")) for row in rows] == 2 * expected
    for row in rows:
        if row["method"] in ("Gemm", "copies", "auto", "overlap", "sequential"):
            assert "note" not in row and row["us"] > 0
            assert row["bytes"] == {"24x32x16": 768, "8x16x8": 128}[row["shape"]]
        else:
            assert row["note"].startswith("refused: ")


def test_ratios():
    results = Results.__new__(Results)
    times = [("Gemm", "product", 8.0), (CUBLAS, "product", 9.0), ("copies", "gathering", 4.0)]
    times += [(NCCL, "gathering", 6.0), (NCCL_CUBLAS, None, 15.0), ("overlap", None, 10.0)]
    results.rows = [
        Row("ag_gemm", method, 1, us * factor, shape=shape, alone=alone)
        for shape, factor in (("1x2x3", 1), ("3x2x1", 2))
        for method, alone, us in times
    ]
    results.p2p_GBps = None
    results.compare()
    for rows in (results.rows[:6], results.rows[6:]):
        found = {row.method: row for row in rows}
        assert found["Gemm"].vs_cublas == 9 / 8 and found["copies"].vs_nccl == 1.5
        whole = found["overlap"]
        assert whole.vs_nccl_cublas == 1.5 and whole.overlap == 0.8
        assert whole.vs_nccl is None and whole.vs_cublas is None and found["Gemm"].vs_nccl is None


def test_wrong_results_are_found(monkeypatch, capsys):
    class Wrong(sk.AllGatherGemm):
        def __call__(self, x, weight, out):
            super().__call__(x, weight, out)
            sk.current().synchronize()
            out *= 1.01

    monkeypatch.setattr(sk, "AllGatherGemm", Wrong)
    given = ["ag_gemm", "--shapes", "8x16x8", "--vs", "", "--methods", "sequential"]
    assert sk.emu.run(main, 2, (given,)) == [1, 1]
    assert "wrong: relative" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "text"), [(["--shapes", "3x4"], "'3x4': MxNxK"), (["--methods", "ring"], "'ring'")]
)
def test_refusals(options, text, capsys):
    with pytest.raises(SystemExit):
        parse(["ag_gemm", *options])
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(("shapes", "text"), [("8x15x8", "that 2 ranks share"), ("8192x8192x64", "up to")])
def test_shapes_that_are_not_measured(shapes, text):
    with pytest.raises(SystemExit, match=text):
        sk.emu.run(main, 2, (["ag_gemm", "--shapes", shapes],))
