"""The queue on GPUs: ``mpirun -n 4 python3 -m pytest -m gpu -k test_gpu_queue`` (also 1 and 2)."""

import numpy as np
import pytest
from gpu import on_gpus

from shmemkit.collectives.queue import Queue

pytestmark = pytest.mark.ranks(3)


def values(rank, repeat, n, size, dtype):
    raw = np.random.default_rng([rank, repeat]).integers(0, 100, (n, size))
    return raw.astype(dtype)


def check(world, queue, outputs, repeat, n):
    expected = values(queue.sender, repeat, n, queue.item_size, queue.dtype)
    np.testing.assert_array_equal(world.asnumpy(outputs), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "float64", "float8_e4m3fn"])
@pytest.mark.parametrize("item_size", [128, 37])
def test_dtypes_and_odd_sizes(world, dtype, item_size):
    queue = Queue(world, 8, item_size, dtype, n_producers=5, n_consumers=3, block=96)
    for repeat, n in enumerate((on_gpus(100, 20), 0, 7, 33)):
        given = values(world.rank, repeat, n, item_size, queue.dtype)
        inputs = world.xp.asarray(given.view("uint8")).view(queue.dtype)
        check(world, queue, queue(inputs), repeat, n)
    queue.free()


def test_repeats_of_the_full_queue(world):
    repeats, n_slots, size, n = on_gpus((200, 32, 128, 2025), (4, 3, 8, 20))
    queue = Queue(world, n_slots, size)
    for repeat in range(repeats):
        inputs = world.xp.asarray(values(world.rank, repeat, n, size, "float32"))
        check(world, queue, queue(inputs), repeat, n)
    queue.free()


def test_graphs_interleaved(world):
    queue = Queue(world, 16, 64)
    inputs = [world.xp.zeros((n, 64), "float32") for n in on_gpus((50, 21), (7, 3))]
    outputs = [world.xp.zeros_like(x) for x in inputs]
    graphs = []
    for x, y in zip(inputs, outputs, strict=True):
        world.stream.begin_capture()
        queue(x, y)
        graphs.append(world.stream.end_capture())
    for repeat in range(on_gpus(20, 4)):
        x, y, graph = inputs[repeat % 2], outputs[repeat % 2], graphs[repeat % 2]
        x[...] = world.xp.asarray(values(world.rank, repeat, len(x), 64, "float32"))
        y.fill(np.nan)
        graph.launch(world.stream)
        check(world, queue, y, repeat, len(x))
    queue.free()


@pytest.mark.gpu("how many blocks fit")
def test_a_grid_that_cannot_be_resident_is_refused(world):
    with pytest.raises(ValueError, match="grid"):
        Queue(world, 8, 16, n_producers=100_000, n_consumers=1)
