"""What every primitive of shmemkit.device does on the emulator, on several PEs, in thread, warp and block
form."""

import enum
import sys

import numpy as np
import pytest
from emulated import untyped
from fast import examples
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda

import shmemkit as sk
from shmemkit import device
from shmemkit.device import (
    ComparisonType,
    SignalOp,
    Teams,
    barrier_all,
    barrier_all_block,
    consume_token,
    copy_block,
    copy_warp,
    g,
    grid_barrier,
    ld_acquire,
    load_vec16,
    n_pes,
    notify,
    notify_at,
    num_ranks,
    p,
    quiet,
    rank,
    red_release,
    signal_op,
    signal_wait,
    signal_wait_until,
    st_release,
    store_vec16,
    symm_at,
    sync_all,
    team_my_pe,
    team_n_pes,
    threadfence,
    wait,
    wait_block,
    wait_warp,
)
from shmemkit.runtime.symmetric_memory import DTYPES, as_dtype

PES = [1, 2, 3, 5]
FORMS = {"": 1, "_warp": 32, "_block": 50}  # form -> threads that call it together
every_form = pytest.mark.parametrize("form", FORMS)
every_n = pytest.mark.parametrize("n", PES)


def spmd(n, local_size=None):
    """Decorator: run the function on n PEs at once; it gets the World, and may return something."""

    def decorate(main):
        return sk.emu.run(lambda: main(sk.init()), n, local_size=local_size)

    return decorate


def sample(dtype, n, seed=0):
    """Numbers that every dtype can hold, small enough to be summed."""
    return np.random.default_rng(seed).integers(0, 10, n).astype(as_dtype(dtype))


# ---- put and get


@every_n
@every_form
@pytest.mark.parametrize("nbi", ["", "_nbi"])
@pytest.mark.parametrize("size", [1, 7, 64])
def test_put_and_get(n, form, nbi, size):
    put, get = getattr(device, f"put{nbi}{form}"), getattr(device, f"get{nbi}{form}")

    @cuda.jit
    def kernel(target, source, back):
        me, count = rank(), num_ranks()
        put(target[me], source, (me + 1) % count)  # row `me` of the next PE
        quiet()
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            sync_all()
        cuda.syncthreads()
        get(back, target[me], (me + 1) % count)
        quiet()

    @spmd(n)
    def main(world):
        target = sk.zeros((n, size), "int32")
        source = sk.array(sample("int32", size, world.rank), name="source")
        back = np.zeros(size, "int32")
        kernel[1, FORMS[form]](target, source, back)
        np.testing.assert_array_equal(back, source)
        world.host_barrier()
        previous = (world.rank - 1) % n
        np.testing.assert_array_equal(target[previous], sample("int32", size, previous))
        assert (np.delete(target, previous, 0) == 0).all()


@every_n
@every_form
@pytest.mark.parametrize("nbi", ["", "_nbi"])
@pytest.mark.parametrize("op", [SignalOp.SIGNAL_SET, SignalOp.SIGNAL_ADD, 9, 10])
def test_put_signal(n, form, nbi, op):
    put_signal = getattr(device, f"put_signal{nbi}{form}")

    @cuda.jit
    def kernel(target, source, signals, out):
        me, count = rank(), num_ranks()
        put_signal(target, source, signals[2:], 5, op, (me + 1) % count)
        if cuda.threadIdx.x == 0:
            out[0] = signal_wait(signals[2:], ComparisonType.CMP_EQ, 12 if op == SignalOp.SIGNAL_ADD else 5)
            for i in range(target.size):
                out[1 + i] = target[i]

    @spmd(n)
    def main(world):
        target, source = sk.zeros(9, "float16"), sk.array(sample("float16", 9, world.rank))
        signals = sk.array(np.array([7, 7, 7, 7], "uint64"))
        out = np.zeros(10)
        kernel[1, FORMS[form]](target, source, signals, out)
        assert signals.tolist() == [7, 7, 12 if op == SignalOp.SIGNAL_ADD else 5, 7] and out[0] == signals[2]
        np.testing.assert_array_equal(out[1:], sample("float16", 9, (world.rank - 1) % n))


@untyped  # p and g of 16 bytes
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dtype_moves(dtype):
    @cuda.jit
    def kernel(target, one, source, value):
        other = 1 - rank()
        device.put(target, source, other)
        if rank() == 0:
            p(one[1:], value[0], other)
        barrier_all()
        target[0] = g(target[1:], other)

    @spmd(2)
    def main(world):
        target, one = sk.zeros((4,), dtype), sk.zeros(3, dtype)
        kernel[1, 1](target, one, sk.array(sample(dtype, 4, world.rank)), sample(dtype, 1, 99))
        expected = sample(dtype, 4, 1 - world.rank)
        expected[0] = sample(dtype, 4, world.rank)[1]
        np.testing.assert_array_equal(target, expected)
        np.testing.assert_array_equal(one[1], sample(dtype, 1, 99)[0] if world.rank else one[0])


@untyped
def test_put_copies_as_much_as_both_hold_and_checks():
    @cuda.jit
    def kernel(target, source):
        device.put(target[2:5], source, 0)

    with sk.init("emulator"):
        target = sk.zeros(8, "int32")
        kernel[1, 1](target, sk.array(np.arange(1, 8, dtype="int32")))
        assert target.tolist() == [0, 0, 1, 2, 3, 0, 0, 0]
        with pytest.raises(sk.emu.EmulatorError, match="dst is int32, src is float32"):
            kernel[1, 1](target, sk.zeros(2))
        with pytest.raises(
            sk.emu.EmulatorError,
            match=r"put\(\): src is a non-contiguous 1-D array of int32; it must be a contiguous array",
        ):
            kernel[1, 1](target, sk.zeros((4, 2), "int32")[:, 0])
        with pytest.raises(sk.emu.EmulatorError, match="is not symmetric"):
            kernel[1, 1](np.zeros(8, "int32"), target)


# ---- atomics

ATOMICS = {
    "atomic_set": lambda old, v: v,
    "atomic_swap": lambda old, v: v,
    "atomic_add": lambda old, v: old + v,
    "atomic_fetch_add": lambda old, v: old + v,
    "atomic_and": lambda old, v: old & v,
    "atomic_fetch_and": lambda old, v: old & v,
    "atomic_or": lambda old, v: old | v,
    "atomic_fetch_or": lambda old, v: old | v,
    "atomic_xor": lambda old, v: old ^ v,
    "atomic_fetch_xor": lambda old, v: old ^ v,
}


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64"])
@pytest.mark.parametrize("name", [*ATOMICS, "atomic_inc", "atomic_fetch_inc", "atomic_fetch"])
def test_atomics(name, dtype):
    function, has_value, returns = getattr(device, name), name in ATOMICS, "fetch" in name or "swap" in name

    @cuda.jit
    def kernel(x, out):
        if rank() == 1:
            old = function(x[1:], -3, 2) if has_value else function(x[1:], 2)
            if returns:
                out[0] = old

    update = ATOMICS.get(name, lambda old, _: old + ("inc" in name))

    @spmd(3)
    def main(world):
        x, out = sk.full(3, 12, dtype), np.zeros(1, dtype)
        kernel[1, 1, world.stream](x, out)
        world.barrier()
        expected = np.array([update(12, -3)]).astype(dtype)[0]
        assert x.tolist() == [12, expected if world.rank == 2 else 12, 12]
        assert out[0] == (12 if returns and world.rank == 1 else 0)


@cuda.jit
def compare_and_swap(x, out):
    out[0] = device.atomic_compare_swap(x, -1, 5, 0)  # -1 in the dtype of x
    out[1] = device.atomic_compare_swap(x, -1, 6, 0)


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64"])
def test_atomic_compare_swap(dtype):
    @spmd(1)
    def main(world):
        x, out = sk.array(np.array([-1]).astype(dtype)), np.zeros(2, dtype)
        compare_and_swap[1, 1](x, out)
        assert x[0] == 5 and out.tolist() == [np.array([-1]).astype(dtype)[0], 5]


@every_n
def test_additions_of_all_pes_add_up(n):
    @cuda.jit
    def kernel(x):
        for pe in range(n_pes()):
            device.atomic_add(x, rank() + 1, pe)
            red_release(symm_at(x, pe), 1, 1)
            notify(x[2:], pe, 2, "add", "sys")
            signal_op(x[3:], 3, SignalOp.SIGNAL_ADD, pe)
            cuda.atomic.add(symm_at(x, pe), 4, 4)

    @spmd(n)
    def main(world):
        x = sk.signals(5)
        kernel[3, 5, world.stream](x)
        world.barrier()
        assert x.tolist() == [15 * n * (n + 1) // 2, 15 * n, 30 * n, 45 * n, 60 * n]


# ---- signals

COMPARES = {"eq": "__eq__", "ne": "__ne__", "gt": "__gt__", "ge": "__ge__", "lt": "__lt__", "le": "__le__"}


@pytest.mark.every(2)
@pytest.mark.parametrize("compare", COMPARES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n_signals", [1, 3, 70])
def test_wait(compare, form, n_signals):
    """PE 1 notifies PE 0 step by step, away from the value and to it; PE 0 goes on only when all signals are
    right."""
    waits = {"": wait, "_warp": wait_warp, "_block": wait_block}[form]

    @cuda.jit
    def kernel(signals, seen, values):
        if rank() == 0:
            if cuda.blockIdx.x == 0:
                token = waits(signals[1:], n_signals, "sys", "acquire", 10, compare)
                for i in range(n_signals):
                    seen[cuda.threadIdx.x, i] = consume_token(signals, token)[1 + i]
        elif cuda.threadIdx.x == 0 and cuda.blockIdx.x == 0:
            for value in values:
                for i in range(n_signals):
                    cuda.nanosleep(10)
                    notify(signals[1 + i :], 0, value)

    first = {"eq": 11, "ne": 10, "gt": 10, "ge": 9, "lt": 10, "le": 11}[compare]  # does not hold
    last = {"eq": 10, "ne": 9, "gt": 11, "ge": 10, "lt": 9, "le": 10}[compare]

    @spmd(2)
    def main(world):
        signals = sk.full(n_signals + 2, first, "uint64")
        seen = np.full((FORMS[form], n_signals), -1)
        kernel[2, FORMS[form]](signals, seen, (first, last))
        if world.rank == 0:
            assert all(getattr(int(v), COMPARES[compare])(10) for v in seen.ravel()), seen


@pytest.mark.parametrize("form", FORMS)
def test_a_wait_without_a_value_waits_for_1(form):
    waits = {"": wait, "_warp": wait_warp, "_block": wait_block}[form]

    @cuda.jit
    def kernel(signal, seen):
        if rank() == 0:
            waits(signal, 1, "sys", "acquire")
            seen[cuda.threadIdx.x] = signal[0]
        elif cuda.threadIdx.x == 0:
            cuda.nanosleep(10)
            notify(signal, 0, 1)

    @spmd(2)
    def main(world):
        signal, seen = sk.signals(1), np.zeros(FORMS[form], "int64")
        kernel[1, FORMS[form]](signal, seen)
        assert (seen == 1 - world.rank).all()


@pytest.mark.parametrize("compare", ComparisonType)
def test_signal_wait_until(compare):
    @cuda.jit
    def kernel(signal, out):
        if rank() == 0:
            out[0] = signal_wait_until(signal, compare, 10)
        else:
            for value in (8, 9, 10, 11):
                cuda.nanosleep(10)
                signal_op(signal, value, SignalOp.SIGNAL_SET, 0)

    name = compare.name[4:].lower()
    start = {"eq": 0, "ne": 10, "gt": 0, "ge": 0, "lt": 10, "le": 11}[name]

    @spmd(2)
    def main(world):
        signal, out = sk.full(1, start, "uint64"), np.zeros(1, "int64")
        kernel[1, 1](signal, out)
        if world.rank == 0:
            assert getattr(int(out[0]), COMPARES[name])(10)


@pytest.mark.parametrize("dtype", ["uint64", "int64", "uint32", "int32"])
def test_values_are_converted_to_the_dtype_of_the_signals(dtype):
    @cuda.jit
    def kernel(signal, out):
        notify(signal, rank(), -1, "set", "gpu")
        out[0] = wait(signal, 1, "gpu", "relaxed", -1, "eq")

    @spmd(1)
    def main(world):
        signal, out = sk.zeros(1, dtype), np.zeros(1, dtype)
        kernel[1, 1](signal, out)
        assert signal[0] == out[0] == np.array([-1]).astype(dtype)[0]


@every_n
def test_notify_at(n):
    """Each rank tells the next one, by a table, and adds to a counter of it; the waits order its stores."""

    @cuda.jit
    def kernel(slot, signals, offsets, out):
        to = (rank() + 1) % num_ranks()
        symm_at(slot, to)[0] = rank()
        notify_at(signals, 2, offsets, to, 5)
        wait(signals[2:], 1, "sys", "acquire", 5)
        out[0] = slot[0]
        for pe in range(num_ranks()):
            notify_at(signals, 1, offsets, pe, rank() + 1, "add")
        wait(signals[1:], 1, "sys", "acquire", num_ranks() * (num_ranks() + 1) // 2)

    def main():
        world = sk.init()
        slot, signals, out = sk.zeros(1, "int32"), sk.signals(4), np.zeros(1, "int32")
        kernel[1, 1, world.stream](slot, signals, np.zeros(n, "int64"), out)
        return out[0], *signals.tolist()

    sums = n * (n + 1) // 2
    assert sk.emu.run(main, n, races=True) == [((me - 1) % n, 0, sums, 5, 0) for me in range(n)]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((2, np.zeros(1, "int64"), 0, 1), "IndexError"),
        ((0, np.zeros(1, "int64"), 1, 1), "rank is 1; it must be 0 to 0"),
        ((0, np.zeros(1, "int64"), 0, 1, "sub"), "sig_op is 'sub'; it must be 'set' or 'add'"),
        ((0, np.zeros(1, "int32"), 0, 1), "offsets is a 1-D array of int32; it must be a 1-D array of int64"),
    ],
)
@untyped
def test_wrong_notify_at(arguments, message):
    @cuda.jit
    def kernel(signals):
        notify_at(signals, *arguments)

    with pytest.raises(sk.emu.EmulatorError, match=message):
        spmd(1)(lambda world: kernel[1, 1](sk.signals(2)))


@pytest.mark.parametrize("scope, sig_op", [("system", "set"), ("sys", "sub"), ("gpu", "set")])
@untyped
def test_wrong_notify(scope, sig_op):
    @cuda.jit
    def kernel(signal):
        notify(signal, 1 - rank(), 1, sig_op, scope)

    with pytest.raises(sk.emu.EmulatorError, match=r"ValueError: notify\(\)"):
        spmd(2)(lambda world: kernel[1, 1](sk.signals(1)))


@pytest.mark.parametrize(
    "arguments", [("cta", "acquire", 1, "ge"), ("sys", "release", 1, "ge"), ("sys", "acquire", 1, ">=")]
)
@pytest.mark.parametrize("form", FORMS)
@untyped
def test_wrong_wait(form, arguments):
    waits = {"": wait, "_warp": wait_warp, "_block": wait_block}[form]

    @cuda.jit
    def kernel(signal):
        waits(signal, 1, arguments[0], arguments[1], arguments[2], arguments[3])

    with pytest.raises(sk.emu.EmulatorError, match=rf"ValueError: wait{form}\(\)"):
        spmd(1)(lambda world: kernel[1, 1](sk.signals(1)))


# ---- memory


@every_n
def test_symm_at_of_slices_and_matrices(n):
    @cuda.jit
    def kernel(x, out):
        me, count = rank(), num_ranks()
        for pe in range(count):
            there = symm_at(x, pe)
            out[pe, 0] = there[1, 2]
            out[pe, 1] = symm_at(x[1], pe)[2]
            out[pe, 2] = symm_at(x[:, 2], pe)[1]
            out[pe, 3] = symm_at(x[1:, 1:], pe)[0, 1]
            out[pe, 4] = symm_at(there, me)[1, 2]  # back home
            there[me + 2, 0] = 100 * me + pe

    @spmd(n)
    def main(world):
        x = sk.array(np.arange(7 * 4, dtype="float32").reshape(7, 4) + 100 * world.rank)
        out = np.zeros((n, 5))
        world.barrier()
        kernel[1, 1, world.stream](x, out)
        world.barrier()
        expected = 6 + 100 * np.repeat(np.arange(n)[:, None], 5, 1)
        expected[:, 4] = 6 + 100 * world.rank
        np.testing.assert_array_equal(out, expected)
        np.testing.assert_array_equal(x[2 : 2 + n, 0], 100 * np.arange(n) + world.rank)


@untyped  # each example has another kernel
@examples(60)
@given(
    st.sampled_from(DTYPES),
    st.integers(0, 200),
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(1, 70),
    st.booleans(),
)
def test_copies(dtype, size, to, start, threads, whole_block):
    """Any length, offset and number of threads; nothing before or after is touched."""
    copy = copy_block if whole_block else copy_warp

    @cuda.jit
    def kernel(dst, src):
        if whole_block or cuda.threadIdx.x < 32:
            copy(dst, src)

    src, dst = sample(dtype, start + size + 3), sample(dtype, to + size + 5, 1)
    expected = dst.copy()
    expected[to : to + size] = src[start : start + size]
    with sk.init("emulator"):
        kernel[1, threads](dst[to : to + size], src[start : start + size + 3])
    np.testing.assert_array_equal(dst, expected)


@untyped
def test_copies_of_matrices_and_to_shared_memory():
    @cuda.jit
    def kernel(dst, src):
        buffer = cuda.shared.array((3, 4), np.float32)
        copy_block(buffer, src)
        cuda.syncthreads()
        copy_block(dst, buffer)

    src, dst = np.arange(12, dtype="float32").reshape(3, 4), np.zeros((4, 3), "float32")
    with sk.init("emulator"):
        kernel[1, 5](dst, src)
        np.testing.assert_array_equal(dst.ravel(), src.ravel())
        with pytest.raises(sk.emu.EmulatorError, match="contiguous"):
            kernel[1, 5](dst[:, :2], src)


@pytest.mark.parametrize("dtype", ["int32", "uint32", "int64", "uint64", "float32", "float64"])
def test_ordered_loads_and_stores(dtype):
    @cuda.jit
    def kernel(x, out):
        if rank() == 0:
            theirs = symm_at(x, 1)
            theirs[0] = 3
            threadfence("sys")
            st_release(theirs, 1, 1)
            red_release(theirs, 1, 1, "sys")
        else:
            while ld_acquire(x, 1) != 2:
                pass
            out[0] = ld_acquire(x, 0, "gpu")

    @spmd(2)
    def main(world):
        x, out = sk.zeros(2, dtype), np.zeros(1)
        kernel[1, 1](x, out)
        assert out[0] == (3 if world.rank else 0)


@pytest.mark.parametrize("dtype", [d for d in DTYPES])
def test_vectors_of_16_bytes(dtype):
    @cuda.jit
    def kernel(dst, src, words):
        per = 16 // src.itemsize
        four = load_vec16(src, per)
        for i in range(4):
            words[i] = four[i]
        store_vec16(dst, 2 * per, four)

    per = 16 // as_dtype(dtype).itemsize
    with sk.init("emulator"):
        src, dst, words = sk.array(sample(dtype, 3 * per)), sk.zeros(4 * per, dtype), np.zeros(4, "uint32")
        kernel[1, 1](dst, src, words)
        expected = np.zeros(4 * per, src.dtype)
        expected[2 * per : 3 * per] = src[per : 2 * per]
        np.testing.assert_array_equal(dst, expected)
        np.testing.assert_array_equal(words, src[per : 2 * per].copy().view("uint32"))
        if per > 1:
            with pytest.raises(sk.emu.EmulatorError, match="multiple of 16 bytes"):
                kernel[1, 1](dst, src[1:], words)


# ---- barriers


@every_n
@pytest.mark.parametrize("name", ["barrier_all", "sync_all", "barrier", "sync"])
@every_form
def test_barriers_of_all(n, name, form):
    """Rounds of: tell everybody, meet, check that everybody has told. It fails if the barrier lets anybody
    pass early."""
    function, with_team = getattr(device, name + form), not name.endswith("all")

    @cuda.jit
    def kernel(told, wrong):
        me, t = rank(), cuda.threadIdx.x
        for turn in range(1, 6):
            if t == 0:
                for _ in range(me * turn):
                    cuda.nanosleep(10)
                for pe in range(num_ranks()):
                    symm_at(told, pe)[me] = turn
            cuda.syncthreads()
            if with_team:
                function(Teams.TEAM_WORLD)
            else:
                function()
            for pe in range(num_ranks()):
                if told[pe] < turn:
                    wrong[0] = pe * 100 + turn

    @spmd(n)
    def main(world):
        told, wrong = sk.zeros(n, "int64"), np.zeros(1, "int64")
        kernel[1, FORMS[form]](told, wrong)
        assert wrong[0] == 0


@every_n
def test_barrier_over_signals(n):
    @cuda.jit
    def kernel(arrivals, epoch, told, wrong, first):
        me, t = rank(), cuda.threadIdx.x
        for turn in range(first, first + 3):
            if t < num_ranks():
                symm_at(told, t)[me] = turn
            barrier_all_block(arrivals, epoch)
            if t < num_ranks() and told[t] < turn:
                wrong[0] = turn

    @spmd(n)
    def main(world):
        arrivals, epoch, told = sk.signals(n), np.zeros(1, "uint64"), sk.zeros(n, "uint64")
        wrong = np.zeros(1, "uint64")
        for call in range(4):
            kernel[1, 40, world.stream](arrivals, epoch, told, wrong, 3 * call + 1)
        world.host_barrier()
        assert epoch[0] == 12 and (arrivals == 12).all() and wrong[0] == 0


@pytest.mark.parametrize(
    "arrivals, epoch, message",
    [
        (lambda: sk.signals(1), lambda: 1, "epoch"),
        (lambda: 3, lambda: np.zeros(1, "uint64"), "arrivals"),
        (lambda: sk.signals(1), lambda: np.zeros(1, "int32"), "epoch is a 1-D array of int32"),
        (lambda: sk.signals(1), lambda: None, "give both arrivals and epoch"),
    ],
)
@untyped
def test_wrong_signals_of_a_barrier(arrivals, epoch, message):
    @cuda.jit
    def kernel(arrivals, epoch):
        barrier_all_block(arrivals, epoch)

    with (
        sk.init("emulator") as world,
        pytest.raises(sk.emu.EmulatorError, match=rf"barrier_all_block\(\): {message}"),
    ):
        kernel[1, 4, world.stream](arrivals(), epoch())


@pytest.mark.parametrize("team", Teams)
@every_form
def test_teams(team, form):
    """6 PEs on 3 nodes; the teams meet different numbers of times, and the world in between."""
    members = {
        Teams.TEAM_WORLD: lambda pe: [0, 1, 2, 3, 4, 5],
        Teams.TEAM_SHARED: lambda pe: [pe // 2 * 2, pe // 2 * 2 + 1],
        Teams.TEAM_NODE: lambda pe: [pe // 2 * 2, pe // 2 * 2 + 1],
        Teams.TEAM_SAME_MYPE_NODE: lambda pe: [pe % 2, pe % 2 + 2, pe % 2 + 4],
    }[team]
    barrier, sync, fcollect = (getattr(device, name + form) for name in ("barrier", "sync", "fcollect"))

    @cuda.jit
    def kernel(out, all_ranks, me, extra):
        out[0], out[1] = team_my_pe(team), team_n_pes(team)
        for _ in range(extra):
            sync(team)
        barrier(Teams.TEAM_WORLD)
        fcollect(team, all_ranks, me)
        barrier(team)

    @spmd(6, local_size=2)
    def main(world):
        pes = members(world.rank)
        out, me = np.zeros(2, "int64"), sk.full(1, world.rank, "int32")
        all_ranks = sk.full(len(pes), -1, "int32")
        for repeat in range(2):
            kernel[1, FORMS[form]](out, all_ranks, me, repeat * pes[0])  # as often for all members of a team
        assert out.tolist() == [pes.index(world.rank), len(pes)]
        assert all_ranks.tolist() == pes


def test_grid_barrier_again_and_again():
    @cuda.jit
    def kernel(x, state, out):
        i, n = cuda.grid(1), cuda.gridsize(1)
        for _ in range(5):
            value = x[(i + 1) % n]
            grid_barrier(state)
            x[i] = value
            grid_barrier(state)
        out[i] = x[i]

    with sk.init("emulator"):
        state = np.zeros(2, "uint32")
        for blocks, threads in ((4, 3), (1, 6), (7, 33)):
            n = blocks * threads
            x, out = np.arange(n), np.zeros(n, "int64")
            kernel[blocks, threads](x, state, out)
            np.testing.assert_array_equal(out, (np.arange(n) + 5) % n)


# ---- several nodes


@pytest.mark.parametrize(
    "access",
    [symm_at, device.get_peer_array, lambda x, pe: notify(x, pe, 1)],
    ids=["symm_at", "get_peer_array", "notify"],
)
@untyped
def test_loads_and_stores_stay_in_the_node(access):
    @cuda.jit
    def kernel(x, pe):
        access(x, pe)
        access(x[2:], pe)

    def main(pe):
        world = sk.init()
        x = sk.zeros(4, "uint64")
        if world.rank == 1:
            kernel[1, 1](x, pe)

    for pe in (0, 1):
        sk.emu.run(main, 4, (pe,), local_size=2)
    with pytest.raises(sk.emu.EmulatorError, match="rank 2 is on another node than rank 1"):
        sk.emu.run(main, 4, (2,), local_size=2)


def test_the_network_reaches_all_nodes():
    @cuda.jit
    def kernel(x, flags, pe):
        device.put(x, x[8:], pe)
        device.put_signal(x[1:], x[9:], flags, 1, SignalOp.SIGNAL_SET, pe)
        p(x[2:], 7, pe)
        signal_op(flags[1:], 3, SignalOp.SIGNAL_ADD, pe)
        device.atomic_add(x[3:], 4, pe)
        x[4], x[5] = device.atomic_fetch_add(x[6:], 1, pe), g(x[8:], pe)
        quiet()
        barrier_all()
        x[7] = device.atomic_fetch(x[6:], pe)

    @spmd(4, local_size=1)
    def main(world):
        x, flags = sk.zeros(10, "int64"), sk.signals(2)
        x[8:] = 10 * world.rank + np.arange(2)
        world.host_barrier()
        pe = (world.rank + 1) % 4
        kernel[1, 1, world.stream](x, flags, pe)
        before = 10 * ((world.rank - 1) % 4)
        assert x[:8].tolist() == [before, before + 1, 7, 4, 0, 10 * pe, 1, 1]
        assert flags.tolist() == [1, 3]


# ---- collectives


@every_n
@every_form
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8", "bool"])
def test_moving_collectives(n, form, dtype):
    broadcast, fcollect, alltoall = (getattr(device, c + form) for c in ("broadcast", "fcollect", "alltoall"))

    @cuda.jit
    def kernel(world, src, parts, a, b, c):
        broadcast(world, a, src, n - 1)
        fcollect(world, b, src)
        alltoall(world, c, parts)

    @spmd(n)
    def main(world):
        src, parts = sk.array(sample(dtype, 6, world.rank)), sk.array(sample(dtype, (n, 4), world.rank + 50))
        a, b, c = sk.zeros((2, 3), dtype), sk.zeros((n, 6), dtype), sk.zeros(4 * n, dtype)
        for _ in range(2):
            kernel[1, FORMS[form]](Teams.TEAM_WORLD, src, parts, a, b, c)
            np.testing.assert_array_equal(a.ravel(), sample(dtype, 6, n - 1))
            np.testing.assert_array_equal(b, [sample(dtype, 6, pe) for pe in range(n)])
            there = [sample(dtype, (n, 4), pe + 50)[world.rank] for pe in range(n)]
            np.testing.assert_array_equal(c.reshape(n, 4), there)
            a[...] = b[...] = 0
            c[...] = 0
            world.host_barrier()


REDUCTIONS = {"sum": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}
BITS = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@every_n
@every_form
@pytest.mark.parametrize(
    "op, dtype",
    [(op, dtype) for op in [*REDUCTIONS, *BITS] for dtype in ("int8", "uint64")]
    + [(op, dtype) for op in REDUCTIONS for dtype in ("float64", "float16")],
)
def test_reductions(n, form, op, dtype):
    reduce, reducescatter = getattr(device, "reduce" + form), getattr(device, "reducescatter" + form)

    @cuda.jit
    def kernel(src, dst, mine):
        reduce(0, dst, src, op)
        reducescatter(0, mine, src, op)
        reduce(0, src, src, op)  # in place

    def combined():
        result = sample(dtype, 3 * n)
        for pe in range(1, n):
            result = {**REDUCTIONS, **BITS}[op](result, sample(dtype, 3 * n, pe))
        return result.astype(dtype)

    @spmd(n)
    def main(world):
        src, dst, mine = (
            sk.array(sample(dtype, 3 * n, world.rank)),
            sk.zeros(3 * n, dtype),
            sk.zeros(3, dtype),
        )
        kernel[1, FORMS[form]](src, dst, mine)
        np.testing.assert_array_equal(dst, combined())
        np.testing.assert_array_equal(src, combined())
        np.testing.assert_array_equal(mine, combined()[3 * world.rank :][:3])


@untyped
def test_wrong_collectives():
    @cuda.jit
    def too_small(dst, src):
        device.fcollect(0, dst, src)

    @cuda.jit
    def no_op(dst, src):
        device.reduce(0, dst, src, "average")

    @cuda.jit
    def no_root(dst, src):
        device.broadcast(0, dst, src, 2)

    @cuda.jit
    def no_team(dst, src):
        device.sync(17)

    messages = {
        too_small: r"fcollect\(\): dst has 4 elements; it must have 8",
        no_op: r"reduce\(\): op is 'average'; it must be 'sum', ",
        no_root: "root is 2; it must be 0 to 1",
        no_team: "team is 17; on the emulator it must be TEAM_WORLD",
    }
    for kernel, message in messages.items():
        with pytest.raises(sk.emu.EmulatorError, match=message):
            spmd(2)(lambda world, kernel=kernel: kernel[1, 1](sk.zeros(4), sk.zeros(4)))


def test_shared_memory_that_is_lent_is_not_needed():
    minimum = int(device.SmemAmount.SMEM_MINIMUM)

    @cuda.jit
    def kernel(dst, src, asked):
        device.give_smem(cuda.shared.array(0, "uint8"))
        device.put_block(dst, src, 1 - device.rank())
        device.barrier_all_block()
        device.release_smem()
        asked[0] = device.ask_smem(minimum)

    @spmd(2)
    def main(world):
        dst, asked = sk.zeros(5), np.ones(1)
        kernel[1, 8, world.stream, 64](dst, sk.full(5, world.rank + 1), asked)
        assert (dst == 2 - world.rank).all() and asked[0] == 0


# ---- nvshmem4py's own functions


def test_functions_of_nvshmem4py_are_mapped_by_name():
    nv = pytest.importorskip("nvshmem.core.device.numba")
    pytest.importorskip("nvshmem.core")
    from nvshmem.bindings.device.numba import quiet as nv_quiet
    from nvshmem.core.device.numba import my_pe as nv_me
    from nvshmem.core.device.numba import put_signal_nbi_block

    @cuda.jit
    def kernel(dst, src, signal, out):
        put_signal_nbi_block(
            dst, src, signal, 1, nv.SignalOp.SIGNAL_ADD if hasattr(nv, "SignalOp") else 10, 1 - nv_me()
        )
        nv_quiet()
        if cuda.threadIdx.x == 0:
            nv.signal_wait(signal, 5, 1)
            out[0] = nv.n_pes()
            out[1] = nv.get_peer_array(src, 1 - nv.my_pe())[0]
            nv.sync_all()

    @spmd(2)
    def main(world):
        dst, src, signal = sk.zeros(5), sk.full(5, world.rank + 1), sk.signals(1)
        out = np.zeros(2)
        kernel[1, 8](dst, src, signal, out)
        assert (dst == 2 - world.rank).all() and out.tolist() == [2, 2 - world.rank]


def test_all_of_nvshmem4py_is_mapped():
    nv = pytest.importorskip("nvshmem.core.device.numba")
    assert [name for name in nv.__all__ if not hasattr(device, name)] == []


def test_primitives_need_a_kernel():
    for name in ("rank", "quiet", "barrier_all", "fence"):
        with pytest.raises(RuntimeError, match=rf"{name}\(\) runs inside a kernel"):
            getattr(device, name)()
    assert "numba.cuda" in sys.modules  # plain functions all the same


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: device.notify(FLAGS[0], 0, 1), r"notify\(\): signal is of type uint64; .*Write x\[3:\]"),
        (
            lambda: device.notify(FLAGS.astype("float32"), 0, 1),
            r"notify\(\): signal is a 1-D array of float32; it must ",
        ),
        (
            lambda: device.wait(FLAGS.astype("int16"), 1, "sys", "acquire", 0),
            r"wait\(\): signals is .*int16; it must ",
        ),
        (
            lambda: device.grid_barrier(FLAGS.astype("int64")),
            r"grid_barrier\(\): state is .* int64; it must .* uint32 or uint64",
        ),
        (
            lambda: device.grid_barrier(FLAGS + 1),
            r"grid_barrier\(\): state is \[1, 1, 1, 1\]; it must be two zeros at first",
        ),
        (lambda: device.ld_acquire(FLAGS.astype("uint8"), 0), r"ld_acquire\(\): array is .* uint8; it must "),
        (
            lambda: device.signal_op(FLAGS.astype("int32"), 1, 9, 0),
            r"signal_op\(\): signal_var is .*int32; it must ",
        ),
        (
            lambda: device.put_signal(FLAGS, FLAGS, FLAGS.astype("uint32"), 1, device.SignalOp.SIGNAL_SET, 0),
            r"put_signal\(\): signal_var is .*uint32; it must ",
        ),
    ],
)
@untyped
def test_what_the_gpu_would_refuse(call, message):
    @cuda.jit
    def kernel():
        call()

    def main():
        sk.init()
        kernel[1, 1]()

    with pytest.raises(sk.emu.EmulatorError, match=message):
        sk.emu.run(main, 1)


FLAGS = np.zeros(4, "uint64")


SET, ADD, GE, NE = 9, 10, device.ComparisonType.CMP_GE, device.ComparisonType.CMP_NE
_SET, _ADD = device.SignalOp.SIGNAL_SET, device.SignalOp.SIGNAL_ADD


class State(enum.IntEnum):
    """A program's own: it may be a value."""

    READY = 1


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda f: device.signal_wait_until(f, 1, GE),
            "value is a ComparisonType, which is for compare. The order of these arguments is compare, value",
        ),
        (lambda f: device.signal_wait(f, 1, GE), "value is a ComparisonType, .* for compare"),
        (lambda f: device.signal_wait_until(f, _SET, 1), "compare is a SignalOp, .* for signal_op"),
        (lambda f: device.signal_wait_until(f, device.Teams.TEAM_SHARED, 1), "which is for team"),
        (lambda f: device.signal_op(f, _SET, 1, 0), "signal_val is a SignalOp, .* signal_op, pe"),
        (lambda f: device.signal_op(f, 1, 0, _SET), "pe is a SignalOp"),
        (lambda f: device.signal_op(f, 1, GE, 0), "signal_op is a ComparisonType"),
        (
            lambda f: device.put_signal(f, f, f, _ADD, 1, 0),
            r"put_signal\(\): signal_val is a SignalOp",
        ),
        (lambda f: device.put_signal_nbi(f, f, f, 1, NE, 0), r"put_signal_nbi\(\): signal_op is a Comp"),
        (lambda f: device.put_signal_block(f, f, f, 1, 0, _SET), r"put_signal_block\(\): pe is a SignalOp"),
        (lambda f: device.signal_wait_until(f, 5, 1.5), "value is of type float64; it must be an integer"),
        (lambda f: device.signal_wait_until(f, "ge", 1), r"compare is of type str; .* ComparisonType.CMP_GE"),
        (
            lambda f: device.put_signal(f, f, f, 1, "set", 0),
            r"is of type str; it must be SignalOp.SIGNAL_SET \(9\) or SignalOp.SIGNAL_ADD \(10\)",
        ),
    ],
)
@untyped
def test_enums_in_the_wrong_place(call, message):
    @cuda.jit
    def kernel(flags):
        call(flags)

    def main():
        sk.init()
        kernel[1, 1](sk.signals(4))

    with pytest.raises(sk.emu.EmulatorError, match=f"TypeError: .*{message}"):
        sk.emu.run(main, 1)


@pytest.mark.parametrize("op, compare", [(SET, 5), (ADD, 0), (_SET, GE), (np.int64(9), np.int32(3))])
def test_enums_and_integers_in_the_right_place(op, compare):
    @cuda.jit
    def kernel(flags):
        device.signal_op(flags, State.READY, op, 0)
        device.put_signal(flags[1:2], flags[:1], flags[2:], 1, op, 0)
        device.signal_wait_until(flags, compare, State.READY)

    def main():
        sk.init()
        kernel[1, 1](sk.signals(4))

    sk.emu.run(main, 1)
