"""Docstrings have their tables as they were written."""

import ast
import re
from pathlib import Path

import shmemkit

PACKAGE = Path(shmemkit.__file__).parent
GAP = r"(?<=\S) {4,}(?=[^\s=])"  # but those before "=" of equations
TWO_GAPS = re.compile(f"{GAP}.*{GAP}")


def joined_rows(text):
    """Return the lines in which a reflow joined rows of a table: their gaps of four spaces or more, two at
    least, do not all end where another line has a gap, too."""
    lines, found = text.splitlines(), []
    columns = [{gap.end() for gap in re.finditer(r"  (?=\S)", line)} for line in lines]
    for i, line in enumerate(lines):
        gaps = {gap.end() for gap in re.finditer(GAP, line)}
        if len(gaps) > 1 and not gaps <= set().union(*columns[:i], *columns[i + 1 :]):
            found.append(line.strip())
    return found


TABLE = """
    sender:      1. store the unit                    release, sys
                 2. set full
    receiver:    3. wait until full                   acquire, sys
    out        = x * scale    here
"""


def test_rows_that_a_reflow_joined_are_found():
    assert joined_rows(TABLE) == []
    row = "me            this rank, of n_ranks, from 0 staged        uint8 (n,)"
    assert joined_rows(f"{TABLE}    {row}\n    of each rank") == [row]


def test_no_docstring_has_joined_rows():
    found, texts = {}, {path: path.read_text() for path in PACKAGE.rglob("*.py")}
    for path in (path for path in texts if TWO_GAPS.search(texts[path])):  # to parse all takes a second
        for node in ast.walk(ast.parse(texts[path])):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                text = ast.get_docstring(node, clean=False) or ""
                if rows := joined_rows(text):
                    found[f"{path.relative_to(PACKAGE)}: {getattr(node, 'name', '')}"] = rows
    assert found == {}
