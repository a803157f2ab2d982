"""Tiles of LL128 to one rank, and from anywhere (``ll128_store_tile``, ``ll128_load_some``), on the emulator
and as PTX."""

import contextlib
import re

import numpy as np
import pytest
from numba import cuda, types
from ptx import compile_ptx, resources

import shmemkit as sk
from shmemkit.compiler.bounded_compile import arming
from shmemkit.device import TILE_WORDS, ll128_load_some, ll128_store_tile, load_tile, rank, store_tile


@cuda.jit
def swap(x, out, lines, calls, first):
    """Two tiles of x to the other rank, whose tiles come in another order."""
    call = 1
    while call <= calls:
        at = first + 2 * (call & 1)
        ll128_store_tile(lines, at, load_tile(x, 0), call, 1 - rank())
        ll128_store_tile(lines, at + 1, load_tile(x, 1), call, 1 - rank())
        b, a, _ = ll128_load_some(lines, (at + 1, at, at + 1), call)
        store_tile(out, 0, a)
        store_tile(out, 1, b)
        call += 1


def swapped(calls=1, threads=32, tiles=4, flags=0, first=0):
    world = sk.init()
    x, out = np.arange(120, dtype="uint64") + 1000 * world.rank, np.zeros(120, "uint64")
    lines = world.zeros((tiles * TILE_WORDS,), "uint64", "lines")
    lines[15::16] = flags
    world.barrier()
    swap[1, threads, world.stream](x, out, lines, calls, first)
    world.synchronize()
    assert (out == np.arange(120) + 1000 * (1 - world.rank)).all()


@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
def test_a_tile_for_one_rank(pes):
    pes(2).run(swapped, 3)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"threads": 48}, "the block has 48 threads; it must have a multiple of 32"),
        ({"tiles": 3}, r"ll128_\w+\(\): lines has 192 words; it must have 256 or more"),
        ({"flags": 1}, "has the flag 1 already"),
    ],
)
def test_wrong(pes, wrong, message):
    with pytest.raises(sk.emu.EmulatorError, match=message):
        pes(2).run(swapped, *{"calls": 1, "threads": 32, "tiles": 4, "flags": 0, **wrong}.values())


@pytest.mark.parametrize("armed", [False, True])
def test_on_the_gpu(armed):
    """Two accesses of 16 bytes that store, three that wait together, whether or not they give up."""
    data, lines = types.Array(types.complex128, 1, "C"), types.Array(types.uint64, 1, "C")
    with arming() if armed else contextlib.nullcontext():
        ptx = compile_ptx(swap, (data, data, lines, types.int64, types.int64))
    assert len(re.findall(r"st\.relaxed\.sys\.global\.v2\.b64", ptx)) == 2
    assert len(re.findall(r"ld\.relaxed\.sys\.global\.v2\.b64", ptx)) == 2 * 3
    assert ("globaltimer" in ptx) == armed
    needed = resources(ptx)
    assert (needed.spills, needed.stack) == (0, 0)
