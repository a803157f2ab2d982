"""What all host objects of collectives refuse: see shmemkit/collectives/collective.py."""

import numpy as np
import pytest
from specification import ALL

import shmemkit as sk
from shmemkit.emu.stream import Stream
from shmemkit.operations.plans import Plans


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

    for seed in (None, 1):
        sk.emu.run(main, 2, races=True, delivery="unordered", seed=seed)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("where", [{0, 1}, {1}], ids=["everywhere", "on_rank_1"])
def test_wrong_arguments(pes, name, where):
    """What one rank refuses all do, and they are together afterwards."""
    what = ALL[name]
    wrong = [
        ({"method": "magic"}, f"method is 'magic'; it must be '{what.kind.methods[0]}'.* or 'auto'"),
        ({"nbytes": -1}, "max_nbytes is -1; it must be 0 or more"),
        ({"nbytes": "64"}, "max_nbytes is '64'; it must be"),
    ]
    if what.reduces:
        wrong.append(({"op": "mean"}, "op is 'mean'; it must be 'sum', 'prod', 'max', 'min' or 'avg'"))
    if what.root:
        wrong.append(({"root": 2}, "root is 2; it must be 0 to 1"))
        wrong.append(({"root": 1.0}, "root is 1.0; it must be an integer"))

    def main():
        world = sk.init()
        for arguments, message in wrong:
            given = {"nbytes": 8, **(arguments if world.rank in where else {})}
            beginning = "" if world.rank in where else "rank 1: "
            with pytest.raises((TypeError, ValueError), match=f"{beginning}.*{name}: {message}"):
                what.make(world, **given)
            assert world.host_allgather(world.rank) == [0, 1]
        differing = {"nbytes": 8 + world.rank}, {"root": world.rank}
        for arguments in differing[: 2 if what.root else 1]:
            ((key, _),) = arguments.items()
            key = {"nbytes": "max_nbytes"}.get(key, key)
            message = f"rank 0 gives {key}=., rank 1 gives {key}=.. {name} needs the same {key} on"
            with pytest.raises(ValueError, match=message):
                what.make(world, **{"nbytes": 8, **arguments})
        with pytest.raises(TypeError, match="world is 3; it must be the World"):
            what.make(3, 8)

    pes(2).run(main)


def wrong_calls(what, room):
    """-> what, x, out, and the error of each, of two ranks. Of the 16 float32 of `room`, x and out of 4."""
    shapes = [(2, 4) if many else (4,) for many in (what.scatters, what.gathers)]
    x, out = (np.zeros(shape, "float32") for shape in shapes)
    larger = np.zeros((2, 20) if what.scatters else 20, "float32")
    checked, kept = ("x", x) if what.kind is sk.Scatter else ("out", out)  # which must fit the other
    short = np.zeros(kept.size - 1, "float32")
    yield (short, out) if kept is x else (x, short), f"{checked} must be float32 with {kept.size} elements"
    yield (x, out.astype("int32")), f"out is int32 .*; {checked} must be (float32|int32)"
    many = larger if what.gathers == what.scatters else np.zeros((2, 20), "float32")
    outs = many if what.gathers else np.zeros(20, "float32")
    yield (larger, outs), "has (80|160) bytes, more than max_nbytes=64. Make an? .* with a larger max_nbytes"
    for first in (1, 3):  # nor are they in place
        begin = room[first : first + x.size].reshape(x.shape), room[: out.size].reshape(out.shape)
        yield begin, "x and out overlap; they must lie apart"
    if what.scatters and what.kind is not sk.Scatter:
        yield (np.zeros(5, "float32"), None), "number of its elements must be a multiple of 2"
    if what.reduces:
        yield (x.astype(">f4"), None), "x has dtype >f4; it must be of this machine's"
        yield (x.astype("complex64"), None), "dtype is complex64; it must be "
        yield (x.astype("bool"), None), "x has dtype bool, which cannot be reduced"
        yield (x.astype("int32"), None), "op is 'avg' and dtype int32; it must be a floating"


@pytest.mark.parametrize("name", ALL)
def test_wrong_calls(pes, name):
    """The root alone calls, if there is one: nobody waits for what is refused."""
    what = ALL[name]

    def main():
        world = sk.init()
        made = what.make(world, 64, op="avg")
        if what.root and world.rank:
            return
        for (x, out), message in wrong_calls(what, np.zeros(16, "float32")):
            with pytest.raises((TypeError, ValueError), match=f"{name}: .*{message}"):
                made(x, out)

    pes(2).run(main)


@pytest.mark.parametrize(
    "make, call, message",
    [
        (lambda w: sk.Scatter(w, 64), (None, np.zeros(2)), "x is None on rank 0, the root; it must have all"),
        (lambda w: sk.Scatter(w, 64, 1), (np.zeros(4), np.zeros(2)), "x is given on rank 0; it must be None"),
        (lambda w: sk.Scatter(w, 64, 1), (None,), "rank 0 gives no out; it must give an array for its seg"),
        (lambda w: sk.Reduce(w, 64, 1), (np.zeros(4), np.zeros(4)), "out is given on rank 0; it must be"),
        (
            lambda w: sk.Gather(w, 64, 1),
            (np.zeros(4), np.zeros(8)),
            "out is given on rank 0; .* rank 1, gets",
        ),
        (lambda w: sk.Broadcast(w, 64), (None,), "Broadcast: x is None; it must be a NumPy array"),
    ],
)
def test_who_gives_and_who_gets(pes, make, call, message):
    def main():
        world = sk.init()
        made = make(world)
        if world.rank == 0:
            with pytest.raises((TypeError, ValueError), match=message):
                made(*call)

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
