"""examples/13_flash_decode.py: it prints what it says."""

from pathlib import Path

import pytest
from emulated import emulate
from fast import slow

PROGRAM = Path(__file__).parents[2] / "examples" / "13_flash_decode.py"


@pytest.mark.parametrize("n, tokens", [(1, 3), *slow((2, 6), (1, 9), (3, 20), (2, 64))])
def test_it_runs(capsys, n, tokens):
    options = ["-n", str(n), "--races", "--delivery", "unordered", str(PROGRAM), "--tokens", str(tokens)]
    assert emulate(options) == 0
    sizes = f"{n} ranks (emulator), {tokens} tokens, 4 heads of q, 2 of k and v, pages of 4"
    assert capsys.readouterr().out.splitlines() == [sizes, "passed: all steps are as in float64"]
