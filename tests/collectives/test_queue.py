"""The queue on the emulator, under several schedules: ranks, odd sizes, dtypes, wrap-around, repeats, graphs,
wrong arguments; and no races."""

from pathlib import Path

import numpy as np
import pytest
from emulated import emulate
from fast import examples
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda, types
from ptx import compile_ptx

import shmemkit as sk
from shmemkit.collectives.queue import (
    Queue,
    consumer_release,
    consumer_wait,
    producer_acquire,
    producer_commit,
)
from shmemkit.device import copy_block, rank, symm_at
from shmemkit.runtime.symmetric_memory import DTYPES, as_dtype

EXAMPLE = Path(__file__).parents[2] / "examples" / "01_notify_wait.py"
schedules = pytest.mark.schedules(deliveries="eager", seeds=[None, *range(5)])  # the queue sends no messages


def values(rank, repeat, n, size, dtype):
    """What `rank` sends in `repeat`: random, and different every time."""
    raw = np.random.default_rng([rank, repeat]).integers(0, 100, (n, size))
    return raw.astype(as_dtype(dtype))


def send_around(n_slots, size, dtype, counts, producers, consumers, block, to_offset=1):
    """Every rank sends counts[k] items in repeat k to the rank `to_offset` further; all arrive in order."""
    world = sk.init()
    n = world.n_ranks
    to, sender = (world.rank + to_offset) % n, (world.rank - to_offset) % n
    queue = Queue(
        world, n_slots, size, dtype, to=to, n_producers=producers, n_consumers=consumers, block=block
    )
    for repeat, count in enumerate(counts):
        inputs = values(world.rank, repeat, count, size, dtype)
        outputs = queue(inputs)
        np.testing.assert_array_equal(outputs, values(sender, repeat, count, size, dtype))
        np.testing.assert_array_equal(inputs, values(world.rank, repeat, count, size, dtype))  # untouched
    queue.free()


@pytest.mark.each_value
@schedules
@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4, 5, 8])
def test_any_number_of_ranks(pes, n_ranks):
    pes(n_ranks).run(send_around, 4, 8, "float32", [7, 3, 9], 2, 2, 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dtype(pes, dtype):
    pes(2).run(send_around, 3, 5, dtype, [4, 4], 2, 1, 4)


@examples(25)
@given(
    seed=st.none() | st.integers(0, 1 << 30),
    n_ranks=st.integers(1, 4),
    n_slots=st.integers(1, 7),
    size=st.integers(1, 19),
    counts=st.lists(st.integers(0, 17), min_size=1, max_size=4),
    producers=st.integers(1, 5),
    consumers=st.integers(1, 5),
    block=st.integers(1, 40),
    to_offset=st.integers(0, 3),
)
def test_any_shape(pes, seed, n_ranks, n_slots, size, counts, producers, consumers, block, to_offset):
    """Fewer slots than blocks, no items, one slot, slots that do not divide the items: all of it arrives."""
    shape = n_slots, size, "float32", counts, producers, consumers, block, to_offset
    pes(n_ranks, seed=seed).run(send_around, *shape)


@schedules
def test_ranks_send_different_numbers(pes):
    def main():
        world = sk.init()
        queue = Queue(world, 3, 4, n_producers=2, n_consumers=2, block=4)
        sender = (world.rank - 1) % world.n_ranks
        for repeat in range(3):
            inputs = values(world.rank, repeat, 5 * world.rank + repeat, 4, "float32")
            outputs = np.full((5 * sender + repeat, 4), np.nan, "float32")
            assert queue(inputs, outputs) is outputs
            np.testing.assert_array_equal(outputs, values(sender, repeat, 5 * sender + repeat, 4, "float32"))

    pes(3).run(main)


def test_too_few_items_is_a_deadlock(pes):
    def main():
        world = sk.init()
        queue = Queue(world, 3, 4, n_producers=1, n_consumers=1, block=4)
        queue(np.ones((4, 4), "float32"), np.ones((4 if world.rank else 5, 4), "float32"))
        world.stream.synchronize()

    with pytest.raises(
        sk.emu.DeadlockError, match=r"rank 0 block 1.*waits for full\[1\] on rank 0 >= 2, now 1"
    ):
        pes(2).run(main)


@pytest.mark.every(3)
@schedules
def test_graph_replays_count_on(pes):
    """Two graphs replayed in turn, with eager calls between: the state in device memory keeps them apart."""

    def main():
        world = sk.init()
        sender = (world.rank - 1) % world.n_ranks
        queue = Queue(world, 3, 4, n_producers=2, n_consumers=1, block=4)
        inputs = [np.zeros((5, 4), "float32"), np.zeros((2, 4), "float32")]
        outputs = [np.zeros_like(x) for x in inputs]
        graphs = []
        for x, y in zip(inputs, outputs, strict=True):
            world.stream.begin_capture()
            queue(x, y)
            graphs.append(world.stream.end_capture())
        for repeat in range(6):
            which = repeat % 2
            inputs[which][...] = values(world.rank, repeat, len(inputs[which]), 4, "float32")
            outputs[which][...] = np.nan
            graphs[which].launch(world.stream)
            np.testing.assert_array_equal(
                outputs[which], values(sender, repeat, len(inputs[which]), 4, "float32")
            )
            eager = queue(values(world.rank, 10 + repeat, 3, 4, "float32"))
            np.testing.assert_array_equal(eager, values(sender, 10 + repeat, 3, 4, "float32"))

    pes(3).run(main)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(n_slots=0), "Queue: n_slots is 0; it must be 1 or more"),
        (dict(n_consumers=0), "n_consumers is 0"),
        (dict(to=0), r"to is \[0, 0\] on ranks 0 to 1; each rank must be"),
        (dict(dtype="float33"), "Queue: dtype is 'float33'; it must be"),
        (dict(to=2), "Queue: to is 2; it must be 0 to 1"),
    ],
)
def test_wrong_arguments(pes, arguments, message):
    def main():
        Queue(sk.init(), **{"n_slots": 2, "item_size": 4, **arguments})

    with pytest.raises(ValueError, match=message):
        pes(2).run(main)


@pytest.mark.parametrize("where", [{1}, {0, 2}])
@pytest.mark.parametrize(
    "arguments, message",
    [
        (dict(n_slots=0), "Queue: n_slots is 0; it must be 1 or more"),
        (dict(dtype="float33"), "Queue: dtype is 'float33'; it must be"),
        (dict(to="next"), "Queue: to is 'next'; it must be an integer"),
        (dict(block=4), "does not fit"),
    ],
)
def test_what_one_rank_refuses_all_refuse(pes, monkeypatch, capfd, arguments, message, where):
    """And nothing is left of it: each goes on."""

    def bind(kernel, grid, block, *args, **options):
        if block == 4:
            raise ValueError("does not fit")
        return real(kernel, grid, block, *args, **options)

    real = sk.bind
    monkeypatch.setattr("shmemkit.collectives.queue.bind", bind)

    def main():
        with sk.init() as world:
            mine = world.rank in where
            with pytest.raises((TypeError, ValueError)) as caught:
                Queue(world, **{"n_slots": 2, "item_size": 4, "block": 8, **(arguments if mine else {})})
            assert str(caught.value).startswith(message if mine else f"rank {min(where)}: {message}")
            queue = Queue(world, 2, 4, n_producers=1, n_consumers=1, block=8)
            outputs = queue(np.full((3, 4), world.rank, "float32"))
            assert (outputs == (world.rank - 1) % 3).all()
            queue.free()

    pes(3).run(main)
    assert "without free" not in capfd.readouterr().err


def test_no_memory():
    """The slots fit, the signals do not: all is given back."""

    def main():
        world = sk.init()
        with pytest.raises(MemoryError):
            Queue(world, n_slots=1 << 11, item_size=1, dtype="uint64")
        world.free(world.empty(1 << 14, "uint8"))

    sk.emu.run(main, 2, heap_size=1 << 15)


@cuda.jit
def push_and_pop_squares(inputs, outputs, slots, full, empty, receiver, sender):
    """A user's kernel on the queue's pieces: squares on the way in. One producer and one consumer block."""
    n = slots.shape[0]
    thread = cuda.threadIdx.y * cuda.blockDim.x + cuda.threadIdx.x
    for i in range(inputs.shape[0]):
        if cuda.blockIdx.x == 0:
            slot = producer_acquire(empty, n, i)
            for k in range(thread, slots.shape[1], cuda.blockDim.x * cuda.blockDim.y):
                symm_at(slots, receiver)[slot, k] = inputs[i, k] * inputs[i, k] + rank()
            producer_commit(full, n, i, receiver)
        else:
            slot = consumer_wait(full, n, i)
            copy_block(outputs[i], slots[slot])
            consumer_release(empty, n, i, sender)


@pytest.mark.each_value
@schedules
@pytest.mark.parametrize("block", [4, (2, 3)])
def test_pieces_in_a_users_kernel(pes, block):
    def main():
        world = sk.init()
        receiver, sender = (world.rank + 1) % world.n_ranks, (world.rank - 1) % world.n_ranks
        slots, full, empty = sk.empty((2, 6), "int32"), sk.signals(2), sk.signals(2)
        inputs, outputs = values(world.rank, 0, 9, 6, "int32"), np.zeros((9, 6), "int32")
        push_and_pop_squares[2, block](inputs, outputs, slots, full, empty, receiver, sender)
        np.testing.assert_array_equal(outputs, values(sender, 0, 9, 6, "int32") ** 2 + sender)

    pes(3).run(main)


def test_one_thread_of_a_block_of_any_shape_notifies():
    """Two of them set the same value, but one may be late, and set the signal back to an earlier round."""

    def kernel(signals):
        producer_commit(signals, 2, 1, 0)
        consumer_release(signals, 2, 1, 0)

    ptx = compile_ptx(kernel, (types.Array(types.uint64, 1, "C"),))
    assert "%tid.x" in ptx and "%tid.y" in ptx and "%tid.z" in ptx
    assert ptx.count("st.release.sys") == 2


def test_the_example(capsys):
    """More inputs than slots. Under mpirun it is in test_emu_mpi.py."""
    assert emulate(["-n", "2", str(EXAMPLE), "--inputs", "40"]) == 0
    assert [line[-6:] for line in capsys.readouterr().out.splitlines()] == ["passed", "passed"]
