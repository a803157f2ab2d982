"""The multimem functions on the emulator, with races."""

import numpy as np
import pytest
from emulated import line_of, spmd, untyped
from numba import cuda

import shmemkit as sk
from shmemkit.device import (
    copy_block,
    ll_recv_block,
    ll_words,
    load_vec16,
    multimem_copy_block,
    multimem_copy_warp,
    multimem_fence,
    multimem_ll_pack_block,
    multimem_ll_pack_warp,
    multimem_ll_recv_pack_block,
    multimem_ll_recv_pack_warp,
    multimem_red,
    multimem_reduce,
    multimem_reduce_vec16,
    multimem_store,
    multimem_store_vec16,
    notify,
    num_ranks,
    rank,
    wait_block,
)
from shmemkit.emu import RaceError

unordered = pytest.mark.schedules(deliveries="unordered", seeds=[None, 0, 1])


# ---- elements


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64", "float32", "float64"])
@pytest.mark.parametrize("semantic", ["weak", "relaxed", "release"])
def test_store_reaches_every_rank_of_the_node(pes, semantic, dtype):
    @cuda.jit
    def kernel(view, value):
        if rank() % 2 == 0:
            multimem_store(view[1:], 2, value, semantic)

    def main():
        world = sk.init(local_size=2)
        x = sk.zeros(5, dtype)
        kernel[1, 1, world.stream](world.multicast_view(x), -3 if x.dtype.kind != "u" else 3)
        world.barrier()
        value = 3 if x.dtype.kind == "u" else -3
        return world.asnumpy(x).tolist() == [0, 0, 0, value, 0]

    assert pes(4).run(main) == [True] * 4


def test_store_stops_at_the_node(pes):
    @cuda.jit
    def kernel(view):
        if rank() == 1:
            multimem_store(view, 0, 7)

    def main():
        world = sk.init(local_size=2)
        x = sk.zeros(1, "int32")
        kernel[1, 1, world.stream](world.multicast_view(x))
        world.barrier()
        return int(world.asnumpy(x)[0])

    assert pes(6).run(main) == [7, 7, 0, 0, 0, 0]


@pytest.mark.schedules(deliveries="eager", seeds=[None, 0, 1])
@pytest.mark.parametrize("dtype", ["int32", "uint64", "float64"])
def test_red_of_all_ranks(pes, dtype):
    @cuda.jit
    def kernel(view):
        multimem_red(view, cuda.threadIdx.x & 1, rank() + 1)

    def main():
        world = sk.init()
        x = sk.zeros(2, dtype)
        kernel[1, 4, world.stream](world.multicast_view(x))
        world.barrier()
        return world.asnumpy(x).tolist()

    assert pes(3).run(main) == [[12, 12]] * 3


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64", "float32", "float64"])
def test_reduce(pes, dtype):
    @cuda.jit
    def kernel(view, out):
        out[0] = multimem_reduce(view[1:], 1)
        if not floating:
            out[1] = multimem_reduce(view, 2, "min")
            out[2] = multimem_reduce(view, 2, "max")

    floating = dtype.startswith("float")

    def main():
        world = sk.init()
        given = [5, -2, 7] if dtype[0] != "u" else [5, 2, 7]
        x, out = sk.array([0, 0, given[world.rank]], dtype), np.zeros(3, dtype)
        kernel[1, 1](world.multicast_view(x), out)
        assert out.tolist() == ([sum(given), 0, 0] if floating else [sum(given), min(given), max(given)])

    pes(3).run(main)


@pytest.mark.parametrize(
    "dtype, op",
    [
        (dtype, op)
        for dtype in ("float16", "bfloat16", "int32", "uint32", "int64")
        for op in ("add", "min", "max")
    ]
    + [("float32", "add"), ("float64", "add")],
)
def test_reduce_and_store_of_vectors(pes, dtype, op):
    """Sums of halves are rounded once: 2048 + 1 + 1 is 2050 in float16, where 2048 + 1 is 2048."""

    @cuda.jit
    def kernel(view, out):
        words = multimem_reduce_vec16(view[16:], 0, op)
        if rank() == 1:
            multimem_store_vec16(view, 0, words)

    def main():
        world = sk.init()
        special = {"float16": [2048, 1, 1], "bfloat16": [256, 1, 1], "uint32": [2**32 - 9, 1, 1]}
        given = special.get(dtype, [2, 1, -4])
        x = sk.zeros(32, dtype)
        x[16:] = given[world.rank]
        world.barrier()
        kernel[1, 1, world.stream](world.multicast_view(x), x)
        world.barrier()
        expected = {"add": sum, "min": min, "max": max}[op](given)
        n = 16 // x.itemsize
        assert world.asnumpy(x)[:n].tolist() == [expected] * n and not world.asnumpy(x)[n:16].any()

    if dtype in ("float32", "float64") and op != "add":
        message = (
            f"is of {dtype}; for op '{op}' it must be of int32, uint32, int64, uint64, float16 or bfloat16"
        )
        with pytest.raises(sk.emu.EmulatorError, match=message):
            pes(3).run(main)
    else:
        pes(3).run(main)


@pytest.mark.parametrize("semantic", ["weak", "release"])
def test_vectors_of_any_dtype(pes, semantic):
    @cuda.jit
    def kernel(view, y):
        if rank() == 1:
            multimem_store_vec16(view, 16, load_vec16(y, 0), semantic)

    def main():
        world = sk.init()
        x, y = sk.zeros(40, "uint8"), np.arange(1, 17, dtype="uint8")
        kernel[1, 1, world.stream](world.multicast_view(x), y)
        world.barrier()
        assert (world.asnumpy(x) == np.r_[[0] * 16, y, [0] * 8]).all()

    pes(2).run(main)


# ---- copies


@pytest.mark.every(3)
@pytest.mark.parametrize("copy, threads", [(multimem_copy_block, 40), (multimem_copy_warp, 32)])
@pytest.mark.parametrize("dtype, size", [("uint8", 1), ("uint8", 21), ("int16", 9), ("complex128", 5)])
@pytest.mark.parametrize("offset", [0, 1])
def test_copies(pes, copy, threads, dtype, size, offset):
    @cuda.jit
    def kernel(view, x):
        if rank() == 1:
            copy(view[1], x)

    def main():
        world = sk.init()
        x = np.arange(1, size + 1 + offset).astype(dtype)[offset:]
        there = sk.full((2, 64), 77, dtype)
        kernel[1, threads, world.stream](world.multicast_view(there), x)
        world.barrier()
        got = world.asnumpy(there)
        assert (got[0] == 77).all() and (got[1, :size] == x).all()
        padding = -x.nbytes % 4 // x.itemsize
        assert not got[1, size : size + padding].any() and (got[1, size + padding :] == 77).all()

    pes(3).run(main)


@untyped
@pytest.mark.parametrize(
    "view_of, size, message",
    [
        (lambda view: view[:20], 21, "dst has 20 bytes; it must have 24 or more for the 21 of src"),
        (lambda view: view[4:], 8, "begin at a multiple of 16 bytes"),
        (lambda view: view[::2], 8, "dst is a non-contiguous 1-D array"),
    ],
)
def test_wrong_copies(pes, view_of, size, message):
    @cuda.jit
    def kernel(view, x):
        multimem_copy_block(view, x)

    def main():
        view = sk.init().multicast_view(sk.zeros(64, "uint8"))
        kernel[1, 1](view_of(view), np.zeros(size, "uint8"))

    with pytest.raises(sk.emu.EmulatorError, match=message):
        pes(1).run(main)


# ---- LL


@pytest.mark.every(3)
@pytest.mark.parametrize("form", ["warp", "block"])
@pytest.mark.parametrize("dtype, size", [("uint8", 21), ("int16", 5), ("float64", 9)])
@unordered
def test_packed_for_all_and_passed_on_to_all(pes, form, dtype, size):
    """Rank 0 packs for all; rank 1 passes it on to all, in the second half of the lines."""
    pack = {"warp": multimem_ll_pack_warp, "block": multimem_ll_pack_block}[form]
    pass_on = {"warp": multimem_ll_recv_pack_warp, "block": multimem_ll_recv_pack_block}[form]

    @cuda.jit
    def kernel(view, lines, x, out, flag):
        if rank() == 0:
            pack(view[0], x, flag)
        elif rank() == 1:
            pass_on(view[1], lines[0], ll_words(x.size * x.itemsize), flag)
        ll_recv_block(out, lines[1], flag)

    def main():
        world = sk.init()
        x, out = np.arange(1, size + 1).astype(dtype), np.zeros(size + 1, dtype)
        lines = sk.zeros((2, ll_words(x.nbytes)), "uint64")
        kernel[1, 20, world.stream](world.multicast_view(lines), lines, x, out[:size], 1 << 32 | 5)
        world.barrier()
        assert (out[:size] == x).all() and out[size] == 0
        return np.unique(lines >> np.uint64(32)).tolist()

    assert pes(3).run(main) == [[5]] * 3


@pytest.mark.parametrize("same", [False, True])
def test_words_that_are_stored_again(pes, same):
    """The same flag with the same data changes nothing; with other data, who waits may take the old one."""

    @cuda.jit
    def kernel(view, x, y):
        multimem_ll_pack_block(view, x, 5)
        multimem_ll_pack_block(view, y, 5)

    def main():
        world = sk.init()
        lines, x = sk.zeros(2, "uint64"), np.arange(8, dtype="uint8")
        view = world.multicast_view(lines)
        if world.rank == 0:
            kernel[1, 2, world.stream](view, x, x.copy() if same else x + x)
        world.barrier()
        assert lines.tolist() == [0x503020100, 0x507060504]

    if same:
        pes(2).run(main)
    else:
        with pytest.raises(sk.emu.EmulatorError, match="has the flag 5 already"):
            pes(2).run(main)


@pytest.mark.parametrize("passed_on", [False, True])
@pytest.mark.parametrize("held_by", [None, 0, 1])
def test_a_flag_that_a_rank_has_already(pes, passed_on, held_by):
    """Who passes on its own lines to all replaces them by themselves."""

    @cuda.jit
    def kernel(view, lines, x):
        if rank() == 0 and not passed_on:
            multimem_ll_pack_block(view, x, 5)
        elif rank() == 0:
            multimem_ll_recv_pack_block(view, lines, 2, 5)

    def main():
        world = sk.init()
        has_it = world.rank == held_by or passed_on and world.rank == 0
        lines = sk.full(2, 5 << 32 | world.rank if has_it else 0, "uint64")  # with other data
        kernel[1, 1, world.stream](world.multicast_view(lines), lines, np.ones(8, "uint8"))
        world.barrier()
        assert (lines >> np.uint64(32) == 5).all()

    if held_by is None or passed_on and held_by == 0:
        pes(2).run(main)
    else:
        with pytest.raises(sk.emu.EmulatorError, match=rf"lines\[0\] on rank {held_by} has the flag 5"):
            pes(2).run(main)


# ---- races (tests/planted/multicast.py has more)


def send_and_read(how, fence=None):
    """A kernel: rank 0 stores 16 bytes to all, and signals by `how`; all read them. The "writer" or the
    "reader" has a `fence`."""

    @cuda.jit
    def kernel(view, x, flags, signals, out):
        if rank() == 0:
            multimem_copy_block(view, out[:4])
            if fence == "writer":
                multimem_fence()
            cuda.syncthreads()
            if cuda.threadIdx.x == 0:
                if how == "notify":
                    for peer in range(num_ranks()):
                        notify(signals, peer, 1)
                else:
                    multimem_store(flags, 0, 1, "release")
        wait_block(signals, 1, "sys", "acquire", 1)
        if fence == "reader":
            multimem_fence()
        copy_block(out[4:], x)

    return kernel


def run_send(kernel, **options):
    def main(world):
        x, signals = sk.zeros(4), sk.signals(1)
        out = np.arange(8, dtype="float32")
        kernel[1, 8](world.multicast_view(x), x, world.multicast_view(signals), signals, out)
        return out[4:].tolist()

    return spmd(2, main, races=True, heap_size=1 << 16, **options)


@pytest.mark.every(3)
@pytest.mark.parametrize("how", ["notify", "multimem"])
@pytest.mark.parametrize("fence", ["writer", "reader"])
@pytest.mark.parametrize("seed", [None, 0, 1])
def test_no_race_with_a_fence_on_either_side(how, fence, seed):
    assert run_send(send_and_read(how, fence), seed=seed) == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("how", ["notify", "multimem"])
def test_without_a_fence_between_the_addresses(how):
    kernel = send_and_read(how)
    with pytest.raises(RaceError) as caught:
        run_send(kernel)
    for race in caught.value.races:
        assert (
            "stores through a multicast view" in race.missing and "multimem_fence() between" in race.missing
        )
        assert race.first.what == "its multimem store, under way, writes"
    assert line_of(kernel, "copy_block(out[4:], x)") in str(caught.value)


def test_the_end_of_the_kernel_is_a_fence_and_the_view_needs_none():
    """Stores through the view follow each other without; a later kernel reads."""

    @cuda.jit
    def stores(view):
        multimem_store(view, cuda.threadIdx.x, 1)
        multimem_store(view, cuda.threadIdx.x, 2)
        cuda.syncthreads()
        if cuda.threadIdx.x == 0 and rank() == 0:
            multimem_store_vec16(view, 0, (0, 0, 0, 0))

    @cuda.jit
    def reads(x, out):
        out[0] = x[0] + x[4]

    def main(world):
        x, out = sk.zeros(8), np.zeros(1, "float32")
        if world.rank == 0:
            stores[1, 8, world.stream](world.multicast_view(x))
        else:
            world.multicast_view(x)
        world.barrier()
        reads[1, 1, world.stream](x, out)
        assert out[0] == 2

    spmd(2, main, races=True, heap_size=1 << 16)


def test_two_ranks_that_store_to_one_place():
    @cuda.jit
    def kernel(view):
        multimem_store(view, 0, rank())

    with pytest.raises(RaceError, match="stores? through a multicast|multimem"):
        spmd(2, lambda world: kernel[1, 1](world.multicast_view(sk.zeros(8))), races=True, heap_size=1 << 16)
