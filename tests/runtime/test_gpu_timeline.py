"""Timelines of kernels on GPUs; on any number of ranks. On the emulator: test_timeline.py."""

import os

import gpu
import pytest
from numba import cuda
from timeline_files import check_timeline

import shmemkit as sk
from shmemkit.device import begin_phase, end_phase, mark, notify, num_ranks, rank, wait
from shmemkit.support import trace_file

pytestmark = pytest.mark.gpu
ROUNDS = 50


@pytest.fixture
def world():
    return gpu.world()


@cuda.jit
def ring(flags, rounds):
    block, right = cuda.blockIdx.x, (rank() + 1) % num_ranks()
    for i in range(rounds):
        begin_phase("round")
        notify(flags[block:], right, i + 1)
        wait(flags[block:], 1, "sys", "acquire", i + 1)
        end_phase("round")
    mark("done")


def test_a_ring(world, tmp_path):
    flags = world.signals(4, "flags")
    with sk.Timeline(world) as timeline:
        sk.bind(ring, 4, 64, (flags, ROUNDS), co_resident=True)()
    world.free(flags)
    data = timeline.data
    check_timeline(data)
    totals = {(t.rank, t.name): t for t in trace_file.totals(data)}
    for r in range(world.n_ranks):
        assert totals[r, "round"].count == 4 * 2 * ROUNDS  # two warps
        marks = [e for e in data["traceEvents"] if e["ph"] == "i" and e["pid"] == r]
        assert len(marks) == 8
        assert totals[r, "ring"].count == 4  # blocks
        assert totals[r, "launch ring"].count == totals[r, "synchronize"].count == 1
    waits = [e for e in data["traceEvents"] if e.get("cat") == "wait"]
    assert all(e["args"]["for"].startswith("flags[") for e in waits)
    if world.n_ranks > 1:
        shared = os.environ.get("SHMEMKIT_OVERSUBSCRIBE") == "1"  # ranks take turns, of milliseconds
        assert waits and data["otherData"]["uncertainty_ns"] < (100_000_000 if shared else 100_000)
    timeline.save(tmp_path / "run.json")


def test_what_finds_no_room_is_counted(world):
    flags = world.signals(4, "flags")
    with sk.Timeline(world, records=10) as timeline:
        sk.bind(ring, 4, 64, (flags, ROUNDS), co_resident=True)()
    world.free(flags)
    check_timeline(timeline.data)
    assert all(n > 100 for n in timeline.data["otherData"]["dropped"].values())


def test_collectives_and_products(world):
    x = world.xp.ones(1 << 20, "float32")
    with sk.Timeline(world) as timeline:
        reduce = sk.AllReduce(world, x.nbytes, "sum", "two_shot_ll128")
        for _ in range(3):
            total = reduce(x)
    assert (world.asnumpy(total) == world.n_ranks).all()
    reduce.free()
    check_timeline(timeline.data)
    assert {"reduce-scatter", "all-gather"} <= {e["name"] for e in timeline.data["traceEvents"]}
    again = sk.AllReduce(world, x.nbytes, "sum", "two_shot_ll128")  # not recorded: it is made outside
    assert (world.asnumpy(again(x)) == world.n_ranks).all()
    again.free()


@pytest.mark.parametrize("private", [True, False])
def test_copies(world, private):
    """Eagerly, and those of a graph's last run: into private memory they are pulled, else pushed."""
    x, n = world.xp.ones(1 << 20, "float32"), world.n_ranks
    shape = n, 1 << 20
    out = world.xp.zeros(shape, "float32") if private else world.zeros(shape)
    with sk.Timeline(world) as timeline:
        gather = sk.AllGather(world, x.nbytes * n, "copy_push")
        gather(x, out)
        world.stream.begin_capture()
        gather(x, out)
        graph = world.stream.end_capture()
        for _ in range(3):
            graph.launch(world.stream)
    assert (world.asnumpy(out) == 1).all()
    gather.free()
    if not private:
        world.free(out)
    check_timeline(timeline.data)
    copies = [e for e in timeline.data["traceEvents"] if e.get("cat") == "copy"]
    for r in range(n):
        found = {}
        for e in copies:
            if e["pid"] == r:
                found[e["name"]] = found.get(e["name"], 0) + e["args"]["bytes"]
        others = [k for k in range(n) if k != r]
        wanted = {f"copy {'from' if private else 'to'} rank {k}" for k in others} | (
            {"copy"} if private else set()
        )
        assert found == dict.fromkeys(wanted, 2 * x.nbytes)  # an own one goes where the others read it
    assert all(1 < e["dur"] < 1e5 for e in copies)
