"""``bench --sms``: rows within budgets of multiprocessors."""

import json

import pytest

import shmemkit as sk
from shmemkit.bench.__main__ import main, parse

pytest.importorskip("rich")


def methods_of(tmp_path, *arguments):
    path = tmp_path / "results.json"
    assert sk.emu.run(main, 2, ([*arguments, "--json", str(path)],)) == [0, 0]
    rows = json.loads(path.read_text())["rows"]
    assert all(row["us"] > 0 and "note" not in row for row in rows)
    return [row["method"] for row in rows if not row.get("alone")]


@pytest.mark.slow
def test_collectives(tmp_path):
    options = "--sizes", "1K", "--methods", "auto,ll128", "--vs", "", "--sms", "2,3"
    assert methods_of(tmp_path, "all_reduce", *options[:3], "auto,push", *options[4:]) == [
        *("auto", "push", "auto, sms=2", "push, sms=2", "auto, sms=3", "push, sms=3")
    ]


@pytest.mark.every(3)
@pytest.mark.parametrize("op", ["ag_gemm", "gemm_rs", "gemm"])
def test_products(tmp_path, op):
    options = "--shapes", "16x16x16", "--methods", "auto", "--vs", "", "--sms", "4"
    assert methods_of(tmp_path, op, *options) == ["auto", "auto, sms=4"]


def test_what_is_wrong(capsys):
    for given in ("0", "x", "-1"):
        with pytest.raises(SystemExit):
            parse(["all_reduce", f"--sms={given}"])
        assert "--sms" in capsys.readouterr().err
