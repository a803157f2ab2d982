"""``explore``: random schedules until one fails, and all of them, each once, for small programs."""

import numpy as np
import pytest
from emulated import spmd, untyped
from fast import examples, slow
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda, int32

import shmemkit as sk
from shmemkit import device as d
from shmemkit.collectives.queue import Queue
from shmemkit.emu import DeadlockError, RaceError
from shmemkit.emu.dpor import Explorer, Redundant

SET, ADD = d.SignalOp.SIGNAL_SET, d.SignalOp.SIGNAL_ADD


def every_schedule(main, n_ranks, **options):
    return sk.emu.explore(lambda: main(sk.init()), n_ranks, exhaustive=True, heap_size=1 << 14, **options)


def proven(main, n_ranks, **options):
    """-> how many schedules differ"""
    found = every_schedule(main, n_ranks, **options)
    if found.failure:
        raise found.failure
    assert found.finished and found.exhaustive and str(found).endswith("no deadlock, no race, no failure")
    return found.runs


def failure_of(main, n_ranks, **options):
    """The failure of an exhaustive exploration, which happens again with its schedule."""
    found = every_schedule(main, n_ranks, **options)
    assert found.failure is not None and not found.finished
    for _ in range(2):
        with pytest.raises(type(found.failure)) as caught:
            spmd(n_ranks, main, heap_size=1 << 14, delivery=found.delivery, choice=found.choice)
        assert str(caught.value) == str(found.failure)
    return found.failure


# ---- protocols, proven for a size


def through_a_queue(world, n_slots=2, n_items=3):
    queue = Queue(world, n_slots, 1, n_producers=1, n_consumers=1, block=1)
    x = np.arange(n_items, dtype="float32").reshape(-1, 1)
    for round in range(2):
        assert (queue(x + 10 * world.rank + round) == x + 10 * (1 - world.rank) + round).all()


@pytest.mark.parametrize("n_slots, n_items", [(1, 2), *slow((2, 3), (3, 3))])
def test_queue(n_slots, n_items):
    assert proven(lambda world: through_a_queue(world, n_slots, n_items), 2) > 1


def send_stores(gathered, part, arrived, peer):
    d.symm_at(gathered, peer)[d.rank()] = part[0]
    d.notify(arrived[d.rank() :], peer, 1)


def send_put(gathered, part, arrived, peer):
    d.put_nbi(gathered[d.rank() :], part, peer)
    d.fence()
    d.signal_op(arrived[d.rank() :], 1, SET, peer)


def send_put_signal(gathered, part, arrived, peer):
    d.put_signal_nbi(gathered[d.rank() :], part, arrived[d.rank() :], 1, SET, peer)


def send_and_add(gathered, part, arrived, peer):
    """The sum of all signals is in the last word."""
    d.put_signal_nbi(gathered[d.rank() :], part, arrived[d.num_ranks() :], 1, ADD, peer)


def send_without_fence(gathered, part, arrived, peer):
    d.put_nbi(gathered[d.rank() :], part, peer)
    d.signal_op(arrived[d.rank() :], 1, SET, peer)


def all_gather(send, polls):
    """One-shot: each rank sends its part to all, and waits for, or polls, all signals."""
    adds, send = send is send_and_add, cuda.jit(device=True)(send)

    @cuda.jit
    def kernel(gathered, part, arrived, out):
        n = d.num_ranks()
        for i in range(n):
            send(gathered, part, arrived, (d.rank() + i) % n)
        signals, value = (arrived[n:], n) if adds else (arrived[:n], 1)
        if not polls:
            d.wait(signals, len(signals), "sys", "acquire", value)
        for i in range(len(signals) if polls else 0):
            while d.ld_acquire(signals, i) != value:
                pass
        for i in range(n):
            out[i] = gathered[i]

    def main(world):
        n, out = world.n_ranks, np.zeros(world.n_ranks, "int32")
        kernel[1, 1](sk.zeros(n, "int32"), sk.full(1, world.rank + 1, "int32"), sk.signals(n + 1), out)
        assert out.tolist() == list(range(1, n + 1))

    return main


@pytest.mark.each_value
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("delivery", ["eager", "unordered"])
@pytest.mark.parametrize("send", [send_stores, send_put, send_put_signal, send_and_add])
def test_all_gather(send, delivery, n):
    """Sends to different words commute, and waits do not matter: few schedules differ."""
    runs = proven(all_gather(send, polls=False), n, deliveries=delivery)
    assert runs == 1 if send is not send_put or delivery == "eager" else runs <= 40


def test_polls_come_before_or_after_what_they_look_for():
    """Each rank sees the signal of the other at the first look, or at a later one; not both at a later one,
    if signals are delivered at once."""
    assert 3 <= proven(all_gather(send_put_signal, polls=True), 2, deliveries="eager") <= 7
    assert 9 <= proven(all_gather(send_put_signal, polls=True), 2) <= 32


# ---- planted bugs


def test_a_missing_fence():
    error = failure_of(all_gather(send_without_fence, polls=False), 2)
    assert isinstance(error, RaceError) and "fence() between them, or put_signal" in str(error)


def exchange(flag_of, words_of):
    """Rounds in which each rank stores data and flag of the round in one word, and polls for the other's."""
    flag_of, words_of = map(cuda.jit(device=True), (flag_of, words_of))

    @cuda.jit
    def kernel(words, out):
        for r in range(3):
            here = words_of(r)
            d.st_release(d.symm_at(words, 1 - d.rank()), here, flag_of(r) << 32 | r)
            word = d.ld_acquire(words, here)
            while word >> 32 != flag_of(r):
                word = d.ld_acquire(words, here)
            out[r] = word & 0xFFFFFFFF

    def main(world):
        out = np.zeros(3, "int64")
        kernel[1, 1](sk.zeros(2, "int64"), out)
        world.synchronize()
        assert out.tolist() == [0, 1, 2]

    return main


def test_flags_of_a_round():
    assert proven(exchange(lambda r: r + 1, lambda r: r % 2), 2) > 2
    same_flag = failure_of(exchange(lambda r: 1, lambda r: r % 2), 2)
    assert isinstance(same_flag, AssertionError)
    one_word = failure_of(exchange(lambda r: r + 1, lambda r: 0), 2)
    assert isinstance(one_word, DeadlockError) and "polled in a loop" in str(one_word)


@pytest.mark.parametrize("how", ["load and store", "atomic", "lock", "lock and sleep"])
def test_a_counter(how):
    @cuda.jit
    def kernel(counter, lock):
        there = d.symm_at(counter, 0)
        if how == "atomic":
            d.atomic_fetch_add(counter, 1, 0)
            return
        while "lock" in how and d.atomic_compare_swap(lock, 0, 1, 0) != 0:
            if "sleep" in how:
                cuda.nanosleep(1)
        d.st_release(there, 0, d.ld_acquire(there, 0) + 1)
        if "lock" in how:
            d.atomic_swap(lock, 0, 0)

    def main(world):
        counter = sk.signals(1)
        kernel[1, 1, world.stream](counter, sk.signals(1))
        world.barrier()
        assert world.rank or counter[0] == world.n_ranks

    if how == "load and store":
        assert isinstance(failure_of(main, 2), AssertionError)
        assert isinstance(failure_of(main, 3), AssertionError)
    else:
        proven(main, 2)


def test_a_deadlock_of_locks_taken_in_different_orders():
    def main_of(first):
        first = cuda.jit(device=True)(first)

        @cuda.jit
        def kernel(locks):
            one = np.int64(first(d.rank()))
            for i in (one, 1 - one):
                while d.atomic_compare_swap(locks[i:], 0, 1, 0) != 0:
                    pass
            for i in (0, 1):
                d.atomic_swap(locks[i:], 0, 0)

        return lambda world: kernel[1, 1](sk.signals(2))

    assert proven(main_of(lambda rank: 0), 2) > 1
    assert isinstance(failure_of(main_of(lambda rank: rank), 2), DeadlockError)


def test_messages_that_nobody_waits_for_arrive_in_any_order():
    @cuda.jit
    def kernel(flag):
        if d.rank() < 2:
            d.atomic_set(flag, d.rank() + 1, 2)
        else:
            d.wait(flag, 1, "sys", "acquire", 2)  # after the one of rank 0 it may be too late

    def main(world):
        kernel[1, 1](sk.signals(1))
        world.synchronize()

    for delivery in ("eager", "ordered", "unordered"):
        assert isinstance(failure_of(main, 3, deliveries=delivery), DeadlockError)


def test_a_wait_and_a_spin_loop_for_what_nobody_writes():
    @cuda.jit
    def kernel(word):
        if cuda.blockIdx.x == 0:
            d.wait(word, 1, "gpu", "acquire", 1)
        while d.ld_acquire(word, 0, "gpu") == 0:
            pass

    assert isinstance(failure_of(lambda world: kernel[2, 1](sk.signals(1)), 1), DeadlockError)


@pytest.mark.parametrize("polls", [False, True])
def test_an_atomic_that_changes_nothing_tells_nobody(polls):
    """Whoever sees the flag knows that one of the two has set it, not which."""

    @cuda.jit
    def kernel(data, flag, out):
        block = cuda.blockIdx.x
        if block < 2:
            data[block] = 1
            cuda.threadfence()
            cuda.atomic.exch(flag, 0, 1)
            return
        if not polls:
            d.wait(flag, 1, "gpu", "acquire", 1)
        while d.ld_acquire(flag, 0, "gpu") == 0:
            pass
        out[0] = data[0] + data[1]

    main = lambda world: kernel[3, 1](sk.zeros(2), sk.signals(1), np.zeros(1))  # noqa: E731
    assert {race.array for race in failure_of(main, 1).races} == {"data"}


@pytest.mark.parametrize("where", ["variable", "tuple", "local", "global", "atomic", "block mate"])
def test_a_loop_that_gives_up(where):
    """It counts its polls: one that has polled before is not where it was."""

    @cuda.jit
    def kernel(word, out):
        if d.rank() == 1:
            if cuda.threadIdx.x == 0:
                d.st_release(d.symm_at(word, 0), 0, 1)
            return
        polls, pair, local = 0, (0, 0), cuda.local.array(1, int32)
        shared = cuda.shared.array(2, int32)
        local[0] = shared[cuda.threadIdx.x] = 0
        cuda.syncthreads()
        while max(polls, pair[0], local[0], out[1]) < 6:
            if where == "block mate":
                if cuda.threadIdx.x == 0:
                    shared[0] = d.ld_acquire(word, 0)
                else:
                    pair = pair[0] + 1, 0
                    shared[1] = pair[0] == 6
                cuda.syncthreads()
                seen, gives_up = shared[0], shared[1]
                cuda.syncthreads()
                polls = 6 if gives_up else 0
            else:
                seen = d.ld_acquire(word, 0)
            if seen:
                return
            if where == "variable":
                polls += 1
            elif where == "tuple":
                pair = pair[0] + 1, 0
            elif where == "local":
                local[0] += 1
            elif where == "global":
                out[1] += 1
            elif where == "atomic" and d.atomic_fetch_add(word[1:], 1, 0) == 5:
                break
        if cuda.threadIdx.x == 0:
            out[0] = 1

    def main(world):
        out = np.zeros(2, "int32")
        kernel[1, 2 if where == "block mate" else 1, world.stream](sk.signals(2), out)
        world.barrier()
        assert not out[0], "gave up"

    assert "gave up" in str(failure_of(main, 2))


def test_a_wait_may_be_over_before_it_cannot_be():
    """The word is 1, then 2, then 1 again."""
    seen = set()

    @cuda.jit
    def kernel(words, out):
        if d.rank() == 0:
            for value in (1, 2, 1):
                d.st_release(d.symm_at(words, 1), 0, value)
        else:
            for _ in range(5):
                d.ld_acquire(words, 1)
            d.wait(words, 1, "sys", "acquire", 1, "eq")
            out[0] = d.ld_acquire(words, 0)

    def main(world):
        out = np.zeros(1, "int64")
        kernel[1, 1](sk.signals(2), out)
        seen.add(int(out[0])) if world.rank == 1 else None

    proven(main, 2)
    assert seen == {1, 2}


@pytest.mark.slow
def test_what_others_do_while_a_loop_has_looked_too_early():
    """A loop that is not followed any further may not hide what comes after."""
    outcomes = set()

    @cuda.jit
    def kernel(words, out):
        me = d.rank()
        if me < 2:
            out[0] = d.atomic_compare_swap(words, 0, 1, 2)
            d.signal_op(words[1:], 1, ADD, 2)
        else:
            while d.ld_acquire(words, 1) == 0:
                pass
            out[0] = d.atomic_compare_swap(words, 0, 1, 2)

    def main(world):
        out = np.zeros(1, "int64")
        kernel[1, 1](sk.signals(2), out)
        world.synchronize()
        results = world.host_allgather(int(out[0]))
        outcomes.add(tuple(results))

    proven(main, 3)
    found, outcomes = outcomes, set()
    for seed in range(200):
        spmd(3, main, seed=seed, delivery="unordered", heap_size=1 << 14)
    assert found == outcomes == {(0, 1, 1), (1, 0, 1)}


def test_what_a_word_was_before_is_seen():
    """The same instruction may read a word twice before it is written."""
    seen = set()

    @cuda.jit
    def kernel(word, out):
        for i in range(3):
            if d.rank() == 0:
                out[i] = d.ld_acquire(word, 0)
            elif i == 0:
                d.st_release(d.symm_at(word, 0), 0, 1)

    def main(world):
        out = np.zeros(3, "int32")
        kernel[1, 1](sk.zeros(1, "int32"), out)
        seen.add(tuple(out.tolist())) if world.rank == 0 else None

    assert proven(main, 2) == 4
    assert seen == {(0, 0, 0), (0, 0, 1), (0, 1, 1), (1, 1, 1)}


# ---- against a definition: the schedules that differ, among all of them


class Everything(Explorer):
    """Every schedule, however alike they are."""

    def _sleep(self):
        return {}

    def polled_in_vain(self):
        pass

    def _choose(self, enabled):
        chosen = super()._choose(enabled)
        self.states[len(self.steps)].backtrack.update(enabled)
        return chosen


def program(steps):
    """Rank r does ``steps[r]``: (what, word, rank of the word, value)."""

    @cuda.jit
    def kernel(words, out):
        for i, (what, word, pe, value) in enumerate(steps[d.rank()]):
            there = d.symm_at(words, pe)
            if what == "store":
                d.st_release(there, word, value)
            elif what == "load":
                out[i] = d.ld_acquire(there, word)
            elif what == "fetch":
                out[i] = d.atomic_fetch_add(words[word:], value, pe)
            elif what == "cas":
                out[i] = d.atomic_compare_swap(words[word:], 0, value, pe)
            elif what == "add":
                d.red_release(there, word, value)
            elif what == "wait":
                d.wait(words[word:], 1, "sys", "acquire", value)
            elif what == "spin":
                while d.ld_acquire(words, word) < value:
                    pass
            elif what in ("set signal", "add signal"):
                d.signal_op(words[word:], value, SET if what == "set signal" else ADD, pe)
            else:
                getattr(d, what)()
        d.quiet()

    def main(world):
        words, out = sk.signals(2), np.full(4, -1, "int64")
        kernel[1, 1](words, out)
        world.synchronize()
        return out.tolist()

    return main


def runs_of(explorer, main, n, delivery, limit):
    """-> what the runs return, which steps come before which in each, and whether all were made; None after a
    deadlock"""
    results, orders, n_runs, more = set(), [], 0, True
    while more and n_runs < limit:
        n_runs += 1
        try:
            try:
                results.add(str(spmd(n, main, delivery=delivery, choice=explorer, heap_size=1 << 14)))
            except RaceError:  # stores of one word by several ranks
                results.add("race")
            steps, names = explorer.steps, [(s.process, s.count) for s in explorer.steps]
            orders.append(
                frozenset(
                    (names[i], frozenset(names[j] for j in range(i) if step.past >> j & 1))
                    for i, step in enumerate(steps)
                )
            )
        except Redundant:
            pass
        except DeadlockError:
            return None
        more = explorer.advance()
    return results, orders, not more


SENDS = ["store", "load", "fetch", "cas", "add", "set signal", "add signal", "fence", "quiet"]


@pytest.mark.slow
@untyped
@examples(12)
@given(st.data(), st.integers(2, 3), st.sampled_from(["eager", "ordered", "unordered"]))
def test_each_schedule_that_differs_is_run_once(data, n, delivery):
    kinds = data.draw(st.lists(st.sampled_from(SENDS), min_size=1, max_size=3, unique=True))
    words, ranks, values = st.integers(0, 1), st.sampled_from([0, 0, 0, 1]), st.integers(1, 2)
    step = st.tuples(st.sampled_from(kinds), words, ranks, values)
    steps = [data.draw(st.lists(step, min_size=1, max_size=5 - n)) for _ in range(n)]
    waits = data.draw(st.sampled_from([None, None, "wait", "spin"]))
    if waits:
        steps[0].insert(data.draw(st.integers(0, len(steps[0]))), (waits, data.draw(words), 0, 1))
    main = program(steps)
    everything = runs_of(Everything(), main, n, delivery, 100)
    if everything is not None and not everything[2]:
        return  # too many
    found = runs_of(Explorer(), main, n, delivery, 100)
    assert (everything is None) == (found is None)
    if found is not None:
        assert found[0] == everything[0]
        orders, all_orders = set(found[1]), set(everything[1])
        assert orders <= all_orders and len(orders) == len(found[1]) and found[2]
        # A run does not always record that a fence orders the arrivals of messages.
        assert orders == all_orders or waits == "spin" or (delivery == "unordered" and "fence" in kinds)


# ---- random schedules


def racy_counter(world):
    @cuda.jit
    def kernel(counter):
        there = d.symm_at(counter, 0)
        d.st_release(there, 0, d.ld_acquire(there, 0) + 1)

    counter = sk.signals(1)
    kernel[1, 1, world.stream](counter)
    world.barrier()
    assert world.rank or counter[0] == world.n_ranks


def test_random_schedules_until_one_fails():
    found = sk.emu.explore(lambda: racy_counter(sk.init()), 2)
    assert isinstance(found.failure, AssertionError) and not (found.finished or found.exhaustive)
    assert str(found).startswith(
        f"explored {found.runs} schedules: AssertionError in the last one (seed {found.seed}"
    )
    deliveries = ("eager", "ordered", "unordered")
    assert found.runs == 3 * found.seed + deliveries.index(found.delivery) + 1 > 1
    for seed in range(found.seed + 1):
        for delivery in deliveries[: deliveries.index(found.delivery) + 1 if seed == found.seed else 3]:
            if (seed, delivery) != (found.seed, found.delivery):
                spmd(2, racy_counter, seed=seed, delivery=delivery, races=True)
    with pytest.raises(AssertionError):
        spmd(2, racy_counter, seed=found.seed, delivery=found.delivery, races=True)


def test_random_schedules_of_a_correct_program(monkeypatch):
    calls = []
    monkeypatch.setenv("SHMEMKIT_SEED", "bad")  # no effect

    def main(scale):
        calls.append(scale)
        through_a_queue(sk.init())

    found = sk.emu.explore(main, 2, args=(3,), seeds=[5, 7], deliveries="unordered", heap_size=1 << 16)
    assert (found.failure, found.runs, found.finished, calls) == (None, 2, True, [3] * 4)
    assert (
        str(found)
        == "explored 2 schedules: no deadlock, no race, no failure; other seeds are other schedules"
    )


def test_races_are_looked_for_unless_told_otherwise():
    main = all_gather(send_without_fence, polls=False)
    run = dict(n_ranks=2, seeds=range(1), deliveries="eager")
    assert isinstance(sk.emu.explore(lambda: main(sk.init()), **run).failure, RaceError)
    assert sk.emu.explore(lambda: main(sk.init()), **run, races=False).failure is None


# ---- bounds and errors


def test_as_many_schedules_as_allowed():
    found = every_schedule(through_a_queue, 2, max_runs=3)
    assert (found.runs, found.finished, found.failure) == (3, False, None)
    assert str(found) == "explored 3 schedules, no failure among them, but these are not all: raise max_runs"
    found = every_schedule(through_a_queue, 2, max_runs=20)
    assert found.runs + found.repeats == 20 and f"(and {found.repeats} that repeat one of them)" in str(found)


def test_a_loop_that_counts_its_polls_forever():
    @cuda.jit
    def kernel(word):
        polls = 0
        while d.ld_acquire(word, 0) == 0:
            polls += 1

    with pytest.raises(RuntimeError, match="a run has more than 500 steps"):
        spmd(2, lambda world: kernel[1, 1](sk.signals(1)), choice=Explorer(max_steps=500))


@pytest.mark.parametrize(
    "wrong, message",
    [
        (dict(n_ranks=0), "n_ranks is 0; it must be 1 to 1024"),
        (dict(local_size=3), "local_size is 3; it must be a divisor of n_ranks"),
        (
            dict(deliveries="late"),
            "delivery is 'late'; it must be 'eager', 'ordered', 'unordered', or as 'node 1 late'",
        ),
        (dict(seeds=["x"]), "seed is 'x'; it must be an integer"),
        (dict(exhaustive=True, races=False), "exhaustive=True and races=False"),
    ],
)
def test_wrong_arguments(wrong, message):
    with pytest.raises((TypeError, ValueError), match=message):
        sk.emu.explore(lambda: 1 / 0, **{"n_ranks": 2, **wrong})


def test_not_inside_of_a_run():
    with pytest.raises(RuntimeError, match="cannot be called by a program that they run"):
        spmd(2, lambda world: sk.emu.explore(racy_counter, 2))
