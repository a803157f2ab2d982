"""The docs are true: their programs run, their tables are the measured results, their links lead on."""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shmemkit as sk

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def programs(page, mark):
    """The Python blocks of a page in which `mark` stands."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    found = [block for block in blocks if mark in block]
    assert found, f"{page} has no program with {mark!r}"
    return found


def output_of(run):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run()
    return printed.getvalue()


@pytest.mark.parametrize("program", programs("README.md", "with sk.init()"))
def test_readme_program(program):
    lines = output_of(lambda: sk.emu.run(lambda: exec(program, {}), 3)).splitlines()
    assert sorted(lines) == [f"rank {r} got {(r - 1) % 3}" for r in range(3)]


@pytest.mark.parametrize("program", programs("docs/emulator.md", "emu.run"))
def test_emulator_program(program):
    expected = re.search(r"print\(.*# (.*)", program)[1]
    assert output_of(lambda: exec(program, {})).strip() == expected


def test_tables_are_those_of_the_results():
    check = subprocess.run(
        [sys.executable, ROOT / "docs" / "tables.py", "--check"], capture_output=True, text=True
    )
    assert check.returncode == 0, check.stdout + check.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    prose = re.sub(r"```.*?```|`.*?`", "", page.read_text(), flags=re.S)
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", prose):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_programs_named_in_the_docs_exist():
    for page in PAGES:
        for name in re.findall(
            r"\b(?:examples|benchmarks|docs|tests)/[\w/]+\.(?:py|md|json)\b", page.read_text()
        ):
            assert (ROOT / name).exists(), f"{page.name} names {name}"
