"""No primitive is half there: each has a docstring, a GPU implementation, and a row in a table of docs;
and everything that nvshmem4py offers in kernels is there, with the same parameters."""

import ast
import inspect
import re
from enum import EnumMeta
from pathlib import Path

import pytest

from shmemkit import device
from shmemkit.compiler.ptx import GPU
from shmemkit.device import swizzle
from shmemkit.device.cuda import (
    accumulators,
    arithmetic,
    float8,
    float_storage,
    mma,
    partial_results,
    register_tuples,
    weighted_sums,
    wgmma,
    word_reductions,
)
from shmemkit.device.cuda.marks import begin_kernel, end_kernel
from shmemkit.device.shmem import barriers, rma, signals, team_collectives

FOR_HOSTS = {"tensor_map"}
PRIMITIVES = [
    name for name in device.__all__ if inspect.isfunction(getattr(device, name)) and name not in FOR_HOSTS
]
FOR_HOSTS_TOO = {"ll_words", "n_words"}
DOCS = Path(__file__).parents[2] / "docs"
TABLES = [DOCS / f"{page}.md" for page in "primitives messages packets tensor_cores timeline".split()]


def parameters(function):
    return list(inspect.signature(function).parameters.values())


@pytest.mark.parametrize("name", PRIMITIVES)
def test_on_the_gpu_too(name):
    primitive = getattr(device, name)
    assert inspect.getdoc(primitive), f"{name} has no docstring"
    assert primitive in GPU, f"{name} has no GPU implementation: add one with @gpu({name})"
    on_gpu = [(p.name, p.default) for p in parameters(GPU[primitive])]
    assert [(p.name, p.default) for p in parameters(primitive)] == on_gpu


@pytest.mark.parametrize(
    "module", (rma, barriers, signals, team_collectives), ids=lambda module: module.__name__
)
def test_editors_see_the_docstrings_of_forms(module):
    """An editor takes the string below an assignment for the docstring of a variable."""
    body = ast.parse(inspect.getsource(module)).body
    forms = [i for i, part in enumerate(body) if re.match(r"\w+ = called_by\(", ast.unparse(part))]
    assert len(forms) > 1
    for i in forms:
        name = body[i].targets[0].id
        assert ast.literal_eval(body[i + 1].value) == getattr(module, name).__doc__
        assert getattr(module, name).__name__ == name


@pytest.mark.parametrize("name", [name for name in PRIMITIVES if name not in FOR_HOSTS_TOO])
def test_outside_of_a_kernel(name):
    primitive = getattr(device, name)
    arguments = [None] * sum(p.default is inspect.Parameter.empty for p in parameters(primitive))
    with pytest.raises(RuntimeError, match="inside a kernel"):
        primitive(*arguments)


def test_all_gpu_implementations_are_public():
    public = {getattr(device, name) for name in PRIMITIVES}
    # What reduction() and the like return, helpers of the package's own kernels, and other projects' names.
    modules = float_storage, accumulators, mma, word_reductions, register_tuples, swizzle, wgmma
    modules += arithmetic, float8, weighted_sums, partial_results
    factories = {module.__name__ for module in modules}
    apart = (".collectives.", ".gemm.", ".moe.", ".compat.")
    made = {f for f in GPU if f.__module__ in factories or any(part in f.__module__ for part in apart)}
    made |= {begin_kernel, end_kernel}  # launches of recorded kernels call them
    assert [f.__name__ for f in GPU if f not in public | made] == []


@pytest.mark.parametrize("name", device.__all__)
def test_in_the_table(name):
    rows = [line for page in TABLES for line in page.read_text().splitlines() if line.startswith("|")]
    assert any(re.search(rf"`{name}[`(]", row.split("|")[1]) for row in rows), (
        f"no page of primitives has a row for {name}"
    )


def nvshmem_overload(name):
    """nvshmem4py's typing function for `name`: its own parameters are not always its stub's."""
    from nvshmem.core.device.numba import amo, collective, direct, mem, rma

    for module in (rma, direct, amo, collective, mem):
        for spelling in (f"{name}_ol", f"overload_{name}"):
            if hasattr(module, spelling):
                return getattr(module, spelling)
    raise AssertionError(f"no overload of {name} found in nvshmem4py")


def test_everything_of_nvshmem4py():
    theirs = pytest.importorskip("nvshmem.core.device.numba")
    assert set(theirs.__all__) <= set(device.__all__)
    for name in set(theirs.__all__):
        if isinstance(getattr(theirs, name), EnumMeta):
            continue
        wanted = [p.name for p in parameters(nvshmem_overload(name))]
        ours = parameters(getattr(device, name))
        assert [p.name for p in ours[: len(wanted)]] == wanted, name
        assert all(p.default is not inspect.Parameter.empty for p in ours[len(wanted) :]), name


def test_constants_are_nvshmem4pys():
    core = pytest.importorskip("nvshmem.core")
    pytest.importorskip("nvshmem.core.device.numba")
    from nvshmem.core.device.numba import SmemAmount

    pairs = [(device.SignalOp, core.SignalOp), (device.ComparisonType, core.ComparisonType)]
    for ours, theirs in [*pairs, (device.SmemAmount, SmemAmount), (device.Teams, core.Teams)]:
        for member in ours:
            assert int(getattr(theirs, member.name)) == member
