"""docs/glossary.md has the arguments of all operations, and no others; some are given by name only."""

import functools
import inspect
import re

import numpy as np
import pytest
from pages import ROOT

import shmemkit as sk

PAGE = (ROOT / "docs" / "glossary.md").read_text()
ROWS = [
    (re.findall(r"`(\w+)`", words), where)
    for words, where in re.findall(r"^\| (`[^|]*) \|.*\| ([^|]*) \|$", PAGE, re.M)
]
WORDS = {word for words, _ in ROWS for word in words}
NEVER = {"n_pes", "num_ranks", "nranks", "world_size"}  # on the host
BY_NAME = {"stream", "group", "sms"}
OF_PYTORCH = {"comm.from_torch"}  # whose group is one of PyTorch
NOT_YET: set = set()


@functools.cache
def signatures():
    """-> {name: {function: its parameters}} of the functions, and of the methods of classes, for hosts"""
    found = {}
    for package in (sk, sk.comm, sk.emu, sk.notebook):
        for name in package.__all__:
            of = getattr(package, name)
            name = f"{package.__name__}.{name}".removeprefix("shmemkit.")
            if not inspect.ismodule(of):
                found[name] = {
                    function.__qualname__: inspect.signature(function).parameters
                    for function in functions(of)
                }
    return found


def functions(of):
    if not inspect.isclass(of):
        return [of] if callable(of) else []
    names = [name for name in dir(of) if name in ("__init__", "__call__") or not name.startswith("_")]
    members = filter(inspect.isroutine, (getattr(of, name) for name in names))
    return [member for member in members if (getattr(member, "__module__", "") or "").startswith("shmemkit")]


@functools.cache
def arguments():
    """-> {name: names of its arguments} of all operations, and of the functions that call one"""
    rooms = "attention", "collectives", "gemm", "moe"
    return {
        name: {argument for of in found.values() for argument in of} - {"self", "cls"}
        for name, found in signatures().items()
        if name in sk._HOMES and sk._HOMES[name].startswith(rooms) and name not in NOT_YET
    }


@pytest.mark.parametrize("name", arguments())
def test_the_arguments_are_in_the_glossary(name):
    assert arguments()[name] - WORDS == set()


def test_the_glossary_has_no_other_words():
    all_of = {argument for found in signatures().values() for of in found.values() for argument in of}
    assert WORDS - all_of == set()


@pytest.mark.parametrize(("words", "where"), ROWS, ids=[" ".join(words) for words, _ in ROWS])
def test_where_a_word_is(words, where):
    named = set(re.findall(r"`(\w+)`", where))
    assert not [name for name, of in arguments().items() if name in named and not of & set(words)]
    if re.fullmatch(r"(`\w+`(, )?)+", where):  # these alone
        assert {name for name, of in arguments().items() if words[0] in of} <= named


@pytest.mark.parametrize("name", sorted(signatures().keys() - NOT_YET))
def test_what_is_given_by_name_only(name):
    for function, parameters in signatures()[name].items():
        assert not NEVER & parameters.keys(), function
        for argument in BY_NAME & parameters.keys() if name not in OF_PYTORCH else ():
            assert parameters[argument].kind is inspect.Parameter.KEYWORD_ONLY, (function, argument)


def test_old_names_work_and_warn():
    def main():
        world, x = sk.init(), np.ones((4, 4), "float32")
        with pytest.warns(DeprecationWarning, match="^GemmAllReduce: max_m is now max_tokens"):
            product = sk.GemmAllReduce(world, max_m=4, max_n=4, dtype="float32")
        gathered, queue = sk.AllGatherGemm(world, 64), sk.Queue(world, 2, 4)
        calls = (
            ("GemmAllReduce: b is now w", lambda: product(x, b=x)),
            ("AllGatherGemm: weight is now w", lambda: gathered(x, weight=x)),
            ("Queue: inputs is now x", lambda: queue(inputs=x)),
        )
        for said, call in calls:
            with pytest.warns(DeprecationWarning, match=f"^{said}"):
                assert (call() == (1 if said[0] == "Q" else 4)).all()

    with pytest.warns(DeprecationWarning, match="^run: n_pes is now n_ranks"):
        sk.emu.run(main, n_pes=1)
