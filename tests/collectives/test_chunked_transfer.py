"""Chunked copy by stores: calls in a row by each of its schedules, with no host between. Each step of the
transport and of the schedules is needed."""

import numpy as np
import pytest
from fast import slow
from mutations import argument, goes_wrong, omit, seeds, single_buffer
from numba import cuda
from specification import ALL

import shmemkit as sk
from shmemkit.collectives import chunked_transfer
from shmemkit.collectives.broadcast import scatter
from shmemkit.collectives.schedules import push_exchange, push_rooted
from shmemkit.device import copy_block
from shmemkit.emu import run

METHODS = {
    "AllGather": "push_1d",
    "AllToAll": "push",
    "ReduceScatter": "push",
    "Gather": "push",
    "Scatter": "push",
    "Broadcast": "scatter",
}
SETTINGS = {"part": 1 << 14, "chunk": 1 << 13, "senders": 6, "threads": 4}
UNORDERED = {"delivery": "unordered", "races": True}
ONE_CHUNK, SEVERAL = 100, 20_000  # bytes: of the parts of a segment, too


@pytest.fixture(autouse=True)
def several_chunks(small):
    for name, method in METHODS.items():
        small(ALL[name].kind, **{method: SETTINGS})


@cuda.jit
def keep(out, room):
    copy_block(out, room)


def few_calls(name, size, symmetric):
    """-> whether all results are right; no host waits between calls."""
    what, world = ALL[name], sk.init()
    n, me = world.n_ranks, world.rank
    shape = (n, size) if what.gathers else size
    made = what.make(world, n * size, METHODS[name])
    results, room = [], made.output(shape, "uint8") if symmetric else np.zeros(shape, "uint8")
    for call in range(4):
        given = what.given(call, size, "uint8", n)
        what.call(made, given[me], room)
        if what.gets(me, 0):
            results.append((np.zeros(shape, "uint8"), what.wanted(given, METHODS[name], me)))
            keep[1, 2, world.stream](results[-1][0], room)
    world.synchronize()
    return all((out == wanted).all() for out, wanted in results)


def is_wrong(name, size=SEVERAL, symmetric=False, n=6):
    """Whether it is seen in n schedules."""
    return goes_wrong(run, few_calls, 3, (name, size, symmetric), **UNORDERED, each=seeds(n))


@pytest.mark.parametrize("size", [ONE_CHUNK, *slow(SEVERAL)])
@pytest.mark.parametrize("name", METHODS)
def test_calls_in_a_row(name, size):
    assert not is_wrong(name, size, n=1)


@pytest.mark.slow
def test_calls_in_a_row_into_symmetric_memory():
    assert not is_wrong("AllToAll", symmetric=True)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "Broadcast"])
@pytest.mark.parametrize(
    "change",
    [
        omit("notify", inside="put"),
        argument("notify", 2, "value + CHUNKS", inside="put"),
        omit("cuda.syncthreads", inside="put"),
    ],
)
def test_each_step_of_a_put_is_needed(mutate, name, change):
    mutate(chunked_transfer, change)
    assert is_wrong(name)


@pytest.mark.parametrize("name", ["AllGather", "AllToAll", "Gather", "Scatter"])
@pytest.mark.parametrize("change", [omit("wait_block"), argument("wait_block", 4, "value - 1")])
def test_receivers_wait(mutate, name, change):
    mutate(chunked_transfer, change)
    assert is_wrong(name)


@pytest.mark.parametrize("name", ["Gather", "Scatter"])
@pytest.mark.parametrize(
    "change",
    [
        omit("wait_block"),
        argument("wait_block", 4, "epoch - 3"),
        omit("cuda.syncthreads"),
        omit("notify"),
        single_buffer(),
    ],
)
def test_each_step_of_rooted_is_needed(mutate, name, change):
    mutate(push_rooted, change)
    assert is_wrong(name)


@pytest.mark.parametrize(
    "name, size, change",
    [
        ("AllGather", ONE_CHUNK, omit("notify_all")),
        ("AllGather", ONE_CHUNK, omit("cuda.syncthreads", inside="put_to_all")),
        ("ReduceScatter", SEVERAL, omit("wait")),
        ("ReduceScatter", SEVERAL, omit("cuda.syncthreads", inside="combine_all")),
        ("AllGather", SEVERAL, single_buffer()),
        ("ReduceScatter", SEVERAL, single_buffer()),
    ],
)
def test_each_step_of_an_exchange_is_needed(mutate, name, size, change):
    mutate(push_exchange, change)
    assert is_wrong(name, size)


@pytest.mark.parametrize(
    "change",
    [omit(call, k, inside="push_direct") for call in ("block_barrier", "cuda.syncthreads") for k in (1, 2)],
)
def test_each_step_into_symmetric_memory_is_needed(mutate, change):
    mutate(push_exchange, change)
    assert is_wrong("AllToAll", symmetric=True)


@pytest.mark.parametrize(
    "change",
    [
        omit("wait"),
        omit("notify", 1),
        omit("wait_block"),
        omit("cuda.syncthreads", 2),
        omit("notify", 2),
        single_buffer(),
    ],
)
def test_each_step_of_a_broadcast_is_needed(mutate, change):
    mutate(scatter, change)
    assert is_wrong("Broadcast")
