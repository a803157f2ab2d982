"""``bench grouped_gemm``: what it measures, what it refuses, and that wrong results are found."""

import json

import pytest

import shmemkit as sk
from shmemkit.bench.__main__ import main, parse
from shmemkit.bench.grouped_gemm import parse_shapes
from shmemkit.bench.results import CUBLAS, CUBLAS_LOOP, TORCH_GROUPED
from shmemkit.bench.shapes import parse_tiles

pytest.importorskip("rich")
SMALL = ["grouped_gemm", "--shapes", "3x8x32x64,2x16x8x64zipf"]


@pytest.fixture(autouse=True)
def wide(monkeypatch):
    """Notes are not broken into columns of a few letters."""
    monkeypatch.setenv("COLUMNS", "200")


@pytest.mark.slow
def test_it_runs(tmp_path):
    path = tmp_path / "f.json"
    given = [*SMALL, "--methods", "auto,sm90", "--tiles", "64x32", "--json", str(path)]
    assert sk.emu.run(main, 1, (given,)) == [0]
    rows = json.loads(path.read_text())["rows"]
    peers, ours = [CUBLAS, CUBLAS_LOOP, TORCH_GROUPED], ["auto", "sm90", "sm90 64x32"]
    expected = [(shape, name) for shape in ("3x8x32x64", "2x16x8x64 zipf") for name in (*peers, *ours)]
    assert [(row["shape"], row["method"]) for row in rows] == expected
    for row in rows:
        if row["method"] in peers:
            assert row["note"].startswith("refused: ") and "GPU" in row["note"]
        else:
            assert "note" not in row and row["tflops"] > 0 and row["weights_GBps"] > 0


@pytest.mark.slow
def test_float8(tmp_path):
    path = tmp_path / "f.json"
    given = [*SMALL, "--dtype", "float8_e4m3fn", "--json", str(path)]
    assert sk.emu.run(main, 1, (given,)) == [0]
    rows = json.loads(path.read_text())["rows"]
    names = ["auto, bfloat16", CUBLAS, "torch._scaled_grouped_mm", "auto"]
    assert [row["method"] for row in rows] == names * 2
    for row in rows:
        assert ("us" in row) == row["method"].startswith("auto")


def test_shapes():
    even, uneven = parse_shapes("4x16x8x32, 4X25x8x32zipf")
    assert (str(even), str(uneven)) == ("4x16x8x32", "4x25x8x32 zipf")
    assert even.counts == [16] * 4
    assert sorted(uneven.counts, reverse=True) == [48, 24, 16, 12]  # 100 rows by 1, 1/2, 1/3, 1/4


def test_tiles():
    assert parse_tiles("") == []
    assert parse_tiles("64x256,128X96") == [(64, 256), (128, 96)]


@pytest.mark.slow
def test_wrong_results_are_found(monkeypatch, capsys):
    class Wrong(sk.GroupedGemm):
        def __call__(self, x, w, counts, out=None, **options):
            super().__call__(x, w, counts, out, **options)
            sk.current().synchronize()
            out[-1] *= 2
            return out

    monkeypatch.setattr(sk, "GroupedGemm", Wrong)
    assert sk.emu.run(main, 1, (["grouped_gemm", "--shapes", "1x8x8x8", "--vs", ""],)) == [1]
    assert "wrong: relative error" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--shapes", "3x4x5"], "it has '3x4x5'; it must be ExROWSxNxK"),
        (["--shapes", "3x4x5x0"], "it has '3x4x5x0'"),
        (["--tiles", "64"], "it has '64'; it must be MxN, 64 or 128 rows by a multiple of 16 up to 256"),
        (["--tiles", "64x32,96x64"], "it has '96x64'"),
        (["--tiles", "64x300"], "it has '64x300'"),
        (["--methods", "simt"], "'simt'"),
        (["--dtype", "float32"], "float32"),
        (["--vs", "nccl"], "nccl"),
    ],
)
def test_refusals(options, text, capsys):
    with pytest.raises(SystemExit):
        parse(["grouped_gemm", *options])
    assert text in " ".join(capsys.readouterr().err.split())


def test_large_shapes_are_not_emulated():
    with pytest.raises(SystemExit, match="as 2x8x32x32"):
        sk.emu.run(main, 1, (["grouped_gemm", "--shapes", "8x1024x4096x4096"],))
