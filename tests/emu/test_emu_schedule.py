"""Schedules: a seed repeats its run bit for bit, the environment sets what the arguments do, and messages
arrive when, and in the order, that their delivery promises."""

import os
import re
import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from emulated import spmd, untyped
from fast import examples
from greenlet import getcurrent
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda

import shmemkit as sk
from shmemkit import device as d
from shmemkit.emu import EmulatorError, RaceError

SET, ADD = d.SignalOp.SIGNAL_SET, d.SignalOp.SIGNAL_ADD
DELIVERIES = ("eager", "ordered", "unordered")
SETTINGS = ("SHMEMKIT_SEED", "SHMEMKIT_DELIVERY", "SHMEMKIT_RACES")
each_delivery = pytest.mark.parametrize("delivery", DELIVERIES)


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)


@untyped
def run(*actions, **options):
    """Rank r calls ``actions[r](x, src)`` in a kernel of one thread: x are zeros, src sevens, both symmetric
    and uint64. -> what each returned; then x of each after the kernel; and after a barrier"""
    results = [None] * len(actions)

    @cuda.jit
    def kernel(x, src):
        results[d.rank()] = actions[d.rank()](x, src)

    def main(world):
        x, src = sk.signals(16), sk.full(1, 7, "uint64")
        kernel[1, 1, world.stream](x, src)
        world.host_barrier()
        after_kernel = x.tolist()
        world.barrier()
        return after_kernel, world.asnumpy(x).tolist()

    return results, *zip(*spmd(len(actions), main, **options), strict=True)


def nothing(x, src):
    pass


# ---- the same run


@untyped
def events(**options):
    """What happens in a kernel with a lock, a ticket, messages and polls, in order. It has no race."""
    order = []

    @cuda.jit
    def kernel(lock, ticket, box, src, arrived):
        me, n, t = d.rank(), d.num_ranks(), cuda.grid(1)
        while cuda.atomic.cas(lock, 0, 0, 1) != 0:
            order.append((me, t, "finds it locked"))
        cuda.nanosleep(1)
        cuda.atomic.exch(lock, 0, 0)
        d.put_signal_nbi(box[t:], src[t : t + 1], arrived[t:], 1, ADD, (me + 1) % n)
        order.append((me, t, "ticket", int(d.atomic_fetch_add(ticket, 1, 0))))
        cuda.syncthreads()
        d.signal_op(arrived[t:], 1, ADD, (me + 2) % n)
        while d.ld_acquire(arrived, t) < 2:
            order.append((me, t, "polls", int(d.ld_acquire(arrived, t))))
        d.st_release(arrived, t, 9)
        order.append((me, t, "has", int(box[t])))

    def main(world):
        box, src = sk.zeros(6, "int64"), sk.full(6, world.rank, "int64")
        kernel[2, 3](sk.zeros(1, "int32"), sk.zeros(1, "int32"), box, src, sk.signals(6))

    spmd(3, main, **options)
    return order


@pytest.mark.every(3)
@each_delivery
def test_the_same_seed_is_the_same_run(delivery):
    runs = {seed: events(delivery=delivery, seed=seed) for seed in (None, *range(4))}
    for seed, run in runs.items():
        assert {e[3] for e in run if e[2] == "ticket"} == set(range(18))
        assert {(e[0] - e[3]) % 3 for e in run if e[2] == "has"} == {1}
        assert events(delivery=delivery, seed=seed) == run == events(delivery=delivery, seed=seed, races=True)
    assert len({tuple(run) for run in runs.values()}) == 5


@pytest.mark.slow
def test_it_is_the_same_in_another_process():
    """Where memory is elsewhere, and sets have another order."""
    program = "import test_emu_schedule as t; print(t.events(delivery='unordered', seed=3))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "1234"}
    written = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    assert written.strip() == str(events(delivery="unordered", seed=3))


# ---- arguments and environment


def test_the_environment_acts_as_the_arguments_and_arguments_win(monkeypatch):
    racy = [lambda x, src: d.put(x, src, 0)] * 2
    plain, other = events(), events(delivery="ordered", seed=2)
    both, one = events(delivery="unordered", seed=5), events(delivery="unordered", seed=4)
    monkeypatch.setenv("SHMEMKIT_SEED", "5")
    monkeypatch.setenv("SHMEMKIT_DELIVERY", "unordered")
    assert events() == both and events(seed=4) == one and events(delivery="ordered", seed=2) == other
    assert len({tuple(run) for run in (plain, other, both, one, events(delivery="ordered"))}) == 5
    run(*racy)
    monkeypatch.setenv("SHMEMKIT_RACES", "1")
    with pytest.raises(RaceError):
        run(*racy)
    run(*racy, races=False)
    for name, value in product(SETTINGS, ["bad", ""]):
        monkeypatch.setenv(name, value)
        assert events(delivery="ordered", seed=2, races=False) == other
    assert events() == plain


INTEGER, NAMES = "an integer( or None)?", "'eager', 'ordered', 'unordered', or as 'node 1 late'"


@pytest.mark.parametrize(
    "name, bad, allowed",
    [("SEED", "1.5", INTEGER), ("seed", "3", INTEGER), ("DELIVERY", "late", NAMES), ("delivery", "", NAMES)],
)
def test_what_is_not_allowed(monkeypatch, name, bad, allowed):
    monkeypatch.setenv(f"SHMEMKIT_{name}", bad)
    with pytest.raises(
        (TypeError, ValueError), match=f"^(SHMEMKIT_)?{name} is '{bad}'; it must be {allowed}$"
    ):
        spmd(2, lambda world: None, **({name: bad} if name.islower() else {}))


@pytest.mark.every(3)
@pytest.mark.parametrize("how", ["race", "deadlock", "error"] + ["host"] * (sys.version_info >= (3, 11)))
def test_the_last_line_of_a_failure_repeats_it(monkeypatch, how):
    def fail(x, src):
        third = d.atomic_fetch_add(x, 1, 0) == 2
        d.symm_at(src, 1)[0] = d.rank()
        if third and how == "deadlock":
            d.wait(src, 1, "sys", "acquire", 100 + d.rank())
        assert not third or how != "error", f"rank {d.rank()}"

    def report(**options):
        with pytest.raises((EmulatorError, ZeroDivisionError)) as caught:
            run(*[fail] * 4, **options)
            spmd(2, lambda world: 1 // world.rank, **options)
        return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])

    reports = set()
    for delivery, seed in product(DELIVERIES[1:], [None, 0, 1, 2]):
        text = report(delivery=delivery, seed=seed, races=how == "race")
        before, last = text.rsplit("\n", 1)
        arguments, settings = re.fullmatch(r"the same again: (.*) \((.*)\)", last).groups()
        assert report(**eval(f"dict({arguments})")) == text
        with monkeypatch.context() as environment:
            for setting in settings.split():
                environment.setenv(*setting.split("="))
            assert report() == text
        reports.add(before)
    assert len(reports) > 1 or how == "host"


# ---- when a message arrives


@each_delivery
def test_what_is_held_back_until_quiet(delivery):
    """All that returns no value. A non-blocking put or get reads its source only then."""

    def send(x, src):
        there, one, got, seen = d.symm_at(x, 1), src[:1], np.full(2, 3, "uint64"), []
        d.put(x, one, 1)
        d.put_signal(x[1:], one, x[12:], 1, SET, 1)
        d.p(x[2:], src[0], 1)
        d.put_nbi_block(x[3:], one, 1)
        d.put_signal_nbi(x[4:], one, x[13:], 1, SET, 1)
        d.signal_op(x[5:], 7, SET, 1)
        d.atomic_add(x[6:], 7, 1)
        d.atomic_set(x[7:], 7, 1)
        d.notify(x[8:], 1, 7)  # through memory, not a message
        d.atomic_fetch_add(x[9:], 7, 1)
        d.get(got[:1], x[10:], 1)
        d.get_nbi(got[1:], x[10:], 1)
        for do in (lambda: None, d.fence, d.quiet):
            do()
            seen.append([*there[:10].tolist(), *got.tolist()])
            src[0] = there[10] = 9
        return seen

    early, late = [0] * 8 + [7, 7, 0, 3], [7, 7, 7, 9, 9, 7, 7, 7, 7, 7, 0, 9]
    (seen, _), *_ = run(send, nothing, delivery=delivery)
    assert seen == ([[7] * 10 + [0, 0]] * 3 if delivery == "eager" else [early, early, late])


def test_a_node_whose_messages_are_late():
    """Those to and from it, the last one first; all others arrive at once, also within the node."""

    def to(*ranks):
        def send(x, src):
            seen = []
            for rank in ranks:
                for value in (7, 8):
                    d.put_nbi(x, np.full(1, value, "uint64"), rank)
                seen.append(int(d.g(x, rank)))
            d.quiet()
            return seen, [int(d.g(x, rank)) for rank in ranks]

        return send

    def sent(*actions, delivery="node 1 late"):
        return run(*actions, delivery=delivery, local_size=2)[0]

    assert sent(to(1, 2), nothing, nothing, nothing, nothing, nothing)[0] == ([8, 0], [8, 7])
    assert sent(nothing, nothing, to(3, 4), nothing, nothing, nothing)[2] == ([8, 0], [8, 7])
    assert sent(nothing, nothing, nothing, nothing, to(1), nothing)[4] == ([8], [8])
    with pytest.raises(ValueError, match="delivery is 'node 2 late', but the nodes are 0 to 1"):
        sent(*[nothing] * 4, delivery="node 2 late")
    with pytest.raises(ValueError, match="delivery is 'node late'; it must be .*, or as 'node 1 late'"):
        sent(nothing, nothing, delivery="node late")
    if not cuda.is_available():  # the World that was refused has ended: the emulator, too
        with pytest.raises(RuntimeError, match="kernel <lambda>: this rank has no World"):
            cuda.jit(lambda: None)[1, 1]()


@pytest.mark.parametrize(
    "delivery, expected", [("eager", (7, 8, 8)), ("ordered", (0, 0, 8)), ("unordered", (0, 0, 7))]
)
def test_what_completes_messages(delivery, expected):
    """Barriers do, but not: work that goes on, fence and quiet of another rank, the end of a kernel."""

    def both(x, src):
        me = d.rank()
        d.put_nbi(x, src[:1], 1) if me == 0 else None
        for i in range(1, 30):
            d.notify(x[1:], 1 - me, i)
            d.wait(x[1:], 1, "sys", "acquire", i)
            (d.fence(), d.quiet()) if me == 1 and i == 15 else None
        seen = int(d.symm_at(x, 1)[0])
        d.p(x, 8, 1) if me == 0 else None
        return seen

    (seen, _), (_, after_kernel), (_, after_barrier) = run(both, both, delivery=delivery)
    assert (seen, after_kernel[0], after_barrier[0]) == expected


@each_delivery
@pytest.mark.parametrize("ways", ["ww", "ws", "ss"])
def test_messages_arrive_when_only_waits_or_spin_loops_are_left(ways, delivery):
    def find(x):
        polls = 1
        if ways[d.rank()] == "w":
            d.wait(x, 1, "sys", "acquire", 7)
        while d.ld_acquire(x, 0) != 7:
            polls += 1
        return polls

    def ping(x, src):
        d.signal_op(x, 7, SET, 1)
        return find(x)

    def pong(x, src):
        polls = find(x)
        d.put_nbi(x, src, 0)
        return polls

    for seed in (None, *range(4)):
        for way, polls in zip(ways, run(ping, pong, delivery=delivery, seed=seed)[0], strict=True):
            assert polls == 1 if way == "w" else polls < 50 and (polls > 1 or delivery == "eager")


# ---- in which order, and all of them


@pytest.mark.parametrize(
    "script, targets, ordered, unordered",
    [
        ("012", "111", "012", "210"),
        ("0|12|3", "1111", "0123", "0213"),
        ("0123", "1122", "2301", "3210"),  # between PEs the last one first
        ("0|1|23", "1212", "1302", "1302"),  # a fence does not order them
        ("0.12", "122", "012", "021"),  # but quiet does
    ],
)
@untyped
def test_the_order_of_arrival(script, targets, ordered, unordered):
    """Messages 0, 1, ... of rank 0 to the ranks `targets`; | is a fence, . is quiet."""
    order = []

    @cuda.jit
    def kernel(x, one):
        t = cuda.threadIdx.x
        if d.rank() == 0 and t == 0:
            for step in script:
                if step.isdigit():
                    d.put_nbi(x[int(step) :], one, int(targets[int(step)]))
                else:
                    d.fence() if step == "|" else d.quiet()
        elif t < len(targets) and d.rank() == int(targets[t]):
            d.wait(x[t:], 1, "sys", "acquire", 1)
            order.append(str(t))

    for delivery in ("ordered", "unordered"):
        spmd(3, lambda world: kernel[1, 4](sk.signals(4), sk.full(1, 1, "uint64")), delivery=delivery)
    assert "".join(order) == ordered + unordered


@pytest.mark.every(3)
@pytest.mark.parametrize("script, unordered", [("123", {1, 2, 3}), ("12|3", {3}), ("1|23", {2, 3})])
def test_the_last_to_arrive_in_many_schedules(script, unordered):
    def send(x, src):
        for step in script:
            d.fence() if step == "|" else d.signal_op(x, int(step), SET, 1)

    for delivery in DELIVERIES:
        last = {run(send, nothing, delivery=delivery, seed=seed)[2][1][0] for seed in range(20)}
        assert last == (unordered if delivery == "unordered" else {3})


@each_delivery
@pytest.mark.parametrize("between", [None, d.fence, d.quiet])
def test_what_a_signal_says_about_data(between, delivery):
    """Its own data is there in every schedule, that of an earlier put after a fence or quiet."""

    def send(x, src):
        d.put_nbi(x, src[:1], 1)
        between() if between else None
        d.put_signal_nbi(x[1:], src[:1], x[2:], 1, ADD, 1)

    def receive(x, src):
        for _ in range(9):
            d.atomic_fetch_add(x[3:], 1, 1)
        early = int(x[2])
        d.wait(x[2:], 1, "sys", "acquire", 1)
        return early, int(x[0]), int(x[1])

    seen = [run(send, receive, delivery=delivery, seed=seed)[0][1] for seed in (None, *range(20))]
    early, data, own = map(set, zip(*seen, strict=True))
    free = (delivery, between) == ("unordered", None)
    assert own == {7} and data == ({0, 7} if free else {7})
    assert not free or (seen[0] == (0, 0, 7) and early == {0, 1})


@examples(200)
@given(st.data(), st.integers(2, 3), st.sampled_from(DELIVERIES), st.none() | st.integers(0, 1000))
def test_random_programs_end_as_they_may(data, n, delivery, seed):
    """All of the puts, signals and sums arrive; the last one to a word is one that no other must follow."""
    pes, kinds = st.integers(0, n - 1), st.sampled_from(["p", "put_signal", "set", "fence", "quiet"])
    steps = data.draw(st.lists(st.tuples(pes, kinds, pes, st.integers(0, 1)), max_size=15))

    def act(x, src):
        for i, (pe, kind, target, word) in enumerate(steps):
            if pe != d.rank():
                continue
            if kind == "p":
                d.p(x[word:], 1 << i, target)
            elif kind == "set":
                d.signal_op(x[word:], 1 << i, SET, target)
            elif kind == "put_signal":
                d.put_signal_nbi(x[word:], np.full(1, 1 << i, "uint64"), x[2:], 1 << i, ADD, target)
            else:
                getattr(d, kind)()

    def must_follow(j, i):
        """Message j, to the same word of the same PE, can only arrive after message i."""
        between = {kind for pe, kind, *_ in steps[i:j] if pe == steps[i][0] == steps[j][0]}
        return between & ({"fence", "quiet"} if delivery == "unordered" else {steps[i][1]})

    sent = [i for i, (_, kind, *_) in enumerate(steps) if kind not in ("fence", "quiet")]
    for target, x in enumerate(run(*[act] * n, delivery=delivery, seed=seed)[2]):
        assert x[2] == sum(1 << i for i in sent if steps[i][1:3] == ("put_signal", target))
        for word in (0, 1):
            there = [i for i in sent if steps[i][2:] == (target, word)]
            last = [i for i in there if not any(must_follow(j, i) for j in there)]
            assert x[word] in ([1 << i for i in last] or [0])


# ---- greenlets


@untyped
@pytest.mark.parametrize("waits", [False, True])
def test_threads_that_do_not_wait_run_in_one_greenlet(waits):
    greenlets = []

    @cuda.jit
    def kernel():
        if waits:
            cuda.syncthreads()
        greenlets.append(getcurrent())

    def main():
        sk.init()
        kernel[1, 64]()

    sk.emu.run(main, 1)
    assert len(greenlets) == 64 and len(set(greenlets)) == (64 if waits else 1)
