"""Data races: which pairs of accesses are reported, how, and which are not. (planted/ has many more.)"""

import gc
import tracemalloc

import numpy as np
import pytest
from emulated import line_of, spmd, untyped
from fast import examples
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda, float32, int32

import shmemkit as sk
from shmemkit.device import (
    SignalOp,
    atomic_fetch_add,
    copy_block,
    fence,
    g,
    get_nbi,
    grid_barrier,
    ld_acquire,
    load_vec16,
    notify,
    num_ranks,
    p,
    put_nbi,
    put_signal_nbi,
    quiet,
    rank,
    red_release,
    signal_op,
    signal_wait_until,
    st_release,
    store_vec16,
    symm_at,
    wait,
    wait_block,
)
from shmemkit.emu import RaceError

HEAP = 1 << 16


def races_of(n, main, **options):
    with pytest.raises(RaceError) as caught:
        spmd(n, main, races=True, heap_size=HEAP, **options)
    return caught.value


def clean(n, main, **options):
    return spmd(n, main, races=True, heap_size=HEAP, **options)


# ---- the report


@cuda.jit
def put_then_signal(dst, src, flag, out):
    if rank() == 0:
        put_nbi(dst, src, 1)
        signal_op(flag, 1, SignalOp.SIGNAL_SET, 1)
    else:
        signal_wait_until(flag, 5, 1)
        out[0] = dst[3]


def test_report_of_a_missing_fence():
    error = races_of(
        2,
        lambda world: put_then_signal[1, 1](
            sk.zeros(8, "float32"), sk.zeros(8, "float32"), sk.signals(1), np.zeros(1, "float32")
        ),
    )
    put, signal, read = (line_of(put_then_signal, text) for text in ("put_nbi(", "signal_op(", "out[0]"))
    line_of_put, line_of_signal = put.split(":")[1], signal.split(":")[1]
    lines = str(error).splitlines()
    assert lines[:4] == [
        "1 data race",
        "race on dst[3] on rank 1",
        "  rank 1 block 0 thread 0 in put_then_signal: reads it",
        f"      tests/emu/{read}",
    ]
    assert lines[4:] == [
        "  rank 0 block 0 thread 0 in put_then_signal: its put_nbi, under way, writes it",
        f"      tests/emu/{put}",
        f"    the put_nbi of line {line_of_put} is not ordered before the signal of line {line_of_signal}: "
        "fence() between them, or put_signal",
        "the same again: delivery='eager', seed=None, races=True (SHMEMKIT_DELIVERY=eager SHMEMKIT_RACES=1)",
    ]
    (race,) = error.races
    assert (race.array, race.index, race.rank) == ("dst", "3", 1)
    assert (race.first.what, race.first.rank, race.second.rank) == ("its put_nbi, under way, writes", 0, 1)


x: object = None  # a symmetric array, in the test below


@cuda.jit
def reads_no_x(inbox, out, signals):
    i = cuda.threadIdx.x
    symm_at(inbox, 1 - rank())[i] = 7
    notify(signals, 1 - rank(), 1)
    wait(signals, 1, "sys", "acquire", 1)
    out[i] = inbox[i]


def test_an_attributes_name_captures_no_array(monkeypatch):
    """The module's `x` is not what ``cuda.threadIdx.x`` names, so the kernel captures nothing."""

    def main(world):
        inbox, out = sk.zeros(1, "int32"), np.zeros(1, "int32")
        monkeypatch.setitem(globals(), "x", inbox)
        reads_no_x[1, 1, world.stream](inbox, out, sk.signals(1))
        world.synchronize()
        return out.tolist()

    assert clean(2, main) == [[7]] * 2


def test_same_lines_are_reported_once():
    @cuda.jit
    def kernel(x):
        for i in range(x.size):
            x[i] = rank()  # one race, however many elements and threads
            symm_at(x, 0)[i] = 1

    error = races_of(3, lambda world: kernel[2, 4](sk.zeros(50)))
    assert len(error.races) <= 4 and len({(r.first.line, r.second.line) for r in error.races}) >= 2


def test_different_races_are_all_reported():
    @cuda.jit
    def kernel(x, y):
        x[0] = cuda.threadIdx.x
        y[0] = cuda.threadIdx.x

    error = races_of(1, lambda world: kernel[1, 2](sk.zeros(1), np.zeros(1)))
    assert [race.array for race in error.races] == ["x", "y"]
    assert str(error).startswith("2 data races\nrace on x[0] on rank 0\n")


def test_a_failure_comes_first_and_the_races_besides():
    @cuda.jit
    def kernel(x, flag):
        if rank() == 0:
            symm_at(x, 1)[0] = 1
        else:
            x[0] = 5
        if rank() == 1:
            wait(flag, 1, "sys", "acquire", 1)  # nobody notifies

    with pytest.raises(sk.emu.DeadlockError) as caught:
        spmd(2, lambda world: kernel[1, 1](sk.zeros(1), sk.signals(1)), races=True)
    (race,) = caught.value.races
    assert str(caught.value).startswith("deadlock: ") and f"Besides, 1 data race\n{race}" in str(caught.value)

    def wrong(world):
        kernel_without_wait[1, 1, world.stream](x := sk.zeros(1))
        world.host_barrier()
        assert x[0] == 7

    @cuda.jit
    def kernel_without_wait(x):
        symm_at(x, 0)[0] = rank()

    with pytest.raises(AssertionError) as caught:
        spmd(2, wrong, races=True)
    (race,) = caught.value.races
    assert f"Besides, 1 data race\n{race}" in caught.value.__notes__

    @cuda.jit
    def outside(x, y):
        y[0] = cuda.threadIdx.x
        x[cuda.threadIdx.x] = 1

    with pytest.raises(
        sk.emu.OutOfBoundsError, match=r"(?s)x\[2\] is out of.*Besides, 1 data race"
    ) as caught:
        spmd(1, lambda world: outside[1, 3](sk.zeros(2), sk.zeros(1)), races=True)
    assert len(caught.value.races) == 1


def test_on_one_rank_a_race_is_told_once(monkeypatch):
    """With the failure, and not again when the World ends."""

    @cuda.jit
    def outside(x, y):
        y[0] = cuda.threadIdx.x
        x[cuda.threadIdx.x] = 1

    monkeypatch.setenv("SHMEMKIT_RACES", "1")
    with sk.init("emulator"), pytest.raises(sk.emu.OutOfBoundsError) as caught:
        outside[1, 3](sk.zeros(2), sk.zeros(1))
    assert len(caught.value.races) == 1


def test_a_line_in_a_device_function_is_the_users():
    @cuda.jit(device=True)
    def store(x):
        x[0] = cuda.threadIdx.x

    @cuda.jit
    def kernel(x, words):
        store(x)
        store_vec16(words, 0, load_vec16(words, 4))

    error = races_of(1, lambda world: kernel[1, 2](np.zeros(1), sk.zeros(8, "float32")))
    assert {race.first.source for race in error.races} == {
        "x[0] = cuda.threadIdx.x",
        "store_vec16(words, 0, load_vec16(words, 4))",
    }


def test_names_of_rows_shared_arrays_and_slices():
    @cuda.jit
    def kernel(x, y):
        tile = cuda.shared.array((2, 3), int32)
        i = cuda.threadIdx.x
        tile[1, 2] = i
        x[1][2:][1] = i
        y[0, i % 1] = i

    error = races_of(1, lambda world: kernel[1, 2](sk.zeros((2, 5)), np.zeros((1, 4), "int16")))
    assert {race.element for race in error.races} == {
        "tile[1, 2] on rank 0",
        "x[1, 3] on rank 0",
        "y[0, 0] on rank 0",
    }


def test_more_than_the_most_end_the_program():
    lines = "\n".join(f"    x[{i}] = cuda.threadIdx.x" for i in range(40))
    names = {"cuda": cuda}
    exec(f"def kernel(x):\n{lines}\n", names)
    error = races_of(1, lambda world: cuda.jit(names["kernel"])[1, 2](np.zeros(40)))
    assert len(error.races) == 20


# ---- what orders, and what does not


def test_every_reader_is_remembered():
    @cuda.jit
    def kernel(x, out, flags, absent):
        me = rank()
        if me == 0:
            for pe in range(1, num_ranks()):
                if pe != absent:
                    wait(flags[pe:], 1, "sys", "acquire", 1)
            x[0] = 1
        else:
            out[0] = symm_at(x, 0)[0]
            notify(flags[me:], 0, 1)

    def main(absent):
        return lambda world: kernel[1, 1](sk.zeros(1), np.zeros(1), sk.signals(4), absent)

    clean(4, main(0))
    for absent in (1, 2, 3):
        (race,) = races_of(4, main(absent)).races
        assert {race.first.rank, race.second.rank} == {0, absent}


@pytest.mark.parametrize("how", ["relaxed then fence", "relaxed", "acquire"])
def test_relaxed_waits_order_with_a_fence_only(how):
    semantic = how.split()[0]

    @cuda.jit
    def kernel(x, flag, out):
        if rank() == 0:
            symm_at(x, 1)[0] = 1
            notify(flag, 1, 1)
        else:
            wait(flag, 1, "sys", semantic, 1)
            if how == "relaxed then fence":
                cuda.threadfence_system()
            out[0] = x[0]

    def main(world):
        kernel[1, 1](sk.zeros(1), sk.signals(1), np.zeros(1))

    if how == "relaxed":
        assert "reads the signal relaxed" in races_of(2, main).races[0].missing
    else:
        clean(2, main)


@pytest.mark.parametrize("released", ["gpu", "sys"])
@pytest.mark.parametrize("acquired", ["gpu", "sys"])
@pytest.mark.parametrize("blocks, ranks", [(2, 1), (1, 2)])
def test_scopes(released, acquired, blocks, ranks):
    @cuda.jit
    def kernel(x, flag, out):
        there = num_ranks() - 1
        if rank() == 0 and cuda.blockIdx.x == 0:
            symm_at(x, there)[0] = 1
            st_release(symm_at(flag, there), 0, 1, released)
        elif cuda.blockIdx.x == cuda.gridDim.x - 1:
            while ld_acquire(flag, 0, acquired) != 1:
                pass
            out[0] = x[0]

    def main(world):
        kernel[blocks, 1](sk.zeros(1), sk.signals(1), np.zeros(1))

    if ranks == 1 or released == acquired == "sys":
        clean(ranks, main)
    else:
        assert any("scope 'sys'" in race.missing for race in races_of(ranks, main).races)


def test_a_sum_of_releases_orders_all_of_them():
    @cuda.jit
    def kernel(x, count, out):
        me, n = rank(), num_ranks()
        symm_at(x, 0)[me] = me
        red_release(symm_at(count, 0), 0, 1, "sys")
        if me == 0:
            wait(count, 1, "sys", "acquire", n)
            for i in range(n):
                out[i] = x[i]

    clean(4, lambda world: kernel[1, 1](sk.zeros(4), sk.signals(1), np.zeros(4)))


def test_a_set_hides_what_was_released_before():
    @cuda.jit
    def kernel(x, y, flag, out):
        if rank() == 0:
            symm_at(x, 2)[0] = 1
            notify(flag, 1, 1)
        elif rank() == 1:
            wait(flag, 1, "sys", "relaxed", 1)  # knows nothing of rank 0
            notify(flag, 2, 2)
        else:
            wait(flag, 1, "sys", "acquire", 2)
            out[0] = x[0]

    error = races_of(3, lambda world: kernel[1, 1](sk.zeros(1), sk.zeros(1), sk.signals(1), np.zeros(1)))
    assert [(race.array, race.first.rank) for race in error.races] == [("x", 0)]


def test_order_is_transitive_over_ranks():
    @cuda.jit
    def kernel(x, flag, out):
        me = rank()
        if me > 0:
            wait(flag, 1, "sys", "acquire", 1)
        if me == num_ranks() - 1:
            out[0] = x[0]
        else:
            if me == 0:
                symm_at(x, num_ranks() - 1)[0] = 1
            notify(flag, me + 1, 1)

    clean(5, lambda world: kernel[1, 1](sk.zeros(1), sk.signals(1), np.zeros(1)))


def test_p_is_a_flag_and_g_polls_it():
    @cuda.jit
    def kernel(x, flag, out):
        if rank() == 0:
            put_nbi(x, x, 1)
            fence()
            p(flag, 1, 1)
        else:
            while g(flag, 1) != 1:
                pass
            cuda.threadfence_system()
            out[0] = x[0]

    clean(2, lambda world: kernel[1, 1](sk.zeros(1, "float32"), sk.signals(1), np.zeros(1)))


@pytest.mark.parametrize("how, expect", [("fetch", clean), ("get_nbi", races_of), ("by way of 1", races_of)])
def test_what_a_fence_orders(how, expect):
    via = {"fetch": 2, "get_nbi": 0, "by way of 1": 1}[how]

    @cuda.jit
    def kernel(x, y, flag, out):
        if rank() == 0:
            get_nbi(y, x, 1) if how == "get_nbi" else put_nbi(x, y, 2)
            fence()
            atomic_fetch_add(flag, 1, 2) if how == "fetch" else signal_op(flag, 1, SignalOp.SIGNAL_SET, via)
        if rank() == via == 1:
            wait(flag, 1, "sys", "acquire", 1)
            signal_op(flag, 1, SignalOp.SIGNAL_SET, 2)
        if rank() == (2 if via else 0):
            wait(flag, 1, "sys", "acquire", 1)
            out[0] = x[0] + y[0]

    expect(3, lambda world: kernel[1, 1](sk.zeros(1), sk.zeros(1), sk.signals(1), np.zeros(1)))


def test_all_threads_of_the_last_block_fence():
    """Thread 0 counts, all fence: their fences follow what it has seen."""

    @cuda.jit
    def kernel(parts, done, out):
        last, i = cuda.shared.array(1, int32), cuda.threadIdx.x
        parts[cuda.grid(1)] = 1
        cuda.threadfence()
        cuda.syncthreads()
        if i == 0:
            last[0] = cuda.atomic.add(done, 0, 1) == cuda.gridDim.x - 1
        cuda.syncthreads()
        if last[0] == 1:
            cuda.threadfence()
            out[i] = parts[1 - i] + parts[3 - i]

    clean(1, lambda world: kernel[2, 2](np.zeros(4), np.zeros(1, "int32"), np.zeros(2)))


def test_grid_barriers_streams_and_events():
    @cuda.jit
    def exchange(x, state):
        i, n = cuda.grid(1), cuda.gridsize(1)
        for _ in range(3):
            value = x[(i + 1) % n]
            grid_barrier(state)
            x[i] = value + 1
            grid_barrier(state)

    def main(world, ordered):
        x, state, other = np.zeros(6), np.zeros(2, "uint32"), cuda.stream()
        for _ in range(2):
            exchange[3, 2, world.stream](x, state)
        if ordered == "event":
            other.wait_event(world.stream.record())
        elif ordered == "synchronize":
            world.stream.synchronize()
        exchange[3, 2, other](x, np.zeros(2, "uint32"))

    clean(1, lambda world: main(world, "event"))
    clean(1, lambda world: main(world, "synchronize"))
    races = races_of(1, lambda world: main(world, None)).races
    assert all("different streams" in race.missing for race in races)


def test_barriers_of_ranks_order_kernels():
    @cuda.jit
    def store_at_next(x, value):
        symm_at(x, (rank() + 1) % num_ranks())[cuda.grid(1)] = value

    @cuda.jit
    def add_up(x, out):
        for value in x:
            out[0] += value

    def main(world, how):
        x, out = sk.zeros(8), np.zeros(1)
        store_at_next[2, 4, world.stream](x, 1)
        if how == "stream":
            world.barrier()
        elif how == "host":
            world.synchronize()
            world.host_barrier()
        add_up[1, 1, world.stream](x, out)

    clean(3, lambda world: main(world, "stream"))
    clean(3, lambda world: main(world, "host"))
    assert races_of(3, lambda world: main(world, None)).races[0].array == "x"


def test_elements_of_different_sizes_share_memory():
    """Bytes, halves and wholes of one allocation: neighbours do not conflict, overlaps do."""

    @cuda.jit
    def kernel(words, overlap):
        t = cuda.threadIdx.x
        narrow = words.view(np.uint8)
        if t == 0:
            words[0] = 1
            narrow[9] = 2
        else:
            narrow[8] = 3
            words[3] = 4
            if overlap:
                narrow[2] = 5  # a byte of words[0]

    def main(overlap):
        return lambda world: kernel[1, 2](sk.zeros(4, "uint32"), overlap)

    clean(1, main(False))
    (race,) = races_of(1, main(True)).races
    assert race.index in "01" and {race.first.thread, race.second.thread} == {"0", "1"}


def test_bytes_of_a_word_that_several_have_read():
    @cuda.jit
    def kernel(x, out):
        out[cuda.threadIdx.x] = x[0]
        cuda.syncthreads()
        if cuda.threadIdx.x == 1:
            x.view(np.uint8)[1]  # at first: the last to arrive goes on
        else:
            x.view(np.uint8)[0] = 3

    clean(1, lambda world: kernel[1, 2](np.zeros(1, "uint32"), np.zeros(2)))


@pytest.mark.parametrize("shift, conflict", [(5, False), (4, True)])
def test_blocks_copied_at_any_byte(shift, conflict):
    @cuda.jit
    def kernel(dst, src):
        if cuda.blockIdx.x == 0:
            copy_block(dst[0:5], src[0:5])
        else:
            copy_block(dst[shift : shift + 5], src[shift : shift + 5])

    def main(world):
        kernel[2, 3](sk.zeros(10, "uint8"), np.arange(10, dtype="uint8"))

    races_of(1, main) if conflict else clean(1, main)


def test_memory_that_is_used_again():
    """Freed and allocated again, by the ranks or by NumPy: what was there before does not matter."""

    @cuda.jit
    def kernel(x, local):
        tile = cuda.shared.array(4, float32)
        i = cuda.threadIdx.x
        tile[i] = i
        symm_at(x, (rank() + 1) % num_ranks())[i] = i
        local[i] = tile[i]

    def main(world):
        for _ in range(5):
            x = sk.zeros(4)
            kernel[1, 4, world.stream](x, np.zeros(4))
            kernel[1, 4, cuda.stream()](sk.zeros(4), np.zeros(4))
            world.host_barrier()
            sk.free(x)

    clean(3, main)


def test_a_source_that_is_overwritten():
    @cuda.jit
    def kernel(dst, src, done, again):
        put_nbi(dst, src, (rank() + 1) % num_ranks())
        if again == 1:
            quiet()
        src[0] = 1

    def main(again):
        return lambda world: kernel[1, 1](sk.zeros(2), sk.zeros(2), sk.signals(1), again)

    clean(2, main(1))
    (race,) = races_of(2, main(0)).races
    assert "may still read its source" in race.missing and "quiet()" in race.missing


@pytest.mark.slow
def test_many_messages_and_threads_leave_the_clocks_small():
    """A ring for hundreds of steps, with a signal each: what is superseded is forgotten."""

    @cuda.jit
    def kernel(x, flags, n):
        following = (rank() + 1) % num_ranks()
        for step in range(n):
            slot = step % 2
            if cuda.threadIdx.x == 0:
                source = x[2 * slot + 1 :][:1]
                put_signal_nbi(x[2 * slot :], source, flags[slot:], 1, SignalOp.SIGNAL_ADD, following)
            wait_block(flags[slot:], 1, "sys", "acquire", step // 2 + 1)
            notify(flags[2 + cuda.threadIdx.x :], (rank() - 1) % num_ranks(), step + 1)
            wait_block(flags[2:], 4, "sys", "acquire", step + 1)
            quiet()
            cuda.syncthreads()

    sizes = []

    def main(world):
        kernel[1, 4, world.stream](sk.zeros(4), sk.signals(6), 150)
        races = world.backend.machine.races
        sizes.append((len(world.stream.clock), len(races.pending[world.rank])))

    clean(3, main)
    assert max(clock for clock, _ in sizes) < 50 and max(pending for _, pending in sizes) == 0


# ---- what a wait has read, and how much of the past is kept


@pytest.mark.parametrize("how", ["wait", "wait_block"])
def test_a_wait_returns_the_first_value_that_satisfies_it(how):
    """Each value in turn, although the word holds the last one already; without races, what it holds."""

    @cuda.jit
    def kernel(signal, seen):
        if rank() == 0:
            for i in range(5):
                notify(signal, 1, 10 * (i + 1))
            notify(signal[1:], 1, 1)
        elif how == "wait":
            wait(signal[1:], 1, "sys", "relaxed", 1)  # all are there
            seen[0] = wait(signal, 1, "sys", "acquire", 1)
            seen[1] = wait(signal, 1, "sys", "acquire", 11)
            seen[2] = wait(signal, 1, "sys", "acquire", 11)  # once more the same
            seen[3] = wait(signal, 1, "sys", "acquire", 35)
            seen[4] = ld_acquire(signal, 0)  # which has no condition
            seen[5] = wait(signal, 1, "sys", "acquire", 1)  # what is known to be overwritten cannot come
        else:
            wait_block(signal[1:], 1, "sys", "relaxed", 1)
            if cuda.threadIdx.x == 0:
                seen[0] = wait(signal, 1, "sys", "acquire", 21)

    def main(world):
        seen = np.zeros(6, "int64")
        kernel[1, 1](sk.signals(2), seen)
        return seen.tolist()

    expected = [10, 20, 20, 40, 50, 50] if how == "wait" else [30, 0, 0, 0, 0, 0]
    assert clean(2, main)[1] == expected
    if how == "wait":
        assert spmd(2, main)[1] == [50] * 6


def test_a_wait_does_not_go_back_behind_its_own_write():
    @cuda.jit
    def kernel(signal, seen):
        if rank() == 0:
            for _ in range(3):
                notify(signal, 1, 1, "add")
            notify(signal[1:], 1, 1)
        else:
            wait(signal[1:], 1, "sys", "relaxed", 1)
            notify(signal, 1, 10, "add")
            seen[0] = wait(signal, 1, "sys", "acquire", 1)

    def main(world):
        seen = np.zeros(1, "int64")
        kernel[1, 1](sk.signals(2), seen)
        return seen.tolist()

    assert clean(2, main)[1] == [13]


def traced():
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.fixture
def tracing():
    gc.collect()
    gc.freeze()  # what other tests have left: to look at it again and again takes minutes
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("messages", [False, True])
@untyped
def test_many_rounds_of_a_signal_need_no_more_memory(tracing, messages):
    """The emulator keeps the last writes of a word, not all of them; a thread that is behind learns less."""

    @cuda.jit
    def kernel(slot, full, empty):
        for i in range(1, 1201):
            if rank() == 0:
                wait(empty, 1, "sys", "acquire", i - 1)
                symm_at(slot, 1)[0] = i
                if messages and i % 2:
                    signal_op(full, i, SignalOp.SIGNAL_SET, 1)
                    quiet()
                else:
                    notify(full, 1, i)
                notify(full[1:], 1, 1, "add")  # nobody waits for it
            else:
                wait(full, 1, "sys", "acquire", i)
                slot[0]
                notify(empty, 0, i)
                if i % 100 == 0:
                    sizes.append(traced())

    sizes = []
    clean(2, lambda world: kernel[1, 1](sk.zeros(1), sk.signals(2), sk.signals(1)))
    # What is known of messages is forgotten now and then.
    assert max(sizes) - sizes[1] < (6_000_000 if messages else 200_000), sizes


@pytest.mark.slow
@pytest.mark.parametrize("symmetric", [True, False])
def test_freed_signals_leave_nothing_behind(tracing, symmetric):
    @cuda.jit
    def kernel(flags, one):
        for i in range(flags.size):
            st_release(flags, i, 1)
            wait(flags[i:], one, "sys", "acquire", 1)

    def main(world):
        sizes = []
        for i in range(40):
            flags = sk.signals(100) if symmetric else np.zeros(100, "uint64")
            kernel[1, 1](flags, 1)
            world.synchronize()
            if symmetric:
                sk.free(flags)
            del flags
            if i % 10 == 9:
                sizes.append(traced())
        return sizes

    (sizes,) = clean(1, main)
    assert max(sizes) - sizes[0] < 200_000, sizes


# ---- against a definition: races are unordered pairs of conflicting accesses

CELLS, SIGNALS = 2, 6


@st.composite
def programs(draw):
    """Steps of 4 agents (2 ranks of 2 blocks), in one order in which they can run."""
    steps, notified = [], []
    for _ in range(draw(st.integers(2, 24))):
        agent = draw(st.integers(0, 3))
        kind = draw(st.sampled_from(["read", "write", "notify", "wait", "wait"]))
        if kind == "notify":
            if len(notified) < SIGNALS:
                steps.append((agent, kind, len(notified)))
                notified.append(agent)
        elif kind == "wait":
            if notified:
                steps.append((agent, kind, draw(st.integers(0, len(notified) - 1))))
        else:
            steps.append((agent, kind, draw(st.integers(0, CELLS - 1))))
    return steps


def racy_cells(steps):
    """The cells with two accesses, one a write, that no path of program order and signals connects."""
    before = [set() for _ in steps]
    for i, (agent, kind, what) in enumerate(steps):
        for j in range(i):
            other, other_kind, other_what = steps[j]
            if other == agent or (kind == "wait" and (other_kind, other_what) == ("notify", what)):
                before[i] |= before[j] | {j}
    return {
        what
        for i, (agent, kind, what) in enumerate(steps)
        for j, (other, other_kind, other_what) in enumerate(steps[:i])
        if {kind, other_kind} <= {"read", "write"}
        and what == other_what
        and "write" in (kind, other_kind)
        and j not in before[i]
    }


@examples(300)
@given(steps=programs(), seed=st.none() | st.integers(0, 50))
@untyped
def test_races_are_unordered_pairs(steps, seed):
    @cuda.jit
    def kernel(cells, signals):
        agent = 2 * rank() + cuda.blockIdx.x
        here = symm_at(cells, 0)
        for who, kind, what in steps:
            if who != agent:
                continue
            if kind == "read":
                here[what]
            elif kind == "write":
                here[what] = agent
            elif kind == "notify":
                notify(signals[what:], 0, 1)
                notify(signals[what:], 1, 1)
            else:
                wait(signals[what:], 1, "sys", "acquire", 1)

    def main(world):
        kernel[2, 1](sk.zeros(CELLS, "int32"), sk.signals(SIGNALS))

    expected = racy_cells(steps)
    try:
        clean(2, main, seed=seed)
        found = set()
    except RaceError as error:
        found = {race.index for race in error.races}
    # The same pair of lines is reported once, for the first cell only.
    assert bool(found) == bool(expected) and {int(cell) for cell in found} <= expected
