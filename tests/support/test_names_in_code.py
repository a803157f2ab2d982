"""Which names of variables and of attributes a function's code has."""

from typing import Any

from shmemkit.support.names_in_code import names_in

a: Any = None
b: Any = None
c: Any = None
d: Any = None


def test_variables_and_attributes():
    local = b

    def outer(cell):
        def inner():
            return b.a, cell, local, [c for x in d.c]

        return inner, a.b.x, float(cell.f)

    variables, attributes = names_in(outer.__code__)
    assert variables == {"a", "b", "c", "d", "float"} and attributes == {"a", "b", "c", "x", "f"}


def test_a_class_body():
    assert names_in(compile("a.b\ne = 1", "", "exec"))[0] == {"a"}
