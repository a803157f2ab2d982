"""All-gathers of several nodes on the emulator: the example; and the words of LL that
travel by NVSHMEM."""

import re
import textwrap
from pathlib import Path

import numpy as np
import pytest
from emulated import emulate
from fast import slow
from numba import cuda

import shmemkit as sk
from shmemkit.device import (
    ld_acquire,
    ll_pack_block,
    ll_pack_warp,
    ll_put_block,
    ll_put_warp,
    ll_recv_block,
    ll_recv_warp,
    ll_words,
    num_ranks,
    quiet,
    rank,
)

pytestmark = pytest.mark.usefixtures("messages")
HARD = ["--races", "--delivery", "unordered"]


@pytest.mark.parametrize("options, size", [(HARD, 40), *slow(([], 1000), (HARD, 1000))])
def test_example(monkeypatch, capsys, options, size):
    """It prints what it says: ranks of one host become two nodes."""
    program = Path(__file__).parents[2] / "examples" / "03_all_gather_2d.py"
    expected = re.search(r"emulator it prints\n\n(.*?)\n\n", program.read_text(), re.S)[1]
    expected = expected.replace("1000", str(size))
    monkeypatch.delenv("SHMEMKIT_LOCAL_SIZE", raising=False)
    assert emulate(["-n", "4", *options, str(program), "--size", str(size)]) == 0
    assert capsys.readouterr().out.split("\n") == [*textwrap.dedent(expected).split("\n"), ""]


# ---- packed words by NVSHMEM

FORMS = {
    "warp": (ll_pack_warp, ll_put_warp, ll_recv_warp),
    "block": (ll_pack_block, ll_put_block, ll_recv_block),
}
forms = pytest.mark.parametrize("form", FORMS)


def ring(form, size, wait_for_the_put=True):
    """Twice from one buffer to the next rank's."""
    pack, put, recv = FORMS[form]

    @cuda.jit
    def kernel(x, y, out, lines, n_bytes):
        for flag in (7, 8):
            pack(out, x[flag - 7], flag)
            cuda.syncthreads()
            put(lines[flag - 7], out, ll_words(n_bytes), (rank() + 1) % num_ranks())
            if wait_for_the_put and cuda.threadIdx.x == 0:
                quiet()
            cuda.syncthreads()
        recv(y[0], lines[0], 7)
        recv(y[1], lines[1], 8)

    def main():
        world = sk.init()
        x = np.arange(2 * size, dtype="uint8").reshape(2, size) + world.rank
        y = np.zeros_like(x)
        words = ll_words(size)
        kernel[1, 20](x, y, sk.zeros(words, "uint64"), sk.zeros((2, words), "uint64"), size)
        world.synchronize()
        return (y - x).min(), (y - x).max()

    return main


@pytest.mark.each_value
@forms
@pytest.mark.parametrize("size", [3, 8, 41])
@pytest.mark.schedules(deliveries=("eager", "ordered", "unordered"), seeds=[None, 0, 1])
def test_words_that_are_sent(pes, form, size):
    assert pes(3, local_size=1).run(ring(form, size)) == [(2, 2), (255, 255), (255, 255)]


@pytest.mark.schedules(deliveries=("ordered", "unordered"), seeds=[None])
def test_words_that_are_packed_again_too_early(pes):
    with pytest.raises(sk.emu.DeadlockError, match="to hold the flag 7"):
        pes(2, local_size=1).run(ring("block", 8, wait_for_the_put=False))


@pytest.mark.parametrize("delivery, together", [("ordered", True), ("unordered", False)])
def test_words_arrive_one_by_one(delivery, together):
    @cuda.jit
    def kernel(lines, mine, seen, x):
        if rank() == 0:
            ll_pack_warp(mine, x, 5)
            ll_put_warp(lines, mine, 4, 1)
        else:
            ll_recv_warp(x[8:], lines[2:], 5)
            seen[0] = ld_acquire(lines, 1)

    def main():
        world = sk.init()
        seen = np.zeros(1, "uint64")
        kernel[1, 1](sk.zeros(4, "uint64"), sk.zeros(4, "uint64"), seen, np.ones(16, "uint8"))
        world.synchronize()
        assert world.rank == 0 or seen[0] >> 32 == 5

    found = sk.emu.explore(main, 2, exhaustive=True, deliveries=delivery, local_size=1)
    assert isinstance(found.failure, AssertionError) != together, str(found)
    assert found.finished == together


@pytest.mark.parametrize(
    "lines, source, n_words, message",
    [
        (4, 4, 3, "n_words is 3; it must be even"),
        (4, 2, 4, "source has 2 words; it must have 4 or more"),
        (2, 4, 4, "lines has 2 words; it must have 4 or more"),
        (4, None, 4, "is not symmetric"),
    ],
)
def test_wrong_words(pes, lines, source, n_words, message):
    @cuda.jit
    def kernel(lines, source):
        ll_put_block(lines, source, n_words, 1 - rank())

    def main():
        sk.init()
        there = sk.zeros(lines, "uint64")
        kernel[1, 1](there, np.zeros(4, "uint64") if source is None else sk.zeros(source, "uint64"))

    with pytest.raises(sk.emu.EmulatorError, match=message):
        pes(2, local_size=1).run(main)


@pytest.mark.every(2)
@pytest.mark.parametrize("nodes", [1, 2])
def test_no_flag_is_0(pes, nodes):
    """As new slots hold: a chunk may be sent for the first time in any epoch."""

    def main():
        world = sk.init()
        gather = sk.AllGather(world, 2 * 8192 * 4, "ll_2d")
        epochs = gather._methods["ll_2d"].arrays[-1]
        epochs[...] = (1 << 32) - 2
        world.host_barrier()
        for call in range(4):
            x = np.arange(512) + 1000 * world.rank + call
            out = gather(x)
            world.synchronize()
            for r in range(2):
                np.testing.assert_array_equal(out[r], np.arange(512) + 1000 * r + call)

    pes(2, local_size=2 // nodes).run(main)
