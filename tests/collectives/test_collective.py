"""What all host objects of collectives refuse: see shmemkit/collectives/collective.py."""

import numpy as np
import pytest

import shmemkit as sk
from shmemkit.collectives.bound_calls import Plans
from shmemkit.emu.stream import Stream

MAKE = {
    "AllGather": lambda w: sk.AllGather(w, 64),
    "AllReduce": lambda w: sk.AllReduce(w, 64),
    "ReduceScatter": lambda w: sk.ReduceScatter(w, 64),
    "AllToAll": lambda w: sk.AllToAll(w, 64),
    "Broadcast": lambda w: sk.Broadcast(w, 64),
    "Gather": lambda w: sk.Gather(w, 64),
}


def test_calls_of_several_objects_are_in_one_order():
    """On streams that nothing else orders, products too: each works on what the one before has made."""

    def main():
        world = sk.init()
        gather, reduce = sk.AllGather(world, 64), sk.AllReduce(world, 64)
        product = sk.AllGatherGemm(world, 64)
        first, second, third = (Stream(world.stream.machine, world.rank) for _ in range(3))
        x, ones = np.full((1, 2), world.rank + 1.0), np.ones((2, 1))
        gathered, reduced, summed = np.zeros((2, 1, 2)), np.zeros((1, 2)), np.zeros((2, 1))
        for _ in range(2):
            gather(x, gathered, stream=first)
            reduce(gathered[0], out=reduced, stream=second)
            product(reduced, ones, summed, stream=third)
        world.synchronize()
        assert summed.tolist() == [[4.0], [4.0]]
        others = sk.Barrier(world), sk.ExpertParallel(world, 1, 8, 2, 1)
        assert all(other._order is gather._order for other in others)

    for seed in (None, 0, 1):
        sk.emu.run(main, 2, races=True, delivery="unordered", seed=seed)


@pytest.mark.parametrize("kind", MAKE)
def test_after_the_world(pes, kind):
    """Also of arrays that a call was bound for before."""

    def main():
        world, x = sk.init(), np.zeros(2)
        made = MAKE[kind](world)
        made(x)
        made.free()
        barrier = sk.Barrier(world)
        world.finalize()
        with pytest.raises(RuntimeError, match=f"{kind}: its World is finalized"):
            made(x)
        with pytest.raises(RuntimeError, match="Barrier: its World is finalized"):
            barrier()

    pes(2).run(main)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (lambda w, bad: sk.AllReduce(w, 64, "mean" if bad else "sum"), "op is 'mean'; it must be 'sum'"),
        (lambda w, bad: sk.ReduceScatter(w, 64, "mean" if bad else "sum"), "op is 'mean'; it must be 'sum'"),
        (lambda w, bad: sk.Broadcast(w, 64, 2 * bad), "Broadcast: root is 2; it must be 0 to 1"),
        (lambda w, bad: sk.Gather(w, 64, 1.0 if bad else 1), "Gather: root is 1.0; it must be an integer"),
        (lambda w, bad: sk.AllToAll(w, "64" if bad else 64), "AllToAll: max_nbytes is '64'; it must be"),
        (
            lambda w, bad: sk.AllGather(w, 64, "magic" if bad else "ll"),
            "AllGather: method is 'magic'; it must be 'll'",
        ),
    ],
)
def test_what_one_rank_refuses_all_do(pes, wrong, message):
    """And the ranks are together afterwards."""

    def main():
        world = sk.init()
        with pytest.raises((TypeError, ValueError), match=message if world.rank else f"rank 1: .*{message}"):
            wrong(world, world.rank)
        assert world.host_allgather(world.rank) == [0, 1]

    pes(2).run(main)


reductions = pytest.mark.parametrize("kind", [sk.AllReduce, sk.ReduceScatter])


@reductions
@pytest.mark.parametrize(
    "arguments, message",
    [
        (lambda w: (w, 8, "mean"), ": op is 'mean'; it must be 'sum', 'prod', 'max', 'min' or 'avg'"),
        (lambda w: (w, 8, "sum", "shot"), "method is 'shot'; it must be '.*', .* or 'auto'"),
        (lambda w: (w, -1), "max_nbytes is -1; it must be 0 or more"),
        (
            lambda w: (w, 8 + w.rank),
            "ranks disagree: rank 0 gives max_nbytes=8, rank 1 gives max_nbytes=9. .* same max_nbytes on",
        ),
    ],
)
def test_wrong_arguments(pes, kind, arguments, message):
    def main():
        world = sk.init()
        with pytest.raises(ValueError, match=message):
            kind(*arguments(world))

    pes(2).run(main)


@reductions
def test_of_another_byte_order(pes, kind):
    def main():
        with pytest.raises(
            ValueError, match=f"{kind.__name__}: x has dtype >f4; it must be of this machine's"
        ):
            kind(sk.init(), 64)(np.ones(4, ">f4"))

    pes(2).run(main)


@pytest.mark.parametrize("call", [sk.all_to_all, sk.broadcast, sk.all_gather])
def test_python_objects(pes, call):
    def main():
        sk.init()
        with pytest.raises(TypeError, match="x has Python objects; it must have numbers"):
            call(np.array([None, None]))

    pes(2).run(main)


def test_a_result_that_cannot_be_written(pes):
    def main():
        x = np.ones(4)
        x.flags.writeable = False
        with pytest.raises(ValueError, match="Broadcast: the output is a read-only array; give `out`"):
            sk.Broadcast(sk.init(), 64)(x)

    pes(2).run(main)


def test_memory_that_is_not_there(pes):
    """MemoryError also where all methods of "auto" were tried."""

    def main():
        with pytest.raises(MemoryError, match="no method can run here\\. .*symmetric heap is full"):
            sk.AllReduce(sk.init(), 1 << 22)

    pes(2, heap_size=1 << 16).run(main)


def test_bound_calls_are_kept():
    """The newest ones. Those with device memory go by halves, once the GPU has finished, which a capture
    cannot wait for."""
    plans = Plans(4)
    for key in range(6):
        plans.keep(key, f"run {key}")
    assert list(plans) == [2, 3, 4, 5] and plans[2] == "run 2"

    waits = []
    plans = Plans(4, lambda: waits.append(list(plans)))
    for key in range(4):
        plans.keep(key, key)
    plans.keep(4, 4, capturing=True)
    assert list(plans) == [0, 1, 2, 3, 4] and not waits
    plans.keep(5, 5)
    assert list(plans) == [2, 3, 4, 5] and waits == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("kind", [sk.AllGather, sk.AllReduce, sk.AllToAll, sk.Gather, sk.Reduce])
def test_x_may_be_read_only_on_one_rank(pes, kind):
    def main():
        world = sk.init()
        x = np.arange(4.0)
        x.flags.writeable = world.rank == 0
        method = "one_shot" if kind is sk.AllReduce else "ll"
        out = kind(world, 256, method=method)(x)
        world.synchronize()
        if out is not None:
            last = {sk.AllReduce: 6, sk.Reduce: 6, sk.AllToAll: 1 + 2 * world.rank}
            assert out.flat[-1] == last.get(kind, 3)

    pes(2).run(main)
