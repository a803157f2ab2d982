"""Budgets of multiprocessors: no launch of a collective has more blocks than `sms`, and the results are as
without it."""

import functools
import re

import numpy as np
import pytest
from budgets import least_budget, most_blocks
from emulated import spmd
from fast import slow
from specification import ALL, calls

import shmemkit as sk
from shmemkit.runtime.symmetric_memory import as_dtype

SIZES = [9, 130, 0, 41]
WAYS = [(name, method) for name, what in ALL.items() for method in what.kind.methods]
LEAST = {  # on 3 ranks; 1 of all others
    **{("AllGather", method): 3 for method in ("pull", "multimem", "ll_2d", "ll_2d_multimem", "push_2d")},
    **{("AllReduce", method): 2 for method in ("push", "ring")},
    **{way: 2 for way in (("AllGather", "push_1d"), ("ReduceScatter", "push"), ("AllToAll", "push"))},
    **{way: 2 for way in (("Broadcast", "scatter"), ("Reduce", "push"), ("ReduceScatter", "push_2d"))},
    **{(name, "push_2d"): 3 for name in ("AllToAll", "Broadcast", "Gather")},
    ("AllReduce", "double_tree"): 4,
}


@pytest.mark.each_value
@pytest.mark.every(4)
@pytest.mark.parametrize("name, method", WAYS)
@pytest.mark.parametrize("sms", [1, *slow(2, 3, 5, 64)])
def test_blocks(pes, small_chunks, name, method, sms):
    """A method that needs more says how many, and works with as many."""

    def main():
        world = sk.init()
        given = least_budget(lambda sms: ALL[name].make(world, 64, method, sms=sms), sms)
        assert given == max(sms, LEAST.get((name, method), 1))
        with sk.Timeline(world) as timeline:
            calls(name, method, SIZES, "int32", root=1, world=world, sms=given)
            calls(name, method, SIZES, "int32", root=1, world=world, sms=given, symmetric=True)
        assert 1 <= most_blocks(timeline) <= given

    pes(3).run(main)


@pytest.mark.every(3)
@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("sms, size", [(1, 300), *slow(*((sms, 3000) for sms in (1, 2, 3, 64)))])
@pytest.mark.schedules(deliveries="unordered", seeds=[0])
def test_auto(pes, name, sms, size):
    """Any budget is enough."""
    pes(3).run(lambda: calls(name, "auto", [9, size, 0, 70], root=1, sms=sms))


@pytest.mark.every(3)
@pytest.mark.parametrize("name, method", [(name, m) for name, m in WAYS if m == "push_2d"])
def test_over_nodes(pes, messages, name, method):
    def main():
        world = sk.init()
        given = least_budget(lambda sms: ALL[name].make(world, 64, method, sms=sms), 1)
        with sk.Timeline(world) as timeline:
            calls(name, method, SIZES, "int32", root=1, world=world, sms=given)
        assert most_blocks(timeline) <= given

    pes(4, local_size=2).run(main)


@pytest.mark.every(3)
@pytest.mark.parametrize("method", ["ll", "ll128", "lamport"])
@pytest.mark.parametrize("n", [4, *slow(5)])
def test_a_block_has_the_packets_of_several_ranks(pes, method, n):
    """Fewer blocks than there are ranks, with races checked and messages late."""
    for name in ("AllToAll", "AllGather"):
        pes(n).run(functools.partial(calls, name, method, [130, 1, 0, 70], sms=2))


@pytest.mark.every(2)
@pytest.mark.parametrize("op, unit", [("sum", "float32"), ("avg", "bfloat16")])
def test_the_same_bits(op, unit):
    """Of numbers whose sums are rounded."""

    def main(world):
        x = np.random.default_rng(world.rank).standard_normal(500).astype("float32")
        x = x.astype(as_dtype(unit))
        for method in ("one_shot_ll128", "two_shot_ll128", "push", "ring", "double_tree"):
            found = []
            for sms in (None, 4, 7):
                reduce = sk.AllReduce(world, x.nbytes, op, method, sms=sms)
                found.append(reduce(x).tobytes())
                reduce.free()
            assert found[0] == found[1] == found[2], method

    spmd(3, main)


def test_all_to_all_v():
    def main(world):
        n, me = world.n_ranks, world.rank
        splits, x = np.array([3, 0, 5], "int64"), np.arange(8 * 16, dtype="int32").reshape(8, 16) + 1000 * me
        wanted = np.concatenate(
            [
                (np.arange(8 * 16).reshape(8, 16) + 1000 * k)[[slice(3), slice(0), slice(3, 8)][me]]
                for k in range(n)
            ]
        )
        for sms in (1, 2, 3, 64):
            exchange = sk.AllToAllV(world, 24 * 64, sms=sms)
            out, sizes = np.zeros((24, 16), "int32"), np.zeros(n, "int64")
            with sk.Timeline(world) as timeline:
                exchange(x, splits, out, sizes)
            assert most_blocks(timeline) <= sms
            np.testing.assert_array_equal(out[: sizes.sum()], wanted)
            exchange.free()

    spmd(3, main)


def test_rows():
    """Of all-reduces with RMSNorm, and of partial attention."""

    def main(world):
        x, ones = np.ones((3, 64), "float16"), np.ones(64, "float16")
        partial, lse = np.ones((3, 4, 32), "float32"), np.zeros((3, 4), "float32")
        for sms in (1, 3, 64):
            norm = sk.AllReduceRMSNorm(world, 3, 64, "float16", sms=sms)
            combine = sk.AttentionCombine(world, 3, 4, 32, "float32", sms=sms)
            with sk.Timeline(world) as timeline:
                _, residual = norm(x, x, ones)
                out = combine(partial, lse)
            assert 1 <= most_blocks(timeline) <= sms
            assert (residual == 3).all() and (out == 1).all()
            norm.free()
            combine.free()

    spmd(2, main)


@pytest.mark.slow
def test_one_line():
    def main(world):
        x, n = np.full(201, world.rank + 1, "int32"), world.n_ranks
        with sk.Timeline(world) as timeline:
            assert (sk.all_reduce(x, sms=1) == sum(range(1, n + 1))).all()
            assert (sk.all_gather(x, sms=1)[1] == 2).all()
            assert sk.reduce_scatter(x, sms=1).shape == (x.size // n,)
            assert sk.all_to_all(x, sms=1).shape == x.shape
            assert (sk.broadcast(x.copy(), sms=1) == 1).all()
            sk.gather(x, sms=1)
            sk.reduce(x, sms=1)
            sk.scatter(x if world.rank == 0 else None, out=np.zeros(x.size // n, "int32"), sms=1)
            combined = sk.attention_combine(
                np.ones((4, 4, 32), "float32"), np.zeros((4, 4), "float32"), sms=1
            )
            assert (combined == 1).all()
        assert most_blocks(timeline) == 1
        with sk.Timeline(world) as timeline:
            sk.all_reduce(x)
        assert most_blocks(timeline) > 1  # an object of its own

    spmd(3, main)


def test_errors():
    def main(world):
        for sms, error, said in (
            (0, ValueError, "sms is 0; it must be 1 or more"),
            (-3, ValueError, "sms is -3"),
            (True, TypeError, "sms is True"),
            (8.0, TypeError, "sms is 8.0"),
        ):
            for make in (
                lambda sms: sk.AllReduce(world, 64, sms=sms),
                lambda sms: sk.AllToAllV(world, 64, sms=sms),
                lambda sms: sk.AllReduceRMSNorm(world, 2, 8, sms=sms),
                lambda sms: sk.AttentionCombine(world, 2, 2, 8, sms=sms),
                lambda sms: sk.FlashDecode(world, 2, 2, 2, sms=sms),
                lambda sms: sk.ExpertParallel(world, 2, 8, 2, 1, sms=sms),
                lambda sms: sk.all_reduce(np.zeros(4, "float32"), sms=sms),
            ):
                with pytest.raises(error, match=re.escape(said)):
                    make(sms)
        with pytest.raises(ValueError, match="sms is 3; it must be 4 at least, the fewest blocks"):
            sk.AllReduce(world, 64, method="double_tree", sms=3)
        with pytest.raises(ValueError, match="sms is 1; it must be 2 at least"):
            sk.ExpertParallel(world, 2, 8, 2, 1, sms=1)
        with pytest.raises(ValueError, match="AllReduce needs the same sms on all ranks"):
            sk.AllReduce(world, 64, sms=8 + world.rank)

    spmd(2, main)
