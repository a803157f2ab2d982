"""``bench gemm_rs`` and ``gemm_ar``: what they measure and refuse, and that wrong results are found."""

import json

import pytest
from fast import slow

import shmemkit as sk
from shmemkit.bench import gemm_reduce
from shmemkit.bench.__main__ import main, parse
from shmemkit.bench.results import CUBLAS, NCCL_CUBLAS_WAYS, NCCL_WAYS, TORCH_GEMM_RS

pytest.importorskip("rich")


@pytest.mark.parametrize("op, reduction", [("gemm_rs", "reduce_scatter"), ("gemm_ar", "all_reduce")])
def test_it_runs(op, reduction, tmp_path):
    path = tmp_path / "f.json"
    given = [op, "--shapes", "8x16x8", "--methods", "auto,sequential", "--json", str(path)]
    assert sk.emu.run(main, 2, (given,)) == [0, 0]
    rows = json.loads(path.read_text())["rows"]
    alone = [("Gemm", "product"), (reduction, "reduction"), (CUBLAS, "product")]
    alone += [(way, "reduction") for way in NCCL_WAYS]
    both = [TORCH_GEMM_RS] if op == "gemm_rs" else []
    expected = [*alone, *((name, None) for name in [*both, *NCCL_CUBLAS_WAYS, "auto", "sequential"])]
    assert [(row["method"], row.get("alone")) for row in rows] == expected
    for row in rows:
        if row["method"] in ("Gemm", reduction, "auto", "sequential"):
            assert "note" not in row and row["us"] > 0 and (row.get("overlap", 0) > 0) == ("alone" not in row)
            assert row["shape"] == "8x16x8" and row["bytes"] == 128
        else:
            assert row["note"].startswith("refused: ")


def test_few_rows_that_ranks_do_not_share():
    given = ["gemm_ar", "--shapes", "3x16x8", "--methods", "one_shot", "--vs", ""]
    assert sk.emu.run(main, 2, (given,)) == [0, 0]


@pytest.mark.slow
@pytest.mark.parametrize("local_size", [1, *slow(2)])
def test_by_default_the_methods_for_so_many_nodes(monkeypatch, capsys, local_size):
    monkeypatch.setenv("SHMEMKIT_LOCAL_SIZE", str(local_size))
    assert sk.emu.run(main, 2, (["gemm_rs", "--shapes", "8x16x16", "--vs", ""],)) == [0, 0]
    table = capsys.readouterr().out
    methods = {"fused", "fused_2d", "copy_engine", "sequential", "auto: sequential"}
    found = {method for method in methods if f"│ {method} " in table}
    assert found == methods - ({"fused_2d"} if local_size == 2 else {"fused", "copy_engine"})


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Notes are not broken into columns of a few letters."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.slow
def test_fused_is_measured_too():
    given = ["gemm_rs", "--shapes", "8x32x16", "--methods", "fused", "--vs", ""]
    assert sk.emu.run(main, 2, (given,), gpu="H200,sms=2") == [0, 0]


def test_wrong_results_are_found(monkeypatch, capsys):
    class Wrong(sk.GemmAllReduce):
        def __call__(self, a, b, out):
            super().__call__(a, b, out)
            sk.current().synchronize()
            out *= 1.02

    monkeypatch.setattr(sk, "GemmAllReduce", Wrong)
    given = ["gemm_ar", "--shapes", "8x16x8", "--vs", "", "--methods", "sequential"]
    assert sk.emu.run(main, 2, (given,)) == [1, 1]
    assert "wrong: relative" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("op", gemm_reduce.OPS)
def test_refusals(op, capsys):
    with pytest.raises(SystemExit):
        parse([op, "--methods", "ring"])
    assert "'ring'" in capsys.readouterr().err
    if op == "gemm_ar":
        with pytest.raises(SystemExit):
            parse([op, "--vs", "torch"])
        assert "'torch' is given; it must be nccl" in capsys.readouterr().err
    for shapes, text in (("8x15x8", "of 2, the number of ranks"), ("8192x8192x64", "up to")):
        with pytest.raises(SystemExit, match=text):
            sk.emu.run(main, 2, ([op, "--shapes", shapes],))
