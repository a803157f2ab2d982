"""The pages of the documentation, and the programs on them."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("*.md")), ROOT / "tests" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def programs(page, mark, some=True):
    """The Python blocks of a page in which `mark` stands; `some`: there must be one."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)
    found = [block for block in blocks if mark in block]
    assert found or not some, f"{page} has no program with {mark!r}"
    return found
