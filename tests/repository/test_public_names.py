"""What the library says of itself: its public names, and the types of their arguments and results."""

import inspect
import pydoc
import re
import typing

import numpy as np
import pytest

import shmemkit as sk
import shmemkit.typing
from shmemkit.compat import libshmem_device, triton_distributed
from shmemkit.device import swizzle

PACKAGES = (sk, sk.emu, sk.device)


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


def test_types_take_what_there_is():
    assert isinstance(np.zeros(1), shmemkit.typing.Array)
