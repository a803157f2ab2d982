"""What a report says is missing: the same in each schedule, whoever comes first."""

import re

import numpy as np
import pytest
from emulated import spmd
from numba import cuda

import shmemkit as sk
from shmemkit.device import notify, num_ranks, rank, symm_at, wait, wait_block
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
    NO_WAIT: r"rank \d announces it with the signal of line {signal}, but rank \d does not wait for that: "
    r"wait\(arrived, ...\) before line {load}",
}


@pytest.mark.parametrize("mistake", HINTS)
def test_the_hint_does_not_depend_on_who_comes_first(mistake):
    wanted = HINTS[mistake].format(**lines())
    for seed in [None, *range(20)]:
        with pytest.raises(RaceError) as caught:
            spmd(2, lambda world: main(world, mistake), races=True, seed=seed)
        for race in caught.value.races:
            assert re.search(wanted, race.missing), (seed, race)


RING, FORGETS_THE_STEP, FORGETS_ONE, SAME_VALUE = range(4)


@cuda.jit
def ring_all_gather(parts, arrived, mistake):
    """Each rank passes on what has arrived from the left, one part in each step."""
    me, n, i = rank(), num_ranks(), cuda.threadIdx.x
    right = (me + 1) % n
    for step in range(n - 1):
        first = (me - step) % n * 4
        symm_at(parts, right)[first + i] = parts[first + i]  # pass_on
        cuda.syncthreads()
        if i == 0:
            notify(arrived, right, 1 if mistake == SAME_VALUE else step + 1)  # announce
        value = 1 if mistake in (FORGETS_THE_STEP, SAME_VALUE) else step + (mistake != FORGETS_ONE)
        wait_block(arrived, 1, "sys", "acquire", value)  # await


def ring(world, mistake):
    parts, arrived = sk.zeros(4 * world.n_ranks, "int32", "parts"), sk.signals(1, "arrived")
    parts[4 * world.rank : 4 * world.rank + 4] = world.rank
    world.barrier()
    ring_all_gather[1, 4, world.stream](parts, arrived, mistake)
    return parts.tolist()  # host


TOO_EARLY = (
    r"the wait of line {await} on rank \d was satisfied by arrived\[0\] = {{}}; rank \d announces this "
)
TOO_EARLY += r"store with arrived\[0\] = {{}} \(line {announce}\){{}}"


@pytest.mark.each_value
@pytest.mark.parametrize("n", [3, 4])
@pytest.mark.parametrize(
    ("mistake", "values"),
    [
        (FORGETS_THE_STEP, ["1", "[23]", ": wait for [23]$"]),
        (FORGETS_ONE, ["[012]", "[123]", "(: wait for [123]|. If line)"]),
        (SAME_VALUE, ["1", "1", ": let the value grow, and wait for the new one$"]),
    ],
)
def test_a_wait_for_an_earlier_value(mistake, values, n):
    wanted = TOO_EARLY.format(**lines()).format(*values)
    for seed in [None, *range(10)]:
        for delivery in ("eager", "unordered"):
            with pytest.raises(RaceError) as caught:
                spmd(n, lambda world: ring(world, mistake), races=True, seed=seed, delivery=delivery)
            for race in caught.value.races:
                assert re.search(wanted, race.missing), (seed, race)
                assert re.search(r"\(the same lines also race on ranks? \d", str(race))


def test_a_slot_that_is_written_again():
    """Which of two stores a reader wants, nobody can tell: the report says what to do in both cases."""

    @cuda.jit
    def kernel(slot, full, out):
        for turn in range(2):
            if rank() == 0:
                symm_at(slot, 1)[0] = turn  # fill
                notify(full, 1, turn + 1)
            else:
                wait(full, 1, "sys", "acquire", turn + 1)
                out[turn] = slot[0]  # take

    wanted = (
        r"= 1; rank 0 announces this store with full\[0\] = 2 .*. If line {take} needs what was there "
        "before, notify after line {take}, and wait for that before line {fill}, or use another slot; if it "
        "needs what comes then, wait for 2 before line {take}$"
    )
    for seed in [None, *range(10)]:
        with pytest.raises(RaceError) as caught:
            spmd(2, lambda w: kernel[1, 1](sk.zeros(1), sk.signals(1), np.zeros(2)), races=True, seed=seed)
        for race in caught.value.races:
            assert re.search(wanted.format(**lines()), race.missing), (seed, race)


def test_a_host_that_reads_what_no_kernel_waits_for():
    @cuda.jit
    def send(inbox, arrived):
        symm_at(inbox, 1 - rank())[0] = 1  # sent
        if len(arrived):
            notify(arrived, 1 - rank(), 1)  # told

    def main(world, n_signals):
        inbox, arrived = sk.zeros(1, "int32"), sk.signals(2, "arrived")
        send[1, 1, world.stream](inbox, arrived[1 : 1 + n_signals])
        return inbox.tolist()  # got

    for n_signals, wanted in (
        (0, r"a notify after line {sent} and a wait for it in a kernel of rank \d, or world.barrier"),
        (1, r"line {told}, but rank \d does not wait for that: wait\(arrived\[1:\], ...\) in a kernel"),
    ):
        with pytest.raises(RaceError) as caught:
            spmd(2, lambda world, n=n_signals: main(world, n), races=True)
        assert re.search(wanted.format(**lines()), str(caught.value)), caught.value


def test_the_right_exchange_is_not_accused():
    for seed in [None, *range(20)]:
        assert spmd(2, lambda world: main(world, RIGHT), races=True, seed=seed) == [
            [11, 12, 13, 10],
            [1, 2, 3, 0],
        ]
        whole = [0] * 4 + [1] * 4 + [2] * 4
        assert spmd(3, lambda world: ring(world, RING), races=True, seed=seed) == [whole] * 3


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


@cuda.jit
def mailbox(inbox, full, empty, rounds, late):
    """Block 0 stores to all ranks, block 1 reads what has come from each. With `late`, block 0 waits for one
    reading too few."""
    n = num_ranks()
    for i in range(rounds):
        for d in range(n):
            peer = (rank() + d) % n
            if cuda.blockIdx.x == 0:
                wait(empty[peer:], 1, "sys", "acquire", max(i - late, 0))
                symm_at(inbox, peer)[rank()] = i
                notify(full[rank() :], peer, i + 1)
            else:
                wait(full[peer:], 1, "sys", "acquire", i + 1)
                inbox[peer]
                notify(empty[rank() :], peer, i + 1)


def test_a_store_that_waits_for_one_reading_too_few():
    def run(world, late):
        n = world.n_ranks
        arrays = sk.zeros(n, "int64", "inbox"), sk.signals(n, "full"), sk.signals(n, "empty")
        mailbox[2, 1, world.stream](*arrays, 2, late)
        world.synchronize()

    found, exact = (
        [],
        r"the wait of line \d+ on rank \d was satisfied by empty\[\d\] = (\d); rank \d announces this read "
        r"with empty\[\d\] = (\d) \(line \d+\): wait for \2",
    )
    for seed in (None, *range(10)):
        spmd(2, lambda world: run(world, 0), races=True, seed=seed)
        with pytest.raises(RaceError) as caught:
            spmd(2, lambda world: run(world, 1), races=True, seed=seed)
        found += [race.missing for race in caught.value.races]
    assert any(re.fullmatch(exact, text) for text in found)  # where the reading comes first
    assert not [text for text in found if re.search("grid_barrier|wait first", text)]
