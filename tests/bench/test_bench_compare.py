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
        ([9.0, 10.0, 11.0], [12.8, 12.9, 12.9], False),  # three times what the old runs differ by
        ([9.0, 10.0, 11.0], [13.1, 13.1, 13.1], True),
        ([10.0, 10.0, 10.0], [11.0, 12.0, 13.0], False),  # likewise the new ones
        ([50.0, 50.0, 50.0, 50.0, 70.0], [65.0] * 5, True),  # one disturbed run says nothing
        ([50.0] * 3, [80.0, 80.0, 50.0], True),
        ([50.0] * 3, [50.0, 50.0, 80.0], False),
    ],
)
def test_slower_than_the_noise(old, new, is_slower):
    assert slower([("ll", old)], [("ll", new)]) == ["ll"] * is_slower


def test_competitors_tell_of_the_machine_and_are_not_judged():
    old = [("nccl", [10.0]), ("nccl_window", [4.0]), ("ll", [2.0]), ("push_1d", [3.0]), ("auto", [2.0])]
    new = [("nccl", [20.0]), ("nccl_window", [2.0]), ("ll", [2.0]), ("push_1d", None, "refused: no")]
    found = Comparison(results_of(*old), results_of(*new))
    assert found.drift == pytest.approx(1.0) and not found.slower and len(found.pairs) == 1
    assert [row.method for row in found.failed] == ["push_1d"] and not found.passed
    assert [row.method for row in found.others] == ["auto"]
    same = Comparison(results_of(("ll", [1.0])), results_of(("ll", [1.0])))
    assert same.drift is None and same.passed
    nothing = Comparison(results_of(("ll", [1.0])), results_of(("push_1d", [1.0])))
    assert not nothing.pairs and not nothing.passed


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    path = tmp_path_factory.mktemp("measured") / "old.json"
    assert sk.emu.run(main, 2, ([*COMMAND, "--json", str(path)],)) == [0, 0]
    return path.read_bytes()


@pytest.fixture
def old(measured, tmp_path):
    """The file of a run on two ranks of the emulator."""
    path = tmp_path / "old.json"
    path.write_bytes(measured)
    return path


def with_times(path, factor):
    """Scale the times in a file."""
    data = json.loads(path.read_text())
    for row in data["rows"]:
        row["us"] *= factor
    path.write_text(json.dumps(data))


@pytest.mark.slow
def test_the_command(old, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "150")
    with_times(old, 1e9)  # so that nothing is slower, whatever this machine does
    assert sk.emu.run(main, 2, ([*COMMAND, "--compare", str(old)],)) == [0, 0]
    assert "0 of 4 rows became slower" in capsys.readouterr().out
    with_times(old, 1e-18)
    new = old.with_name("new.json")
    given = [*COMMAND[:-2], "--methods", "ll", "--vs", "", "--runs", "2", "--json", str(new)]
    for _ in range(3):  # on a busy machine the times of a row may differ too much to say anything
        statuses = sk.emu.run(main, 2, ([*given, "--compare", str(old)],))
        out = " ".join(capsys.readouterr().out.split())
        if "2 of 2 rows became slower" in out:
            break
    assert statuses == [1, 1] and "2 of 2 rows became slower" in out
    assert [len(row["runs"]) for row in json.loads(new.read_text())["rows"]] == [4, 4]  # two, and two again
    assert "slower than before" in out
    assert "not measured now: push_1d 64; push_1d 1K" in out
    assert out.count(" to ") == 3  # the shortest and the longest time of each row, and the ratios


@pytest.mark.slow
def test_without_a_command_the_old_one_runs_again(old, capsys):
    with_times(old, 1e9)
    assert sk.emu.run(main, 2, (["--compare", str(old), "--sizes", "64"],)) == [0, 0]
    out = capsys.readouterr().out
    assert "0 of 2 rows became slower" in out and "not measured now: ll 1K; push_1d 1K" in out
    options = parse(["--compare", str(old)])
    assert options.command == "all_gather" and options.methods == ["ll", "push_1d"] and options.runs == 3
    assert options.json is None


def of_command(text):
    found = Results.__new__(Results)
    found.command = f"python3 -m shmemkit.bench {text}"
    return found


def test_files_and_runs_of_the_old_command_are_left_out():
    found = of_command(
        "all_gather --sizes 8K --json f.json --nccl n.so --vs '' --runs 5 --plot=p.svg --methods ll "
        "--compare o.json"
    )
    assert arguments_of(found) == ["all_gather", "--sizes", "8K", "--vs", "", "--methods", "ll"]
    for text in ("all_gather --tune --sizes 8K", "all_gather --tune=t.json"):
        with pytest.raises(ValueError, match="with --tune"):
            arguments_of(of_command(text))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["all_gather", "--dtype", "float32"], "--dtype is float32; it must be as in the file, bfloat16"),
        (["all_gather", "--iters", "3"], "--iters is 3; it must be as in the file, not given"),
        (["all_reduce"], "the command is all_reduce; it must be as in the file, all_gather"),
        (["all_gather", "--js", "x.json"], "unrecognized arguments: --js"),  # it may name the old file
        (["all_gather", "--json"], "the file to compare with; it must be another one"),
    ],
)
def test_other_settings_are_refused(given, message, old, capsys):
    given += [str(old)] if given[-1] == "--json" else []
    before = old.read_bytes()
    for arguments in ([*given, "--compare", str(old)], ["--compare", str(old), *given[1:]]):
        if arguments[0] == "--compare" and given == ["all_reduce"]:
            continue
        with pytest.raises(SystemExit):
            main(arguments)
        assert message in " ".join(capsys.readouterr().err.split())
    assert old.read_bytes() == before


@pytest.mark.parametrize(("ranks", "change"), [(3, {}), (2, {"gpu": "another"}), (2, {"n_nodes": 2})])
def test_another_machine_is_refused(ranks, change, old):
    data = json.loads(old.read_text())
    data["machine"] |= change
    old.write_text(json.dumps(data))
    with pytest.raises(
        SystemExit, match=r"--compare .*old.json: the file is of 2 ranks .*; here are .* the same machine"
    ):
        sk.emu.run(main, ranks, ([*COMMAND, "--compare", str(old)],))


@pytest.mark.parametrize("text", ["{}", "[]", "no", '{"rows": [{"unknown": 1}]}'])
def test_a_file_that_json_did_not_write(text, tmp_path, capsys):
    path = tmp_path / "f.json"
    path.write_text(text)
    for given in (["--compare", str(path)], [*COMMAND, "--compare", str(path)]):
        with pytest.raises(SystemExit):
            main(given)
        assert "f.json' is no file that this version's --json wrote" in capsys.readouterr().err
