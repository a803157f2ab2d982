"""Groups of ranks on the emulator: how they are made and end, their memory, kernels that are bound for them,
wrong orders of calls, and what is said when a member is missing."""

import ctypes
from types import SimpleNamespace

import numpy as np
import pytest
from emulated import deadlock_of, spmd
from fast import slow
from launched import mpirun, needs_mpi
from numba import cuda

import shmemkit as sk
from shmemkit import device
from shmemkit.backends import nvshmem
from shmemkit.backends.emulator import EmulatorBackend
from shmemkit.comm import SingleComm
from shmemkit.device.shmem import peers
from shmemkit.emu import EmulatorError, UseAfterFreeError
from shmemkit.runtime import gpu_timeline


def members(group):
    return None if group is None else list(group.ranks)


def test_split(pes):
    """The numbers of the ranks: by key, then by rank; None is in no group."""

    def main():
        with sk.init() as world:
            me = world.rank
            three_five = world.split(int(me >= 3), key=-me)
            some = world.split(None if me == 5 else me % 2)
            whole, alone, pair = world.split(7), world.split(me), world.group([6, 2], heap=1 << 20)
            for group in filter(None, (three_five, some, whole, alone, pair)):
                assert group.ranks[group.rank] == me == group.world_rank(group.rank)
                assert group.host_allgather(me) == list(group.ranks)
                assert group.comm.allgather(me) == list(group.ranks) and group.world is world
                x = group.full(3, me, "int64")
                group.barrier()
                assert [int(group.peer_view(x, r)[2]) for r in range(group.n_ranks)] == list(group.ranks)
                assert not world.is_symmetric(x) and group.is_symmetric(x)
                group.free(x)
            return [members(g) for g in (three_five, some, whole, alone, pair)]

    found = pes(8).run(main)
    for me, (three_five, some, whole, alone, pair) in enumerate(found):
        assert three_five == ([2, 1, 0] if me < 3 else [7, 6, 5, 4, 3])
        assert some == (None if me == 5 else [1, 3, 7] if me % 2 else [0, 2, 4, 6])
        assert whole == list(range(8)) and alone == [me]
        assert pair == ([6, 2] if me in (2, 6) else None)


@pytest.mark.parametrize(
    "ranks, local_size, nodes",
    [
        ([0, 1], 2, 1),
        ([3, 2, 1, 0], 2, 2),
        ([0, 2, 4], 2, 3),
        ([0, 1, 2], 2, 3),  # not equally many
        ([0, 2, 1, 3], 2, 4),  # not one after another
        ([1, 4, 2], 8, 1),
    ],
)
def test_nodes(ranks, local_size, nodes):
    def main(world):
        group = world.group(ranks)
        if group is not None:
            assert group.n_nodes == nodes and group.n_nodes * group.local_size == len(ranks)
            assert group.node * group.local_size + group.local_rank == group.rank in group.node_ranks
            assert group.near() == [rank in group.node_ranks for rank in range(group.n_ranks)]
        return world.group_of_node().ranks, members(world.leaders())

    for rank, (node, leaders) in enumerate(spmd(8, main, local_size=local_size)):
        assert list(node) == list(
            range(rank // local_size * local_size, (rank // local_size + 1) * local_size)
        )
        assert leaders == (list(range(0, 8, local_size)) if rank % local_size == 0 else None)


def test_groups_of_groups(pes):
    def main():
        with sk.init() as world:
            upper = world.split(world.rank // 4, key=-world.rank)
            pair = upper.split(upper.rank // 2)
            assert pair.world is world
            x = pair.full(1, world.rank, "int64")
            total = sk.all_reduce(np.array(x), group=pair)
            upper.finalize()
            assert pair.finalized
            with pytest.raises(RuntimeError, match="zeros\\(\\): this group is finalized. Make a new one"):
                pair.zeros(3)
            return list(pair.ranks), int(total[0])

    found = pes(8).run(main)
    assert found == [([r | 1, r & ~1], (r | 1) + (r & ~1)) for r in range(8)]


# ---- memory


def test_a_full_group(pes):
    def main():
        with sk.init() as world, world.split(world.rank % 2, heap="1M") as group:
            x = group.zeros(1000)
            with pytest.raises(
                MemoryError, match=r"the group's heap is full: 2097152 bytes .* heap=\d+ or more"
            ):
                group.zeros(1 << 19)
            with pytest.raises(MemoryError, match="the group's heap is full"):
                group.split(0)
            group.free(x)
            return group.zeros(1 << 17).nbytes

    assert pes(4).run(main) == [1 << 19] * 4
    with pytest.raises(MemoryError, match="the symmetric heap is full"):
        spmd(2, lambda world: world.split(0, heap="2G"))


def test_memory_comes_back(pes):
    """When all ranks have left the groups of a split, also those that were in none."""

    def main():
        with sk.init() as world:
            for call in range(20):
                group = world.split(0 if world.rank != call % 3 else None, heap="100M")
                if group is not None:
                    x = group.full(100, call)
                    assert (x == call).all()
                    if call % 2:
                        group.free(x)
                    del x
                    group.finalize()
            world.free(world.zeros(3))

    pes(3, races=True).run(main)


def test_arrays_of_the_world_and_of_the_group(pes):
    def main():
        with sk.init() as world:
            group = world.split(world.rank % 2)
            of_world = world.full(2, world.rank)
            of_group = group.full(2, world.rank)
            other = group.ranks[1 - group.rank]
            assert group.peer_view(of_world, 1 - group.rank)[0] == other
            assert group.peer_view(of_group, 1 - group.rank)[0] == other
            with pytest.raises(ValueError, match="not in symmetric memory of this World"):
                world.peer_view(of_group, 0)
            with pytest.raises(ValueError, match="not in symmetric memory of this group"):
                group.free(of_world)
            world.host_barrier()

    pes(4).run(main)


def test_an_array_of_a_group_that_has_ended():
    """Its name and both lines are said, also when the World has the group's memory again."""

    def main(world):
        group = world.split(0, heap="64K")
        array = group.zeros(4, "float32", "box")
        group.finalize()
        world.zeros(4)
        sk.all_reduce(array)

    with pytest.raises(
        UseAfterFreeError, match=r"(?s)box \(float32\).*all_reduce\(array\).*group\.finalize\(\)"
    ):
        spmd(2, main)


def test_leaks_are_reported(capsys):
    def main():
        with sk.init() as world:
            world.split(world.rank).zeros(3, name="lost")

    sk.emu.run(main, 2)
    assert "without free (of the group of rank 1): lost float32 (3,)" in capsys.readouterr().err


# ---- wrong arguments


@pytest.mark.parametrize(
    "call, kind, message",
    [
        (lambda w: w.split("a"), TypeError, r"split\(\): color is 'a'; it must be an integer"),
        (lambda w: w.split(-1), ValueError, "color is -1; it must be 0 or more"),
        (lambda w: w.split(0, 1.5), TypeError, "key is 1.5; it must be an integer"),
        (lambda w: w.split(0, 0, "64X"), ValueError, "heap is '64X'; it must be a number of bytes"),
        (lambda w: w.split(0, heap=0), ValueError, "heap is 0; it must be 1 or more"),
        (lambda w: w.split(0, heap=[1]), TypeError, "heap is a list; it must be an integer"),
        (
            lambda w: w.split(0, heap=1000 + w.rank),
            ValueError,
            "rank 0 asks for groups with 1000 bytes, rank 1",
        ),
        (lambda w: w.split(0 if w.rank else "a"), TypeError, "color is 'a'"),
        (lambda w: w.group(3), TypeError, "ranks is 3; it must be a list of ranks"),
        (lambda w: w.group([]), ValueError, "it must have one rank or more, each once"),
        (
            lambda w: w.group([1, 1]),
            ValueError,
            r"ranks is \[1, 1\]; it must have one rank or more, each once",
        ),
        (lambda w: w.group([0, 2]), ValueError, "a rank is 2; it must be 0 to 1"),
        (lambda w: w.group([0, 1] if w.rank else [1, 0]), ValueError, r"asks for a group of \[1, 0\]"),
        (lambda w: sk.bind(nothing, 1, 1, (), group=3), TypeError, "group is 3; it must be a Group"),
        (lambda w: sk.all_reduce(np.ones(3), group=3), TypeError, r"all_reduce\(\): group is 3; it must"),
        (lambda w: w.split(0).world_rank(2), ValueError, "rank is 2; it must be 0 to 1"),
    ],
)
def test_wrong_arguments(call, kind, message):
    """All ranks raise."""

    def main(world):
        with pytest.raises(kind, match=message):
            call(world)
        return len(world.host_allgather(1))

    assert spmd(2, main) == [2, 2]


@cuda.jit
def nothing():
    pass


def test_a_group_that_ends_while_an_object_lives(pes):
    def main():
        with sk.init() as world:
            group = world.split(world.rank % 2)
            reduce, barrier, x = sk.AllReduce(group, 1024), sk.Barrier(group), np.ones(8, "float32")
            launch = sk.bind(nothing, 1, 1, (), group=group)
            assert reduce(x)[0] == 2
            group.finalize()
            for call in (lambda: reduce(x), barrier, lambda: sk.AllReduce(group, 64)):
                with pytest.raises(
                    RuntimeError, match="its group is finalized; make a new one with World.split"
                ):
                    call()
            with pytest.raises(RuntimeError, match="this group is finalized"):
                sk.bind(nothing, 1, 1, (), group=group)
            with pytest.raises(RuntimeError, match=r"kernel nothing\(\): this group is finalized"):
                launch()
            group.finalize()  # does nothing
            world.host_barrier()

    pes(4).run(main)


def test_a_timeline_of_a_group(pes):
    """Also of one without rank 0. Its tracks are those of the World's ranks."""

    def main():
        with sk.init() as world:
            group = world.group([3, 1])
            if group is not None:
                with sk.Timeline(group) as timeline:
                    sk.bind(nothing, 1, 1, (), group=group)()
                return {e["pid"] for e in timeline.data["traceEvents"] if e["name"] == "nothing"}

    assert pes(4).run(main)[1::2] == [{1, 3}] * 2


def test_clocks_are_compared_with_the_ranks_of_the_group(pes, monkeypatch):
    given = []

    def bind(*_, group):
        given.append(group)
        return SimpleNamespace(set=None)

    def main():
        with sk.init() as world:
            recorder = object.__new__(gpu_timeline.GpuRecorder)
            recorder.world = world.split(world.rank)
            assert recorder._offset() == (0, 0) and recorder.world in given

    monkeypatch.setattr(gpu_timeline, "bind", bind)
    pes(2).run(main)


def test_names_of_copies():
    """Of a rank between the memory of ranks 0 to 3, and memory that is not symmetric."""
    recorder = object.__new__(gpu_timeline.GpuRecorder)
    owners = {10: 0, 11: 1, 12: 2, 5: None}
    recorder.world = SimpleNamespace(
        locate=lambda address: (None, None, owners[address]),
        backend=SimpleNamespace(elapsed_ns=lambda first, last: None if last is None else last - first),
    )
    recorder.me, recorder._event, recorder._seen = 1, 100, 1000
    recorder.copies = [((11, 5), 8, 110, 130), ((5, 12), 8, 130, 135), ((10, 11), 4, 140, 150)]
    recorder.copies.append(((10, 11), 4, 140, None))  # which has not run
    spans = list(recorder._of_copies())
    assert [(s.name, s.begin, s.end, s.args["bytes"]) for s in spans] == [
        ("copy", 1010, 1030, 8),
        ("copy from rank 2", 1030, 1035, 8),
        ("copy to rank 0", 1040, 1050, 4),
    ]


# ---- what the emulator has not: NVSHMEM's backend, with another one's NVSHMEM


def test_ranks_of_a_host_that_share_a_gpu_have_the_id_of_it():
    ids = []
    for rank in range(4):
        backend, _ = backend_of(rank, 4)
        backend._uuids, backend.hosts = ["a", "a", "b", "a"], SimpleNamespace(machines=[0, 0, 0, 1])
        ids.append(backend.gpu_id)
    assert ids[0] == ids[1] and len(set(ids)) == 3


def backend_of(rank, n_ranks, shares_gpus=False, offsets=None):
    """-> rank's NvshmemBackend, and what it asks of NVSHMEM"""
    backend, asked = nvshmem.NvshmemBackend.__new__(nvshmem.NvshmemBackend), []

    def team_init(team, config, mask, n, me):
        asked.append(("team_init", n, me))
        ctypes.c_int.from_address(team).value = 7

    backend.rank, backend.n_ranks, backend.ranks = rank, n_ranks, range(n_ranks)
    backend.offsets, backend.groups = offsets or [0] * n_ranks, []
    backend.shares_gpus, backend._bounds_barrier = shares_gpus, False
    backend._core = SimpleNamespace(
        get_team_unique_id=lambda: SimpleNamespace(value=1),
        free=lambda buffer: asked.append(("free", buffer)),
        finalize=lambda: asked.append(("finalize",)),
    )
    backend._bindings = SimpleNamespace(
        TeamConfig=lambda: SimpleNamespace(ptr=0),
        team_config_dtype=np.dtype("V64"),
        team_init=team_init,
        team_destroy=lambda team: asked.append(("team_destroy", team)),
    )
    return backend, asked


ALONE = SingleComm()


def test_a_slab_has_room_for_the_groups_barrier():
    backend, asked = backend_of(0, 4)

    def allocate(n_bytes):
        asked.append(n_bytes)
        return SimpleNamespace(data=SimpleNamespace(ptr=1 << 20), nbytes=n_bytes)

    backend.allocate = allocate
    assert backend.new_slab(1).size == 1 + 8 * 4 + nvshmem.ALIGNMENT and len(asked) == 1


def test_teams_have_the_same_numbers_in_a_later_world():
    """nvshmem4py's own list of teams refuses a number that it knows already."""
    for _ in range(2):
        backend, asked = backend_of(2, 4)
        group = backend.group([2], ALONE, slab=object(), key=(1, 0))
        group.set_local_size(1)
        assert group.teams == dict.fromkeys(range(3), 7) and group._bounds_barrier
        group.end_group()
        assert asked == [("team_init", 1, 0), ("team_destroy", 7)]


def test_ranks_that_share_a_gpu_ask_for_no_team():
    """NVSHMEM would end the program."""
    backend, asked = backend_of(2, 4, shares_gpus=True)
    group = backend.group([2], ALONE, slab=object(), key=(1, 0))
    group.set_local_size(1)
    assert set(group.teams.values()) == {peers.NO_TEAM}
    with pytest.raises(ValueError, match="ranks share a GPU, for which NVSHMEM has no teams"):
        group.multicast_view(SimpleNamespace(data=SimpleNamespace(mem=None)), [0])
    group.end_group()
    assert asked == []
    apart, _ = backend_of(0, 2, shares_gpus=True, offsets=[peers.UNREACHABLE, 0])
    with pytest.raises(RuntimeError, match="rank 0 do not reach each other's memory, and ranks share a GPU"):
        apart.group([0], ALONE, slab=object(), key=(1, 0))


@pytest.mark.parametrize(
    "function, takes_a_team",
    [
        ("nvshmem_barrier", True),
        ("nvshmemx_sync_warp", True),
        ("nvshmem_team_my_pe", True),
        ("nvshmemx_float_sum_reduce_block", True),
        ("nvshmem_int64_fcollect", True),
        ("nvshmem_uint64_put", False),
        ("nvshmemx_uint8_put_signal_nbi_block", False),
        ("nvshmemx_signal_op", False),
        ("nvshmem_uint64_atomic_add", False),
        ("nvshmem_quiet", False),
    ],
)
def test_kernels_that_take_teams_are_refused_where_there_are_none(function, takes_a_team):
    backend, _ = backend_of(0, 1, shares_gpus=True)
    group = backend.group([0], ALONE, slab=object(), key=(1, 0))
    library = SimpleNamespace(modules=[f'declare void @"_ZN25{function}_nbst"()'])
    compiled = type("Kernel", (), {"_codelibrary": library, "entry_name": "_ZN8__main__4stepE"})
    assert nvshmem.calls_teams(compiled) == takes_a_team
    if takes_a_team:
        with pytest.raises(RuntimeError, match="kernel step calls NVSHMEM's barriers or teams for a group"):
            group.load(compiled)


def test_nvshmem_ends_after_the_modules_of_groups_and_all_memory():
    """Also of groups that the program never ended."""
    backend, asked = backend_of(0, 1)
    group = backend.group([0], ALONE, slab=object(), key=(1, 0))
    group._modules["kernel"] = SimpleNamespace(unload=lambda: asked.append(("unload",)))
    backend.stream, backend._buffers = SimpleNamespace(__exit__=lambda: None), {1: "probe", 2: "slab"}
    asked.clear()
    backend.finalize()
    assert asked == [("unload",), ("free", "probe"), ("free", "slab"), ("finalize",)] and not group._modules


def test_a_group_that_cannot_be_made(monkeypatch):
    """All ranks raise, and can make others."""
    make = EmulatorBackend.group

    def group(self, ranks, comm, slab, key):
        if ranks == [0, 2] and key == (1, 0):
            raise RuntimeError("no team is left")
        return make(self, ranks, comm, slab, key)

    monkeypatch.setattr(EmulatorBackend, "group", group)

    def main(world):
        with pytest.raises(RuntimeError, match="no team is left"):
            world.split(world.rank % 2, heap="100M")
        for _ in range(20):  # the memory comes back, too
            world.split(world.rank % 2, heap="100M").finalize()

    spmd(4, main)


# ---- kernels


@cuda.jit
def speak(x, signals, out):
    me, n = device.rank(), device.num_ranks()
    after = (me + 1) % n
    device.symm_at(x, after)[0] = me
    device.notify(signals, after, 1, "add", "sys")
    device.wait(signals, 1, "sys", "acquire", 1)
    device.put(x[1:2], out[5:6], after)
    device.quiet()
    device.signal_op(signals[1:], 1, device.SignalOp.SIGNAL_ADD, after)
    device.wait(signals[1:], 1, "sys", "acquire", 1)
    device.atomic_add(signals[2:], 1 + me, 0)
    device.barrier_all()
    if me == 0:
        out[4] = signals[2]
    out[0], out[1], out[2] = x[0], n, device.world_rank(after)
    out[3] = device.team_my_pe(0) + 10 * device.team_n_pes(0) + 100 * device.team_n_pes(2)


@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
def test_a_kernel_has_the_ranks_of_its_group(pes):
    def main():
        with sk.init() as world:
            group = world.split(int(world.rank >= 2), key=-world.rank)
            x, signals, out = group.zeros(2, "int64"), group.signals(3), np.zeros(6, "int64")
            out[5] = 70 + group.rank
            sk.bind(speak, 1, 1, (x, signals, out), group=group)()
            world.synchronize()
            n, me = group.n_ranks, group.rank
            before = (me - 1) % n
            assert out[:4].tolist() == [before, n, group.ranks[(me + 1) % n], me + 110 * n]
            group.barrier()
            world.synchronize()
            assert x[1] == 70 + before
            assert me or out[4] == n * (n + 1) // 2

    pes(5, races=True).run(main)


@cuda.jit
def collect(x, gathered, total, numbers):
    device.fcollect(0, gathered, x)
    device.sync_all()
    device.reduce(0, total, x, "max")
    device.barrier(0)
    device.broadcast(0, x, gathered, 1)
    numbers[0], numbers[1] = device.team_my_pe(0), device.world_rank(device.rank())


@pytest.mark.schedules(deliveries="unordered", seeds=[None, 0])
def test_teams_in_a_kernel(pes):
    def main():
        with sk.init() as world:
            group, same = world.split(world.rank % 2, key=-world.rank), world.split(0)
            for g in (group, same, group):
                x, gathered = g.full(1, world.rank, "int64"), g.zeros(g.n_ranks, "int64")
                total, numbers = g.zeros(1, "int64"), np.zeros(2, "int64")
                sk.bind(collect, 1, 1, (x, gathered, total, numbers), group=g)()
                world.synchronize()
                assert gathered.tolist() == list(g.ranks) and total[0] == max(g.ranks)
                assert x[0] == g.ranks[0] and numbers.tolist() == [g.rank, world.rank]
                g.barrier()
                world.synchronize()

    pes(6, races=True).run(main)


@cuda.jit
def reach(x, rank):
    device.symm_at(x, rank)[0] = 1


def test_a_rank_that_the_group_has_not(pes):
    def main():
        with sk.init() as world:
            group = world.split(world.rank // 2)
            sk.bind(reach, 1, 1, (group.zeros(1), 2), group=group)()

    with pytest.raises(EmulatorError, match="rank is 2; it must be 0 to 1"):
        pes(4).run(main)


@cuda.jit
def send(x, rank):
    device.put(x, x, rank)


@pytest.mark.parametrize("kernel", [reach, send])
def test_a_kernel_of_the_world_with_an_array_of_a_group(pes, kernel):
    """It does not write into the memory of another group."""

    def main():
        with sk.init() as world:
            group = world.split(world.rank // 2)
            inner = group.split(0)  # memory of a group in that of another
            x, y, z = inner.zeros(1), group.zeros(1), world.zeros(1)
            for array in (x, y):
                sk.bind(kernel, 1, 1, (array, world.rank ^ 1))()
                world.synchronize()
            sk.bind(kernel, 1, 1, (z, 0), group=group)()
            inner.finalize()
            world.host_barrier()
            kernel[1, 1](y, 2)

    with pytest.raises(
        EmulatorError, match="memory of the group of ranks 0 and 1, and rank 2 of the World is"
    ):
        pes(4).run(main)


def test_memory_comes_back_with_the_world():
    """Of groups that the program has not ended."""

    def main():
        for _ in range(20):
            with sk.init() as world:
                x = world.split(world.rank % 2, heap="100M").zeros(1)
                del x

    sk.emu.run(main, 2)


@cuda.jit
def store(x, rank):
    device.symm_at(x, rank)[0] += 1


def test_races_are_found_in_groups():
    def main(world):
        group = world.split(world.rank // 2, key=-world.rank)
        x = group.zeros(1, name="x")
        sk.bind(store, 1, 1, (x, 0), group=group)()
        world.synchronize()
        group.barrier()
        world.synchronize()
        group.free(x)

    with pytest.raises(sk.emu.RaceError, match=r"x\[0\] on rank [13]"):
        spmd(4, main, races=True)


# ---- the order of calls


def test_groups_that_are_called_in_different_orders():
    """The program is wrong, and its deadlock names the groups."""

    def main(world):
        one, other = world.split(0), world.group(range(3))
        calls = [sk.AllReduce(group, 64, method="one_shot") for group in (one, other)]
        for call in calls if world.rank else reversed(calls):
            call(np.ones(1, "float32"), np.empty(1, "float32"))

    report = deadlock_of(3, main)
    assert "exchange (of the group of ranks 0 to 2): waits for" in report


def test_calls_are_compared_in_each_group():
    def main(world):
        group = world.split(world.rank // 2)
        x = np.ones(4 + world.rank // 3, "float32")
        sk.AllReduce(group, 64, method="one_shot")(x, np.empty_like(x))

    with pytest.raises(
        ValueError, match="rank 2 calls AllReduce of 4 float32.*rank 3 .*of the group of ranks 2 and 3"
    ):
        spmd(4, main)


# ---- a missing member


def test_a_member_that_does_not_come():
    def main(world):
        group = world.split(world.rank % 2)
        if world.rank != 3:
            group.zeros(4)

    report = deadlock_of(4, main)
    assert "rank 1: its host program waits for rank 3 to call zeros()" in report
    assert "too (of the group of ranks 1 and 3)" in report


def test_a_member_that_makes_fewer_calls():
    def main(world):
        group, x = world.split(world.rank % 2), np.ones(4, "float32")
        reduce = sk.AllReduce(group, 64, method="one_shot")
        for _ in range(1 + (world.rank == 1)):
            reduce(x, np.empty_like(x))

    report = deadlock_of(4, main)
    assert "Not all ranks of the group of ranks 1 and 3 have made the same collective calls" in report


PROGRAM = """
with sk.init() as world:
    row, column = world.split(world.rank // 2), world.split(world.rank % 2)
    for group in (row, column, world):
        x = group.full(100, world.rank)
        assert sk.all_reduce(x, group=group)[7] == sum(group.ranks)
        group.free(x)
    row.finalize()
    if "error" in sys.argv:
        column.zeros(3 + (world.rank == 3))
    if "late" in sys.argv and world.rank == 3:
        time.sleep(60)
    column.host_barrier()
    world.print("done")
"""


@pytest.mark.processes(4)
@needs_mpi
@pytest.mark.parametrize(
    "argument, message",
    [
        *slow(
            ("", None),
            ("late", "within 2 s; rank 1 is there (of the group of ranks 1 and 3)"),
            ("error", "ranks disagree: rank 1 asks for float32 (3,), rank 3 asks for float32 (4,)"),
        )
    ],
)
def test_processes(argument, message):
    """Each rank a process, on the emulator."""
    limit = {"SHMEMKIT_TIMEOUT": "2"} if argument == "late" else {}
    status, text, _ = mpirun(4, PROGRAM, *[argument] * bool(argument), **limit)
    if message is None:
        assert status == 0 and text.count("done") == 4, text
    else:
        assert status != 0 and message in text, text
