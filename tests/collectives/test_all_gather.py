"""AllGather on the emulator: what is left behind, outputs that are freed; the primitives of LL."""

import numpy as np
import pytest
from emulated import untyped
from numba import cuda, uint8

import shmemkit as sk
from shmemkit.device import (
    ll_load,
    ll_pack_block,
    ll_pack_warp,
    ll_recv_block,
    ll_recv_pack_block,
    ll_recv_pack_warp,
    ll_recv_warp,
    ll_store,
    ll_words,
    num_ranks,
    rank,
    symm_at,
)


@pytest.mark.each_value
@pytest.mark.parametrize("method", ["auto", *sk.AllGather.methods])
@pytest.mark.parametrize("where", [{0, 1, 2}, {1}], ids=["everywhere", "on_rank_1"])
def test_nothing_is_left_of_one_that_is_refused(pes, monkeypatch, capfd, method, where):
    """What does not fit on one GPU is refused on all ranks."""

    def bind(*args, **options):
        if sk.current().rank in where:
            raise ValueError("does not fit")
        return real(*args, **options)

    real = sk.bind
    monkeypatch.setattr("shmemkit.operations.method.bind", bind)
    monkeypatch.setattr("shmemkit.runtime.stream_barrier.bind", bind)

    def main():
        with sk.init() as world:
            reason = "does not fit" if world.rank in where else "rank 1: does not fit"
            with pytest.raises(ValueError, match=f"{'.*: ' * (method == 'auto')}{reason}") as caught:
                sk.AllGather(world, 2 << 20, method)
            assert method == "auto" or str(caught.value) == reason
            world.host_barrier()

    pes(3).run(main)
    assert "without free" not in capfd.readouterr().err


# ---- the primitives of LL


FORMS = {
    "warp": (ll_pack_warp, ll_recv_warp, ll_recv_pack_warp),
    "block": (ll_pack_block, ll_recv_block, ll_recv_pack_block),
}


@pytest.mark.each_value
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype, size", [("uint8", 21), ("int16", 5), ("float64", 130), ("complex128", 4)])
@pytest.mark.schedules(deliveries="eager", seeds=[None, 0, 1])
def test_packed_passed_on_and_unpacked(pes, form, dtype, size):
    """Rank 0 sends to 1, which passes on to 2, which sends back to 0; twice, through one buffer."""
    pack, recv, pass_on = FORMS[form]

    @cuda.jit
    def kernel(x, y, lines, n_bytes):
        following = symm_at(lines, (rank() + 1) % num_ranks())
        for flag in (7, 8):
            if rank() == 0:
                pack(following, x, flag)
                recv(y, lines, flag)
                cuda.syncthreads()
            else:
                pass_on(following, lines, ll_words(n_bytes), flag)

    def main():
        world = sk.init()
        x, y = np.arange(1, size + 1).astype(dtype), np.zeros(size + 1, dtype)
        kernel[1, 20](x, y[:size], sk.zeros(ll_words(x.nbytes), "uint64"), x.nbytes)
        assert world.rank or ((y[:size] == x).all() and y[size] == 0)

    pes(3).run(main)


def pack_for_the_next(form, into=0):
    """A kernel: each rank packs into row `into` of the next one's lines."""
    pack, recv, _ = FORMS[form]

    @cuda.jit
    def kernel(x, y, lines, flag):
        pack(symm_at(lines, (rank() + 1) % num_ranks())[into], x, flag)
        recv(y, lines[into], flag)

    return kernel


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("flags, wrong", [((0,), 0), ((1, 1), 1), ((2, 1, 1 << 64 | 1), 1), ((-1, 1), None)])
def test_a_flag_that_the_words_have_already(pes, form, flags, wrong):
    kernel = pack_for_the_next(form, into=1)

    def main():
        world = sk.init()
        x, y, lines = np.zeros(8, "uint8"), np.zeros(8, "uint8"), sk.zeros((2, 2), "uint64")
        for flag in flags:
            kernel[1, 1, world.stream](x, y, lines, flag)
            world.synchronize()
            world.host_barrier()

    if wrong is None:
        pes(2).run(main)
    else:
        message = rf"ll_pack_{form}\(\): lines\[1, 0\] on rank [01] has the flag {wrong} already"
        with pytest.raises(sk.emu.EmulatorError, match=f"ValueError: {message}"):
            pes(2).run(main)


@pytest.mark.parametrize("form", FORMS)
def test_words_that_are_passed_on_over_the_same_flag(pes, form):
    """Those of others; one's own replace themselves."""
    pack, _, pass_on = FORMS[form]

    @cuda.jit
    def kernel(x, lines, to):
        pack(lines[0], x, 5)
        cuda.syncthreads()
        pass_on(lines[to], lines[0], lines.shape[1], 5)
        cuda.syncthreads()
        pass_on(lines[to], lines[0], lines.shape[1], 5)

    def main(to):
        sk.init()
        kernel[1, 32](np.ones(8, "uint8"), sk.zeros((2, ll_words(8)), "uint64"), to)

    pes(1).run(main, 0)
    with pytest.raises(sk.emu.EmulatorError, match=r"lines\[1, \d+\] on rank 0 has the flag 5 already"):
        pes(1).run(main, 1)


@pytest.mark.parametrize("rows", [1, 2])
def test_one_row_is_not_enough_for_two_calls(rows):
    """The next call's words replace those that nobody has read. To look at what is replaced is no access."""
    packs = [pack_for_the_next("warp", into=row % rows) for row in range(2)]

    def main():
        sk.init()
        x, y, lines = np.zeros(1, "uint8"), np.zeros(1, "uint8"), sk.zeros((2, 2), "uint64")
        for flag, kernel in enumerate(packs, 1):
            kernel[1, 1](x, y, lines, flag)

    found = sk.emu.explore(main, 2, exhaustive=True, heap_size=1 << 16)
    assert found.finished if rows == 2 else isinstance(found.failure, sk.emu.DeadlockError), str(found)


@pytest.mark.parametrize("argument", ["i", "value", "flag"])
def test_a_unit_is_of_integers(pes, argument):
    @cuda.jit
    def kernel(lines, i, value, flag):
        ll_store(lines, i, value, flag)
        assert ll_load(lines, i, flag) == value

    def main(**wrong):
        sk.init()
        arguments = dict(i=1, value=(1 << 64) - 2, flag=np.uint64(7)) | wrong
        kernel[1, 1](sk.zeros(4, "uint64"), *arguments.values())

    pes(1).run(main)
    with pytest.raises(sk.emu.EmulatorError, match=f"{argument} is of type float64; it must be an integer"):
        pes(1).run(lambda: main(**{argument: 3.5}))
    with pytest.raises(sk.emu.EmulatorError, match=r"lines\[2\] on rank 0 has the flag 0 already"):
        pes(1).run(lambda: main(flag=0))


def test_push_of_fewer_parts_that_are_larger(pes, small):
    """Of 1025 bytes, two of half as many; of 1024, one."""
    small(sk.AllGather, push_1d={"part": 1024})

    def main():
        world = sk.init()
        gather = sk.AllGather(world, 2 * 1025, "push_1d")
        for size in (1024, 1025, 1024):
            out = gather(np.full(size, world.rank + 1, "uint8"))
            world.synchronize()
            assert (out == [[1], [2]]).all()

    pes(2).run(main)


@pytest.mark.parametrize("method", ["auto", "push_1d"])
def test_what_does_not_fit_leaves_nothing_behind(method):
    """ "auto" looks for a method that fits, and says what it has tried."""

    def main():
        with sk.init() as world:
            with pytest.raises(MemoryError, match="symmetric heap is full"):
                sk.AllGather(world, 9 << 20, method)
            sk.free(sk.zeros(7 << 20, "uint8"))

    sk.emu.run(main, 2, heap_size=8 << 20)


def test_an_output_that_the_user_has_freed_is_not_freed_again(pes):
    def main():
        with sk.init() as world:
            gather = sk.AllGather(world, 64)
            sk.free(gather.output((2, 3), "uint8"))
            gather.free()
            with pytest.raises(RuntimeError, match="freed"):
                gather.output((2, 3), "uint8")

    pes(2).run(main)


@pytest.mark.parametrize(
    "words, data, message",
    [
        (
            np.zeros(4, "uint32"),
            np.zeros(3, uint8.name),
            "lines is .* uint32; it must be a contiguous 1-D array of uint64",
        ),
        (
            np.zeros(2, "uint64"),
            np.zeros(9, uint8.name),
            "lines has 2 words; it must have 4 or more for 9 bytes",
        ),
        (
            np.zeros(8, "uint64"),
            np.zeros(9, "int32")[::2],
            "(src|dst) is a non-contiguous 1-D array of int32",
        ),
    ],
)
@untyped
def test_wrong_lines(pes, words, data, message):
    @cuda.jit
    def kernel(lines, x):
        ll_pack_block(lines, x, 1)

    def main():
        sk.init()
        kernel[1, 1](words, data)

    with pytest.raises(sk.emu.EmulatorError, match=message):
        pes(1).run(main)
