"""``bench flash_decode`` and ``attention_combine``: what they measure, and that wrong results are found."""

import json

import pytest

import shmemkit as sk
from shmemkit.bench import attention_combine, flash_decode
from shmemkit.bench.__main__ import main, parse
from shmemkit.bench.results import Results, Row

pytest.importorskip("rich")
DECODE = ["flash_decode", "--head-dim", "64", "--replays", "1"]
COMBINE = ["attention_combine", "--replays", "1"]


def rows_of(n, tmp_path, given):
    path = tmp_path / "f.json"
    assert sk.emu.run(main, n, ([*given, "--json", str(path)],)) == [0] * n
    return json.loads(path.read_text())["rows"]


def test_decoding(tmp_path):
    rows = rows_of(2, tmp_path, [*DECODE, "--shapes", "3x1x2", "--batch", "1", "--dtype", "float16"])
    assert {row["method"]: row.get("alone") for row in rows} == {
        "sdpa, nccl, combine": None,
        "flashinfer, nccl, merge_states": None,
        "sdpa": "attention",
        "copy": "memory",
        "AttentionCombine": "exchange",
        "FlashDecode": None,
    }
    for row in rows:
        assert row["shape"] == "3x1x2" and row["bytes"] == 2 * 3 * 64 * 2
        torch = row["method"].startswith(("sdpa", "flashinfer"))
        assert row["note"].startswith("refused: ") if torch else row["us"] > 0
        assert ("bus_GBps" in row) == (row["method"] in ("copy", "FlashDecode"))


def test_combining(tmp_path):
    rows = rows_of(2, tmp_path, [*COMBINE, "--shapes", "1x2x8,2x3x16"])
    methods = ["AllGather", "AllToAll", "torch nccl, combine", "all_gather", "all_to_all"]
    assert [row["method"] for row in rows] == 2 * methods
    for row in rows:
        heads, size = {"1x2x8": (2, 40), "2x3x16": (3, 216)}[row["shape"]]
        assert row["bytes"] == size
        refused = "torch" in row["method"] or (heads == 3 and row["method"] == "all_to_all")
        assert row["note"].startswith("refused: ") if refused else row["us"] > 0


@pytest.mark.parametrize(
    ("host", "given"),
    [
        ("FlashDecode", [*DECODE, "--shapes", "5x1x1", "--vs", ""]),
        ("AttentionCombine", [*COMBINE, "--shapes", "1x2x8", "--vs", "", "--methods", "all_gather"]),
    ],
)
def test_wrong_results_are_found(monkeypatch, capsys, host, given):
    class Wrong(getattr(sk, host)):
        def __call__(self, *arguments, **more):
            out = super().__call__(*arguments, **more)
            sk.current().synchronize()
            out *= 1.03

    monkeypatch.setattr(sk, host, Wrong)
    assert sk.emu.run(main, 2, (given,)) == [1, 1]
    assert "wrong: relative" in " ".join(capsys.readouterr().out.split())


def test_what_a_row_is_compared_with():
    """All of it, not a part: PyTorch's attention alone has no exchange."""
    results = Results.__new__(Results)
    results.p2p_GBps, times = None, {"sdpa, nccl, combine": (30, None), "sdpa": (5, "attention")}
    times |= {"AttentionCombine": (4, "exchange"), "FlashDecode": (10, None)}
    results.rows = [
        Row("flash_decode", method, 64, us, shape="8x1x1", alone=alone)
        for method, (us, alone) in times.items()
    ]
    results.compare()
    assert results.rows[-1].vs_torch == 3 and results.rows[-1].overlap is None


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (["flash_decode", "--shapes", "3x4"], "it must be TOKENSxKV_HEADSxGROUP"),
        (["flash_decode", "--vs", "triton"], "'triton'"),
        (["flash_decode", "--head-dim", "96"], "96"),
        (["attention_combine", "--shapes", "3x4"], "it must be BATCHxHEADSxHEAD_DIM"),
        (["attention_combine", "--methods", "ring"], "'ring'"),
    ],
)
def test_refusals(capsys, given, text):
    with pytest.raises(SystemExit):
        parse(given)
    assert text in capsys.readouterr().err


def test_the_peers_of_the_command_line():
    assert tuple(flash_decode.PEERS) == ("sdpa_nccl", "flashinfer", "sdpa", "copy")
    assert tuple(attention_combine.PEERS) == ("torch_nccl",)
