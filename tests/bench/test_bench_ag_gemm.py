"""``bench ag_gemm``: what it measures, compares and refuses, and that wrong results are found."""

import dataclasses
import json

import pytest

import shmemkit as sk
from shmemkit.bench.__main__ import main, parse
from shmemkit.bench.results import (
    CUBLAS,
    NCCL,
    NCCL_CUBLAS,
    NCCL_CUBLAS_WAYS,
    NCCL_WAYS,
    TORCH_AG_GEMM,
    Results,
)

pytest.importorskip("rich")
SMALL = ["ag_gemm", "--shapes", "24x32x16,8x16x8"]


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Notes are not broken into columns of a few letters."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.slow
def test_it_runs(tmp_path):
    path = tmp_path / "f.json"
    assert sk.emu.run(main, 2, ([*SMALL, "--json", str(path)],)) == [0, 0]
    rows = json.loads(path.read_text())["rows"]
    alone = [("Gemm", "product"), ("copies", "gathering"), (CUBLAS, "product")]
    alone += [(way, "gathering") for way in NCCL_WAYS]
    both = [TORCH_AG_GEMM, *NCCL_CUBLAS_WAYS, "auto", *sk.AllGatherGemm.methods_for(1)]
    expected = [*alone, *((name, None) for name in both)]
    assert [(row["method"], row.get("alone")) for row in rows] == 2 * expected
    for row in rows:
        if row["method"] in ("Gemm", "copies", "auto", "push", "overlap", "sequential"):
            assert "note" not in row and row["us"] > 0 and (row.get("overlap", 0) > 0) == ("alone" not in row)
            assert row["bytes"] == {"24x32x16": 768, "8x16x8": 128}[row["shape"]]
        else:
            assert row["note"].startswith("refused: ")


def compared(*rows):
    """-> {method: its Row}, of (method, what it is alone of, us, note)"""
    results = Results.__new__(Results)
    results.rows, results.p2p_GBps = [], None
    for shape, factor in (("1x2x3", 1), ("3x2x1", 2)):
        for method, alone, us, note in rows:
            results.add("ag_gemm", method, 1, us and us * factor, shape=shape, alone=alone, note=note)
    results.compare()
    first, second = results.rows[: len(rows)], results.rows[len(rows) :]
    for one, other in zip(first, second, strict=True):
        assert dataclasses.replace(other, shape=one.shape, us=one.us) == one
    return {row.method: row for row in first}


PRODUCTS = (("Gemm", "product", 9.0, ""), (CUBLAS, "product", 8.0, ""))
GATHERINGS = (
    ("copies", "gathering", 4.0, ""),
    (NCCL, "gathering", 6.0, ""),
    ("nccl_ce", "gathering", 5.0, ""),
)
LAYERS = (
    (TORCH_AG_GEMM, None, 12.5, ""),
    (NCCL_CUBLAS, None, 18.0, ""),
    (NCCL_CUBLAS_WAYS[-1], None, 15.0, ""),
    ("overlap", None, 10.0, ""),
)


def test_ratios():
    found = compared(*PRODUCTS, *GATHERINGS, *LAYERS)
    assert found["Gemm"].vs_cublas == 8 / 9 and found["copies"].vs_nccl == 1.25
    whole = found["overlap"]
    assert (whole.vs_nccl, whole.vs_plain, whole.vs_torch) == (1.5, 1.8, 1.25)
    assert found[TORCH_AG_GEMM].vs_nccl == 1.2
    assert whole.vs_cublas is None and found["Gemm"].vs_nccl is None


@pytest.mark.parametrize(
    ("alone", "longer"),
    [
        (PRODUCTS + GATHERINGS, 8.0),
        ((("Gemm", "product", 3.0, ""), *GATHERINGS), 4.0),
        ((("Gemm", "product", 9.0, ""), (CUBLAS, "product", 5.0, "wrong: all of it"), *GATHERINGS), 9.0),
        ((("Gemm", "product", 9.0, ""), (CUBLAS, "product", None, "refused: no"), *GATHERINGS), 9.0),
        (PRODUCTS, None),
        ((*PRODUCTS, ("copies", "gathering", 4.0, "wrong: all of it")), None),
    ],
    ids=["product", "gathering", "a wrong one", "a refused one", "one part", "one right part"],
)
def test_overlap_is_the_longer_part_alone_over_the_time(alone, longer):
    found = compared(*alone, *LAYERS)
    for method, _, us, _ in LAYERS:
        assert found[method].overlap == (longer and longer / us)
    assert all(found[method].overlap is None for method, *_ in alone)


def test_wrong_results_are_found(monkeypatch, capsys):
    class Wrong(sk.AllGatherGemm):
        def __call__(self, x, w, out):
            super().__call__(x, w, out)
            sk.current().synchronize()
            out *= 1.01

    monkeypatch.setattr(sk, "AllGatherGemm", Wrong)
    given = ["ag_gemm", "--shapes", "8x16x8", "--vs", "", "--methods", "sequential"]
    assert sk.emu.run(main, 2, (given,)) == [1, 1]
    assert "wrong: relative" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "text"),
    [(["--shapes", "3x4"], "it has '3x4'; it must be MxNxK"), (["--methods", "ring"], "'ring'")],
)
def test_refusals(options, text, capsys):
    with pytest.raises(SystemExit):
        parse(["ag_gemm", *options])
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(("shapes", "text"), [("8x15x8", "multiples of 2"), ("8192x8192x64", "up to")])
def test_shapes_that_are_not_measured(shapes, text):
    with pytest.raises(SystemExit, match=text):
        sk.emu.run(main, 2, (["ag_gemm", "--shapes", shapes],))
