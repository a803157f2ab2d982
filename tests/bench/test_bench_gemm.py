"""``bench gemm``: what it measures, what it refuses, and that wrong results are found."""

import json

import pytest
from fast import slow

import shmemkit as sk
from shmemkit.bench.__main__ import main, parse
from shmemkit.bench.results import CUBLAS, Results, Row
from shmemkit.bench.shapes import parse_shapes

pytest.importorskip("rich")
SMALL = ["gemm", "--shapes", "24x16x32,8x40x8"]


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Notes are not broken into columns of a few letters."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.parametrize(("n", "options"), [(1, ["--layout", "nn", "--dtype", "float32"]), *slow((2, []))])
def test_it_runs(n, options, tmp_path):
    path = tmp_path / "f.json"
    methods = "auto,simt" if "float32" in options else "auto,sm80,sm90"
    given = [*SMALL, *options, "--methods", methods, "--json", str(path)]
    assert sk.emu.run(main, n, (given,)) == [0] * n
    rows = json.loads(path.read_text())["rows"]
    expected = [(shape, name) for shape in ("24x16x32", "8x40x8") for name in (CUBLAS, *methods.split(","))]
    assert [(row["shape"], row["method"]) for row in rows] == expected
    for row in rows:
        if row["method"] == CUBLAS:
            assert row["note"] == "refused: cuBLAS needs a GPU"
        else:
            assert "note" not in row and row["us"] > 0 and row["tflops"] > 0


def test_tiles(tmp_path):
    path = tmp_path / "f.json"
    given = ["gemm", "--shapes", "64x16x32", "--tiles", "64x32", "--methods", "auto", "--vs", ""]
    assert sk.emu.run(main, 1, ([*given, "--json", str(path)],)) == [0]
    rows = json.loads(path.read_text())["rows"]
    assert [row["method"] for row in rows] == ["auto", "sm90 64x32"]
    assert all(row["us"] > 0 and "note" not in row for row in rows)


def test_float8(tmp_path):
    path = tmp_path / "f.json"
    given = [
        "gemm",
        "--shapes",
        "24x16x32",
        "--dtype",
        "float8_e4m3fn",
        "--methods",
        "auto,sm80,sm90",
        "--json",
        str(path),
    ]
    assert sk.emu.run(main, 1, (given,)) == [0]
    rows = json.loads(path.read_text())["rows"]
    names = [CUBLAS, "cuBLAS, bfloat16", "cuBLAS, no fast accumulation", "auto", "auto, bfloat16", "sm90"]
    assert sorted(row["method"] for row in rows) == sorted(names)
    for row in rows:
        assert ("us" in row) == (CUBLAS not in row["method"])


def test_ratios():
    results = Results.__new__(Results)
    times = {CUBLAS: 10.0, "auto": 8.0}
    results.rows = [
        Row("gemm", method, 1, us * factor, shape=shape)
        for shape, factor in (("1x2x3", 1), ("3x2x1", 2))
        for method, us in times.items()
    ]
    results.p2p_GBps = None
    results.compare()
    assert [row.vs_cublas for row in results.rows] == [1, 1.25] * 2


def test_wrong_results_are_found(monkeypatch, capsys):
    class Wrong(sk.Gemm):
        def __call__(self, a, b, out=None, **options):
            super().__call__(a, b, out, **options)
            sk.current().synchronize()
            out *= 1.01
            return out

    monkeypatch.setattr(sk, "Gemm", Wrong)
    assert sk.emu.run(main, 1, ([*SMALL, "--vs", "", "--methods", "simt"],)) == [1]
    assert "wrong: relative error 1.0e-02" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--shapes", "3x4"], "it has '3x4'; it must be MxNxK"),
        (["--methods", "sm70"], "'sm70'"),
        (["--dtype", "int8"], "int8"),
    ],
)
def test_refusals(options, text, capsys):
    with pytest.raises(SystemExit):
        parse(["gemm", *options])
    assert text in capsys.readouterr().err


def test_large_shapes_are_not_emulated():
    with pytest.raises(SystemExit, match="as 32x32x32"):
        sk.emu.run(main, 1, (["gemm", "--shapes", "4096x4096x4096"],))


def test_shapes():
    assert parse_shapes("1x2x3,4X5x6") == [(1, 2, 3), (4, 5, 6)]
