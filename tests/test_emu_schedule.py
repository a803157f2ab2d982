"""Who runs when on the emulator: spin loops, streams, graphs, events; deadlocks and failures, and what they
report."""

import inspect
import re
import threading

import numpy as np
import pytest
from numba import cuda, int32

import shmemkit as sk
from shmemkit import device
from shmemkit.device import (
    atomic_compare_swap,
    atomic_fetch,
    atomic_set,
    barrier_all,
    g,
    ld_acquire,
    load_vec16,
    notify,
    num_ranks,
    p,
    put,
    rank,
    st_release,
    symm_at,
    wait,
)
from shmemkit.emu import DeadlockError, EmulatorError, OutOfBoundsError, spinning, watchdog


def spmd(n, main, **options):
    return sk.emu.run(lambda: main(sk.init()), n, **options)


def deadlock_of(n, main, **options):
    with pytest.raises(DeadlockError) as caught:
        spmd(n, main, **options)
    return str(caught.value)


def line_of(function, text):
    """ "file:line: " of the line of `function` that contains `text`."""
    lines, first = inspect.getsourcelines(function.py_func)
    (offset,) = [i for i, line in enumerate(lines) if text in line]
    return f"test_emu_schedule.py:{first + offset}: {lines[offset].strip()}"


# ---- spin loops make progress


@cuda.jit
def spin_on_mine(flag):
    if rank() == 0:
        while ld_acquire(flag, 0) != 3:
            pass
    else:
        for i in range(1, 4):
            cuda.nanosleep(100)
            st_release(symm_at(flag, 0), 0, i)


@cuda.jit
def spin_on_a_peer(flag):
    if rank() == 0:
        while ld_acquire(symm_at(flag, 1), 0) != 7:
            cuda.nanosleep(10)
    else:
        cuda.nanosleep(100)
        flag[0] = 7  # an ordinary store


@cuda.jit
def spin_everywhere(flag):
    """All threads of all blocks but one spin."""
    if rank() == num_ranks() - 1 and cuda.grid(1) == 0:
        for pe in range(num_ranks()):
            st_release(symm_at(flag, pe), 0, 1)
    while ld_acquire(flag, 0) == 0:
        pass


@cuda.jit
def spin_on_several(flag):
    """No flag alone says when to stop, and the loop looks at another one each time."""
    if rank() == 0:
        i = 0
        while ld_acquire(flag, i % 3) == 0:
            i += 1
    else:
        cuda.nanosleep(100)
        st_release(symm_at(flag, 0), 2, 1)


@cuda.jit
def spin_on_many(flag):
    if rank() == 0:
        i = 0
        while ld_acquire(flag, i % flag.size) == 0:
            i += 1
    else:
        for _ in range(5):
            cuda.nanosleep(100)
        st_release(symm_at(flag, 0), 300, 1)


@cuda.jit
def spin_with_a_fetch(flag):
    if rank() == 0:
        while atomic_fetch(flag, 1) != 5:
            pass
    else:
        cuda.nanosleep(100)
        atomic_set(flag, 5, 1)


@cuda.jit
def spin_with_a_get(flag):
    if rank() == 0:
        while g(flag, 1) != 5:
            pass
    else:
        cuda.nanosleep(100)
        p(flag, 5, 1)


@cuda.jit
def spin_with_cuda_atomics(flag):
    if rank() == 0:
        while cuda.atomic.add(flag, 0, 0) != 1:
            pass
        while cuda.atomic.max(flag, 0, 0) != 2:
            pass
        while cuda.atomic.cas(flag, 0, 3, 3) != 3:
            pass
    else:
        for i in range(1, 4):
            cuda.nanosleep(100)
            cuda.atomic.add(symm_at(flag, 0), 0, 1)
            while ld_acquire(symm_at(flag, 0), 0) != i:
                pass
            cuda.nanosleep(100)


@cuda.jit
def wait_for_a_put(flag):
    """A plain put, and a plain store, end a wait too."""
    if rank() == 0:
        wait(flag, 1, "sys", "acquire", 1)
        wait(flag[1:], 1, "sys", "acquire", 1)
    else:
        cuda.nanosleep(100)
        p(flag, 1, 0)
        symm_at(flag, 0)[1] = 1


@pytest.mark.parametrize("n, threads", [(2, 1), (5, 33)])
@pytest.mark.parametrize(
    "kernel",
    [
        spin_on_mine,
        spin_on_a_peer,
        spin_everywhere,
        spin_on_several,
        spin_on_many,
        spin_with_a_fetch,
        spin_with_a_get,
        wait_for_a_put,
    ],
)
def test_spin_loops(kernel, n, threads):
    spmd(n, lambda world: kernel[2, threads](sk.zeros(400, "int32")))


def test_spinning_with_cuda_atomics():
    spmd(2, lambda world: spin_with_cuda_atomics[1, 1](sk.zeros(1, "int32")))


@pytest.mark.parametrize("how", ["cas", "exch", "shared", "symmetric"])
def test_spin_locks(how):
    """A lock that every thread takes in turn, and holds while others try."""

    @cuda.jit
    def kernel(lock, total):
        if how == "shared":
            mutex = cuda.shared.array(1, int32)
            if cuda.threadIdx.x == 0:
                mutex[0] = 0
            cuda.syncthreads()
        else:
            mutex = lock
        if how == "exch":
            while cuda.atomic.exch(mutex, 0, 1) != 0:
                pass
        elif how == "symmetric":
            while atomic_compare_swap(mutex, 0, 1, 0) != 0:
                pass
        else:
            while cuda.atomic.cas(mutex, 0, 0, 1) != 0:
                pass
        old = total[0]
        cuda.nanosleep(10)  # here the others would get in
        total[0] = old + 1
        cuda.threadfence()
        if how == "symmetric":
            atomic_set(mutex, 0, 0)
        else:
            cuda.atomic.exch(mutex, 0, 0)

    def main(world):
        lock, total = sk.zeros(1, "int32"), np.zeros(1, "int64")
        blocks = 1 if how == "shared" else 3
        kernel[blocks, 20](lock, total)
        return total[0]

    assert spmd(1, main) == [20 if how == "shared" else 60]


def test_bounded_polling_ends_by_itself():
    """A kernel that gives up after many tries does so, although nothing changes and others wait for it."""

    @cuda.jit
    def kernel(flag, out):
        if rank() == 0:
            tries = 0
            while ld_acquire(flag, 0) == 0 and tries < 30000:
                tries += 1
            for _ in range(30000):
                cuda.nanosleep(10)
            for i in range(30000):
                cuda.atomic.max(flag, 1, i % 2)
            out[0] = tries
            notify(flag[2:], 1, 1)
        else:
            wait(flag[2:], 1, "sys", "acquire", 1)

    def main(world):
        out = np.zeros(1, "int64")
        kernel[1, 1](sk.signals(3), out)
        return out[0]

    assert spmd(2, main) == [30000, 0]


def test_endless_counting_is_a_deadlock(monkeypatch):
    @cuda.jit
    def kernel(flag):
        tries = 0
        while ld_acquire(flag, 0) == 0:
            tries += 1

    monkeypatch.setattr(spinning, "LAST_CHECK", 50_000)
    report = deadlock_of(1, lambda world: kernel[1, 2](sk.signals(1)))
    assert "waits for flag[0] on rank 0 to change" in report


# ---- streams, events, graphs


@cuda.jit
def consume(flag, x, out):
    wait(flag, 1, "gpu", "acquire", 1)
    out[0] = x[0]


@cuda.jit
def produce(flag, x):
    x[0] = 5
    notify(flag, rank(), 1, "set", "gpu")


@pytest.mark.parametrize("n", [1, 3])
def test_kernels_on_two_streams_wait_for_each_other(n):
    """The consumer is launched first: its launch returns, and the kernel goes on when the producer runs."""

    def main(world):
        other = cuda.stream()
        flag, x, out = sk.signals(1), np.zeros(1), np.zeros(1)
        consume[1, 1, other](flag, x, out)
        assert out[0] == 0 and not other.done
        produce[1, 1](flag, x)
        other.synchronize()
        return out[0]

    assert spmd(n, main) == [5] * n


def test_work_of_one_stream_runs_in_order():
    @cuda.jit
    def append(x, value):
        if value == 0:
            wait(x[9:], 1, "gpu", "acquire", 1)  # held until everything else has been enqueued
        cuda.atomic.add(x, 0, 1)
        x[x[0]] = value

    def main(world):
        other, x = cuda.stream(), sk.signals(10)
        for value in range(4):
            append[1, 1, other](x, value)
        assert x[0] == 0
        notify_it[1, 1](x)
        other.synchronize()
        return x[1:5].tolist()

    @cuda.jit
    def notify_it(x):
        notify(x[9:], rank(), 1)

    assert spmd(2, main) == [[0, 1, 2, 3]] * 2


def test_events_order_streams():
    """Stream b waits for an event of a, whose kernel waits for a third one: the host is not held up by it."""

    def main(world):
        a, b = cuda.stream(), cuda.stream()
        flag, x, out, copied = sk.signals(1), np.zeros(1), np.zeros(1), np.zeros(1)
        consume[1, 1, a](flag, x, out)
        event = a.record()
        b.wait_event(event)
        copy_one[1, 1, b](copied, out)
        assert not event.done and not event.query() and copied[0] == 0
        produce[1, 1](flag, x)
        event.synchronize()
        assert event.done
        b.synchronize()
        assert world.stream.record().done and cuda.event().query()
        return copied[0]

    assert spmd(2, main) == [5, 5]


@cuda.jit
def copy_one(dst, src):
    dst[0] = src[0]


def test_graphs_are_replayed():
    def main(world):
        x, graphs = np.zeros(1), []
        for factor in (2, 3):
            world.stream.begin_capture()
            assert world.stream.is_capturing()
            scale[1, 1, world.stream](x, factor)
            world.barrier()
            add_one[1, 1](x)
            graphs.append(world.stream.end_capture())
            assert not world.stream.is_capturing()
        assert x[0] == 0  # nothing has run
        results = []
        for which in (0, 1, 0, 0, 1):
            graphs[which].launch(world.stream)
            results.append(x[0])
        other = cuda.stream()
        graphs[1].launch(other)
        other.synchronize()
        return [*results, x[0]]

    assert spmd(3, main) == [[1, 4, 9, 19, 58, 175]] * 3


@cuda.jit
def scale(x, factor):
    x[0] *= factor


@cuda.jit
def add_one(x):
    x[0] += 1


def test_graph_with_a_fork():
    """Two streams in one capture: the kernels wait for each other in every replay."""

    def main(world):
        a, b = world.stream, cuda.stream()
        flag, x, out = sk.signals(1), np.zeros(1), np.zeros(1)
        a.begin_capture()
        b.wait_event(a.record())
        consume[1, 1, b](flag, x, out)
        produce[1, 1, a](flag, x)
        a.wait_event(b.record())
        clear[1, 1, a](flag, x)
        graph = a.end_capture()
        assert not b.is_capturing()
        for _ in range(3):
            out[0] = 0
            graph.launch(a)
            a.synchronize()
            assert out[0] == 5 and flag[0] == 0

    spmd(2, main)


@cuda.jit
def clear(flag, x):
    flag[0], x[0] = 0, 0


def test_misused_captures():
    with sk.init("emulator") as world:
        with pytest.raises(RuntimeError, match="begin_capture was not called"):
            world.stream.end_capture()
        world.stream.begin_capture()
        event = world.stream.record()
        with pytest.raises(RuntimeError, match="already capturing"):
            world.stream.begin_capture()
        with pytest.raises(RuntimeError, match="capturing a graph"):
            world.stream.synchronize()
        world.stream.end_capture()
        with pytest.raises(RuntimeError, match="captured into a graph"):
            event.synchronize()
        with pytest.raises(RuntimeError, match="capture that has ended"):
            cuda.stream().wait_event(event)


# ---- deadlocks


@cuda.jit
def wait_for_three(signals, other):
    if cuda.threadIdx.x == 0:
        wait(signals[1:], 1, "sys", "acquire", rank() + 3, "eq")
    cuda.syncthreads()


def test_deadlock_report():
    report = deadlock_of(2, lambda world: wait_for_three[(2, 2), 4](sk.full(4, 1, "uint64"), sk.zeros(3)))
    assert report.startswith("deadlock: no rank can go on\n")
    for pe in (0, 1):
        assert (
            f"rank {pe} 4 blocks ((0, 0, 0) ... (1, 1, 0)) thread 0 in wait_for_three: "
            f"waits for signals[1] on rank {pe} == {pe + 3}, now 1\n" in report
        )
        assert (
            f"rank {pe} 4 blocks ((0, 0, 0) ... (1, 1, 0)) threads 1 to 3 in wait_for_three: waits for the"
            in report
        )
    assert report.count(line_of(wait_for_three, "wait(signals")) == 2
    assert report.count(line_of(wait_for_three, "syncthreads")) == 2


def test_deadlock_of_a_wait_on_a_matrix_of_a_peer():
    @cuda.jit
    def kernel(x):
        if rank() == 0:
            wait(symm_at(x[1], 1)[1:], 1, "sys", "acquire", 4, "gt")

    report = deadlock_of(2, lambda world: kernel[1, 1](sk.full((2, 2), 3, "int64")))
    assert "rank 0 block 0 thread 0 in kernel: waits for x[1, 1] on rank 1 > 4, now 3\n" in report
    assert "rank 1 block" not in report and "rank 1: its host program has ended" not in report


@cuda.jit
def spin_forever(flag):
    while ld_acquire(flag, 2) != 1:
        pass


@cuda.jit
def lock_forever(flag):
    mutex = cuda.shared.array(2, int32)
    mutex[1] = 1
    while cuda.atomic.cas(mutex, 1, 0, 1) != 0:
        cuda.nanosleep(10)


@cuda.jit
def spin_on_two_forever(flag):
    while ld_acquire(flag, 0) != 1 or ld_acquire(flag, 2) != 1:
        cuda.nanosleep(10)


def test_deadlock_of_spin_loops():
    report = deadlock_of(3, lambda world: spin_forever[2, 40](sk.zeros(3, "int32", name="my flag")))
    assert report.count("waits for flag[2] on rank") == 3 and "to change (polled in a loop), now 0" in report
    assert line_of(spin_forever, "while") in report
    assert "blocks 0 and 1 threads 0 to 39 in spin_forever" in report
    report = deadlock_of(1, lambda world: lock_forever[1, 1](sk.zeros(3, "int32")))
    assert "rank 0 block 0 thread 0 in lock_forever: waits for " in report
    report = deadlock_of(2, lambda world: spin_on_two_forever[1, 2](sk.zeros(3, "int32")))
    assert "in spin_on_two_forever: waits for" in report


def test_deadlock_of_a_lock_in_shared_memory_names_it():
    @cuda.jit
    def kernel():
        mutex = cuda.shared.array(2, int32)
        mutex[1] = 1
        while cuda.atomic.cas(mutex, 1, 0, 1) != 0:
            pass

    assert "waits for mutex[1] on rank 0 to change" in deadlock_of(1, lambda world: kernel[1, 1]())


@cuda.jit
def diverge(x):
    if cuda.threadIdx.x < 3:
        cuda.syncthreads()
    else:
        wait(x, 1, "gpu", "acquire", 1)


@cuda.jit
def half_a_warp(x):
    if cuda.threadIdx.x < 16:
        x[cuda.threadIdx.x] = cuda.shfl_sync(0xFFFFFFFF, 1, 0)
    else:
        cuda.syncthreads()


def test_deadlock_of_diverging_barriers():
    report = deadlock_of(1, lambda world: diverge[1, 5](sk.signals(1)))
    assert "threads 0 to 2 in diverge: waits for the other threads of its block in syncthreads" in report
    assert "threads 3 to 4 in diverge: waits for x[0] on rank 0 >= 1, now 0" in report
    report = deadlock_of(1, lambda world: half_a_warp[1, 32](sk.signals(32)))
    assert (
        "threads 0 to 15 in half_a_warp: waits for the other threads in a warp operation (16 of 32 have"
        in report
    )
    assert line_of(half_a_warp, "shfl_sync") in report and line_of(half_a_warp, "syncthreads") in report


def test_deadlock_of_a_grid_barrier():
    @cuda.jit
    def kernel(state):
        if cuda.blockIdx.x != 2:
            device.grid_barrier(state)
        else:
            wait(state, 1, "gpu", "acquire", 1)

    report = deadlock_of(1, lambda world: kernel[3, 2](np.zeros(2, "uint32")))
    assert (
        "blocks 0 and 1 threads 0 to 1 in kernel: waits for the other threads in a grid barrier (4 of 6"
        in report
    )
    assert "waits for state[0] on rank 0 >= 1, now 0" in report


@cuda.jit
def meet_all():
    device.barrier_all_block()


def test_deadlock_of_a_barrier_that_a_rank_does_not_come_to():
    def main(world):
        if world.rank != 1:
            meet_all[1, 4]()

    report = deadlock_of(3, main)
    assert (
        "waits for rank 1 in a barrier, sync or collective of ranks 0 to 2 (0 calls there, 1 here)" in report
    )
    assert "threads 0 to 2 in meet_all: waits for the thread that carries out a block operation" in report
    assert line_of(meet_all, "barrier_all_block") in report
    assert "rank 1: its host program waits for the other ranks to call finalize(), too" in report


def test_deadlock_of_host_programs():
    def main():
        world = sk.init()
        if world.rank == 0:
            world.host_barrier()
        world.abandon()

    with pytest.raises(DeadlockError) as caught:
        sk.emu.run(main, 2)
    assert "rank 0: its host program waits for the other ranks to call host_barrier(), too" in str(
        caught.value
    )
    assert "rank 1: its host program has ended" in str(caught.value)


def test_missing_rank():
    def main():
        if next(ranks) == 1:
            return  # never calls init
        sk.init().host_barrier()

    ranks = iter(range(3))
    with pytest.raises(DeadlockError) as caught:
        sk.emu.run(main, 3)
    assert "rank 1: its host program has ended" in str(caught.value)
    assert "rank 2: its host program waits for the other ranks to call host_barrier(), too" in str(
        caught.value
    )


def test_very_large_reports_are_cut():
    @cuda.jit
    def kernel(x):
        wait(x[cuda.grid(1) :], 1, "gpu", "acquire", 1)

    report = deadlock_of(1, lambda world: kernel[30, 20](sk.signals(600)))
    assert "rank 0: and 560 more like these" in report and len(report.splitlines()) < 100


# ---- failures


@cuda.jit
def fails(x):
    if rank() == 1 and cuda.grid(1) == 7:
        raise ValueError("seven")
    cuda.syncthreads()
    barrier_all()


def test_an_exception_ends_everything():
    with pytest.raises(EmulatorError) as caught:
        spmd(3, lambda world: fails[2, 5](sk.zeros(1)))
    text = str(caught.value)
    assert text.startswith("ValueError: seven\n  rank 1 block 1 thread 2 at ")
    assert line_of(fails, "raise") in text and text.endswith("in kernel fails")
    assert isinstance(caught.value.__cause__, ValueError)
    assert spmd(2, lambda world: world.rank) == [0, 1]  # as good as new


def test_an_exception_in_a_device_function():
    @cuda.jit(device=True)
    def divide(a, b):
        return a // b

    @cuda.jit
    def kernel(x):
        x[0] = divide(1, x[0])

    with pytest.raises(EmulatorError, match=r"ZeroDivisionError.*\n.*return a // b in kernel kernel"):
        spmd(1, lambda world: kernel[1, 1](np.zeros(1, "int32")))


@pytest.mark.parametrize("with_block", [False, True])
def test_an_exception_in_one_host_program_ends_all(with_block):
    """While kernels of the others wait, and this one's too."""

    def main():
        if with_block:
            with sk.init() as world:
                body(world)
        else:
            body(sk.init())

    def body(world):
        wait_once[1, 3, cuda.stream()](sk.signals(1))
        if world.rank == 1:
            raise KeyError("only here")
        world.host_barrier()

    @cuda.jit
    def wait_once(x):
        wait(x, 1, "sys", "acquire", 1)

    with pytest.raises(KeyError, match="only here") as caught:
        sk.emu.run(main, 3)
    notes = getattr(caught.value, "__notes__", ["raised on rank 1 of 3"])  # Python 3.11
    assert notes == ["raised on rank 1 of 3"]
    assert sk.current() is None


def test_one_rank_can_fail_and_go_on():
    """On a single rank, as in a notebook, the exception comes out of the launch, and the World lives on."""

    @cuda.jit
    def kernel(x, fail):
        if fail:
            if cuda.threadIdx.x == 1:
                x[5] = 1
            cuda.syncthreads()
        x[0] += 1

    with sk.init("emulator") as world:
        x = sk.zeros(3)
        with pytest.raises(OutOfBoundsError):
            kernel[2, 4](x, True)
        x[0] = 0
        kernel[1, 1](x, False)
        never = sk.signals(1)
        with pytest.raises(DeadlockError):
            consume[1, 1](never, x, x)
            world.stream.synchronize()
        kernel[1, 1](x, False)
        assert world.asnumpy(x)[0] == 2


def test_exits_are_not_swallowed():
    def main(world):
        if world.rank == 1:
            raise SystemExit(3)
        world.host_barrier()

    with pytest.raises(SystemExit):
        spmd(2, main)
    assert sk.current() is None


def test_results_come_back_in_rank_order():
    assert sk.emu.run(lambda a, b: (sk.init().rank, a + b), 4, (1, 2)) == [(i, 3) for i in range(4)]


@pytest.mark.parametrize(
    "n, options, message",
    [
        (0, {}, "n_pes=0"),
        (2.0, {}, "n_pes=2.0"),
        (4, {"local_size": 3}, "local_size=3: a divisor"),
        (2, {"local_size": 0}, "local_size=0"),
    ],
)
def test_wrong_runs(n, options, message):
    with pytest.raises(ValueError, match=message):
        sk.emu.run(print, n, **options)


def test_runs_do_not_nest():
    with pytest.raises(RuntimeError, match="cannot be nested"):
        sk.emu.run(lambda: sk.emu.run(print, 2), 2)


def test_launch_without_a_world():
    def main():
        if next(ranks) == 1:
            add_one[1, 1](np.zeros(1))
        sk.init()

    ranks = iter(range(2))
    with pytest.raises(RuntimeError, match="no World: call shmemkit.init"):
        sk.emu.run(main, 2)


# ---- out of bounds


@cuda.jit
def index_1d(x, m, s):
    i = cuda.grid(1)
    if rank() == 1:
        x[i] = 1


@cuda.jit
def index_read(x, m, s):
    value = 0.0
    i = cuda.grid(1)
    if rank() == 1:
        value += x[i] * x[i + 1]


@cuda.jit
def index_2d(x, m, s):
    i = cuda.grid(1)
    if rank() == 1:
        m[1, i] = x[0]


@cuda.jit
def index_row(x, m, s):
    if rank() == 1:
        m[2][0] += 1


@cuda.jit
def index_mixed(x, m, s):
    if rank() == 1:
        m[7, 0:2] = 1


@cuda.jit
def index_peer(x, m, s):
    if rank() == 1:
        x[0] = symm_at(x, 0)[9]


@cuda.jit
def index_slice(x, m, s):
    if rank() == 1:
        wait(s[5:], 1, "sys", "acquire", 1)


@cuda.jit
def index_notify(x, m, s):
    if rank() == 1:
        notify(s[2 + rank() :], 0, 1)


@cuda.jit
def index_wait(x, m, s):
    if rank() == 1:
        wait(s, 4, "sys", "acquire", 0)


@cuda.jit
def index_ld(x, m, s):
    if rank() == 1:
        x[0] = ld_acquire(s, -1)


@cuda.jit
def index_st(x, m, s):
    if rank() == 1:
        st_release(symm_at(s, 0), rank() + 2, 1, "sys")


@cuda.jit
def index_atomic(x, m, s):
    if rank() == 1:
        cuda.atomic.add(m, (1, 4), 1)


@cuda.jit
def index_vec(x, m, s):
    if rank() == 1:
        x[0] = load_vec16(x, 4)[0]


@cuda.jit
def index_put(x, m, s):
    if rank() == 1:
        put(x, m[3], 0)


@cuda.jit
def index_p(x, m, s):
    if rank() == 1:
        p(x[4:], 1.0, 0)


OUT_OF_BOUNDS = {
    index_1d: "x[4] is out of bounds: x is float32 (4,) on rank 1",
    index_read: "x[4] is out of bounds: x is float32 (4,) on rank 1",
    index_2d: "m[1, 3] is out of bounds: m is float32 (2, 3) on rank 1",
    index_row: "m[2] is out of bounds: m is float32 (2, 3) on rank 1",
    index_mixed: "m[7, 0] is out of bounds: m is float32 (2, 3) on rank 1",
    index_peer: "symm_at(x, 0)[9] is out of bounds: symm_at(x, 0) is float32 (4,) on rank 0",
    index_slice: "s[5] is out of bounds: s is uint64 (3,) on rank 1",
    index_notify: "s[3] is out of bounds: s is uint64 (3,) on rank 1",
    index_wait: "s[3] is out of bounds: s is uint64 (3,) on rank 1",
    index_ld: "s[-1] is out of bounds: s is uint64 (3,) on rank 1",
    index_st: "symm_at(s, 0)[3] is out of bounds: symm_at(s, 0) is uint64 (3,) on rank 0",
    index_atomic: "m[1, 4] is out of bounds: m is float32 (2, 3) on rank 1",
    index_vec: "x[4] is out of bounds: x is float32 (4,) on rank 1",
    index_put: "m[3] is out of bounds: m is float32 (2, 3) on rank 1",
    index_p: "x[4] is out of bounds: x is float32 (4,) on rank 1",
}


@pytest.mark.parametrize("kernel", OUT_OF_BOUNDS, ids=lambda kernel: kernel.py_func.__name__)
def test_out_of_bounds(kernel):
    def main(world):
        kernel[2, 3](sk.zeros(4), sk.zeros((2, 3)), sk.signals(3))

    with pytest.raises(OutOfBoundsError) as caught:
        spmd(2, main)
    assert isinstance(caught.value, IndexError)
    first, second = str(caught.value).splitlines()
    assert first == OUT_OF_BOUNDS[kernel]
    assert re.match(
        rf"  rank 1 block \d thread \d at .*schedule.py:\d+: .* in kernel {kernel.py_func.__name__}$",
        second,
    )


def test_a_rank_that_does_not_exist():
    @cuda.jit
    def kernel(x):
        symm_at(x, num_ranks())[0] = 1

    with pytest.raises(EmulatorError, match="rank 2 does not exist: ranks are 0 to 1"):
        spmd(2, lambda world: kernel[1, 1](sk.zeros(4)))


@pytest.mark.parametrize("access", ["ld_acquire(m, 0)", "st_release(m, 0, 1)", "notify(m, 0, 1)"])
def test_matrices_where_a_row_is_needed(access):
    scope = {"ld_acquire": ld_acquire, "st_release": st_release, "notify": notify}
    exec(f"def kernel(m):\n    {access}", scope)
    with pytest.raises(EmulatorError, match="must be a 1-D array of .*; take a row or a slice of it"):
        spmd(1, lambda world: cuda.jit(scope["kernel"])[1, 1](sk.zeros((2, 3), "uint64")))


# ---- the same every time


def test_the_schedule_is_the_same_every_time():
    order = []

    @cuda.jit
    def kernel(lock, x):
        order.append((rank(), cuda.blockIdx.x, cuda.threadIdx.x))
        cuda.syncthreads()
        while cuda.atomic.cas(lock, 0, 0, 1) != 0:
            pass
        order.append((rank(), cuda.blockIdx.x, cuda.threadIdx.x))
        cuda.nanosleep(1)
        cuda.atomic.exch(lock, 0, 0)
        barrier_all() if cuda.grid(1) == 0 else None
        order.append(ld_acquire(x, rank()))
        notify(x[rank() :], (rank() + 1) % num_ranks(), 1, "add")

    def once():
        order.clear()
        spmd(3, lambda world: kernel[3, 5](sk.zeros(1, "int32"), sk.signals(4)))
        return list(order)

    first = once()
    assert len(first) == 3 * 3 * 3 * 5 and once() == first and once() == first


# ---- the watchdog


def test_a_loop_without_a_turn_is_pointed_out(monkeypatch, capfd):
    """An ordinary load in a loop: nobody else runs, and no deadlock can be found. Once, it is said where."""

    @cuda.jit
    def kernel(flag):
        if rank() == 1:
            while flag[0] == 0:
                pass
        cuda.syncthreads()

    def main(world):
        flag = sk.zeros(1, "int32")
        if world.rank == 1:
            timers.append(threading.Timer(1.5, flag.fill, [1]))
            timers[0].start()
        kernel[1, 2](flag)

    timers = []
    monkeypatch.setattr(watchdog, "SECONDS", 0.3)
    monkeypatch.setattr(watchdog, "_dog", None)  # a new one, that looks more often
    spmd(2, main)
    said = capfd.readouterr().err
    assert said.count("runs for 0 s without waiting for anybody") == 1
    assert re.search(
        r"rank 1 block 0 thread 0 at .*test_emu_schedule.py:\d+: (while flag\[0\] == 0:|pass)", said
    )
