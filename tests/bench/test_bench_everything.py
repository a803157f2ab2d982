"""``shmemkit bench everything`` on the emulator: files that are written case by case, go on, merge, and say
which of their figures are of earlier kernels."""

import contextlib
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shmemkit as sk
from shmemkit.bench import cases, p2p
from shmemkit.bench.__main__ import parse
from shmemkit.bench.results import Results
from shmemkit.tools import ledger
from shmemkit.tools.everything import command, files, plan, worker

pytest.importorskip("matplotlib")

ROOT = Path(__file__).parents[2]
GATHER = ["all_gather", "--methods", "auto", "--vs", "", "--replays", "1"]
BATCH = plan.Batch("all_gather", 2, plan.ALL, GATHER, "--sizes", ("64", "128"), (1, 1))
FILE = "all_gather_emulatorx2.json"


@pytest.fixture
def folder(tmp_path):
    """Of results, beside a checked.json with digests of this package."""
    rooms = {room: f"digest of {room}" for room in ledger.rooms()}
    (tmp_path / "checked.json").write_text(json.dumps({"sources": ledger.sources(), "rooms": rooms}))
    made = tmp_path / "results"
    made.mkdir()
    return made


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """What one rank can send to another takes most of the time here."""
    monkeypatch.setattr(p2p, "limit", lambda world, timer: 400.0)


@pytest.fixture
def earlier(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("earlier")


def run(folder, *batches, skip=()):
    work = {"batches": batches, "folder": str(folder), "heartbeat": str(folder.parent / "beat"), "skip": skip}
    sk.emu.run(worker.run, 2, (json.loads(json.dumps(work)),))


def read(folder, name=FILE):
    return json.loads((folder / name).read_text())


def answers(folder):
    return {case: entry["answer"] for case, entry in read(folder)["measured"].items()}


# ---- the files


def test_a_command_of_sizes_takes_its_usual_ones(folder):
    run(folder, plan.Batch("p2p", 2, plan.ALL, ["p2p", "--replays", "1", "--iters", "1", "--blocks", "2"]))
    data = read(folder, "p2p_emulatorx2.json")
    assert data["measured"][""]["answer"] == "done" and len({row["bytes"] for row in data["rows"]}) > 2


def test_what_a_file_says(folder):
    run(folder, BATCH)
    data = read(folder)
    assert [(row["bytes"], row["method"]) for row in data["rows"]] == [(64, "auto"), (128, "auto")]
    assert answers(folder) == {"64": "done", "128": "done"}
    for entry in data["measured"].values():
        assert entry["sources"] == ledger.sources() and entry["date"] and entry["what"] == plan.ALL
        about = data["hosts"][entry["host"]]
        assert (
            about["machine"]["python"]
            and "numba-cuda" in about["versions"]
            and "nvvm library" in about["versions"]
        )
    rooms = {room for row in data["rows"] for room in row["rooms"]}
    assert rooms <= ledger.rooms().keys() and all("rooms" in row and row["rooms"] for row in data["rows"])
    assert data["digests"] == {ledger.sources(): {room: f"digest of {room}" for room in sorted(rooms)}}
    assert data["nccl"] == {"versions": [], "ways": []}
    assert "--sizes 64,128" in data["command"]


def test_a_case_that_was_measured_is_not_measured_again(folder):
    run(folder, BATCH._replace(cases=("64",)))
    before = read(folder)
    before["rows"][0]["us"] = 77  # as it was measured then
    files.write(folder / FILE, before)
    run(folder, BATCH)
    after = read(folder)
    assert after["rows"][0]["us"] == 77 and answers(folder) == {"64": "done", "128": "done"}
    written = (folder / FILE).stat().st_mtime_ns
    run(folder, BATCH)
    assert (folder / FILE).stat().st_mtime_ns == written
    after["measured"]["64"]["sources"] = "of another package"
    files.write(folder / FILE, after)
    run(folder, BATCH)
    assert read(folder)["rows"][0]["us"] != 77 and len(read(folder)["rows"]) == 2


@pytest.mark.slow
def test_a_program_that_is_killed_keeps_the_cases_that_were_over(folder, monkeypatch):
    make = cases.AllGatherCase.make

    def killed_at_128(case):
        if case.bytes == 128 and case.world.rank == 0:
            raise KeyboardInterrupt
        make(case)

    monkeypatch.setattr(cases.AllGatherCase, "make", killed_at_128)
    monkeypatch.setattr(files.Recorder, "EVERY", 0)
    with pytest.raises((KeyboardInterrupt, RuntimeError)):
        run(folder, BATCH)
    assert answers(folder) == {"64": "begun"}
    monkeypatch.undo()
    run(folder, BATCH)
    assert answers(folder) == {"64": "done", "128": "done"} and len(read(folder)["rows"]) == 2


def test_what_is_refused_says_why_and_does_not_end_the_rest(folder):
    run(
        folder,
        BATCH._replace(file="ag_gemm", arguments=["ag_gemm"], option="--shapes", cases=("3x3x3",)),
        BATCH,
    )
    (entry,) = read(folder, "ag_gemm_emulatorx2.json")["measured"].values()
    assert entry["answer"].startswith("refused: --shapes has 3x3x3; M and N must be multiples of 2")
    assert answers(folder) == {"64": "done", "128": "done"}


def test_a_note_keeps_the_rows_of_this_run_and_drops_older_ones(folder):
    run(folder, BATCH)
    data = read(folder)
    data["measured"]["64"]["answer"] = files.BEGUN
    files.write(folder / FILE, data)
    for case in BATCH.cases:
        files.note(folder / FILE, BATCH, case, "hung")
    assert answers(folder) == {"64": "hung", "128": "hung"}
    assert {row["bytes"] for row in read(folder)["rows"]} == {64}
    files.note(folder / "new.json", BATCH, "64", "failed: x")
    assert read(folder, "new.json")["measured"]["64"]["answer"] == "failed: x"


def test_parts_merge(folder, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    run(folder, BATCH._replace(cases=("64",)))
    run(other, BATCH._replace(cases=("32", "128")))
    run(other, plan.Batch("barrier", 2, plan.ALL, ["barrier", "--vs", "", "--replays", "1"]))
    assert files.merge(folder, other) == [FILE, "barrier_emulatorx2.json"]
    data = read(folder)
    assert [row["bytes"] for row in data["rows"]] == [32, 64, 128]
    assert set(answers(folder).values()) == {"done"} and len(data["measured"]) == 3
    assert all(entry["host"] < len(data["hosts"]) for entry in data["measured"].values())
    assert read(folder, "barrier_emulatorx2.json") == read(other, "barrier_emulatorx2.json")
    assert files.merge(folder, other) == []
    theirs = read(other)
    theirs["measured"]["32"] |= {"answer": "hung", "date": "2999"}
    theirs["measured"]["128"]["date"] = "2999"
    theirs["rows"] = [row | {"us": 7} for row in theirs["rows"]]
    files.write(other / FILE, theirs)
    assert files.merge(folder, other) == [FILE]
    assert [row["bytes"] for row in read(folder)["rows"] if row["us"] == 7] == [128]
    assert answers(folder)["32"] == "done"


# ---- of earlier kernels


def results_of(folder):
    return Results.read(folder / FILE)


def rooms_of(folder):
    return json.loads((folder.parent / "checked.json").read_text())["rooms"]


def test_a_figure_of_which_a_digest_has_changed_is_of_earlier_kernels(folder, earlier):
    run(folder, BATCH)
    rooms, day = rooms_of(folder), read(folder)["measured"]["64"]["date"][:10]
    results = earlier.mark(results_of(folder), rooms)
    assert earlier.is_current(results) and earlier.sentence(results) == ""
    (used,) = {room for row in results.rows for room in row.rooms}
    planted = earlier.mark(results_of(folder), rooms | {used: "another one"})
    assert earlier.texts(planted) == [f"of earlier kernels, {day}"]
    assert earlier.sentence(planted) == f"**shmemkit's figures: of earlier kernels, {day}.**"
    others = earlier.mark(results_of(folder), rooms | {"gemm.sm90": "another one"})
    assert earlier.is_current(others)


def test_a_figure_of_auto_is_of_earlier_kernels_where_the_table_has_another_method(
    folder, earlier, tmp_path, monkeypatch
):
    run(folder, BATCH)
    results, packaged = results_of(folder), tmp_path / "tuning.json"
    monkeypatch.setattr(earlier.tuning, "PACKAGED", packaged)
    taken = {row.took for row in results.rows if row.took}.pop()
    place = {"gpu": "emulator", "n_ranks": 2, "n_nodes": 1}
    for limit, current in ((128, True), (127, False)):
        choices = [[limit, taken], [None, "pull"]]
        packaged.write_text(json.dumps({"all_gather": [{**place, "private": choices, "symmetric": choices}]}))
        assert earlier.is_current(earlier.mark(results, rooms_of(folder))) is current


def test_where_rows_differ_a_dagger_marks_those_of_earlier_kernels(folder, earlier):
    run(folder, BATCH)
    data = read(folder)
    data["measured"]["64"] |= {"sources": "old", "date": "2026-11-22T"}
    data["digests"]["old"] = dict.fromkeys(data["rows"][0]["rooms"], "old")
    files.write(folder / FILE, data)
    results = earlier.mark(results_of(folder), rooms_of(folder))
    assert [row.dagger for row in results.rows] == ["†", ""]
    assert earlier.sentence(results) == "**shmemkit's figures: † of earlier kernels, 2026-11-22.**"


def test_digests_that_come_later(folder, earlier):
    (folder.parent / "checked.json").unlink()
    run(folder, BATCH)
    data, rooms = read(folder), {room: f"digest of {room}" for room in ledger.rooms()}
    assert earlier.texts(earlier.mark(results_of(folder), rooms))[0].startswith(
        "of kernels whose digest was not taken"
    )
    assert not files.stamp(data, "other sources", rooms)
    assert files.stamp(data, ledger.sources(), rooms) and not files.stamp(data, ledger.sources(), rooms)
    files.write(folder / FILE, data)
    assert earlier.is_current(earlier.mark(results_of(folder), rooms))


def test_results_that_do_not_say_what_ran_are_of_earlier_kernels(earlier):
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        results = Results.read(path)
        if results is not None and not results.measured:
            assert earlier.texts(earlier.mark(results)) == [f"of earlier kernels, {results.date[:10]}"], path


def test_pages_say_what_is_of_earlier_kernels(folder, earlier, monkeypatch):
    """Pages, the evaluation, README's table and plots."""
    pages, tables = importlib.import_module("bench_page"), importlib.import_module("tables")
    rows = [
        {"op": "all_reduce", "method": "nccl", "bytes": 8192, "us": 4.0},
        {"op": "all_reduce", "method": "auto", "bytes": 8192, "us": 2.0, "took": "lamport", "rooms": ["r"]},
    ]
    machine = {
        "gpu": "NVIDIA H100 80GB HBM3",
        "gpus": {"NVIDIA H100 80GB HBM3": 4},
        "driver": "1",
        "cuda": "13.0",
    }
    data = {
        "machine": machine | {"python": "3.12"},
        "versions": {},
        "environment": {},
        "command": "a b c",
        "method": "",
    }
    data |= {
        "date": "2026-12-01T",
        "n_ranks": 4,
        "p2p_GBps": None,
        "rows": rows,
        "digests": {"s": {"r": "old"}},
    }
    data["measured"] = {"8192": {"sources": "s", "date": "2026-12-01T", "answer": "done"}}
    files.write(folder / "all_reduce_h100x4.json", data)
    monkeypatch.setattr(tables, "RESULTS", folder)
    monkeypatch.setattr(earlier, "CHECKED", folder.parent / "checked.json")

    def said(digest):
        (folder.parent / "checked.json").write_text(json.dumps({"rooms": {"r": digest}}))
        texts = tables.benchmarks(), tables.plots(), tables.headline(), tables.evaluated()
        return ["of earlier kernels, 2026-12-01" in text for text in (*texts, tables.mark_of_headline())]

    assert said("old") == [False] * 5
    assert said("new") == [True] * 5
    assert "Not measured yet." in tables.evaluated()
    (stale,) = pages.stale_plots(folder, folder / "plots")
    pages.draw(*stale)
    assert "shmemkit's times: of earlier kernels, 2026-12-01" in stale[0].read_text()
    assert not pages.stale_plots(folder, folder / "plots")
    said("old")
    assert len(pages.stale_plots(folder, folder / "plots")) == 1  # it must not say that any more


@pytest.mark.slow
def test_readmes_plot_says_what_is_of_earlier_kernels(tmp_path, earlier):
    tables = importlib.import_module("tables")
    tables.draw_headline(tmp_path / "plot.svg")
    shown = (tmp_path / "plot.svg").read_text()
    for results in tables._shown_all_reduces():
        for text in earlier.texts(results):
            assert shown.count(text) >= 2  # in the mark and in the legend


# ---- the plan


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_parts_are_all_of_the_plan_the_most_valuable_first(gpus):
    whole = plan.batches(gpus)
    for n in (1, 3, 9):
        parts = plan.parts(whole, gpus, n)
        assert len(parts) == n and [batch for part in parts for batch in part] == whole
    assert whole[0].file == ("gemm" if gpus == 1 else "all_reduce")
    assert plan.expected(plan.batches(gpus, quick=True), gpus) <= 200
    assert {batch.ranks for batch in whole} == {n for n in (1, 2, 4) if n <= gpus}


def test_cases_are_named_as_rows_are():
    """A size is rounded; a shape is what it prints."""
    assert plan.Batch("x", 3, plan.AUTO, [], "--sizes").key("8K") == "8160"
    (grouped,) = (batch for batch in plan.batches(1) if batch.file == "grouped_gemm")
    shapes = parse(grouped.command(grouped.cases), tables=False).shapes
    assert [grouped.key(case) for case in grouped.cases] == [str(shape) for shape in shapes]


def test_the_plan_has_every_operator_that_the_pages_show(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    titles = importlib.import_module("bench_page").TITLES
    assert titles.keys() <= {batch.file for batch in plan.batches(4)}


@pytest.mark.slow
def test_commands_of_the_plan_are_those_of_the_bench():
    made = [*plan.batches(4), *plan.batches(4, quick=True), *plan.batches(2, emulated=True)]
    told = {(*batch.arguments, batch.option): batch for batch in made}
    for batch in told.values():
        options = parse(batch.command(batch.cases), tables=False)
        given = getattr(options, batch.option.strip("-")) if batch.option else ("",)
        assert len(given) == len(batch.cases) == len(batch.seconds) or batch.what == plan.AUTO


@pytest.mark.parametrize(
    "arguments, text",
    [
        (["--part", "3/2"], "K/N"),
        (["--only", "x", "--emulate", "2", "--folder", "."], "'x'"),
        (["--emulate", "2"], "--emulate needs --folder"),
        (["--folder", "/no/such"], "does not exist"),
        (["--merge", "/no/such", "--folder", "."], "does not exist"),
        (["--seconds", "0"], "1 or more"),
    ],
)
def test_what_is_wrong_is_said_at_once(arguments, text, capsys):
    with pytest.raises(SystemExit) as leaving:
        command.main(arguments)
    assert leaving.value.code == 2 and text in capsys.readouterr().err


def test_a_dry_run_says_what_it_would_do(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(command, "n_gpus", lambda: 4)
    assert command.main(["--dry-run", "--folder", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "4 GPUs, into" in printed and "all_reduce, 4 ranks, auto: 8K, 64K" in printed
    n = int(printed.rpartition("--part 1/")[2].partition(",")[0])
    assert max(plan.expected(part, 4) for part in plan.parts(plan.batches(4), 4, n)) <= 240


# ---- whole runs

PLANTED = """
import sys, time
from shmemkit.bench import cases, p2p
from shmemkit.tools.everything import worker

make = cases.{case}.make

def planted(case):
    if case.bytes == 1024 and case.world.rank == 0:
        {what}
    make(case)

cases.{case}.make = planted
worker.main(sys.argv[1:])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "what, answer",
    [("time.sleep(1000)", "hung: no step ended"), ("raise RuntimeError('no')", "failed: RuntimeError: no")],
)
def test_what_hangs_or_fails_does_not_end_the_rest(tmp_path, monkeypatch, capfd, what, answer):
    (tmp_path / "planted_worker.py").write_text(PLANTED.format(case="AllToAllCase", what=what))
    monkeypatch.setattr(command, "WORKER", "planted_worker")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    arguments = ["--emulate", "2", "--folder", str(tmp_path), "--only", "all_to_all,barrier", "--limit", "10"]
    assert command.main(arguments) == 1
    entries = read(tmp_path, "all_to_all_emulatorx2.json")["measured"]
    assert entries["1024"]["answer"].startswith(answer)
    assert entries["1024"]["answer"].endswith(", at 1K, its data")
    assert entries["2048"]["answer"] == "done"
    done = read(tmp_path, "barrier_emulatorx2.json")["measured"]
    assert {entry["answer"] for entry in done.values()} == {"done"}
    monkeypatch.setattr(command, "WORKER", "shmemkit.tools.everything.worker")
    assert command.main(arguments) == 0  # what failed is tried again
    entries = read(tmp_path, "all_to_all_emulatorx2.json")["measured"]
    assert {entry["answer"] for entry in entries.values()} == {"done"}


@pytest.mark.slow
def test_a_command_that_is_killed_leaves_no_ranks_and_goes_on(tmp_path):
    arguments = [
        sys.executable,
        "-m",
        "shmemkit",
        "bench",
        "everything",
        "--emulate",
        "2",
        "--folder",
        str(tmp_path),
        "--only",
        "all_gather,barrier",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        arguments,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    until = time.monotonic() + 60
    while not (tmp_path / FILE).exists() and time.monotonic() < until:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130
    left = subprocess.run(["pgrep", "-f", f"worker.*{tmp_path}"], capture_output=True, text=True).stdout
    assert not left
    assert answers(tmp_path)
    subprocess.run(arguments, env=environment, check=True, stdout=subprocess.PIPE)
    for path in tmp_path.glob("*.json"):
        assert {e["answer"] for e in json.loads(path.read_text())["measured"].values()} == {"done"}
    with contextlib.suppress(ProcessLookupError):
        process.kill()
