"""examples/00_hello.py prints what it says, in the order of ranks."""

import re
import textwrap
from pathlib import Path

import pytest
from emulated import emulate

ROOT = Path(__file__).parents[2]
HELLO = ROOT / "examples" / "00_hello.py"


def test_it_prints_what_it_says(capsys):
    expected = re.search(r"alike it prints\n\n(.*?)\"\"\"", HELLO.read_text(), re.S)[1]
    assert emulate(["-n", "4", "--races", str(HELLO)]) == 0
    assert capsys.readouterr().out == textwrap.dedent(expected)


@pytest.mark.parametrize("n_ranks", [1, 3])
def test_other_numbers_of_ranks(capsys, n_ranks):
    assert emulate(["-n", str(n_ranks), "--races", str(HELLO)]) == 0
    lines = [f"rank {rank} got {(rank - 1) % n_ranks}" for rank in range(n_ranks)]
    assert capsys.readouterr().out.splitlines() == lines
