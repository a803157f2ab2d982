"""examples/07_ag_gemm.py, 08_gemm_rs.py, 11_torch_mlp.py, 14_moe_tensor_parallel.py, 15_mesh.py,
16_moe_expert_parallel.py: they print what they say; other sizes; no races."""

import re
import sys
import textwrap
from pathlib import Path

import pytest
from emulated import emulate
from fast import slow

EXAMPLES = Path(__file__).parents[2] / "examples"


SLOW = "07_ag_gemm.py", "08_gemm_rs.py", "14_moe_tensor_parallel.py", "16_moe_expert_parallel.py"


@pytest.mark.parametrize("name", [*slow(*SLOW), "15_mesh.py"])
def test_it_prints_what_it_says(capsys, name):
    expected = re.search(r"emulator it prints\n\n(.*?)\n\n", (EXAMPLES / name).read_text(), re.S)[1]
    assert emulate(["-n", "4", str(EXAMPLES / name)]) == 0
    assert capsys.readouterr().out.splitlines() == textwrap.dedent(expected).splitlines()


@pytest.mark.parametrize(
    "n, sizes",
    [(1, ["--tokens", "1", "--experts", "1", "--topk", "1", "--hidden", "8"]), *slow((2, ["--tokens", "4"]))],
)
def test_experts(capsys, n, sizes):
    assert emulate(["-n", str(n), str(EXAMPLES / "14_moe_tensor_parallel.py"), *sizes]) == 0
    assert capsys.readouterr().out.count("passed") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["07_ag_gemm.py", "--rows", "5"],
        ["08_gemm_rs.py", "--tokens", "9"],
        ["16_moe_expert_parallel.py", "--tokens", "5", "--topk", "3"],
    ],
)
def test_other_sizes_and_races(capsys, arguments):
    name, *options = arguments
    assert emulate(["-n", "3", "--races", str(EXAMPLES / name), *options, "--hidden", "40"]) == 0
    assert capsys.readouterr().out.count("passed") >= 2


@pytest.mark.parametrize("n_ranks, tensor", [(1, 1), *slow((3, 1), (6, 3))])
def test_other_meshes(capsys, n_ranks, tensor):
    sizes = ["--batch", "6", "--inside", "12", "--tensor", str(tensor)]
    assert emulate(["-n", str(n_ranks), "--races", str(EXAMPLES / "15_mesh.py"), *sizes]) == 0
    assert capsys.readouterr().out.count("passed") == 3


def test_ranks_that_make_no_mesh(capsys):
    assert emulate(["-n", "3", str(EXAMPLES / "15_mesh.py"), "--tensor", "2"]) == 1
    assert "--tensor is 2" in capsys.readouterr().err


@pytest.mark.parametrize("name", slow("07_ag_gemm.py", "08_gemm_rs.py"))
def test_several_nodes(capsys, name):
    assert emulate(["-n", "4", "--local-size", "2", str(EXAMPLES / name), "--hidden", "16"]) == 0
    assert capsys.readouterr().out.count("passed") >= 2


@pytest.mark.parametrize(
    "n_ranks, tokens, text", [(1, 8, "needs 2 or more"), (3, 10, "a multiple of 3"), (2, 0, "--tokens is 0")]
)
def test_tokens_that_ranks_cannot_share(capsys, n_ranks, tokens, text):
    assert emulate(["-n", str(n_ranks), str(EXAMPLES / "08_gemm_rs.py"), "--tokens", str(tokens)]) == 1
    assert text in capsys.readouterr().err


def test_refused_methods_and_sizes(capsys):
    """On another GPU than Hopper's the rest goes on."""
    for name, size, passed in (("07_ag_gemm.py", "--rows", 1), ("08_gemm_rs.py", "--tokens", 2)):
        sizes = [size, "2", "--hidden", "8"]
        assert emulate(["-n", "2", "--gpu", "A100", str(EXAMPLES / name), *sizes]) == 0
        out = capsys.readouterr().out
        assert out.count("passed") == passed and "compute capability 8.0; it must be 9.0" in out
    assert emulate(["-n", "1", str(EXAMPLES / "07_ag_gemm.py"), "--hidden", "12"]) != 0
    assert "--hidden is 12; it must be a multiple of 8" in capsys.readouterr().err


def test_more_rows_than_the_expert_parallel_layer_has_room_for(capsys):
    assert emulate(["-n", "2", str(EXAMPLES / "16_moe_expert_parallel.py"), "--max-rows", "7"]) == 1
    assert "rows, more than max_rows=7. Nothing was sent" in capsys.readouterr().err


def test_the_pytorch_example_says_what_it_needs(capsys, monkeypatch):
    """Under mpirun it is in test_emu_mpi.py."""
    program = str(EXAMPLES / "11_torch_mlp.py")
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        assert emulate(["-n", "2", program]) == 1
    assert "pip install torch" in capsys.readouterr().err
    pytest.importorskip("torch")
    assert emulate(["-n", "2", program]) == 0
    assert "a process for each rank" in capsys.readouterr().out
