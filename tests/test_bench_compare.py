"""``bench --compare``: what has become slower than in an earlier run."""

import json

import pytest

import shmemkit as sk
from shmemkit.bench.__main__ import main, parse
from shmemkit.bench.compare import Comparison, arguments_of
from shmemkit.bench.results import Results

pytest.importorskip("rich")
COMMAND = ["all_gather", "--sizes", "64,1K", "--methods", "ll,push_1d", "--vs", ""]


def results_of(*rows):
    """Rows of one size: (method, microseconds of each run, or None, note)"""
    found = Results.__new__(Results)
    found.rows, found.p2p_GBps = [], None
    for method, runs, *note in rows:
        for us in runs or [None]:
            found.add("all_gather", method, 8, us, note="".join(note))
    return found


def slower(old, new):
    """The methods that have become slower."""
    return [row.method for _, row in Comparison(results_of(*old), results_of(*new)).slower]


@pytest.mark.parametrize(
    ("old", "new", "is_slower"),
    [
        ([10.0], [10.2], False),  # less than 3 %
        ([10.0], [10.5], True),
        ([10.0], [9.0], False),
        ([10.0, 10.0, 11.0], [10.9, 11.5, 11.6], False),  # within what the old runs differ by
        ([10.0, 10.0, 11.0], [11.1, 11.5, 11.6], True),
        ([10.0, 10.0, 11.0], [9.9, 11.5, 11.6], False),
    ],
)
def test_slower_than_the_noise(old, new, is_slower):
    assert slower([("ll", old)], [("ll", new)]) == ["ll"] * is_slower


def test_competitors_tell_of_the_machine_and_are_not_judged():
    old = [("nccl", [10.0]), ("nccl_window", [4.0]), ("ll", [2.0]), ("push_1d", [3.0]), ("auto", [2.0])]
    new = [("nccl", [20.0]), ("nccl_window", [2.0]), ("ll", [2.0]), ("push_1d", None, "refused: no")]
    found = Comparison(results_of(*old), results_of(*new))
    assert found.drift == pytest.approx(1.0) and not found.slower and len(found.pairs) == 1
    assert [row.method for row in found.missing] == ["push_1d", "auto"]
    assert Comparison(results_of(("ll", [1.0])), results_of(("ll", [1.0]))).drift is None


@pytest.fixture
def old(tmp_path):
    """The file of a run on two ranks of the emulator."""
    path = tmp_path / "old.json"
    assert sk.emu.run(main, 2, ([*COMMAND, "--json", str(path)],)) == [0, 0]
    return path


def with_times(path, factor):
    """Scale the times in a file."""
    data = json.loads(path.read_text())
    for row in data["rows"]:
        row["us"] *= factor
    path.write_text(json.dumps(data))


def test_the_command(old, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "150")
    with_times(old, 1e9)  # so that nothing is slower, whatever this machine does
    assert sk.emu.run(main, 2, ([*COMMAND, "--compare", str(old)],)) == [0, 0]
    assert "0 of 4 rows became slower" in capsys.readouterr().out
    with_times(old, 1e-18)
    given = [*COMMAND[:-2], "--methods", "ll", "--vs", "", "--runs", "2", "--compare", str(old)]
    assert sk.emu.run(main, 2, (given,)) == [1, 1]
    out = " ".join(capsys.readouterr().out.split())
    assert "slower than before" in out and "2 of 2 rows became slower" in out
    assert "not measured now: push_1d" in out


def test_without_a_command_the_old_one_runs_again(old, capsys):
    with_times(old, 1e9)
    assert sk.emu.run(main, 2, (["--compare", str(old), "--sizes", "64"],)) == [0, 0]
    out = capsys.readouterr().out
    assert "0 of 2 rows became slower" in out and "1K" not in out
    options = parse(["--compare", str(old)])
    assert options.command == "all_gather" and options.methods == ["ll", "push_1d"] and options.runs == 3
    assert options.json is None


def test_files_and_runs_of_the_old_command_are_left_out():
    found = Results.__new__(Results)
    found.command = (
        "python3 -m shmemkit.bench all_gather --tune --sizes 8K --tune=t.json --json f.json --nccl n.so "
        "--vs '' --runs 5 --plot=p.svg --methods ll --compare old.json --tune x.json"
    )
    assert arguments_of(found) == ["all_gather", "--sizes", "8K", "--vs", "", "--methods", "ll"]


@pytest.mark.parametrize(("ranks", "change"), [(3, {}), (2, {"gpu": "another"}), (2, {"n_nodes": 2})])
def test_another_machine_is_refused(ranks, change, old):
    data = json.loads(old.read_text())
    data["machine"] |= change
    old.write_text(json.dumps(data))
    with pytest.raises(
        SystemExit, match=r"--compare: the file is of 2 ranks .*; here are .* the same machine"
    ):
        sk.emu.run(main, ranks, ([*COMMAND, "--compare", str(old)],))


@pytest.mark.parametrize("text", ["{}", "[]", "no", '{"rows": [{"unknown": 1}]}'])
def test_a_file_that_json_did_not_write(text, tmp_path, capsys):
    path = tmp_path / "f.json"
    path.write_text(text)
    for given in (["--compare", str(path)], [*COMMAND, "--compare", str(path)]):
        with pytest.raises(SystemExit):
            main(given)
        assert "f.json' is no file that --json wrote" in capsys.readouterr().err
