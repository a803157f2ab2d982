"""AllReduce on the emulator: float8, what is refused, and all schedules of one shot."""

import numpy as np
import pytest
from reduced import combined

import shmemkit as sk
from shmemkit.runtime.symmetric_memory import as_dtype

# Those by multimem are in test_all_reduce_multimem.py: not of all ops and dtypes, nor in order.
methods = pytest.mark.parametrize("method", [m for m in sk.AllReduce.methods if "multimem" not in m])


@pytest.mark.each_value
@methods
@pytest.mark.parametrize("n_pes", range(1, 10))
@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_float8_is_combined_in_float32_and_rounded_once(pes, method, n_pes, dtype):
    """Also of odd lengths, at odd addresses; sums that saturate, and NaN."""

    def main():
        world = sk.init()
        n, me = world.n_ranks, world.rank
        given = 4.0 * np.random.default_rng(n).integers(-64, 64, (n, 101))
        given[n // 2, 7], given[0, 9], given[n - 1, 9] = np.nan, np.inf, -np.inf
        given = given.astype(as_dtype(dtype))
        room = np.zeros(101 + me, given.dtype)
        x = room[me:]
        for op in ("sum", "max", "avg"):
            x[:] = given[me]
            sk.AllReduce(world, 256, op, method)(x, x)
            world.synchronize()
            np.testing.assert_array_equal(x.view("uint8"), combined(op, list(given)).view("uint8"))

    pes(n_pes).run(main)


def few_calls(method, calls, words):
    """Of one thread per block: little enough for all schedules."""
    world = sk.init()
    reduce = sk.AllReduce.maker(method)(world, 8 * words, "sum", threads=1)
    x, out = np.zeros(words, "uint64"), np.zeros(words, "uint64")
    for call in range(calls):
        x[:] = 10 * call + world.rank
        reduce.bind(x, out, False, x.dtype)(None)
        world.synchronize()
        assert (out == 10 * call * world.n_ranks + sum(range(world.n_ranks))).all()
        out[:] = 255


@pytest.mark.slow
def test_one_shot_is_right_in_every_schedule():
    found = sk.emu.explore(few_calls, 2, ("one_shot", 3, 1), exhaustive=True, heap_size=1 << 18)
    assert found.finished and found.failure is None, str(found)


@pytest.mark.slow
def test_push_is_right_in_every_schedule():
    """Both stages have one scratch: the second call uses both of its buffers again."""
    found = sk.emu.explore(few_calls, 2, ("push", 2, 4), exhaustive=True, heap_size=1 << 18)
    assert found.finished and found.failure is None, str(found)


def test_wrong_arrays(pes):
    def main():
        world = sk.init()
        reduce = sk.AllReduce(world, 64, "avg")
        x = np.zeros(8, "float32")
        for array, out, message in [
            (x, np.zeros(7, "float32"), "out must be float32 with 8 elements"),
            (x, np.zeros(8), "out is float64 .*; out must be float32"),
            (
                np.zeros(17, "float32"),
                None,
                "x has 68 bytes, more than max_nbytes=64. Make an AllReduce with",
            ),
            (np.zeros(8, "int32"), None, "op is 'avg' and dtype int32; it must be a floating"),
            (np.zeros(4, "complex64"), None, "dtype is complex64; it must be "),
            (np.zeros(16, "float32")[::2], None, "it must be C-contiguous"),
        ]:
            with pytest.raises(ValueError, match=message):
                reduce(array, out)
        room = np.zeros(12, "float32")
        with pytest.raises(ValueError, match="overlap; they must lie apart, or be the same"):
            reduce(room[:8], room[4:])

    pes(2).run(main)
