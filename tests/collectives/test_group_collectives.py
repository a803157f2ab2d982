"""Every collective, by each of its methods, on groups: each on two groups at once, whose ranks are in
another order than the World's, with races checked and messages late."""

import pytest
from specification import ALL, calls

import shmemkit as sk

WAYS = [(name, method) for name, what in ALL.items() for method in what.kind.methods]
SIZES = [5, 300, 300]  # elements of a segment


def some(world):
    """Ranks 0 and 2, and ranks 4, 3 and 1, in this order."""
    odd = world.rank not in (0, 2)
    return world.split(int(odd), key=-world.rank if odd else world.rank)


def made_on(world, name, method):
    """Calls on `world`. -> why this method is refused there, or None"""
    try:
        calls(name, method, SIZES, root=world.n_ranks - 1, world=world)
    except ValueError as error:
        return str(error)


@pytest.mark.each_value
@pytest.mark.parametrize("way", WAYS, ids="-".join)
def test_every_method_on_groups(way):
    def main():
        with sk.init() as world, some(world) as group:
            assert group.world_rank(group.rank) == world.rank
            return group.n_ranks, made_on(group, *way)

    for n, refusal in sk.emu.run(main, 5, races=True, delivery="unordered", seed=0):
        if refusal is not None:  # as a World of so many ranks
            (alone, *_) = sk.emu.run(lambda: made_on(sk.init(), *way), n)
            assert refusal == alone
