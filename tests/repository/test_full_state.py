"""What .ci/full found, and how old that is (.ci/state.py); CI runs each part."""

import re
import runpy
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def state(tmp_path):
    """.ci/state.py, of a repository with two files, which is in tmp_path."""
    for name in ("shmemkit/a.py", "docs/index.md"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("")
    state = runpy.run_path(str(ROOT / ".ci" / "state.py"))
    told = state["record"].__globals__
    (tmp_path / ".ci").mkdir()
    told.update(TREE=tmp_path, FILE=tmp_path / ".ci" / "full.json")
    state["git"]("init", "-q")
    commit(tmp_path)
    return state


def commit(at):
    author = "-c", "user.name=a", "-c", "user.email=a@b"
    for command in (["add", "-A"], [*author, "commit", "-q", "-m", "a"]):
        subprocess.run(["git", *command], cwd=at, check=True)


def test_how_old_results_are(state, tmp_path, capsys):
    steps = tmp_path / "stages.txt"
    steps.write_text("    12 s  pytest -m slow\n")
    state["record"]("slow", state["digest"](), "0", str(steps))
    state["record"]("full", state["digest"](), "1", str(tmp_path / "none"))
    assert state["results"]()["slow"]["steps"] == {"pytest -m slow": 12}
    assert tells(state, capsys) == [
        "slow: passed on TIME, of these files",
        "full: failed on TIME, of these files",
        "code: has not run",
    ]
    (tmp_path / "docs" / "index.md").write_text("tests do not depend on it")
    commit(tmp_path)
    assert "of these files" in tells(state, capsys)[0]
    (tmp_path / "shmemkit" / "a.py").write_text("b = 1")
    assert re.search("of other files; changed since [0-9a-f]{10}: 1$", tells(state, capsys)[0])
    kept = tmp_path / ".ci" / "full.json"
    kept.write_text(re.sub('(?<="commit": ")[0-9a-f]+', "0" * 40, kept.read_text()))
    assert tells(state, capsys)[0] == "slow: passed on TIME, of other files"


def tells(state, capsys):
    state["tell"]("slow", "full", "code")
    lines = capsys.readouterr().out.splitlines()
    return [re.sub(r"[\d-]{10} [\d:]{5} UTC", "TIME", line).removeprefix(".ci/full ") for line in lines]


def test_ci_runs_each_part():
    parts = subprocess.run([ROOT / ".ci" / "full", "--list"], capture_output=True, text=True, check=True)
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert re.findall(r"part: \[(.*)\]", workflow) == [", ".join(parts.stdout.split())]
