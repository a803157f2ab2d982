"""examples/07_ag_gemm.py and 08_gemm_rs.py: they print what they say; other sizes; no races."""

import re
import textwrap
from pathlib import Path

import pytest

from shmemkit.emu.__main__ import main as emulate

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("name", ["07_ag_gemm.py", "08_gemm_rs.py"])
def test_it_prints_what_it_says(capsys, name):
    expected = re.search(r"emulator it prints\n\n(.*?)\n\n", (EXAMPLES / name).read_text(), re.S)[1]
    assert emulate(["-n", "4", str(EXAMPLES / name)]) == 0
    assert capsys.readouterr().out.splitlines() == textwrap.dedent(expected).splitlines()


@pytest.mark.parametrize("arguments", [["07_ag_gemm.py", "--rows", "5"], ["08_gemm_rs.py", "--tokens", "9"]])
def test_other_sizes_and_races(capsys, arguments):
    name, *options = arguments
    assert emulate(["-n", "3", "--races", str(EXAMPLES / name), *options, "--hidden", "40"]) == 0
    assert capsys.readouterr().out.count("passed") >= 2


@pytest.mark.parametrize("name", ["07_ag_gemm.py", "08_gemm_rs.py"])
def test_several_nodes(capsys, name):
    assert emulate(["-n", "4", "--local-size", "2", str(EXAMPLES / name), "--hidden", "16"]) == 0
    assert capsys.readouterr().out.count("passed") >= 2


@pytest.mark.parametrize("n_ranks, tokens", [(1, 8), (3, 10)])
def test_tokens_that_ranks_cannot_share(capsys, n_ranks, tokens):
    assert emulate(["-n", str(n_ranks), str(EXAMPLES / "08_gemm_rs.py"), "--tokens", str(tokens)]) == 1
    assert "a multiple of them" in capsys.readouterr().err
