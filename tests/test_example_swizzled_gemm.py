"""examples/06_swizzled_gemm.py: it prints what it says, and draws."""

import re
import textwrap
from pathlib import Path

import pytest

from shmemkit.emu.__main__ import main as emulate

PROGRAM = Path(__file__).parent.parent / "examples" / "06_swizzled_gemm.py"


def test_it_prints_what_it_says(capsys):
    expected = re.search(r"emulator it prints\n\n(.*?)\n\n", PROGRAM.read_text(), re.S)[1]
    assert emulate(["-n", "1", "--races", str(PROGRAM)]) == 0
    assert capsys.readouterr().out.splitlines() == textwrap.dedent(expected).splitlines()


def test_other_ranks_and_a_drawing(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "orders.png"
    options = ["--ranks", "3", "--rank", "0", "--size", "72", "--plot", str(path)]
    assert emulate(["-n", "1", str(PROGRAM), *options]) == 0
    assert "passed" in capsys.readouterr().out and path.stat().st_size > 1000
