"""What a report says is missing: the same in each schedule, whoever comes first."""

import re

import pytest
from emulated import spmd
from numba import cuda

import shmemkit as sk
from shmemkit.device import notify, rank, symm_at, wait
from shmemkit.emu import RaceError

RIGHT, EARLY_SIGNAL, NO_BARRIER_BEFORE, NO_BARRIER_AFTER, NO_WAIT = range(5)


@cuda.jit
def exchange(inbox, arrived, out, mistake):
    """Each thread sends an element to the other rank, and reads the one that its neighbour's peer sent."""
    other, t = 1 - rank(), cuda.threadIdx.x
    if mistake == EARLY_SIGNAL and t == 0:
        notify(arrived, other, 1)  # early
    symm_at(inbox, other)[t] = 10 * rank() + t  # store
    if mistake != NO_BARRIER_BEFORE:
        cuda.syncthreads()
    if mistake != EARLY_SIGNAL and t == 0:
        notify(arrived, other, 1)  # signal
    if mistake != NO_WAIT and t == 0:
        wait(arrived, 1, "sys", "acquire", 1)  # wait
    if mistake != NO_BARRIER_AFTER:
        cuda.syncthreads()
    out[t] = inbox[(t + 1) % 4]  # load


def lines():
    """The numbers of the marked lines, by mark."""
    with open(__file__) as file:
        marked = [(re.search(r"  # (\w+)$", line), i) for i, line in enumerate(file.read().splitlines(), 1)]
    return {match[1]: i for match, i in marked if match}


def main(world, mistake):
    inbox, arrived, out = sk.zeros(4, "int32", "inbox"), sk.signals(1), world.xp.zeros(4, "int32")
    exchange[1, 4, world.stream](inbox, arrived, out, mistake)
    return world.asnumpy(out).tolist()


HINTS = {
    EARLY_SIGNAL: "the signal of line {early}, which line {load} follows, is given before line {store}",
    NO_BARRIER_BEFORE: r"thread 0 gives the signal of line {signal} without having met thread \d after line "
    r"{store}: cuda.syncthreads\(\) between them",
    NO_BARRIER_AFTER: r"the wait of line {wait} is thread 0's, and thread \d has not met it since: "
    r"cuda.syncthreads\(\) after line {wait} and before line {load}",
    NO_WAIT: "a notify after line {store}, and a wait for it before line {load}",
}


@pytest.mark.parametrize("mistake", HINTS)
def test_the_hint_does_not_depend_on_who_comes_first(mistake):
    wanted = HINTS[mistake].format(**lines())
    for seed in [None, *range(20)]:
        with pytest.raises(RaceError) as caught:
            spmd(2, lambda world: main(world, mistake), races=True, seed=seed)
        for race in caught.value.races:
            assert re.search(wanted, race.missing), (seed, race)


def test_the_right_exchange_is_not_accused():
    for seed in [None, *range(20)]:
        assert spmd(2, lambda world: main(world, RIGHT), races=True, seed=seed) == [
            [11, 12, 13, 10],
            [1, 2, 3, 0],
        ]


@pytest.mark.parametrize("waits", [False, True])
def test_an_array_that_another_rank_calls_otherwise(waits):
    """Ranks make their arrays in different orders: what one calls inbox is the outbox of the other."""

    @cuda.jit
    def kernel(word):
        if waits:
            if rank() == 0:
                wait(symm_at(word, 1), 1, "sys", "acquire", 1)
        else:
            symm_at(word, 1)[0] = rank()

    def run(world):
        names = ("inbox", "outbox") if world.rank == 0 else ("outbox", "inbox")
        first, _ = sk.signals(1, names[0]), sk.signals(1, names[1])
        kernel[1, 1, world.stream](first)
        world.synchronize()

    with pytest.raises((RaceError, sk.emu.DeadlockError), match=r"\(rank 1 calls this array outbox\)"):
        spmd(2, run, races=True)
