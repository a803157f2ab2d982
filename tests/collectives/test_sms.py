"""Budgets of multiprocessors: no launch of a collective has more blocks than `sms`, and the results are as
without it."""

import re

import pytest
from budgets import most_blocks
from fast import slow
from specification import ALL, calls

import shmemkit as sk

SIZES = [9, 300, 0, 41]


WAYS = [(name, method) for name, what in ALL.items() for method in what.kind.methods]


@pytest.mark.parametrize("name, method", WAYS)
@pytest.mark.parametrize("sms", [1, *slow(2, 3, 5, 64)])
def test_blocks(pes, small_chunks, name, method, sms):
    """A method that needs more says how many, and works with as many."""

    def main():
        world = sk.init()
        least = re.search(r"sms is \d+; it must be (\d+) at least", _refusal(world, name, method, sms))
        given = int(least[1]) if least else sms
        assert given >= sms
        with sk.Timeline(world) as timeline:
            calls(name, method, SIZES, "int32", root=1, world=world, sms=given)
            calls(name, method, SIZES, "int32", root=1, world=world, sms=given, symmetric=True)
        assert 1 <= most_blocks(timeline) <= given

    pes(3).run(main)


def _refusal(world, name, method, sms):
    try:
        ALL[name].make(world, 64, method, sms=sms).free()
    except ValueError as error:
        return str(error)
    return ""
