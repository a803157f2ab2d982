"""``bench ag_grouped_gemm`` and ``grouped_gemm_rs``: what they measure and refuse, and that wrong results are
found."""

import json

import pytest
from fast import slow

import shmemkit as sk
from shmemkit.bench.__main__ import main
from shmemkit.bench.results import TORCH_EXPERTS, TORCH_EXPERTS_LOOP
from shmemkit.moe import all_gather_gemm

pytest.importorskip("rich")


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch):
    monkeypatch.setenv("SHMEMKIT_EMULATED_GPU", "H200,sms=3")
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.parametrize("n_ranks", slow(1, 2))
@pytest.mark.parametrize(
    ("op", "part", "size", "method"),
    [
        ("ag_grouped_gemm", ("copies", "gathering"), 8 * 16 * 2, "overlap"),
        ("grouped_gemm_rs", ("ReduceScatter", "reduction"), 8 * 32 * 2, "gathered"),
    ],
)
def test_it_runs(op, part, size, method, n_ranks, tmp_path):
    path = tmp_path / "f.json"
    given = [op, "--shapes", "8x32x16x3x2", "--methods", f"{method},sequential", "--json", str(path)]
    assert sk.emu.run(main, n_ranks, (given,)) == [0] * n_ranks
    rows = json.loads(path.read_text())["rows"]
    ours = [("GroupedGemm", "product"), part, (method, None), ("sequential", None)]
    ours.append((f"{method}, index made before", None))
    found = [(row["method"], row.get("alone")) for row in rows]
    assert found == [*ours[:2], (TORCH_EXPERTS, None), (TORCH_EXPERTS_LOOP, None), *ours[2:]]
    for row in rows:
        if (row["method"], row.get("alone")) in ours:
            assert "note" not in row and row["us"] > 0 and row["bytes"] == size
        else:
            assert row["note"].startswith("refused: ")


def test_shapes_that_ranks_do_not_share():
    for op, text in (("ag_grouped_gemm", "M and N"), ("grouped_gemm_rs", "M and K")):
        with pytest.raises((SystemExit, sk.emu.EmulatorError), match=f"{text} must be multiples of 2"):
            sk.emu.run(main, 2, ([op, "--shapes", "7x32x16x3x2", "--vs", ""],))


@pytest.mark.slow
def test_a_wrong_result_is_found(monkeypatch, capsys):
    monkeypatch.setattr(all_gather_gemm, "moved_product", lambda *arguments: [])
    given = ["ag_grouped_gemm", "--shapes", "1x8x8x1x1", "--methods", "sequential", "--vs", ""]
    assert sk.emu.run(main, 1, (given,)) == [1]
    assert "wrong: relative error" in capsys.readouterr().out
