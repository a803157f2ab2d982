"""``bench all_reduce_rms_norm``: what it measures, and that wrong results are found."""

import json

import pytest

import shmemkit as sk
from shmemkit.bench import rms_norm
from shmemkit.bench.__main__ import main, parse

pytest.importorskip("rich")


def test_it_runs(tmp_path):
    path = tmp_path / "f.json"
    given = ["all_reduce_rms_norm", "--shapes", "1x64,3x32", "--json", str(path)]
    assert sk.emu.run(main, 2, (given,)) == [0, 0]
    rows = json.loads(path.read_text())["rows"]
    methods = [
        "AllReduce",
        *(peer.method for peer in rms_norm.PEERS.values()),
        "auto",
        "one_shot",
        "two_shot",
    ]
    assert [row["method"] for row in rows] == 2 * methods
    for row in rows:
        assert row["bytes"] == {"1x64": 128, "3x32": 192}[row["shape"]]
        assert row["note"].startswith("refused: ") if "torch" in row["method"] else row["us"] > 0


def test_wrong_results_are_found(monkeypatch, capsys):
    class Wrong(sk.AllReduceRMSNorm):
        def __call__(self, *given, out, **more):
            super().__call__(*given, out=out, **more)
            sk.current().synchronize()
            out *= 1.02

    monkeypatch.setattr(sk, "AllReduceRMSNorm", Wrong)
    given = ["all_reduce_rms_norm", "--shapes", "2x64", "--vs", "", "--methods", "two_shot"]
    assert sk.emu.run(main, 2, (given,)) == [1, 1]
    assert "wrong: relative" in " ".join(capsys.readouterr().out.split())


def test_refusals(capsys):
    for option, text in (
        (["--shapes", "3x4x5"], "it must be TOKENSxHIDDEN"),
        (["--methods", "ring"], "'ring'"),
    ):
        with pytest.raises(SystemExit):
            parse(["all_reduce_rms_norm", *option])
        assert text in capsys.readouterr().err
