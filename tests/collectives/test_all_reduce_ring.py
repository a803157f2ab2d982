"""AllReduce by a ring, on the emulator: totals in float32, what fits in what was made, and what goes wrong
without one of the steps."""

import numpy as np
import pytest
from fast import slow
from mutations import argument, omit, omit_store, store
from specification import explored

import shmemkit as sk
from shmemkit.collectives.schedules import tree
from shmemkit.runtime.symmetric_memory import as_dtype


def test_sums_of_16_bits_are_rounded_once(pes):
    """If each of them is, 256 + 1 + 1 + 1 stays 256 in bfloat16."""

    def main():
        world = sk.init()
        x = np.full(40, 256 if world.rank == 0 else 1, as_dtype("bfloat16"))
        out = sk.AllReduce(world, x.nbytes, "sum", "ring")(x)
        world.synchronize()
        assert (out.astype("float32") == 260).all()  # 259, to nearest even

    pes(4).run(main)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", *slow("float8_e5m2")])
def test_float8_counts_twice(pes, small_chunks, dtype):
    """There is memory for totals of two bytes each."""

    def main():
        world = sk.init()
        x = np.ones(300, as_dtype(dtype))
        reduce = sk.AllReduce(world, 600, "sum", "ring")
        for size in (300, 299, 7):
            out = reduce(x[:size])
            world.synchronize()
            assert (out.astype("float32") == 2).all()
        with pytest.raises(ValueError, match="x has 301 bytes, which count 2 times, .* than max_nbytes=600"):
            reduce(np.ones(301, x.dtype))

    pes(2, local_size=1).run(main)


@pytest.mark.slow
def test_float8_of_one_line_counts_twice(pes):
    """Twice as many bytes are more than 64 KB."""

    def main():
        world = sk.init()
        out = sk.all_reduce(np.ones((1 << 15) + 1, as_dtype("float8_e4m3fn")))
        world.synchronize()
        assert (out.astype("float32") == 2).all()

    pes(2, local_size=1).run(main)


@pytest.mark.parametrize("wanted", [1, 5, 208, 832])
def test_chunks_fit_in_what_was_made(pes, wanted):
    """Whatever the most words, fewer of them need no more chunks, and no larger ones."""

    def main():
        ring = sk.AllReduce._maker("ring")(sk.init(), 8, "sum", blocks=wanted, chunks=1)
        edges = {ring.most * k + d for k in (1, 5, 208, 832) for d in (-1, 0, 1)}
        room = most = 0
        for words in sorted({*range(1, 3000, 7), *edges}):
            chunk, chunks = ring.chunks_of(words)
            assert (chunks - 1) * chunk < words <= chunks * chunk
            room, most = max(room, chunk), max(most, chunks)
            assert room == chunk and most <= ring.most_chunks(words)

    pes(1).run(main)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        omit("wait_for", 1),
        omit("wait_for", 3),
        omit("put", 1),
        omit_store("epochs[]"),
        argument("put", 2, "span(results_full, c, 1)", 3),
        argument("put", 3, "epoch - 1", 3),
        argument("wait_for", 1, "epoch - 1", 3),
        store("rows", "1"),
    ],
)
def test_each_step_is_needed(mutate, small, change):
    mutate(tree, change)
    small(sk.AllReduce, ring={"least": 2, "most": 2, "blocks": 1})
    assert explored(2, "AllReduce", "ring", [6] * 3, nodes=2).failure is not None
