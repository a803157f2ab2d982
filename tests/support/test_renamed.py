import inspect

import pytest

import shmemkit as sk
from shmemkit.support.renamed import renamed


class Thing:
    @renamed(a="x", result="out")
    def __call__(self, x, out=None):
        return x, out


def test_an_old_name_works_and_warns_where_it_is_used():
    with pytest.warns(
        DeprecationWarning, match="^Thing: a is now x, and works in this version alone$"
    ) as seen:
        assert Thing()(a=1, out=2) == (1, 2)
    assert seen[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="^Thing: result is now out"):
        assert Thing()(1, result=2) == (1, 2)


def test_the_warning_names_the_class_that_is_used():
    kind = type("Kind", (Thing,), {})
    with pytest.warns(DeprecationWarning, match="^Kind: a is now x"):
        kind()(a=1)


@pytest.mark.filterwarnings("error")
def test_the_new_name_does_not_warn():
    assert Thing()(1, out=2) == Thing()(x=1, out=2) == (1, 2)
    assert [*inspect.signature(Thing.__call__).parameters] == ["self", "x", "out"]


@pytest.mark.parametrize(
    "given, why", [({"w": 1}, "unexpected keyword argument 'w'"), ({}, "missing 1 .*'x'")]
)
def test_other_wrong_arguments_are_refused_as_ever(given, why):
    with pytest.raises(TypeError, match=rf"^Thing.__call__\(\) .*{why}"):
        Thing()(**given)


def test_both_names():
    with pytest.raises(TypeError, match="^Thing: a is the old name of x, and both are given. Give x$"):
        Thing()(a=1, x=2)


def test_reports_name_the_function_itself(pes):
    def main():
        world = sk.init()
        if world.rank:
            sk.ExpertParallel(world, 1, 8, 2, 1)
        else:
            world.host_barrier()

    with pytest.raises(
        RuntimeError, match=r"rank 0 calls host_barrier\(\) .*, rank 1 calls ExpertParallel\(\) "
    ):
        pes(2).run(main)
