"""Groups of ranks on GPUs: memory, kernels with the group's ranks (by peers' memory, and by NVSHMEM),
collectives, overlapping groups on two streams, and modules that are loaded when objects are made.

    SHMEMKIT_OVERSUBSCRIBE=1 shmemkit run -n 4 -m pytest -m gpu tests/runtime/test_gpu_groups.py

Where ranks share a GPU, NVSHMEM has no teams: what needs them is refused there.
"""

import numpy as np
import pytest
from gpu import on_gpus
from numba import cuda
from numba.cuda import dispatcher

import shmemkit as sk
from shmemkit import device
from shmemkit.runtime import launch

pytestmark = pytest.mark.ranks(4)
SIZE = on_gpus(1 << 16, 100)
HEAP = on_gpus("256M", "4M")
COLORS_AND_KEYS = {
    "halves": lambda rank, n: (rank * 2 // n, 0),
    "reversed": lambda rank, n: (rank % 2, -rank),
    "all": lambda rank, n: (0, -rank),
}
every_group = pytest.mark.parametrize("which", COLORS_AND_KEYS)


def split(world, which):
    """-> a group, for ``with``"""
    if world.n_ranks < 2:
        pytest.skip("needs two ranks or more")
    return world.split(*COLORS_AND_KEYS[which](world.rank, world.n_ranks), HEAP)


@cuda.jit
def near(x, signals, out):
    me, n = device.rank(), device.num_ranks()
    after = (me + 1) % n
    device.symm_at(x, after)[0] = device.world_rank(me)
    device.notify(signals, after, 1, "add", "sys")
    device.wait(signals, 1, "sys", "acquire", 1)
    out[0], out[1] = x[0], n


@cuda.jit
def by_nvshmem(x, signals, out):
    me, n = device.rank(), device.num_ranks()
    after = (me + 1) % n
    out[0] = device.world_rank(me)
    device.put_signal(x, out, signals, 1, device.SignalOp.SIGNAL_SET, after)
    device.signal_wait_until(signals, device.ComparisonType.CMP_EQ, 1)
    device.barrier_all()
    out[0], out[1], out[2] = x[0], device.team_my_pe(0), device.team_n_pes(0)


@every_group
@pytest.mark.parametrize("kernel", [near, by_nvshmem], ids=["near", "by_nvshmem"])
def test_kernels(world, which, kernel):
    with split(world, which) as group:
        check_kernel(world, group, kernel)


def check_kernel(world, group, kernel):
    x, signals, out = group.zeros(1, "int64"), group.signals(1), world.xp.zeros(3, "int64")
    if kernel is by_nvshmem and getattr(world.backend, "shares_gpus", False):
        with pytest.raises(RuntimeError, match="needs a GPU for each rank"):
            sk.bind(kernel, 1, 1, (x, signals, out), group=group)
        return
    sk.bind(kernel, 1, 1, (x, signals, out), group=group)()
    got, n, me = world.asnumpy(out).tolist(), group.n_ranks, group.rank
    assert got[0] == group.ranks[(me - 1) % n]
    assert got[1:] == ([n, 0] if kernel is near else [me, n])
    group.barrier()
    world.synchronize()
    for array in (x, signals):
        group.free(array)


@every_group
@pytest.mark.gpu("the emulator's has other ranks, too; test_groups.py has it")
def test_timeline(world, which):
    with split(world, which) as group:
        x, signals, out = group.zeros(1, "int64"), group.signals(1), world.xp.zeros(3, "int64")
        with sk.Timeline(group) as timeline:
            sk.bind(near, 1, 1, (x, signals, out), group=group)()
        ranks = {e["pid"] for e in timeline.data["traceEvents"] if e["name"] == "near"}
        assert ranks == set(group.ranks)
        for array in (x, signals):
            group.free(array)


def test_each_group_has_tables_of_its_own(world):
    """What is loaded for a group leaves the tables of the World and of other groups as they are."""

    @cuda.jit
    def who(out):
        out[0], out[1] = device.rank(), device.num_ranks()

    alone, reverse = world.split(world.rank), world.split(0, -world.rank)
    out = world.xp.zeros(2, "int64")
    steps = [(of, sk.bind(who, 1, 1, (out,), group=of)) for of in (world, alone, reverse)]
    for of, step in steps + steps[::-1]:
        step()
        assert world.asnumpy(out).tolist() == [of.rank, of.n_ranks]
    alone.finalize()
    for of, step in steps[::2]:
        step()
        assert world.asnumpy(out).tolist() == [of.rank, of.n_ranks]
    reverse.finalize()


@every_group
def test_memory(world, which):
    with split(world, which) as group:
        x = group.full(5, world.rank, "int64")
        group.barrier()
        for rank in range(group.n_ranks):
            if group.near()[rank]:
                assert world.asnumpy(group.peer_view(x, rank)).tolist() == [group.ranks[rank]] * 5
        group.host_barrier()
        group.free(x)
        with pytest.raises(MemoryError, match="the group's heap is full"):
            group.zeros(1 << 30)


@every_group
@pytest.mark.parametrize("n", [1, 1000, *([1 << 20] if on_gpus(True, False) else [])])
def test_collectives(world, which, n):
    with split(world, which) as group:
        xp, ranks = world.xp, np.array(group.ranks)
        x = xp.full(n, world.rank, "float32")
        assert (world.asnumpy(sk.all_reduce(x, group=group)) == ranks.sum()).all()
        gathered = world.asnumpy(sk.all_gather(x, group=group))
        assert (gathered == ranks[:, None]).all()
        assert (world.asnumpy(sk.broadcast(x.copy(), group.n_ranks - 1, group=group)) == ranks[-1]).all()


def test_a_mesh_on_two_streams(world):
    side = 2 if world.n_ranks % 2 == 0 else 1
    row = world.split(world.rank // side, heap=HEAP)
    column = world.split(world.rank % side, heap=HEAP)
    other = world.backend.new_stream()
    x, y = world.xp.ones(SIZE, "float32"), world.xp.full(SIZE, world.rank, "float32")
    world.synchronize()  # y is there, for the other stream
    add, mean = sk.AllReduce(row, x.nbytes), sk.AllReduce(column, y.nbytes, "avg")
    for _ in range(on_gpus(50, 5)):
        add(x, x)
        mean(y, y, stream=other)
        x *= 1 / row.n_ranks
    world.synchronize()
    assert np.allclose(world.asnumpy(x), 1)
    assert np.allclose(world.asnumpy(y), np.mean(column.ranks))
    for group in (row, column):
        group.finalize()


@pytest.mark.gpu("modules are compiled and loaded")
def test_a_second_group_compiles_nothing_and_loads_at_once(world, monkeypatch):
    """A first call finds its module loaded; the first reduction of a dtype loads it. Later ones load none."""
    groups = [world.split(world.rank // 2, heap="64M") for _ in range(2)]
    x = world.xp.ones(100, "float32")
    first = sk.AllGather(groups[0], 1 << 16), sk.AllReduce(groups[0], 1 << 16)
    for call in first:
        call(x)

    def compiles(*args, **_):
        raise AssertionError("a kernel is compiled")

    monkeypatch.setattr(launch, "compile_form", compiles)
    monkeypatch.setattr(dispatcher, "_Kernel", compiles)
    gather, reduce = sk.AllGather(groups[1], 1 << 16), sk.AllReduce(groups[1], 1 << 16)
    loaded = len(groups[1].backend._modules)
    assert loaded > 1
    assert (world.asnumpy(gather(x)) == 1).all() and len(groups[1].backend._modules) == loaded
    for n in (100, 48, 4):  # multiples of 16 bytes
        assert (world.asnumpy(reduce(x[:n].copy())) == groups[1].n_ranks).all()
        assert len(groups[1].backend._modules) == loaded + 1
    for made in (*first, gather, reduce):
        made.free()
    for group in groups:
        group.finalize()
