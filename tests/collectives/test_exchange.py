"""All-gather, all-to-all and reduce-scatter by LL128 and by pieces on the emulator: what they refuse.
(test_all_reduce_ll128.py and test_lamport.py have the device functions.)"""

import pytest
from specification import calls

import shmemkit as sk

KINDS = {
    "all_gather": (sk.AllGather._maker, ()),
    "all_to_all": (sk.AllToAll._maker, ()),
    "reduce_scatter": (sk.ReduceScatter._maker, ("sum",)),
}
kinds = pytest.mark.parametrize("kind", KINDS)
methods = pytest.mark.parametrize("method", ["ll128", "lamport"])


@kinds
@methods
def test_what_cannot_be_counted_is_refused(pes, kind, method):
    """Lines of more than 16 GiB, before they are asked for."""

    def main():
        made, options = KINDS[kind]
        with pytest.raises(ValueError, match=f"{kind} {method}: its slots would take .*; it is for smaller"):
            made(method)(sk.init(), 9 << 30, *options)

    pes(1).run(main)


@pytest.mark.slow
@methods
def test_many_ranks(pes, method):
    """All-to-all has no code for each rank."""
    pes(17).run(calls, "AllToAll", method, [1, 1])


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
@methods
def test_many_ranks_are_refused(pes, kind, method):
    def main():
        made, options = KINDS[kind]
        with pytest.raises(ValueError, match=f"{kind} {method}: there are 17 ranks; it is for 16 at most"):
            made(method)(sk.init(), 64, *options)

    pes(17).run(main)


@methods
def test_the_blocks_of_all_rows_fit(pes, method):
    """Of a grid with a row for each rank, too."""

    def main():
        world = sk.init()
        exchange = sk.AllToAll._maker(method)(world, 100)
        most = exchange.blocks * world.backend.multiprocessors
        assert exchange.most
        assert all(0 <= most - blocks * rows < 3 for (_, rows, _), blocks in exchange.most.items())

    pes(3).run(main)
