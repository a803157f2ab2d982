"""What the library says of itself: its public names, and the types of their arguments and results."""

import functools
import importlib
import inspect
import pydoc
import re
import shutil
import typing

import numpy as np
import pytest
from emulated import untyped
from numba import cuda
from pages import ROOT

import shmemkit as sk
import shmemkit.typing
from shmemkit.collectives.registry import collectives
from shmemkit.compat import libshmem_device, triton_distributed
from shmemkit.device import swizzle

PACKAGES = (sk, sk.comm, sk.emu, sk.device, sk.kernels, sk.notebook)


@functools.cache
def functions():
    """-> {name: function}: public functions, and the methods of public classes"""
    found = {}
    for package in (*PACKAGES, swizzle, libshmem_device, triton_distributed):
        for name in package.__all__:
            of = getattr(package, name)
            name = f"{package.__name__}.{name}"
            if inspect.isclass(of):
                found |= {f"{name}.{method}": function for method, function in methods(of)}
            elif callable(of):
                found[name] = of
    return found


def methods(of):
    for name in dir(of):
        member = inspect.getattr_static(of, name)
        member = getattr(member, "fget", getattr(member, "__func__", member))
        ours = inspect.isfunction(member) and member.__module__.startswith("shmemkit")
        if ours and (name in ("__init__", "__call__") or not name.startswith("_")):
            yield name, member


@pytest.mark.parametrize("name", functions())
def test_functions_are_annotated(name):
    function = functions()[name]
    needed = {*inspect.signature(function).parameters, "return"} - {"self", "cls"}
    if name.endswith(".__init__"):
        needed.remove("return")
    assert needed - typing.get_type_hints(function).keys() == set()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_completion_offers_public_names_alone(package):
    offered = [name for name in dir(package) if not name.startswith("__")]
    documented = ["swizzle"] if package is sk.device else []
    assert offered == sorted([*package.__all__, *documented])
    assert all(hasattr(package, name) for name in offered)


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_help_lists_every_public_name(package):
    text = pydoc.render_doc(package, renderer=pydoc.plaintext)
    for name in package.__all__:
        if not inspect.ismodule(getattr(package, name)):
            assert re.search(rf"^    (class )?{name}\b", text, re.M), name


def test_names_of_collectives_are_written(monkeypatch, tmp_path, capsys):
    """Also those of a new one, from its folder alone."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    names = importlib.import_module("names")
    assert not names.main(check=True)
    for file in names.FILES:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / file, tmp_path / file)
    shutil.copytree(ROOT / "shmemkit" / "collectives", tmp_path / "shmemkit" / "collectives")
    folder = tmp_path / "shmemkit" / "collectives" / "planted"
    folder.mkdir()
    (folder / "__init__.py").write_text('METHODS = {"ll": 1}\n')
    monkeypatch.setattr(names, "ROOT", tmp_path)
    assert names.main(check=True) and not names.main(check=False) and not names.main(check=True)
    assert capsys.readouterr().out.splitlines() == [
        f"{what}: {', '.join(names.FILES)}" for what in ("out of date", "written")
    ]
    text = "".join((tmp_path / file).read_text() for file in names.FILES)
    assert 'PlantedMethod: TypeAlias = Literal["auto", "ll"]\n' in text
    assert "from .collectives.planted import Planted as Planted\n" in text


def test_types_take_what_there_is():
    assert isinstance(np.zeros(1), shmemkit.typing.Array)


def _launched(call):
    """-> main() that calls ``call(array)`` in a kernel of one thread"""

    @cuda.jit
    def kernel(array):
        call(array)

    return untyped(lambda world: sk.bind(kernel, 1, 1, (sk.zeros(4, "uint64"),))())


# Alias, and what refuses "no such" with a message that lists the words it takes.
WORDS = {
    "Backend": lambda world: sk.init("no such"),
    "Op": lambda world: sk.AllReduce(world, 8, op="no such"),
    "TeamOp": _launched(lambda x: sk.device.reduce(sk.device.Teams.TEAM_WORLD, x, x, "no such")),
    "Activation": lambda world: sk.matmul(np.ones((1, 1)), np.ones((1, 1)), activation="no such"),
    "Delivery": None,  # an argument of ``emu.run``
    "Scope": _launched(lambda x: sk.device.notify(x, 0, 1, scope="no such")),
    "WaitSemantic": _launched(lambda x: sk.device.wait(x, 1, "gpu", "no such")),
    "SigOp": _launched(lambda x: sk.device.notify(x, 0, 1, "no such")),
    "Comparison": _launched(lambda x: sk.device.wait(x, 1, "gpu", "acquire", 1, "no such")),
    "FenceScope": _launched(lambda x: sk.device.threadfence("no such")),
    "FenceSemantic": _launched(lambda x: sk.device.threadfence("gpu", "no such")),
    "AllReduceRMSNormMethod": lambda world: sk.AllReduceRMSNorm(world, 8, 8, method="no such"),
    "AttentionForm": lambda world: sk.AttentionCombine(world, 1, 1, 8, form="no such"),
    "GemmMethod": lambda world: sk.Gemm("no such"),
    "GroupedGemmMethod": lambda world: sk.GroupedGemm("no such"),
    "AllGatherGemmMethod": lambda world: sk.AllGatherGemm(world, 8, method="no such"),
    "AllGatherGroupedGemmMethod": lambda world: sk.AllGatherGroupedGemm(world, 8, method="no such"),
    "GroupedGemmReduceScatterMethod": lambda world: sk.GroupedGemmReduceScatter(
        world, 8, 8, 8, method="no such"
    ),
    "GemmReduceScatterMethod": lambda world: sk.GemmReduceScatter(world, 8, 8, method="no such"),
    "GemmAllReduceMethod": lambda world: sk.GemmAllReduce(world, 8, 8, method="no such"),
    **{
        f"{kind.__name__}Method": functools.partial(kind, max_nbytes=8, method="no such")
        for kind in collectives().values()
    },
}


def test_there_is_a_check_of_each_alias():
    values = vars(shmemkit.typing).items()
    assert {name for name, of in values if typing.get_origin(of) is typing.Literal} == WORDS.keys()


@pytest.mark.parametrize("alias", WORDS)
def test_aliases_have_the_words_that_are_taken(alias):
    def main():
        WORDS[alias](None if alias == "Backend" else sk.init())

    with pytest.raises((ValueError, sk.emu.EmulatorError), match="'no such'") as caught:
        sk.emu.run(main, 1, delivery="no such" if alias == "Delivery" else None)
    taken = re.search("it must be (.*)", str(caught.value))[1]
    assert sorted(re.findall(r"'(\w+)'", taken)) == sorted(typing.get_args(getattr(shmemkit.typing, alias)))
