"""examples/17_kernels_in_a_pipeline.py: it prints what it says, without races; other ranks, sizes,
transports."""

import re
import textwrap
from pathlib import Path

import pytest
from emulated import emulate
from fast import slow

PROGRAM = Path(__file__).parents[2] / "examples" / "17_kernels_in_a_pipeline.py"


def test_it_prints_what_it_says(capsys, monkeypatch):
    monkeypatch.setenv(
        "SHMEMKIT_TYPING", "0"
    )  # it takes most of the time; test_kernels.py compiles such tiles
    expected = re.search(r"prints\n\n(.*?)\n\"", PROGRAM.read_text(), re.S)[1]
    assert emulate(["-n", "2", "--races", "--delivery", "unordered", str(PROGRAM)]) == 0
    assert capsys.readouterr().out.splitlines() == textwrap.dedent(expected).splitlines()


@pytest.mark.parametrize(
    "n, size, transport",
    slow((3, 37, "lamport"), (1, 1, "ll128"), (4, 100, "ll"), (4, 65, "ll128"), (5, 3, "lamport")),
)
def test_ranks_sizes_and_transports(capsys, n, size, transport):
    options = ["--size", str(size), "--transport", transport]
    assert emulate(["-n", str(n), "--races", "--delivery", "unordered", str(PROGRAM), *options]) == 0
    assert capsys.readouterr().out.count("passed") == 2
