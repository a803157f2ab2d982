"""Waits that expire on GPUs: who is told what, and that everything works afterwards.

    mpirun -n 2 python3 -m pytest -m gpu -k test_gpu_timeout          (also 1 and 4)
    SHMEMKIT_TIMEOUT=5 mpirun -n 2 python3 -m pytest -m gpu -k test_gpu_timeout

Without the variable, the tests of what it does are skipped.
"""

import time

import gpu
import numpy as np
import pytest
from numba import cuda, types

import shmemkit as sk
from shmemkit.collectives.queue import consumer_release, consumer_wait, producer_acquire, producer_commit
from shmemkit.device import (
    TILE_BYTES,
    TILE_WORDS,
    ComparisonType,
    barrier_all_block,
    copy_block,
    grid_barrier,
    ll128_load_some,
    ll128_store_tile,
    ll_pack_block,
    ll_recv_block,
    ll_recv_pack_block,
    ll_words,
    load_tile,
    notify,
    rank,
    signal_wait_until,
    store_tile,
    symm_at,
    wait,
    wait_block,
    wait_warp,
)
from shmemkit.support import timeouts

pytestmark = pytest.mark.gpu
LIMIT = 0.5  # seconds
GE = ComparisonType.CMP_GE
with_variable = pytest.mark.skipif(timeouts.default() is None, reason="SHMEMKIT_TIMEOUT is not set")


@pytest.fixture
def world():
    world = gpu.world()
    yield world
    world.synchronize()  # nothing is left behind
    world.host_barrier()


@cuda.jit
def wait_for(signals, index, value):
    if cuda.threadIdx.x == 7:
        wait(signals[index:], 1, "sys", "acquire", value)


@cuda.jit
def wait_at_the_peer(signals, peer, value):
    wait(symm_at(signals, peer)[2:], 1, "sys", "acquire", value, "eq")


@cuda.jit
def warp_waits(signals, index, value):
    wait_warp(signals, 8, "sys", "acquire", value)


@cuda.jit
def block_waits(signals, index, value):
    wait_block(signals[index:], 1, "sys", "acquire", value)


@cuda.jit
def until(signals, index, value):
    signal_wait_until(signals[index:], GE, value)


@cuda.jit
def barrier_without_the_last(arrivals, epoch, last):
    if rank() != last:
        barrier_all_block(arrivals, epoch)


@cuda.jit
def grid_barrier_without(state, missing):
    if cuda.blockIdx.x != missing:
        grid_barrier(state)


@cuda.jit
def waits_in_a_row(signals, n, done):
    """Block b waits for signal b, `n` times in a row, all in vain."""
    for i in range(n):
        wait_block(signals[cuda.blockIdx.x :], 1, "sys", "acquire", i + 1)
    if cuda.threadIdx.x == 0:
        done[cuda.blockIdx.x] = 1


@cuda.jit
def tell_after_a_wait(signals, told):
    """Waits in vain; then tells itself, through `told`."""
    wait(signals, 1, "sys", "acquire", 1)
    notify(told, rank(), 1)


@cuda.jit(device=True)
def ll_send(lines, x, flag, pe):
    ll_pack_block(symm_at(lines, pe), x, flag)


@cuda.jit(device=True)
def ll128_send(lines, x, flag, pe):
    i = cuda.threadIdx.x >> 5
    while i * TILE_BYTES < 8 * x.size:
        ll128_store_tile(lines, i, load_tile(x, i), flag, pe)
        i += cuda.blockDim.x >> 5


@cuda.jit(device=True)
def ll128_recv(out, lines, flag):
    i = cuda.threadIdx.x >> 5
    while i * TILE_BYTES < 8 * out.size:
        (tile,) = ll128_load_some(lines, (i,), flag)
        store_tile(out, i, tile)
        i += cuda.blockDim.x >> 5


@cuda.jit(device=True)
def ll128_pass_on(there, lines, n_words, flag):
    i = cuda.threadIdx.x >> 5
    while i * TILE_WORDS < n_words:
        (tile,) = ll128_load_some(lines, (i,), flag)
        ll128_store_tile(there, i, tile, flag, rank())
        i += cuda.blockDim.x >> 5


def line_kernel(send, recv, pass_on):
    @cuda.jit
    def lines_to_the_right(x, n_sent, out, lines, n_words, flag, right):
        """Block 0 sends the first `n_sent` words of x, block 1 receives as many as x has; it then passes the
        lines on, to its own lines[1]. Block 2 waits for those, and sends x to its own lines[2]."""
        if cuda.blockIdx.x == 0:
            send(lines[0], x[:n_sent], flag, right)
        elif cuda.blockIdx.x == 1:
            recv(out[0], lines[0], flag)
            pass_on(lines[1], lines[0], n_words, flag)
        else:
            recv(out[1], lines[1], flag)
            cuda.syncthreads()
            send(lines[2], x, flag, rank())

    return lines_to_the_right


LINES = {
    "ll": (line_kernel(ll_send, ll_recv_block, ll_recv_pack_block), ll_words, "ll_recv_block"),
    "ll128": (
        line_kernel(ll128_send, ll128_recv, ll128_pass_on),
        lambda n_bytes: -(-n_bytes // TILE_BYTES) * TILE_WORDS,
        "ll128_load_some",
    ),
}


@cuda.jit
def set_to(x, value):
    x[cuda.threadIdx.x] = value


@cuda.jit
def forgetful_queue(inputs, outputs, slots, full, empty, receiver, sender, forget):
    """Block 0 pushes, block 1 pops, and does not say that item `forget` has been read."""
    n_slots = slots.shape[0]
    for i in range(inputs.shape[0]):
        if cuda.blockIdx.x == 0:
            slot = producer_acquire(empty, n_slots, types.int64(i))
            copy_block(symm_at(slots, receiver)[slot], inputs[i])
            producer_commit(full, n_slots, types.int64(i), receiver)
        else:
            slot = consumer_wait(full, n_slots, types.int64(i))
            copy_block(outputs[i], slots[slot])
            cuda.syncthreads()
            if i != forget:
                consumer_release(empty, n_slots, types.int64(i), sender)


def timed_out(function, *arguments):
    """The SignalTimeout that the call raises within a few limits."""
    start = time.monotonic()
    with pytest.raises(sk.SignalTimeout) as caught:
        function(*arguments)
    assert time.monotonic() - start < 20 * LIMIT
    return caught.value


def test_the_record_says_it_all(world):
    signals = sk.signals(8, name="flags")
    signals[3] = 4
    step = sk.bind(wait_for, (1, 2, 1), (8, 2, 2), (signals, 3, 5), timeout=LIMIT)
    step()
    error = timed_out(world.synchronize)
    assert error.rank == world.rank and len(error.records) == 8  # 2 blocks, threads with x = 7
    assert {r.block for r in error.records} == {(0, 0, 0), (0, 1, 0)}
    assert {r.thread for r in error.records} == {(7, y, z) for y in (0, 1) for z in (0, 1)}
    for r in error.records:
        assert (r.rank, r.kernel, r.primitive) == (world.rank, "wait_for", "wait")
        assert (r.signal, r.index, r.owner) == ("flags", (3,), world.rank)
        assert (r.compare, r.expected, r.seen) == ("ge", 5, 4)
        assert LIMIT * 0.9 < r.waited < 20 * LIMIT
    assert error.records[0].expired
    assert "wait_for" in str(error) and "flags[3] >= 5" in str(error)

    world.synchronize()  # once is enough
    signals[3] = 5
    step()
    world.synchronize()
    world.host_barrier()
    sk.free(signals)


def test_at_a_peer(world):
    signals = sk.signals(4, name="theirs")
    peer = (world.rank + 1) % world.n_ranks
    sk.bind(wait_at_the_peer, 1, 1, (signals, peer, 9), timeout=LIMIT)()
    (record,) = timed_out(world.synchronize).records
    assert (record.signal, record.index, record.owner) == ("theirs", (2,), peer)
    assert (record.compare, record.expected, record.seen) == ("eq", 9, 0)
    world.host_barrier()
    sk.free(signals)


@pytest.mark.parametrize(
    ("kernel", "primitive", "threads", "n_records"),
    [
        (warp_waits, "wait_warp", 32, 8),
        (block_waits, "wait_block", 64, 1),
        (until, "signal_wait_until", 1, 1),
    ],
    ids=["warp", "block", "until"],
)
@pytest.mark.parametrize("dtype", ["uint64", "int64"])
def test_primitives(world, kernel, primitive, threads, n_records, dtype):
    signals = sk.zeros(8, dtype, name="words")
    step = sk.bind(kernel, 1, threads, (signals, 1, 3), timeout=LIMIT)
    step()
    records = timed_out(world.stream.synchronize).records
    assert len(records) == n_records and {r.primitive for r in records} == {primitive}
    signals.fill(3)
    step()
    world.stream.synchronize()
    world.host_barrier()
    sk.free(signals)


def test_barrier_of_ranks(world):
    arrivals, epoch = sk.signals(world.n_ranks, name="arrivals"), world.xp.zeros(1, "uint64")
    last = world.n_ranks - 1
    step = sk.bind(barrier_without_the_last, 1, 64, (arrivals, epoch, last), timeout=LIMIT)
    world.host_barrier()
    step()
    if world.rank == last:
        world.synchronize()
    else:
        (record,) = timed_out(world.synchronize).records
        assert record.primitive == "barrier_all_block"
        assert (record.signal, record.index, record.seen) == ("arrivals", (last,), 0)
    world.host_barrier()
    sk.free(arrivals)


def test_grid_barrier(world):
    state = world.xp.zeros(2, "uint64")
    sk.bind(grid_barrier_without, 6, 64, (state, 2), co_resident=True, timeout=LIMIT)()
    records = timed_out(world.synchronize).records
    assert {r.block[0] for r in records} == {0, 1, 3, 4, 5}
    assert {(r.primitive, r.expected, r.seen, r.signal) for r in records} == {("grid_barrier", 6, 5, None)}
    state.fill(0)
    sk.bind(grid_barrier_without, 6, 64, (state, -1), co_resident=True, timeout=LIMIT)()
    world.synchronize()


def test_all_waits_end_at_once(world):
    signals, done = sk.signals(40), world.xp.zeros(40, "int64")
    step = sk.bind(waits_in_a_row, 40, 32, (signals, 1000, done), timeout=LIMIT)
    start = time.monotonic()
    for _ in range(5):  # those behind it on the stream, too
        step()
    error = timed_out(world.synchronize)
    assert time.monotonic() - start < 4 * LIMIT
    assert {r.block[0] for r in error.records} == set(range(40))
    assert all(r.expected == 1 for r in error.records), "waits that only began afterwards are not recorded"
    assert world.asnumpy(done).tolist() == [1] * 40
    world.host_barrier()
    sk.free(signals)


def test_no_signal_is_sent_after_a_wait_has_expired(world):
    signals, told = sk.signals(1), sk.signals(1)
    step = sk.bind(tell_after_a_wait, 1, 1, (signals, told), timeout=LIMIT)
    step()
    timed_out(world.synchronize)
    assert world.asnumpy(told)[0] == 0
    signals.fill(1)
    step()
    assert world.asnumpy(told)[0] == 1
    world.host_barrier()
    sk.free(signals)
    sk.free(told)


@pytest.mark.parametrize("protocol", LINES)
def test_lines_that_do_not_come(world, protocol):
    """The last elements are not sent: who receives says which words it waits for, passes nothing on and packs
    nothing. Then, with the next flags and other data, all of it works: also where lines come late."""
    kernel, words_of, primitive = LINES[protocol]
    n, n_sent = 5000, 3000
    left, right = (world.rank - 1) % world.n_ranks, (world.rank + 1) % world.n_ranks
    n_words, n_whole = words_of(4 * n), words_of(4 * n_sent)
    x = world.xp.empty(n, "float32")
    out, lines = world.xp.zeros((2, n), "float32"), sk.zeros((3, n_words), "uint64", name="lines")

    def data(rank, flag):
        return np.arange(n, dtype="float32") + 10000 * flag + rank

    def run(n_sent, flag, seconds=0.0):
        x.set(data(world.rank, flag))
        args = (x.view("uint64"), n_sent // 2, out.view("uint64"), lines, n_words, flag, right)
        step = sk.bind(kernel, 3, 64, args, co_resident=True, timeout=LIMIT)
        world.synchronize()
        world.host_barrier()
        time.sleep(seconds)
        step()

    def check(row, n, flag):
        """Row `row` of `out` has the first n elements that the rank to the left sent with the flag."""
        found, wanted = world.asnumpy(out)[row, :n], data(left, flag)[:n]
        wrong = np.flatnonzero(found != wanted)
        if wrong.size:
            some, words = wrong[:8], world.asnumpy(lines)[min(row, 1), : words_of(4 * n)]
            flags = words[15::16] if protocol == "ll128" else words >> 32
            pytest.fail(
                f"rank {world.rank}, call {flag}, out[{row}]: {wrong.size} of {n} elements wrong, {some} to "
                f"{wrong[-1]}: {found[some]}, not {wanted[some]}; flags of the lines (with their number): "
                f"{np.unique(flags, return_counts=True)}; first words: {[hex(word) for word in words[:18]]}"
            )

    run(n_sent, 7)
    records = timed_out(world.synchronize).records
    assert {r.block[0] for r in records} == {1, 2}
    for r in records:
        assert (r.kernel, r.primitive) == ("lines_to_the_right", primitive)
        assert (r.signal, r.owner, r.compare) == ("lines", world.rank, "eq")
        assert (r.expected, r.seen) == (7, 0)
        half, word = r.index
        assert half == r.block[0] - 1
        assert word >= n_whole or half == 1, f"{r}: the other rank began more than {LIMIT} s later"
        assert protocol == "ll" or word % 16 == 15
    there = world.asnumpy(lines)
    assert there[0, :n_whole].any() and not there[1:].any()
    check(0, n_sent, 7)

    for flag in range(8, 28):
        run(n, flag, LIMIT / 10 if (flag + world.rank) % 2 else 0.0)
        world.synchronize()
        there = world.asnumpy(lines)
        np.testing.assert_array_equal(there[1], there[0])
        assert there[2].any()
        check(0, n, flag)
        check(1, n, flag)
    world.host_barrier()
    sk.free(lines)


def raises_by(world, way, step, x):
    if way == "next launch":
        time.sleep(4 * LIMIT)
        step()
    elif way == "asnumpy":
        world.asnumpy(x)
    elif way == "stream":
        world.stream.synchronize()
    elif way == "zeros":
        sk.zeros(3)
    else:
        world.synchronize()


@pytest.mark.parametrize("way", ["next launch", "asnumpy", "stream", "synchronize", "zeros"])
def test_ways_to_hear_of_it(world, way):
    signals, x = sk.signals(1, name="never"), world.xp.zeros(32, "int64")
    other = sk.bind(set_to, 1, 32, (x, 7))  # has no wait, and no limit
    sk.bind(block_waits, 1, 32, (signals, 0, 1), timeout=LIMIT)()
    error = timed_out(raises_by, world, way, other, x)
    assert error.records[0].signal == "never"
    other()
    assert (world.asnumpy(x) == 7).all()
    world.host_barrier()
    sk.free(signals)


def test_different_limits_of_one_kernel(world):
    signals = sk.signals(1)
    patient = sk.bind(block_waits, 1, 32, (signals, 0, 1), timeout=100.0)
    hasty = sk.bind(block_waits, 1, 32, (signals, 0, 1), timeout=LIMIT)
    # Loading it later would wait for the kernel that waits for it.
    release = sk.bind(set_to, 1, 1, (signals, 1), stream=world.xp.cuda.Stream(non_blocking=True))
    hasty()
    timed_out(world.synchronize)
    patient()
    time.sleep(3 * LIMIT)
    assert not world.stream.done
    release()
    world.synchronize()
    world.host_barrier()
    sk.free(signals)


def test_in_a_graph(world):
    signals = sk.signals(1)
    step = sk.bind(block_waits, 1, 32, (signals, 0, 1), timeout=LIMIT)
    world.stream.begin_capture()
    step()
    graph = world.stream.end_capture()
    for _ in range(2):
        graph.launch(world.stream)
        assert len(timed_out(world.synchronize).records) == 1
    signals.fill(1)
    graph.launch(world.stream)
    world.synchronize()
    world.host_barrier()
    sk.free(signals)


def test_a_missing_notify_in_a_queue(world):
    """Rank 0 forgets to say that it has read item 5: the rank that sends to it waits for this, and rank 0
    for its next item. On all other ranks the operation succeeds."""
    n_slots, n = 4, 20
    slots = sk.zeros((n_slots, 16), "float32")
    sender = (world.rank - 1) % world.n_ranks
    receiver = (world.rank + 1) % world.n_ranks
    inputs = world.xp.arange(n * 16, dtype="float32").reshape(n, 16) + 1000 * world.rank

    def run(forget):
        full, empty = sk.signals(n_slots, name="full"), sk.signals(n_slots, name="empty")
        outputs = world.xp.zeros((n, 16), "float32")
        args = (inputs, outputs, slots, full, empty, receiver, sender, forget if world.rank == 0 else -1)
        step = sk.bind(forgetful_queue, 2, 64, args, co_resident=True, timeout=2 * LIMIT)
        world.host_barrier()
        step()
        try:
            world.synchronize()
            expected = inputs.get() - 1000 * world.rank + 1000 * sender
            np.testing.assert_array_equal(world.asnumpy(outputs), expected)
            return []
        except sk.SignalTimeout as error:
            return error.records
        finally:
            world.host_barrier()
            sk.free(full)
            sk.free(empty)

    records = run(forget=5)
    assert bool(records) == (world.rank in (0, world.n_ranks - 1))
    waits = {(r.block[0], r.signal, r.index, r.expected, r.seen) for r in records}
    # Item 9 takes the slot that item 5 had: round 2 needs the news that round 1 was read.
    expected = set()
    if world.rank == world.n_ranks - 1:
        expected.add((0, "empty", (1,), 2, 1))
    if world.rank == 0:
        expected.add((1, "full", (1,), 3, 2))
    assert waits == expected
    assert run(forget=-1) == []
    sk.free(slots)


@with_variable
def test_variable_numbas_own_launch(world):
    signals = sk.signals(2, name="plain")
    block_waits[3, 32, world.stream](signals, 1, 5)
    error = timed_out(world.synchronize)
    assert {(r.kernel, r.signal, r.index) for r in error.records} == {("block_waits", "plain", (1,))}
    assert len(error.records) == 3
    signals.fill(5)
    block_waits[3, 32, world.stream](signals, 1, 5)
    world.synchronize()
    world.host_barrier()
    sk.free(signals)


@with_variable
def test_variable_barrier_names_the_rank_that_has_not_come(world):
    if world.n_ranks == 1:
        pytest.skip("needs several ranks")
    late = world.n_ranks - 1
    for _ in range(3):
        world.barrier()
    world.synchronize()
    world.comm.barrier()
    if world.rank == late:
        time.sleep(2 * timeouts.default())
        world.barrier()
        world.synchronize()  # all others have been there
    else:
        world.barrier()
        error = timed_out(world.stream.synchronize)
        assert [(r.signal, r.index, r.kernel) for r in error.records] == [
            ("World.barrier", (late,), "barrier_kernel")
        ]
        assert f"rank {late} has not come to World.barrier" in str(error)
    world.comm.barrier()
    for _ in range(10):  # in step again
        world.barrier()
    world.synchronize()


@with_variable
def test_variable_barrier_in_graphs_and_on_other_streams(world):
    x = sk.zeros(world.n_ranks, "int64", name="x")
    other = world.xp.cuda.Stream(non_blocking=True)
    for repeat in range(20):
        sk.peer_view(x, (world.rank + 1) % world.n_ranks)[world.rank] = repeat
        world.barrier()
        assert world.asnumpy(x)[(world.rank - 1) % world.n_ranks] == repeat
        world.barrier()
        world.stream.synchronize()
        world.barrier(stream=other)
        other.synchronize()
    world.stream.begin_capture()
    world.barrier()
    graph = world.stream.end_capture()
    for _ in range(5):
        graph.launch(world.stream)
    world.synchronize()
    world.host_barrier()
    sk.free(x)
