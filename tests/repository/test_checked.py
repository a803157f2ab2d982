"""docs/checked.py: a page and README say of each module of kernels what benchmarks/checked.json says."""

import copy
import importlib
import json
import sys

import pytest
from pages import ROOT

import shmemkit as sk
from shmemkit.collectives.schedules.two_shot import TwoShot
from shmemkit.tools import ledger

pytest.importorskip("matplotlib")  # which pages with plots need

ROOMS = ledger.rooms()
ROOM, OTHER = "collectives.schedules.two_shot", "gemm.sm90"
MADE = {"toolchain": {"python": "3.11.7", "ptxas": "13.5.37"}, "sources": ledger.sources()}
MADE["kernels"] = {f"{name}-sm_90a": name for names in ROOMS.values() for name in names}
CHECK = {
    "command": "shmemkit run -n 4 -m shmemkit check",
    "date": "2026-11-28T01:00:00+00:00",
    "gpus": {"NVIDIA H100": 4},
    "n_ranks": 4,
    "machine": {"python": "3.12.3", "driver": "580.1", "cuda": "13.0", "n_nodes": 1},
    "versions": {"numba-cuda": "0.30", "nvidia-nvvm": "13.0", "NVSHMEM library": "3.8.0", "numpy": "2"},
    "environment": {},
    "shmemkit": "0.3.0",
}


@pytest.fixture
def checked(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("checked")


@pytest.fixture
def data(checked):
    """What the file has before the first check."""
    found = {"checks": []}
    checked.take_digests(found, MADE)
    return found


def check(*answers, rooms=(ROOM,), answer="passed", **more):
    cases = [{"answer": each, "rooms": list(rooms)} for each in answers]
    ledger_of = {**CHECK, "sources": ledger.sources(), **more}
    return {"ledger": ledger_of, "answer": answer, "cases": cases}


def row(checked, data, room=ROOM):
    (found,) = (line for line in checked.checked(data).splitlines() if line.startswith(f"| `{room}`"))
    return found.split(" | ")[2].removesuffix(" |")


def changed(room):
    """As if a kernel of `room` were another one."""
    made = copy.deepcopy(MADE)
    made["kernels"][f"{ROOMS[room][0]}-sm_90a"] = "another"
    return made


def test_a_check_marks_what_it_ran(checked, data):
    assert row(checked, data) == "not checked on GPUs yet"
    checked.add(data, check("right", "not tried", "right"), "abc1234")
    assert row(checked, data) == "right in 2 cases (1)"
    assert row(checked, data, OTHER) == "not checked on GPUs yet"
    assert checked.checked(data).splitlines()[-1] == (
        "| 1 | 4 x NVIDIA H100, Python 3.12; 4 ranks, 1 node | driver 580.1, NVSHMEM 3.8.0, numba-cuda 0.30, "
        "nvidia-nvvm 13.0 | 0.3.0, abc1234 | 2026-11-28 | `shmemkit run -n 4 -m shmemkit check` |"
    )
    n = len(ROOMS)
    assert checked.checked_line(data) == (
        f"- Checked on 4 x NVIDIA H100, Python 3.12: 1 of {n} modules of kernels; not "
        f"checked on GPUs yet: {n - 1} of {n} modules of kernels. [Which, and how](docs/checked.md)."
    )


def test_parts_of_a_check_are_one(checked, data):
    for part, room in (("'Gather *'", ROOM), ("'Reduce *'", OTHER), ("'Gather c*'", ROOM)):
        command = f"shmemkit run -n 4 -m shmemkit check --only {part} --seconds 60"
        checked.add(data, check("right", rooms=(room,), command=command), "abc1234")
    checked.add(data, check("right", command="another"), "abc1234")
    assert len(data["checks"]) == 2
    assert row(checked, data) == "right in 1 case (1); right in 2 cases (2)"
    assert "`shmemkit run -n 4 -m shmemkit check --only ...`" in checked.checked(data)
    command = "shmemkit run -n 4 -m shmemkit check --only 'Re*'"
    checked.add(data, check("wrong", rooms=(ROOM,), command=command), "abc1234")
    assert "**wrong** in 3 cases" in row(checked, data)


def test_parts_that_leave_nothing_out_are_whole(checked, data):
    def part(name, room, *untried):
        command = f"shmemkit run -n 4 -m shmemkit check --only {name}"
        found = check("right", rooms=(room,), answer="incomplete", command=command)
        checked.add(data, found | {"untried": list(untried)}, "abc1234")
        return row(checked, data, room)

    assert "not all was tried, in 1 case" in part("A", ROOM, "B", "C")
    assert "not all was tried, in 1 case" in part("B", OTHER, "A", "C")
    assert part("C", ROOM, "A", "B") == "right in 2 cases (1)"
    assert row(checked, data, OTHER) == "right in 1 case (1)"
    assert part("A", ROOM, "B", "C") == "right in 3 cases (1)"  # once more


def test_a_check_of_another_digest_is_stale(checked, data):
    checked.add(data, check("right", rooms=(ROOM, OTHER)), "abc1234")
    checked.take_digests(data, changed(ROOM))
    assert row(checked, data).startswith("not checked on GPUs yet; stale, the code of 2026-11-28: right in 1")
    assert row(checked, data, OTHER) == "right in 1 case (1)"
    checked.add(data, check("right", command="another"), "def5678")
    assert row(checked, data) == "right in 1 case (1)"


def test_what_is_wrong_stays_until_the_code_changes(checked, data):
    checked.add(data, check("right", "wrong"), "abc1234")
    checked.add(data, check("right"), "abc1234")
    assert row(checked, data) == "right in 1 case (1); **wrong** in 2 cases (2)"
    assert checked.checked_line(data).startswith(f"- **wrong** in a check: `{ROOM}`; not checked on GPUs yet")
    checked.take_digests(data, changed(ROOM))
    checked.add(data, check("right"), "def5678")
    assert [len(each["rooms"]) for each in data["checks"]] == [1]
    assert row(checked, data) == "right in 1 case (1)"


def test_a_check_that_ended_early(checked, data):
    checked.add(data, check("right", answer="incomplete"), "abc1234")
    assert row(checked, data) == "right, but not all was tried, in 1 case (1)"
    assert "hecked on 4 x" not in checked.checked_line(data)


@pytest.mark.parametrize(
    "more, message",
    [
        ({"rooms": ("gemm.sm70",)}, "it names gemm.sm70; that is no module of kernels"),
        ({"gpus": {}}, "it ran on the emulator"),
        ({"sources": "0" * 16}, "shmemkit/ had the digest 0{16}; it must be"),
    ],
)
def test_refused(checked, data, more, message):
    with pytest.raises(ValueError, match=message):
        checked.add(data, check("right", **more), "abc1234")
    assert data["checks"] == []


def test_a_digest_is_of_code_and_launches(checked, monkeypatch):
    def differ():
        return {room for room, digest in checked.digests_of(MADE).items() if digest != before[room]}

    before = checked.digests_of(MADE)
    assert differ() == set()
    with monkeypatch.context() as patch:
        patch.setattr(TwoShot, "ring", 12)
        assert differ() == {ROOM}
    with monkeypatch.context() as patch:
        patch.setitem(sk.AllReduce._METHODS, "two_shot_ll128", (TwoShot, None))
        assert differ() == {ROOM}
    with pytest.raises(ValueError, match="tests/machine_code.py makes all"):
        checked.digests_of(MADE | {"kernels": {}})
    with pytest.raises(ValueError, match="of a shmemkit/ with the digest 0{16}; here it is .* again"):
        checked.digests_of(MADE | {"sources": "0" * 16})


def test_what_ci_prints(checked, data):
    checked.add(data, check("right"), "abc1234")
    assert checked.state(data, MADE)[-1] == "right: 1"
    stale, unchecked = sorted(checked.state(data, changed(ROOM)))
    assert stale == f"stale: 1: {ROOM}" and unchecked.startswith(f"unchecked: {len(ROOMS) - 1}: ")
    (line,) = checked.state(data, MADE | {"toolchain": {"python": "3.13.1", "ptxas": "13.5.37"}})
    assert line == "made by another toolchain: cannot be compared with the digests by python 3.11.7"


def test_commands_write_file_and_pages(checked, monkeypatch, tmp_path, capsys):
    contents = {"digests": MADE, "check": check("right"), "no_check": check("right", gpus={}), "other": {}}
    for name, content in contents.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- table: checked -->\n<!-- end -->\n<!-- table: other -->\n<!-- end -->\n")
    monkeypatch.setattr(checked, "FILE", tmp_path / "checked.json")
    monkeypatch.setattr(checked, "PAGES", [page])
    monkeypatch.setattr(checked.tuning, "DIGESTS", tmp_path / "shipped.json")
    checked.FILE.write_text('{"toolchain": null, "sources": null, "rooms": {}, "checks": []}')
    for what in ("digests", "check"):
        assert not checked.main(["add" if what == "check" else what, str(tmp_path / f"{what}.json")])
    shipped = json.loads((tmp_path / "shipped.json").read_text())
    assert (
        shipped["methods"] == checked.digests_of_methods(MADE) and shipped["toolchain"] == MADE["toolchain"]
    )
    written = page.read_text()
    assert written.startswith("before\n") and "| right in 1 case (1) |" in written
    assert checked.main(["add", str(tmp_path / "no_check.json")]) and page.read_text() == written
    assert "no_check.json: it ran on the emulator" in capsys.readouterr().err
    assert checked.main(["add", str(tmp_path / "other.json")])
    assert "other.json: it has no 'ledger'" in capsys.readouterr().err
    assert not checked.main(["state", str(tmp_path / "none.json"), str(tmp_path / "digests.json")])
    assert "right: 1" in capsys.readouterr().out


def test_pages_are_what_the_file_says(checked):
    data = json.loads(checked.FILE.read_text())
    for page in checked.PAGES:
        assert page.read_text() == checked.with_tables(page.read_text(), data), "run: python docs/checked.py"
    assert list(data["rooms"]) == sorted(ROOMS), "run: python docs/checked.py"


TEST = """
import pytest, recorded, shmemkit as sk

@pytest.fixture
def world():
    if sk.current() is None:
        recorded.begin(sk.init("emulator"))
    return sk.current()

def test_right(world):
    sk.all_reduce(world.xp.ones(3, "float32"))

def test_nothing(world):
    pass

def test_wrong(world):
    sk.matmul(*[world.xp.ones((2, 2), "float32")] * 2)
    assert {0}
"""


@pytest.mark.parametrize("passes", [True, False])
def test_gpu_tests_write_what_they_launched(pytester, monkeypatch, passes):
    file = pytester.path / "tests.json"
    monkeypatch.setenv("SHMEMKIT_CHECKED", str(file))
    monkeypatch.setattr(sys, "argv", ["/usr/bin/pytest", "-m", "gpu"])
    pytester.makepyfile(TEST.replace("{0}", str(passes)))
    pytester.runpytest_inprocess("-p", "recorded", "-p", "no:cacheprovider")
    sk.current().finalize()
    found = json.loads(file.read_text())
    about = found["ledger"]
    assert about["command"] == "shmemkit run -n 1 -m pytest -m gpu" and about["gpus"] == {}
    assert about["sources"] == ledger.sources() and found["answer"] == ("passed" if passes else "wrong")
    assert [(case["case"].partition("::")[2], case["answer"], case["rooms"]) for case in found["cases"]] == [
        ("test_right", "right", ["collectives.schedules.exchange"]),
        ("test_wrong", "right" if passes else "wrong", ["gemm.simt"]),
    ]


# ---- digests of methods, for tuning tables


def test_the_digest_of_a_method_is_of_the_rooms_that_it_may_launch(checked):
    before = checked.digests_of_methods(MADE)
    changed_ = checked.digests_of_methods(changed(ROOM))  # two_shot
    differ = {(op, m) for op, of in before.items() for m, digest in of.items() if changed_[op][m] != digest}
    assert differ == {("all_reduce", "two_shot_ll128")}
    for op, of_op in before.items():
        assert of_op.keys() == checked.host_of(op)._METHODS.keys()
        assert all(checked.rooms_of(checked.host_of(op), name) for name in of_op), op


def test_a_table_changes_no_digests(checked, tmp_path, monkeypatch):
    before = checked.digests_of_methods(MADE), checked.digests_of(MADE)
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps({"all_reduce": [table_entry({})]}))
    monkeypatch.setattr(checked.tuning, "PACKAGED", path)
    assert (checked.digests_of_methods(MADE), checked.digests_of(MADE)) == before


def table_entry(digests):
    choices = [[None, "two_shot_ll128"]]
    place = {"gpu": "NVIDIA H200", "n_ranks": 4, "n_nodes": 1}
    return {**place, "private": choices, "symmetric": choices, "digests": digests}


def test_a_table_of_other_kernels_that_would_be_used_fails(checked, tmp_path, monkeypatch, capsys):
    now = checked.digests_of_methods(MADE)
    table, made = tmp_path / "tuning.json", tmp_path / "digests.json"
    table.write_text(json.dumps({"all_reduce": [table_entry(now["all_reduce"])]}))
    monkeypatch.setattr(checked.tuning, "PACKAGED", table)
    monkeypatch.setattr(checked.tuning, "digests", lambda: now)
    made.write_text(json.dumps({**MADE, "sources": ledger.sources()}))
    assert not checked.main(["tables", str(made)])
    made.write_text(json.dumps({**changed(ROOM), "sources": ledger.sources()}))
    assert checked.main(["tables", str(made)])
    assert "all_reduce, NVIDIA H200, 4 ranks: two_shot_ll128" in capsys.readouterr().err
    monkeypatch.setattr(checked.tuning, "digests", dict)  # it is not used, then
    assert not checked.main(["tables", str(made)])
