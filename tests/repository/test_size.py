"""What ``.ci/size`` counts."""

import runpy
from pathlib import Path

from pages import ROOT

PROGRAM = '''"""A docstring
of two lines."""

import os  # a comment

# a comment of its own
TEXT = """two
lines"""
print(
    1,

    2,
)


class Words:
    "A docstring in one line."
    x = 1
    """Of an attribute."""

    def first(self):
        r"""A docstring
        """
        return (self.x,
                # a comment in brackets
                os)
'''
LINES = "import", "TEXT", "lines", "print", "1", "2", ")", "class", "x", "def", "return", "os"


def test_lines_with_a_token_are_counted_by_room():
    by_room = runpy.run_path(str(ROOT / ".ci" / "size"))["by_room"]
    files = [("room/folder/words.py", PROGRAM), ("room/x.py", "x = 1"), ("top.py", "if x:\n\n    pass\n")]
    assert by_room((Path(path), text) for path, text in files) == {"room": len(LINES) + 1, "top": 2}
