"""Timelines: what the emulator records, files, summary and picture. On GPUs: test_gpu_timeline.py."""

import json
import re
import xml.etree.ElementTree as ElementTree
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from emulated import emulate, spmd, untyped
from fast import slow
from hypothesis import given
from hypothesis import strategies as st
from numba import cuda
from timeline_files import check_timeline

import shmemkit as sk
from shmemkit.device import (
    ComparisonType,
    SignalOp,
    atomic_fetch_add,
    barrier_all_block,
    begin_phase,
    end_phase,
    fence,
    ld_acquire,
    mark,
    notify,
    num_ranks,
    put_nbi,
    put_signal_nbi,
    quiet,
    rank,
    signal_wait_until,
    symm_at,
    wait,
    wait_block,
)
from shmemkit.support import trace_file
from shmemkit.support.trace_file import Arrow, Mark, Span, Track
from shmemkit.timeline import main as shmemkit_timeline


@cuda.jit
def ring(inbox, flags, rounds):
    """Each block passes a number to the right, `rounds` times."""
    block, right = cuda.blockIdx.x, (rank() + 1) % num_ranks()
    for i in range(rounds):
        begin_phase("round")
        symm_at(inbox, right)[block] = i
        notify(flags[block:], right, i + 1)
        wait(flags[block:], 1, "sys", "acquire", i + 1)
        mark("got it")
        end_phase("round")


def run_ring(blocks=2, rounds=3, leave=None):
    def main():
        with sk.init() as world:
            inbox, flags = sk.zeros(blocks, "int64", "inbox"), sk.signals(blocks, "flags")
            with sk.Timeline(world) as timeline:
                ring[blocks, 1, world.stream](inbox, flags, rounds)
            if leave is not None:
                leave(timeline)
            return timeline.data

    return main


def events(data, ph, cat=None):
    return [e for e in data["traceEvents"] if e["ph"] == ph and cat in (None, e["cat"])]


def arrows(data):
    """[(the span that an arrow leaves, the span that it reaches)]"""
    spans, ends = events(data, "X"), defaultdict(dict)

    def around(e):
        track = [s for s in spans if (s["pid"], s["tid"]) == (e["pid"], e["tid"])]
        inside = [s for s in track if s["ts"] <= e["ts"] <= s["ts"] + s["dur"]]
        return min(inside, key=lambda s: s["dur"])

    for e in data["traceEvents"]:
        if e["ph"] in "sf":
            ends[e["id"]][e["ph"]] = around(e)
    return [(both["s"], both["f"]) for both in ends.values()]


def recorded(n, main, tmp_path, **options):
    """-> the timeline of a program, which is valid"""
    path = tmp_path / "run.json"
    try:
        spmd(n, main, timeline=path, **options)
    finally:
        data = trace_file.load(path)
        check_timeline(data)
    return data


# ---- what is recorded


@pytest.mark.parametrize("n", [1, 2, *slow(5, 16)])
def test_a_ring(n):
    for data in sk.emu.run(run_ring(), n):
        check_timeline(data)
        for r in range(n):
            ours = [e for e in events(data, "X") if e["pid"] == r]
            assert sum(e["cat"] == "phase" and e["name"] == "round" for e in ours) == 6
            assert sum(e["name"] == "ring" for e in ours) == 2  # blocks
            waits = [e for e in ours if e["cat"] == "wait"]
            assert len(waits) >= 6 and all("test_timeline.py" in e["args"]["line"] for e in waits[:6])
            assert sum(e["pid"] == r for e in events(data, "i", "mark")) == 6
        sent = [(s, f) for s, f in arrows(data) if s["name"] == "notify"]
        assert len([f for _, f in sent if f["args"]["for"].startswith("flags[")]) == 6 * n
        assert all(f["name"] == "wait" and (s["pid"] + 1) % n == f["pid"] for s, f in sent[: 6 * n])


def test_it_shows_who_waits_for_whom():
    """A chain: each rank waits for the one before, and takes one step. Steps grow from rank to rank, in any
    order in which the emulator runs them."""

    @cuda.jit
    def chain(flag):
        if rank():
            wait(flag, 1, "sys", "acquire")
        if rank() + 1 < num_ranks():
            notify(flag, rank() + 1, 1)

    def main(world):
        flag = sk.signals(1, "flag")
        with sk.Timeline(world) as timeline:
            chain[1, 1, world.stream](flag)
        return timeline.data

    for seed in (None, 1, 2, 3):
        data = spmd(4, main, seed=seed)[0]
        kernels = {e["pid"]: e for e in events(data, "X", "kernel")}
        start = kernels[0]["ts"]
        ends = [kernels[r]["ts"] + kernels[r]["dur"] - start for r in range(4)]
        assert ends == [1, 3, 5, 6]


def test_a_wait_points_to_the_store_that_satisfied_it_first(tmp_path):
    """Also when later ones have come before it began."""

    @cuda.jit
    def counts(flag):
        if rank() == 0:
            for i in range(1, 4):
                begin_phase("store")
                notify(flag, 1, i)
                end_phase("store")
        else:
            for i in range(1, 4):
                wait(flag, 1, "sys", "acquire", i)

    def main(world):
        flag = sk.signals(1)
        counts[1, 1, world.stream](flag)
        world.synchronize()

    for seed in (None, *range(5)):
        data = recorded(2, main, tmp_path, seed=seed)
        found = [(s["ts"], f["ts"]) for s, f in arrows(data) if s["name"] == "notify" and f["name"] == "wait"]
        assert len({s for s, _ in found}) == len({f for _, f in found}) == 3, (seed, found)


@pytest.mark.parametrize("delivery", ["eager", "ordered", "unordered"])
@pytest.mark.parametrize("races", [False, True])
def test_messages_and_polls(tmp_path, delivery, races):
    @cuda.jit
    def kernel(data, signal, word, count):
        right = (rank() + 1) % num_ranks()
        put_nbi(data, word, right)
        fence()
        put_signal_nbi(data[1:], word, signal, 1, SignalOp.SIGNAL_SET, right)
        quiet()
        signal_wait_until(signal, ComparisonType.CMP_GE, 1)
        atomic_fetch_add(count, 1, right)
        while ld_acquire(count, 0, "sys") == 0:
            pass
        barrier_all_block()

    def main(world):
        data, signal, count = sk.zeros(2, "int64"), sk.signals(1, "signal"), sk.zeros(1, "int64")
        kernel[1, 1, world.stream](data, signal, sk.zeros(1, "int64"), count)
        world.synchronize()

    found = recorded(3, main, tmp_path, delivery=delivery, races=races)
    puts = [e for e in events(found, "X") if e["name"].startswith("put")]
    assert len(puts) == 6 and all(e["args"]["bytes"] == 8 for e in puts)
    pairs = {(s["name"], f["name"]) for s, f in arrows(found)}
    assert ("put_signal_nbi", "signal_wait_until") in pairs
    assert ("atomic_fetch_add", "ld_acquire") in pairs
    if delivery != "eager":
        assert any(f == "quiet" for _, f in pairs)


@pytest.mark.parametrize("method", ["one_shot_ll128", "two_shot_ll128", "push", "copy_engine", "ring"])
def test_collectives(tmp_path, method):
    def main(world):
        reduce = sk.AllReduce(world, 4096, "sum", method)
        reduce(np.ones(512))
        reduce.free()

    data = recorded(2, main, tmp_path)
    assert {(s["pid"], f["pid"]) for s, f in arrows(data)} >= {(0, 1), (1, 0)}
    assert events(data, "X", "wait") and "host" in {e["cat"] for e in events(data, "X")}


@pytest.mark.parametrize("delivery, seed, races", [("eager", None, False), ("unordered", 3, True)])
def test_the_same_seed_gives_the_same_file(tmp_path, delivery, seed, races):
    texts = set()
    for i in range(3):
        path = tmp_path / f"{i}.json"
        sk.emu.run(run_ring(), 4, delivery=delivery, seed=seed, races=races, timeline=path)
        texts.add(path.read_text())
    assert len(texts) == 1


def test_threads_of_a_warp_share_a_span():
    @cuda.jit
    def kernel(flags):
        symm = symm_at(flags, (rank() + 1) % num_ranks())
        notify(symm[cuda.threadIdx.x :], rank(), 1)
        wait(flags[cuda.threadIdx.x :], 1, "sys", "acquire")
        wait_block(flags, 64, "sys", "acquire")

    def main(world):
        flags = sk.signals(64)
        with sk.Timeline(world) as timeline:
            kernel[1, 64, world.stream](flags)
        return timeline.data

    waits = [e for e in events(spmd(2, main)[0], "X", "wait") if e["name"] == "wait"]
    assert len(waits) == 4 and all(e["args"]["threads"] == 32 for e in waits)


def test_threads_of_a_warp_share_a_mark(tmp_path):
    @cuda.jit
    def kernel(rounds):
        for _ in range(rounds):
            mark("here")

    def main(world):
        kernel[1, 64, world.stream](3)
        world.synchronize()

    marks = events(recorded(1, main, tmp_path), "i")
    assert len(marks) == 3 * 2  # of two warps


def test_phases_that_do_not_match(tmp_path):
    @cuda.jit
    def not_ended(flag):
        begin_phase("outer")
        begin_phase("inner")
        notify(flag, rank(), 1)
        end_phase("inner")

    @cuda.jit
    def not_begun(flag):
        begin_phase("a")
        end_phase("b")

    def main(kernel):
        world = sk.init()
        kernel[1, 1, world.stream](sk.signals(1))
        world.synchronize()

    data = recorded(1, lambda world: not_ended[1, 1, world.stream](sk.signals(1)), tmp_path)
    (outer,) = [e for e in events(data, "X") if e["name"] == "outer"]
    assert outer["args"]["not ended"] and outer["dur"] == 4
    with pytest.raises(
        sk.emu.EmulatorError, match=r'end_phase\("b"\): this thread has not called begin_phase\("b"\)'
    ):
        sk.emu.run(main, 1, (not_begun,), timeline=tmp_path / "b.json")
    with pytest.raises(sk.emu.EmulatorError, match=r"mark\(\): name is 3; it must be a string"):

        @cuda.jit
        def number(flag):
            mark(3)

        untyped(sk.emu.run)(main, 1, (number,))


def test_a_full_timeline_counts_the_rest():
    def main():
        with sk.init() as world:
            flags = sk.signals(2)
            with sk.Timeline(world, records=5) as timeline:
                ring[2, 1, world.stream](sk.zeros(2, "int64"), flags, 50)
            return timeline.data, str(timeline)

    data, text = sk.emu.run(main, 2)[0]
    check_timeline(data)
    assert all(sum(e["pid"] == r and e["ph"] in "Xi" for e in data["traceEvents"]) == 5 for r in (0, 1))
    n = data["otherData"]["dropped"]["0"]
    assert n > 300 and f"rank 0: {n} records had no room" in text


def test_only_what_runs_in_the_block():
    def main():
        with sk.init() as world:
            inbox, flags = sk.zeros(1, "int64"), sk.signals(1)
            ring[1, 1, world.stream](inbox, flags, 1)
            with sk.Timeline(world) as first:
                pass
            with sk.Timeline(world) as second:
                ring[1, 1, world.stream](sk.zeros(1, "int64"), sk.signals(1), 1)
            return [[e["name"] for e in events(t.data, "X", "kernel")] for t in (first, second)]

    first, second = sk.emu.run(main, 2)[0]
    assert "ring" not in first and second.count("ring") == 2


def test_a_kernel_that_runs_already():
    @cuda.jit
    def waits(flag):
        wait(flag, 1, "sys", "acquire")

    @cuda.jit
    def sets(flag):
        notify(flag, rank(), 1)

    def main():
        with sk.init() as world:
            flag, stream = sk.signals(1), cuda.stream()
            waits[1, 1, stream](flag)
            with sk.Timeline(world) as timeline:
                sets[1, 1, world.stream](flag)
                world.synchronize()
            return timeline.data

    data = sk.emu.run(main, 2)[0]
    check_timeline(data)
    assert {"waits", "sets"} <= {e["name"] for e in events(data, "X", "kernel")}


def test_a_phase_that_began_before(tmp_path):
    """Its end is not an error."""

    @cuda.jit
    def kernel(flag):
        begin_phase("a")
        wait(flag, 1, "sys", "acquire")
        end_phase("a")

    @cuda.jit
    def sets(flag):
        notify(flag, rank(), 1)

    def main():
        with sk.init() as world:
            flag, stream = sk.signals(1), cuda.stream()
            kernel[1, 1, stream](flag)
            with sk.Timeline(world) as timeline:
                sets[1, 1, world.stream](flag)
                world.synchronize()
            return timeline.data

    data = sk.emu.run(main, 1)[0]
    check_timeline(data)
    (waited,) = events(data, "X", "wait")
    (stored,) = [e for e in events(data, "X") if e["name"] == "notify"]
    assert waited["ts"] + waited["dur"] > stored["ts"] + stored["dur"]


@pytest.mark.parametrize("delivery", ["ordered", "unordered"])
def test_a_message_that_was_sent_before(delivery):
    """It arrives in the timeline, and has no arrow."""

    @cuda.jit
    def sends(x):
        put_nbi(x, x[1:], rank())

    @cuda.jit
    def waits():
        quiet()

    def main():
        with sk.init() as world:
            x = sk.zeros(2, "int64")
            sends[1, 1, world.stream](x)
            with sk.Timeline(world) as timeline:
                waits[1, 1, world.stream]()
                world.synchronize()
            return timeline.data

    data = sk.emu.run(main, 1, delivery=delivery)[0]
    check_timeline(data)
    assert not arrows(data)


def test_a_lock_is_held_by_one_at_a_time():
    @cuda.jit
    def kernel(lock, flag):
        while cuda.atomic.cas(lock, 0, 0, 1) != 0:
            pass
        begin_phase("held")
        notify(flag, rank(), 1)
        end_phase("held")
        cuda.atomic.exch(lock, 0, 0)

    def main(world):
        with sk.Timeline(world) as timeline:
            kernel[4, 1, world.stream](world.xp.zeros(1, "int64"), sk.signals(1))
        return timeline.data

    for seed in (None, 1, 2):
        phases = [e for e in events(spmd(1, main, seed=seed)[0], "X") if e["name"] == "held"]
        times = sorted((e["ts"], e["ts"] + e["dur"]) for e in phases)
        assert len(times) == 4 and all(a[1] <= b[0] for a, b in pairwise(times)), (seed, times)


def test_the_host_waits_for_an_event():
    @cuda.jit
    def kernel(flags, n):
        for i in range(n):
            notify(flags, rank(), i)

    def main(world):
        flags, slow = sk.signals(1), cuda.stream()
        with sk.Timeline(world) as timeline:
            kernel[1, 1, slow](flags, 9)
            event = cuda.event()
            event.record(slow)
            event.synchronize()
            kernel[1, 1, world.stream](flags, 1)
        return timeline.data

    first, second = events(spmd(1, main)[0], "X", "kernel")
    first, second = (
        sorted((first, second), key=lambda e: e["tid"]) if first["ts"] == second["ts"] else (first, second)
    )
    assert second["ts"] >= first["ts"] + first["dur"]


# ---- failures


def test_an_interrupt_writes_what_there_is(tmp_path):
    def main(world):
        world.barrier()
        world.synchronize()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        spmd(2, main, timeline=tmp_path / "run.json")
    check_timeline(trace_file.load(tmp_path / "run.json"))


def test_a_deadlock_writes_what_there_is(tmp_path):
    @cuda.jit
    def stuck(flag):
        wait(flag, 1, "sys", "acquire", 2)

    path = tmp_path / "run.json"
    with pytest.raises(sk.emu.DeadlockError, match=re.escape(f"the timeline: {path} (open it")):
        spmd(2, lambda world: stuck[1, 1, world.stream](sk.signals(1)) or world.synchronize(), timeline=path)
    data = trace_file.load(path)
    check_timeline(data)
    waits = events(data, "X", "wait")
    assert len(waits) == 2 and all(e["args"]["never ended"] for e in waits)


def test_a_race_is_marked(tmp_path):
    @cuda.jit
    def racy(inbox, flag, out):
        symm_at(inbox, (rank() + 1) % num_ranks())[0] = rank()
        notify(flag, (rank() + 1) % num_ranks(), 1)
        out[0] = inbox[0]
        wait(flag, 1, "sys", "acquire")

    def main(world):
        racy[1, 1, world.stream](sk.zeros(1, "int64", "inbox"), sk.signals(1), world.xp.zeros(1, "int64"))
        world.synchronize()

    path = tmp_path / "run.json"
    with pytest.raises(sk.emu.RaceError, match=re.escape(str(path))) as caught:
        spmd(2, main, races=True, timeline=path)
    data = trace_file.load(path)
    check_timeline(data)
    marks = events(data, "i", "race")
    race = caught.value.races[0]
    accesses = {(a.rank, f"{a.what} {race.element}") for a in (race.first, race.second)}
    assert {(m["pid"], m["name"].removeprefix("race: ")) for m in marks} >= accesses
    assert all("test_timeline.py" in m["args"]["line"] for m in marks)


# ---- programs


def test_environment_and_option(tmp_path, capsys, monkeypatch):
    program = tmp_path / "program.py"
    program.write_text("import shmemkit as sk\nwith sk.init() as world:\n    world.barrier()\n")
    path = tmp_path / "a.json"
    assert emulate(["-n", "2", "--timeline", str(path), str(program)]) == 0
    monkeypatch.setenv("SHMEMKIT_TIMELINE", str(tmp_path / "b.json"))
    assert emulate(["-n", "2", str(program)]) == 0
    assert (tmp_path / "b.json").read_text() == path.read_text()
    with sk.init() as world:  # one rank of a process of its own
        world.barrier()
    assert trace_file.load(tmp_path / "b.json")["traceEvents"][0]["args"]["name"] == "rank 0"
    monkeypatch.setenv("SHMEMKIT_TIMELINE", str(tmp_path / "none" / "b.json"))
    with pytest.raises(OSError, match="SHMEMKIT_TIMELINE is .*; it must be the path of a file in a folder"):
        sk.init()
    monkeypatch.delenv("SHMEMKIT_TIMELINE")
    sk.emu.explore(run_ring(1, 1), 2, seeds=[0])
    with pytest.raises(TypeError, match=r"run\(\): timeline is 3; it must be the path of a file"):
        sk.emu.run(run_ring(), 1, timeline=3)
    capsys.readouterr()


def test_a_script_of_nvshmem4py(tmp_path, capsys):
    """It knows nothing of shmemkit."""
    path, script = tmp_path / "a.json", Path(__file__).parents[1] / "scripts" / "ring.py"
    assert emulate(["-n", "3", "--timeline", str(path), str(script)]) == 0, capsys.readouterr()
    data = trace_file.load(path)
    check_timeline(data)
    assert ("put_signal_nbi", "signal_wait") in {(s["name"], f["name"]) for s, f in arrows(data)}


@pytest.mark.slow
def test_objects(tmp_path, capsys):
    def leave(timeline):
        timeline.save(tmp_path / "run.json")
        with pytest.raises(RuntimeError, match="it records one block"):
            timeline.__enter__()
        assert ElementTree.fromstring(timeline._repr_svg_()).tag.endswith("svg")

    sk.emu.run(run_ring(leave=leave), 2)
    file = tmp_path / "run.json"
    assert shmemkit_timeline([str(file)]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"^0 +phase +round +6 ", printed, re.M) and "run.svg" in printed
    assert "rank 1 block 1" in (tmp_path / "run.svg").read_text()
    for where in (file, tmp_path / "none" / "a.svg"):
        with pytest.raises(SystemExit):
            shmemkit_timeline([str(file), "--svg", str(where)])
        assert "is the timeline" in (text := capsys.readouterr().err) or "No such file" in text
    assert shmemkit_timeline([str(file), "--between", "0", "3"]) == 0
    assert not re.search(r"^0 +phase +round +6 ", capsys.readouterr().out, re.M)
    assert (tmp_path / "run.0-3.svg").exists()
    with pytest.raises(SystemExit):
        shmemkit_timeline([str(file), "--between", "1e6", "2e6"])
    assert "nothing is there; the timeline ends at" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        shmemkit_timeline([str(file), "--between", "3", "0"])
    assert "the first time must be before the last" in capsys.readouterr().err
    for bad in ("[]", "{", '{"traceEvents": []}'):
        file.write_text(bad)
        with pytest.raises(SystemExit):
            shmemkit_timeline([str(file)])
        assert "is no timeline" in capsys.readouterr().err

    def wrong():
        world = sk.init()
        with pytest.raises(RuntimeError, match="nothing is recorded yet"):
            print(sk.Timeline(world))
        with pytest.raises(ValueError, match="records is 0"):
            sk.Timeline(world, records=0)
        with pytest.raises(TypeError, match="world is None"):
            sk.Timeline(None)

    sk.emu.run(wrong, 1)


# ---- files

times = st.integers(0, 50)
tracks = st.builds(Track, st.integers(0, 2), st.integers(-1, 2), st.integers(0, 1))
spans = st.builds(
    lambda track, kind, begin, length: Span(track, kind, f"{kind}!", begin, begin + length),
    tracks,
    st.sampled_from(trace_file.KINDS),
    times,
    times,
)


def test_long_timelines_are_valid():
    """Of minutes: spans that touch, whose ends are rounded."""
    rng = np.random.default_rng(0)
    times = np.cumsum(rng.integers(1, 9, 3000) * 32) + int(6e11)
    those = [Span(Track(0, 0), "wait", "w", *map(int, pair)) for pair in pairwise(times)]
    check_timeline(trace_file.trace(those, unit="ns"))


@given(st.lists(spans, min_size=1, max_size=20), st.data())
def test_files_are_valid_whatever_overlaps(those, data):
    """And so is a part of them."""
    pick = st.sampled_from(those)
    found = data.draw(st.lists(st.tuples(pick, pick), max_size=5))
    marks = [Mark(s.track, "mark", "m", s.end, {}) for s in those[:3]]
    ends = [sorted([(s.begin + s.end) / 2, (f.begin + f.end) / 2]) for s, f in found]
    arrows_ = [Arrow("a", s, first, f, last) for (s, f), (first, last) in zip(found, ends, strict=True)]
    for unit in trace_file.UNITS:
        file = json.loads(json.dumps(trace_file.trace(those, marks, arrows_, unit)))
        check_timeline(file)
        kept = sorted((e["name"], round(e["dur"], 6)) for e in events(file, "X"))
        scale = trace_file.UNITS[unit]
        assert kept == sorted((s.name, round((s.end - s.begin) * scale, 6)) for s in those)
        trace_file.summary(file)
        part = trace_file.between(file, 10.5 * scale, 30.5 * scale)  # no end is there, however it is rounded
        check_timeline(part)
        inside = [(e["ts"] / scale, (e["ts"] + e["dur"]) / scale) for e in events(part, "X")]
        assert all(10.49 <= begin <= end <= 30.51 for begin, end in inside)
        assert len(inside) == sum(s.begin < 30.5 and s.end > 10.5 for s in those)


@pytest.mark.parametrize(
    "spoil, message",
    [
        (lambda es: es[-1].pop("ts"), "lacks ts"),
        (lambda es: es[4].pop("dur"), "lacks dur"),
        (lambda es: es[4].update(ts=99), "comes after a later one"),
        (lambda es: es[-2].update(dur=99), "ends after the one that encloses it"),
        (lambda es: es.pop(), "must have one s, and then one f"),
        (lambda es: es.pop(2), "has no name"),
    ],
)
def test_what_is_not_valid(spoil, message):
    outer = Span(Track(0, 1), "kernel", "k", 0, 10)
    inner = Span(Track(0, 1), "phase", "p", 2, 5)
    data = trace_file.trace([outer, inner], [], [Arrow("a", outer, 1, inner, 3)])
    check_timeline(data)
    spoil(data["traceEvents"])
    with pytest.raises(ValueError, match=message):
        check_timeline(data)


def test_files_of_several_processes():
    parts = []
    for r in range(3):
        spans = [Span(Track(r, block), "kernel", "k", block, 10) for block in range(3)]
        arrows_ = [Arrow("a", a, 3, b, 4) for a, b in pairwise(spans)]
        parts.append(trace_file.trace(spans, [], arrows_, dropped={str(r): r}))
    whole = trace_file.merged([parts[0], None, *parts[1:]])
    check_timeline(whole)
    assert len(events(whole, "s")) == 6 and len(events(whole, "X")) == 9
    assert whole["otherData"]["dropped"] == {"0": 0, "1": 1, "2": 2}
    check_timeline(trace_file.merged([]))


def test_numbers_of_the_summary():
    track, other = Track(0, 0), Track(0, 1)
    spans = [
        Span(track, "phase", "copy", 0, 10, {"bytes": 64}),
        Span(other, "phase", "copy", 5, 15, {"bytes": 64}),
        Span(track, "phase", "compute", 10, 20),
        Span(track, "wait", "wait", 12, 15),
    ]
    data = trace_file.trace(spans, unit="ns", uncertainty_ns=300, dropped={"0": 7})
    totals = {t.name: t for t in trace_file.totals(data)}
    assert totals["copy"][3:] == pytest.approx((2, 0.015, 0.0, 128))
    assert totals["compute"].waiting == pytest.approx(0.003)
    assert trace_file.overlap(data, 0) == pytest.approx(0.75)
    text = trace_file.summary(data)
    assert "overlap 0.75" in text and "within 0.30 us" in text and "7 records had no room" in text


def test_a_file_is_whole_or_not_there(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("before")
    with pytest.raises(TypeError):
        trace_file.save({"traceEvents": [object()]}, path)
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]
