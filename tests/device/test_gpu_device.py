"""The primitives at work between ranks: the same programs on the emulator and, under mpirun, on GPUs."""

import gpu
import numpy as np
import pytest
from fast import slow
from numba import cuda

import shmemkit as sk
from shmemkit.device import (
    ComparisonType,
    SignalOp,
    Teams,
    atomic_add,
    atomic_compare_swap,
    atomic_fetch,
    atomic_fetch_add,
    atomic_fetch_or,
    atomic_xor,
    barrier_all_block,
    broadcast_block,
    consume_token,
    copy_block,
    copy_warp,
    fcollect_block,
    fence,
    g,
    get_block,
    grid_barrier,
    ld_acquire,
    load_vec16,
    notify,
    num_ranks,
    p,
    put_block,
    put_nbi,
    put_signal_nbi_block,
    put_warp,
    quiet,
    rank,
    red_release,
    reduce_block,
    signal_op,
    signal_wait_until,
    st_release,
    store_vec16,
    symm_at,
    sync_all_block,
    team_my_pe,
    team_n_pes,
    wait,
    wait_block,
    wait_warp,
)


@cuda.jit
def push(dst, src, peer, by_warp):
    if not by_warp:
        copy_block(symm_at(dst, peer), src)
    elif cuda.threadIdx.x < 32:
        copy_warp(symm_at(dst, peer), src)


def copies(world):
    """Any alignment and length, any dtype; nothing beyond the ends is touched."""
    xp, peer, before = world.xp, (world.rank + 1) % world.n_ranks, (world.rank - 1) % world.n_ranks
    for dtype in ("uint8", "float16", "float32", "int64"):
        theirs, mine = sk.zeros(6000, dtype), xp.empty(6000, dtype)
        for to, start, by_warp in ((0, 0, False), (1, 1, True), (3, 8, False), (16, 4, True), (5, 21, False)):
            for n in (0, 1, 7, 16, 63, 1000, 5001):
                theirs[:] = 77
                mine[:] = xp.asarray((np.arange(6000) * 7 + world.rank) % 101, dtype)
                world.barrier()
                push[1, 96, world.stream](theirs[to:], mine[start : start + n], peer, by_warp)
                world.barrier()
                got, expected = np.asarray(theirs.tolist()), np.full(6000, 77)
                expected[to : to + n] = ((np.arange(6000) * 7 + before) % 101)[start : start + n]
                assert (got == expected).all(), (dtype, to, start, n, by_warp)
                world.barrier()
        sk.free(theirs)


@cuda.jit
def rounds_kernel(data, signals, arrivals, epoch, errors, rounds):
    me, n, t = rank(), num_ranks(), cuda.threadIdx.x
    after, before = (me + 1) % n, (me + n - 1) % n
    for r in range(1, rounds + 1):
        symm_at(data, after)[t] = 1000 * r + t + me
        cuda.syncthreads()
        if t == 0:
            notify(signals, after, r)
            notify(signals[1:], after, 1, "add", "sys")
        if r % 3 == 0:
            wait_block(signals, 2, "sys", "acquire", r)
        elif r % 3 == 1:
            wait_warp(signals, 2, "sys", "acquire", r, "eq")
            cuda.syncthreads()
        else:
            token = wait(signals[1:], 1, "sys", "acquire", r)
            if consume_token(data, token)[t] != 1000 * r + t + before:
                cuda.atomic.add(errors, 0, 1)
            cuda.syncthreads()
        if data[(t + 33) % cuda.blockDim.x] != 1000 * r + (t + 33) % cuda.blockDim.x + before:
            cuda.atomic.add(errors, 0, 1)
        barrier_all_block(arrivals, epoch)


def signals(world):
    """What precedes a notify is there after the wait; barriers over signals keep the rounds apart."""
    xp, emulated = world.xp, world.backend.name != "nvshmem"
    for dtype in ("uint64", "int32"):
        data, flags = sk.zeros(64, "int64"), sk.zeros(2, dtype)
        arrivals, epoch = sk.zeros(world.n_ranks, dtype), xp.zeros(1, dtype)
        errors, rounds = xp.zeros(1, "int64"), 6 if emulated else 2000
        for done in range(2):
            flags[:] = 0
            world.barrier()
            rounds_kernel[1, 64, world.stream](data, flags, arrivals, epoch, errors, rounds)
            world.barrier()
            assert int(errors[0]) == 0 and int(epoch[0]) == rounds * (done + 1)


@cuda.jit
def grid_kernel(state, data, errors, rounds):
    b, n, t = cuda.blockIdx.x, cuda.gridDim.x, cuda.threadIdx.x
    for r in range(1, rounds + 1):
        if t == 31:
            data[b] = r
        grid_barrier(state)
        if data[(b + t) % n] != r:
            cuda.atomic.add(errors, 0, 1)
        grid_barrier(state)


def grids(world):
    """The same state serves grids of different sizes."""
    xp, emulated = world.xp, world.backend.name != "nvshmem"
    for dtype in ("uint32", "uint64"):
        state, data, errors = xp.zeros(2, dtype), xp.zeros(64, "int64"), xp.zeros(1, "int64")
        for blocks in (1, 5, 3, 1) if emulated else (1, 64, 7, 40):
            grid_kernel[blocks, 32, world.stream](state, data, errors, 3 if emulated else 500)
        world.barrier()
        assert int(errors[0]) == 0 and int(state[0]) == 0


@cuda.jit
def ordered_kernel(flags, out):
    me, n, t = rank(), num_ranks(), cuda.threadIdx.x
    if t == 0:
        for pe in range(n):
            red_release(symm_at(flags, pe), 0, me + 1)
        while ld_acquire(flags, 0) != n * (n + 1) // 2:
            pass
        st_release(symm_at(flags, (me + 1) % n), 1, 40 + me)
        out[0] = wait(flags[1:], 1, "sys", "acquire", 40)
        a, b, c, d = load_vec16(out, 4)
        store_vec16(out, 8, (d, c, b, a))


def ordered(world):
    flags, out = sk.zeros(2, "uint32"), world.xp.arange(12, dtype="uint32")
    ordered_kernel[1, 32, world.stream](flags, out)
    world.barrier()
    assert out.tolist() == [40 + (world.rank - 1) % world.n_ranks, 1, 2, 3, 4, 5, 6, 7, 7, 6, 5, 4]


@cuda.jit
def openshmem_kernel(data, src, signals, counts, out):
    me, n, t = rank(), num_ranks(), cuda.threadIdx.x
    after = (me + 1) % n
    put_block(data, src[:10], after)
    if t < 32:
        put_warp(data[10:], src[10:20], after)
    put_signal_nbi_block(data[20:], src[20:30], signals, 3, SignalOp.SIGNAL_ADD, after)
    if t == 0:
        put_nbi(data[30:], src[30:40], after)
        p(data[40:], src[40], after)
        fence()
        signal_op(signals[1:], 4, SignalOp.SIGNAL_SET, after)
        quiet()
        signal_wait_until(signals, ComparisonType.CMP_GE, 3)
        signal_wait_until(signals[1:], ComparisonType.CMP_EQ, 4)
        atomic_add(counts, me + 1, 0)
        atomic_fetch_add(counts[1:], 10, 0)
        atomic_fetch_or(counts[2:], 1 << me, 0)
        atomic_xor(counts[3:], 1 << me, 0)
        if me == 0:
            atomic_compare_swap(counts[4:], 0, 99, n - 1)
    barrier_all_block()
    if t == 0:
        counts[5] = atomic_fetch(counts, 0)
        out[50] = g(data[40:], after)
        counts[6] = team_my_pe(Teams.TEAM_WORLD) * 100 + team_n_pes(Teams.TEAM_WORLD)
    cuda.syncthreads()
    get_block(out[:41], data, after)
    sync_all_block()
    barrier_all_block()


def openshmem(world):
    """NVSHMEM's own, over views of unsigned integers: dtypes that it has no functions for."""
    n, me = world.n_ranks, world.rank
    for dtype in ("float32", "bool", "float16", "complex64"):
        # all zeros and ones: representable in every dtype
        pattern = lambda pe: (np.arange(64) * 5 + pe) % 3 % 2  # noqa: E731
        data, src = sk.zeros(64, dtype), world.xp.asarray(pattern(me), dtype)
        flags, counts, out = sk.signals(2), sk.zeros(64, "uint64"), world.xp.zeros(64, dtype)
        world.barrier()
        openshmem_kernel[1, 64, world.stream](data, src, flags, counts, out)
        world.barrier()
        assert data.tolist()[:41] == pattern((me - 1) % n)[:41].tolist()
        assert out.tolist()[:41] == pattern(me)[:41].tolist() and out.tolist()[50] == pattern(me)[40]
        got = counts.tolist()
        expected = [n * (n + 1) // 2, 10 * n, 2**n - 1, 2**n - 1]
        assert got[:4] == (expected if me == 0 else [0] * 4) and got[4] == (99 if me == n - 1 else 0)
        assert got[5] == expected[0] and got[6] == 100 * me + n


@cuda.jit(lto=False)  # nvJitLink optimizes NVSHMEM's collectives for minutes
def collectives_kernel(dst, src):
    broadcast_block(Teams.TEAM_WORLD, dst[:4], src[:4], 0)
    fcollect_block(Teams.TEAM_WORLD, dst[8:], src[4:5])
    reduce_block(Teams.TEAM_WORLD, dst[4:5], src[4:5], "sum")


def collectives(world):
    n, me = world.n_ranks, world.rank
    src, dst = sk.array(np.arange(5, dtype="uint64") + 10 * me), sk.zeros(8 + n, "uint64")
    collectives_kernel[1, 64, world.stream](dst, src)
    world.barrier()
    fourths = [10 * pe + 4 for pe in range(n)]
    assert dst.tolist() == [0, 1, 2, 3, sum(fourths), 0, 0, 0, *fourths]


PROGRAMS = [copies, signals, grids, ordered, openshmem, collectives]


@pytest.mark.parametrize("program", [*slow(copies), *PROGRAMS[1:]])
@pytest.mark.parametrize("n_ranks", [1, 3])
def test_emulated(program, n_ranks):
    def main():
        with sk.init(backend="emulator") as world:
            program(world)

    sk.emu.run(main, n_ranks=n_ranks)


@pytest.mark.gpu
@pytest.mark.parametrize("program", PROGRAMS)
def test_on_gpus(program):
    program(gpu.world())
