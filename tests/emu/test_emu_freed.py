"""Symmetric memory that was freed, or never written: what needs no report, and what is forgotten."""

import pytest
from numba import cuda
from planted.plant import HEAP, result

import shmemkit as sk
from shmemkit.device import notify, num_ranks, rank, symm_at, wait
from shmemkit.emu import UseAfterFreeError


@cuda.jit
def store_next(box):
    symm_at(box, (rank() + 1) % num_ranks())[0] = rank() + 10


@pytest.mark.parametrize("races", [False, True])
def test_freed_memory_rests(races):
    """While there is room elsewhere, nobody gets it; then the oldest first."""

    def main():
        sk.init()
        first, second = sk.zeros(64, "int32", "first"), sk.zeros(64, "int32", "second")
        addresses = [array.ctypes.data for array in (first, second)]
        sk.free(first)
        sk.free(second)
        others = [sk.zeros(64, "int32") for _ in range(HEAP // 256 - 3)]
        assert not {array.ctypes.data for array in others} & set(addresses)
        assert sk.zeros(64, "int32").ctypes.data == addresses[0]
        with pytest.raises(UseAfterFreeError, match="second"):
            store_next[1, 1](second)
        return sk.zeros(64, "int32").ctypes.data == addresses[1]

    assert sk.emu.run(main, 2, races=races, heap_size=HEAP) == [True, True]


def test_flag_of_freed_memory_is_not_known():
    """What a signal of freed memory has told is forgotten: another array at its place begins anew."""

    @cuda.jit
    def ping(flags, out):
        other = 1 - rank()
        notify(flags, other, 1)
        wait(flags, 1, "sys", "acquire", 1)
        out[0] += 1

    def main(world, out):
        for _ in range(3):
            flags = sk.signals(HEAP // 8 - 256)
            ping[1, 1](flags, out)
            sk.free(flags)

    def run():
        world = sk.init()
        return result(world, lambda out: (out.fill(0), main(world, out)))

    assert sk.emu.run(run, 2, races=True, heap_size=HEAP) == [[3], [3]]


@cuda.jit
def read_next(box, out):
    out[0] = symm_at(box, (rank() + 1) % num_ranks())[1]


@pytest.mark.parametrize("races", [False, True])
def test_reads_of_unwritten_memory_can_be_allowed(monkeypatch, races):
    monkeypatch.setenv("SHMEMKIT_UNINITIALIZED", "0")

    def main():
        world = sk.init()
        return result(world, lambda out: read_next[1, 1](sk.empty(2, "int32"), out))

    assert len(sk.emu.run(main, 2, races=races)) == 2
