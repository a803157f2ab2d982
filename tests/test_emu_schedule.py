"""Schedules: a seed repeats its run bit for bit, the environment sets what the arguments do, and messages
arrive when, and in the order, that their delivery promises."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
from emulated import spmd
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cuda

import shmemkit as sk
from shmemkit import device as d
from shmemkit.emu import EmulatorError, RaceError

SET, ADD = d.SignalOp.SIGNAL_SET, d.SignalOp.SIGNAL_ADD
DELIVERIES = ("eager", "ordered", "unordered")
SEEDS = (None, *range(8))
SETTINGS = ("SHMEMKIT_SEED", "SHMEMKIT_DELIVERY", "SHMEMKIT_RACES")


@pytest.fixture(autouse=True)
def no_settings(monkeypatch):
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)


# ---- the same run


def events(**options):
    """What happens in a kernel with a lock, a ticket, messages and polls, in order. It has no race."""
    order = []

    @cuda.jit
    def kernel(lock, ticket, box, src, arrived):
        me, n, t = d.rank(), d.num_ranks(), cuda.grid(1)
        order.append((me, t, "starts"))
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
        d.barrier_all() if t == 0 else None
        order.append((me, t, "has", int(box[t])))

    def main(world):
        box, src = sk.zeros(6, "int64"), sk.full(6, world.rank, "int64")
        kernel[2, 3](sk.zeros(1, "int32"), sk.zeros(1, "int32"), box, src, sk.signals(6))

    spmd(3, main, **options)
    return order


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_the_same_seed_is_the_same_run(delivery):
    runs = {seed: events(delivery=delivery, seed=seed) for seed in SEEDS}
    for seed, run in runs.items():
        assert {e[3] for e in run if e[2] == "ticket"} == set(range(18))
        assert {(e[0] - e[3]) % 3 for e in run if e[2] == "has"} == {1}
        assert events(delivery=delivery, seed=seed) == run == events(delivery=delivery, seed=seed, races=True)
    assert len({tuple(run) for run in runs.values()}) == len(SEEDS)


def test_it_is_the_same_in_another_process():
    """Where memory is elsewhere, and sets have another order."""
    program = "import test_emu_schedule as t; print(t.events(delivery='unordered', seed=3))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "1234"}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == str(events(delivery="unordered", seed=3))


# ---- arguments and environment


def test_the_environment_acts_as_the_arguments_and_arguments_win(monkeypatch):
    @cuda.jit
    def kernel(x):
        x[0] = cuda.threadIdx.x

    def racy(**options):
        spmd(1, lambda world: kernel[1, 2](sk.zeros(1, "int32")), **options)

    plain, other = events(), events(delivery="ordered", seed=2)
    both, one = events(delivery="unordered", seed=5), events(delivery="unordered", seed=4)
    monkeypatch.setenv("SHMEMKIT_SEED", "5")
    monkeypatch.setenv("SHMEMKIT_DELIVERY", "unordered")
    assert events() == both and events(seed=4) == one and events(delivery="ordered", seed=2) == other
    assert len({tuple(run) for run in (plain, other, both, one, events(delivery="ordered"))}) == 5
    racy()
    monkeypatch.setenv("SHMEMKIT_RACES", "1")
    with pytest.raises(RaceError):
        racy()
    racy(races=False)
    for name in SETTINGS:
        monkeypatch.setenv(name, "")
    assert events() == plain
    racy()
    for name in SETTINGS:
        monkeypatch.setenv(name, "bad")
    assert events(delivery="ordered", seed=2, races=False) == other


@pytest.mark.parametrize(
    "name, value, allowed",
    [
        ("SHMEMKIT_SEED", "x", "an integer is"),
        ("SHMEMKIT_SEED", "1.5", "an integer is"),
        ("seed", "3", "an integer, or None, is"),
        ("seed", 1.5, "an integer, or None, is"),
        ("SHMEMKIT_DELIVERY", "late", "'eager', 'ordered', 'unordered' are"),
        ("delivery", "late", "'eager', 'ordered', 'unordered' are"),
        ("delivery", "", "'eager', 'ordered', 'unordered' are"),
    ],
)
def test_what_is_not_allowed(monkeypatch, name, value, allowed):
    if name in SETTINGS:
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"^{re.escape(f'{name}={value!r}: {allowed} allowed')}$"):
        spmd(2, lambda world: None, **({} if name in SETTINGS else {name: value}))


@pytest.mark.parametrize("how", ["race", "deadlock", "error", "assertion"])
def test_the_last_line_of_a_failure_repeats_it(monkeypatch, how):
    if how == "assertion" and sys.version_info < (3, 11):
        pytest.skip("exceptions have no notes before Python 3.11")

    @cuda.jit
    def kernel(ticket, counts, got):
        me = 2 * d.rank() + cuda.threadIdx.x
        got[0] = number = d.atomic_fetch_add(ticket, 1, 0)  # got: of both threads
        if number == 2 and how == "error":
            raise ArithmeticError(f"the third is {me}")
        if number == 2 and how == "deadlock":
            d.wait(counts, 1, "sys", "acquire", me + 100)

    def main(world):
        got = np.zeros(1, "int32")
        kernel[1, 2](sk.zeros(1, "int32"), sk.zeros(1, "int32"), got)
        assert how != "assertion", f"rank {world.rank} got {got[0]}"

    def report(**options):
        with pytest.raises((EmulatorError, AssertionError)) as caught:
            spmd(3, main, **options)
        return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", [])])

    reports = set()
    for options in [{"delivery": name, "seed": seed} for name in DELIVERIES for seed in range(4)]:
        text = report(**options, races=how == "race")
        before, _, last = text.rpartition("\n")
        reports.add(before)
        said, arguments, settings = re.fullmatch(r"(the same again: )(.*) \((.*)\)", last).groups()
        assert report(**eval(f"dict({arguments})")) == text
        with monkeypatch.context() as environment:
            for setting in settings.split():
                environment.setenv(*setting.split("="))
            assert report() == text
    assert len(reports) > 1 or how == "race"


# ---- when a message arrives


def run(*actions, **options):
    """Rank r calls ``actions[r](x, src)`` in a kernel of one thread: x are zeros, src sevens, both symmetric
    and uint64. -> what each returned"""
    results = [None] * len(actions)

    @cuda.jit
    def kernel(x, src):
        results[d.rank()] = actions[d.rank()](x, src)

    spmd(len(actions), lambda w: kernel[1, 1](sk.signals(8), sk.full(8, 7, "uint64")), **options)
    return results


def nothing(x, src):
    pass


MESSAGES = {
    "put": lambda x, src: d.put(x, src[:1], 1),
    "put_warp": lambda x, src: d.put_warp(x, src[:1], 1),
    "put_nbi": lambda x, src: d.put_nbi(x, src, 1),
    "put_nbi_block": lambda x, src: d.put_nbi_block(x, src, 1),
    "p": lambda x, src: d.p(x, 7, 1),
    "put_signal": lambda x, src: d.put_signal(x[1:], src[:1], x, 7, SET, 1),
    "put_signal_nbi": lambda x, src: d.put_signal_nbi(x, src[:1], x[4:], 1, ADD, 1),
    "signal_op set": lambda x, src: d.signal_op(x, 7, SET, 1),
    "signal_op add": lambda x, src: d.signal_op(x, 7, ADD, 1),
    "atomic_add": lambda x, src: d.atomic_add(x, 7, 1),
    "atomic_set": lambda x, src: d.atomic_set(x, 7, 1),
    "atomic_or": lambda x, src: d.atomic_or(x, 7, 1),
}
AT_ONCE = {
    "notify": lambda x, src: d.notify(x, 1, 7),
    "notify add": lambda x, src: d.notify(x, 1, 7, "add"),
    "st_release": lambda x, src: d.st_release(d.symm_at(x, 1), 0, 7),
    "atomic_fetch_add": lambda x, src: d.atomic_fetch_add(x, 7, 1),
    "atomic_swap": lambda x, src: d.atomic_swap(x, 7, 1),
}


@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("name", [*MESSAGES, *AT_ONCE])
def test_messages_are_held_back_until_quiet(name, delivery):
    def send(x, src):
        seen = []
        for do in (lambda: {**MESSAGES, **AT_ONCE}[name](x, src), d.fence, d.quiet):
            do()
            seen += [int(d.symm_at(x, 1)[0]), int(d.g(x, 1))]
        return seen

    held = delivery != "eager" and name in MESSAGES
    assert run(send, nothing, delivery=delivery)[0] == [0 if held else 7] * 4 + [7] * 2


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_when_the_source_is_read(delivery):
    """A non-blocking put or get reads it when it arrives, a blocking one at once."""

    def send(x, src):
        got = np.full(2, 3, "uint64")
        d.put(x, src[:1], 1)
        d.put_nbi(x[1:], src[:1], 1)
        d.put_signal(x[2:], src[:1], x[6:], 1, SET, 1)
        d.put_signal_nbi(x[3:], src[:1], x[7:], 1, SET, 1)
        d.p(x[4:], src[0], 1)
        d.get(got[:1], x[5:], 1)
        d.get_nbi(got[1:], x[5:], 1)
        seen = got.tolist()
        src[0] = d.symm_at(x, 1)[5] = 9
        d.quiet()
        return [*d.symm_at(x, 1)[:5].tolist(), *seen, *got.tolist()]

    expected = [7] * 5 + [0] * 4 if delivery == "eager" else [7, 9, 7, 9, 7, 0, 3, 0, 9]
    assert run(send, nothing, delivery=delivery)[0] == expected


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_what_completes_messages(delivery):
    """Neither the quiet of another rank, nor work that goes on, nor the end of a kernel; barriers do."""
    seen = []

    @cuda.jit
    def kernel(x, one, turn, step):
        if d.rank() == 0 and step in (0, 3):
            d.put_nbi(x[step:], one, 1)
        for i in range(1, 20):
            d.notify(turn, 1 - d.rank(), i)
            d.wait(turn, 1, "sys", "acquire", i)
        if d.rank() == 1:
            d.quiet()
        if step == 3:
            d.barrier_all()
        seen.append(int(d.symm_at(x, 1)[0] + d.symm_at(x, 1)[3]))

    def main(world):
        x, one, turn = sk.zeros(4, "int32"), sk.full(1, 1, "int32"), sk.signals(4)
        for step in range(4):
            kernel[1, 1](x, one, turn[step:], step)
            if step == 1:
                world.barrier()

    spmd(2, main, delivery=delivery)
    assert seen == [1] * 6 + [2] * 2 if delivery == "eager" else [0] * 4 + [1] * 2 + [2] * 2


WAITS = {
    "wait": lambda x: d.wait(x, 1, "sys", "acquire", 7, "eq"),
    "signal_wait_until": lambda x: d.signal_wait_until(x, d.ComparisonType.CMP_EQ, 7),
    "ld_acquire": lambda x: d.ld_acquire(x, 0) == 7,
    "atomic_fetch": lambda x: d.atomic_fetch(x, d.rank()) == 7,
    "atomic_compare_swap": lambda x: d.atomic_compare_swap(x, 7, 7, d.rank()) == 7,
    "g": lambda x: d.g(x, d.rank()) == 7,
}


@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("name", WAITS)
def test_messages_arrive_when_only_waits_or_spin_loops_are_left(name, delivery):
    """Ranks 1 and 2 wait for rank 0, which waits for their answers, all three in the same way or not."""
    polls = []

    def waits(x, name=name):
        while not WAITS[name](x):
            polls.append(name)

    def first(x, src):
        d.signal_op(x, 7, SET, 1)
        d.put_nbi(x, src[:1], 2)
        waits(x)
        return int(x[0])

    def second(x, src):
        waits(x)
        d.signal_op(x, 4, ADD, 0)

    def third(x, src):
        waits(x, "ld_acquire")
        d.atomic_add(x, 3, 0)

    for seed in SEEDS[:4]:
        polls.clear()
        assert run(first, second, third, delivery=delivery, seed=seed)[0] == 7
        assert polls or delivery == "eager"


# ---- in which order


@pytest.mark.parametrize(
    "script, targets, ordered, unordered",
    [
        ("012", "111", "012", "210"),
        ("01|2", "111", "012", "102"),
        ("0|12|3", "1111", "0123", "0213"),
        ("0123", "1122", "2301", "3210"),  # between PEs the last one first
        ("0|1", "12", "10", "10"),  # a fence does not order them
        ("0|1|23", "1212", "1302", "3120"),
        ("01.2", "111", "012", "102"),
        ("0.1", "12", "01", "01"),  # but quiet does
    ],
)
def test_the_order_of_arrival(script, targets, ordered, unordered):
    """Messages 0, 1, ... of rank 0 to the ranks `targets`; | is a fence, . is quiet."""
    order = []

    @cuda.jit
    def kernel(x, one):
        t = cuda.threadIdx.x
        if d.rank() == 0 and t == 0:
            for step in script:
                if step in "|.":
                    d.fence() if step == "|" else d.quiet()
                else:
                    d.put_nbi(x[int(step) :], one, int(targets[int(step)]))
        elif t < len(targets) and d.rank() == int(targets[t]):
            d.wait(x[t:], 1, "sys", "acquire", 1)
            order.append(str(t))

    for delivery, expected in (("ordered", ordered), ("unordered", unordered)):
        order.clear()
        spmd(3, lambda world: kernel[1, 4](sk.signals(4), sk.full(1, 1, "uint64")), delivery=delivery)
        assert "".join(order) == expected


@pytest.mark.parametrize("delivery", DELIVERIES)
@pytest.mark.parametrize("between", [nothing, d.fence, d.quiet])
def test_what_a_signal_says_about_data(between, delivery):
    """Its own data is there in every schedule, that of an earlier put after a fence or quiet."""

    def send(x, src):
        d.put_nbi(x, src[:1], 1)
        between() if between is not nothing else None
        d.put_signal_nbi(x[1:], src[:1], x[2:], 1, ADD, 1)

    def receive(x, src):
        d.wait(x[2:], 1, "sys", "acquire", 1)
        return x[:2].tolist()

    seen = [run(send, receive, delivery=delivery, seed=seed)[1] for seed in (None, *range(15))]
    if delivery == "unordered" and between is nothing:
        assert seen[0] == [0, 7] and [7, 7] in seen and {own for _, own in seen} == {7}
    else:
        assert seen == [[7, 7]] * 16


# ---- nothing is lost: random programs, and a model of what may become of them

SRC, LOG, WORDS = 3, 5, 6  # of each PE: words 0 and 1, signal 2, sources 3 and 4, what was seen
KINDS = ("put", "put_nbi", "put_signal_nbi", "set", "add", "store", "g", "get_nbi", "fence", "quiet")


@st.composite
def programs(draw):
    """-> the steps (kind, target, word, value) of each of 2 or 3 PEs"""
    n = draw(st.integers(2, 3))
    pes = st.integers(0, n - 1)
    steps = draw(st.lists(st.tuples(pes, st.sampled_from(KINDS), pes, st.integers(0, 1)), max_size=9))
    return [[(*step, 10 << i) for i, (who, *step) in enumerate(steps) if who == pe] for pe in range(n)]


def do(x, kind, target, word, value):
    source = x[SRC + word : SRC + word + 1]
    if kind == "put_signal_nbi":
        d.put_signal_nbi(x[word:], source, x[2:], value, ADD, target)
    elif kind in ("put", "put_nbi"):
        getattr(d, kind)(x[word:], source, target)
    elif kind in ("set", "add"):
        d.signal_op(x[2:], value, SET if kind == "set" else ADD, target)
    elif kind == "store":
        source[0] = value
    elif kind == "g":
        x[LOG] = 3 * x[LOG] + d.g(x[word:], target)
    elif kind == "get_nbi":
        d.get_nbi(x[LOG:], x[word : word + 1], target)
    else:
        getattr(d, kind)()


def may_end_as(program, memory, goal, delivery):
    """Whether some schedule leads from `memory`, the words of all PEs, to `goal`.

    A state is the next step of each PE, the messages under way (PE, step, value that it has read), and memory.
    """

    def put_off(pe, i, under_way):
        """Whether an earlier message of `pe` must arrive before that of step i."""
        steps = program[pe]
        return any(
            q == pe
            and j < i
            and steps[j][1] == steps[i][1]
            and (delivery == "ordered" or any(s[0] == "fence" for s in steps[j:i]))
            for q, j, _ in under_way
        )

    state = ((0,) * len(program), frozenset(), memory)
    end = (tuple(map(len, program)), frozenset(), goal)
    known, todo = {state}, [state]
    while todo and end not in known:
        at, under_way, memory = todo.pop()
        following = [
            (at, under_way - {m}, arrived(memory, m[0], *program[m[0]][m[1]], m[2]))
            for m in under_way
            if not put_off(*m[:2], under_way)
        ]
        for pe, i in enumerate(at):
            if i == len(program[pe]):
                continue
            kind, target, word, value = step = program[pe][i]
            sent, after = under_way, memory
            if kind == "store":
                after = stored(memory, WORDS * pe + SRC + word, value)
            elif kind == "g":
                log = WORDS * pe + LOG
                after = stored(memory, log, 3 * memory[log] + memory[WORDS * target + word])
            elif kind == "quiet" and any(q == pe for q, *_ in under_way):
                continue
            elif kind not in ("fence", "quiet"):
                read = memory[WORDS * pe + SRC + word] if kind == "put" or delivery == "eager" else None
                sent = under_way | {(pe, i, read)}
            if delivery == "eager" and sent is not under_way:
                sent, after = under_way, arrived(memory, pe, *step, read)
            following.append(((*at[:pe], i + 1, *at[pe + 1 :]), sent, after))
        todo += [state for state in following if state not in known]
        known.update(following)
    return end in known


def stored(memory, index, value):
    return (*memory[:index], value, *memory[index + 1 :])


def arrived(memory, pe, kind, target, word, value, read):
    """Memory after the arrival of the message of that step of `pe`."""
    here, there = WORDS * pe, WORDS * target
    if kind == "get_nbi":
        return stored(memory, here + LOG, memory[there + word])
    if kind.startswith("put"):
        memory = stored(memory, there + word, memory[here + SRC + word] if read is None else read)
    if kind in ("put", "put_nbi"):
        return memory
    return stored(memory, there + 2, value if kind == "set" else memory[there + 2] + value)


@settings(max_examples=200, deadline=None)
@given(programs(), st.sampled_from(DELIVERIES), st.none() | st.integers(0, 1000))
def test_random_programs_end_as_they_may(program, delivery, seed):
    @cuda.jit
    def kernel(x):
        for step in program[d.rank()]:
            do(x, *step)

    def main(world):
        x = sk.array([0, 0, 0, world.rank + 1, world.rank + 4, 0], "uint64")
        before = x.tolist()
        kernel[1, 1](x)
        world.barrier()
        return before, x.tolist()

    results = spmd(len(program), main, delivery=delivery, seed=seed)
    memory, goal = (tuple(word for pe in results for word in pe[i]) for i in (0, 1))
    assert may_end_as(program, memory, goal, delivery)
