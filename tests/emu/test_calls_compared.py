"""On the emulator, what the ranks give to a collective call is compared."""

import numpy as np
import pytest
from emulated import spmd

import shmemkit as sk
from shmemkit.emu.collective_calls import SLOT, SLOTS, Calls


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda w: sk.all_reduce(np.ones(4, "float32" if w.rank else "float64")), "AllReduce of 4 float"),
        (lambda w: sk.all_gather(np.ones(4 + w.rank)), "AllGather of [45] float64"),
        (lambda w: sk.broadcast(np.ones(4 + w.rank)), "Broadcast of [45] float64"),
        (lambda w: sk.reduce_scatter(np.ones(4 + 2 * w.rank)), "ReduceScatter of [46] float64"),
        (lambda w: sk.all_to_all(np.ones(4 + 2 * w.rank)), "AllToAll of [46] float64"),
        (lambda w: sk.gather(np.ones(4 + w.rank)), "Gather of [45] float64"),
    ],
)
def test_other_arrays(call, text):
    said = f"rank 0 calls {text}[^,]*[(].*py:[0-9]+[)], rank 1 calls .*the same order"
    with pytest.raises(ValueError, match=said):
        spmd(2, lambda world: (call(world), world.synchronize()))


def products(kind, *sizes):
    return lambda w: kind(w, 16, 8, "float32")(*(np.ones(s, "float32") for s in sizes[w.rank]))


@pytest.mark.parametrize(
    "call, numbers",
    [
        (products(sk.GemmAllReduce, [(4, 8), (8, 8)], [(5, 8), (8, 8)]), (32, 40)),
        (products(sk.GemmReduceScatter, [(4, 8), (8, 4)], [(4, 8), (8, 8)]), (8, 16)),
        (
            lambda w: sk.AllGatherGemm(w, 2048)(np.ones((4 + w.rank, 8)), np.ones((8, 4 + w.rank))),
            (32, 40),
        ),
    ],
)
def test_other_products(call, numbers):
    """Weights of an all-gather may differ."""
    with pytest.raises(ValueError, match="rank 0 calls .*Gemm.*, rank 1 calls .*Gemm") as raised:
        spmd(2, lambda world: (call(world), world.synchronize()))
    assert all(f"{number} float" in str(raised.value) for number in numbers), raised.value
    spmd(2, lambda w: sk.AllGatherGemm(w, 2048)(np.ones((4, 8)), np.ones((8, 4 + w.rank))))


def placed(kind, parts):
    """A call with an array of 16 that begins with this element of a symmetric array, or is private (None)."""

    def main(world):
        room = world.zeros(24, "float64", "here")
        part = parts[world.rank]
        placed = np.zeros(16) if part is None else room[part : part + 16]
        sizes = {sk.AllGather: 8, sk.ReduceScatter: 32}
        kind(world, 256)(np.ones(sizes.get(kind, 16)), placed)
        world.synchronize()

    return main


@pytest.mark.each_value
@pytest.mark.parametrize("kind", [sk.AllGather, sk.AllReduce, sk.AllToAll])
@pytest.mark.parametrize(
    "parts, text", [((0, 8), "here at byte (0|64)"), ((None, 0), "private memory|here at")]
)
def test_other_places(kind, parts, text):
    """Of what peers may write."""
    said = f"rank 0 calls {kind.__name__} of .* float64 in ({text}).*, rank 1 calls"
    with pytest.raises(ValueError, match=said):
        spmd(2, placed(kind, parts))
    spmd(2, placed(kind, (8, 8)))


@pytest.mark.parametrize("kind", [sk.Broadcast, sk.ReduceScatter])
@pytest.mark.parametrize("parts", [(0, 8), (None, 0)])
def test_places_of_what_peers_do_not_write(kind, parts):
    spmd(2, placed(kind, parts))


def test_another_order():
    def main(world):
        reduce, barrier = sk.AllReduce(world, 64), sk.Barrier(world)
        x = np.ones(4)
        reduce(x)
        first, second = (barrier, lambda: reduce(x)) if world.rank else (lambda: reduce(x), barrier)
        first()
        second()
        world.synchronize()

    with pytest.raises(
        ValueError, match=r"rank 0 calls AllReduce of 4 float64 \(.*, rank 1 calls Barrier \("
    ):
        spmd(2, main)


@pytest.mark.slow
def test_the_same_calls_many_times():
    """Shapes, and ranks that are ahead, may differ."""

    def main(world):
        x = np.ones(6, "float32").reshape((2, 3) if world.rank else (6,))
        for k in range(2 * SLOTS + 3):
            sk.broadcast(x, root=k % 3)
        world.synchronize()
        return (x == 1).all()

    assert all(spmd(3, main))


def test_slots_are_used_again():
    """Of a call whose slot another rank has written again nothing is known."""
    table = np.zeros((2, SLOTS), SLOT)
    ahead, behind = Calls(table, 0), Calls(table, 1)
    for k in range(SLOTS + 1):
        ahead.enter(f"call {k}", "main.py:8")
    behind.enter("another")
    with pytest.raises(ValueError, match=r"rank 0 calls call 1 \(main.py:8\), rank 1 calls another\. All"):
        behind.enter("another")
