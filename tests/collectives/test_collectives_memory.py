"""How much symmetric memory methods take on each rank: as much as docs/methods.md says, and a little for
signals and rounding."""

import json

import pytest

import shmemkit as sk
from shmemkit.collectives import tuning

SIZE = 1 << 20
LITTLE = 1 << 16  # bytes: signals, the World's too, and what is rounded up


def fits(kind, method, heap):
    """Whether 4 ranks, with a symmetric heap of `heap` bytes each, can make it for SIZE bytes."""

    def main():
        world = sk.init()
        world.backend.multiprocessors = 1
        try:
            made = kind(world, SIZE, method=method)
        except MemoryError:
            return False
        made.free()
        return not made.refused

    return all(sk.emu.run(main, 4, heap_size=heap))


@pytest.mark.each_value
@pytest.mark.parametrize(
    "kind, method, times",
    [
        (sk.AllReduce, "push", 3 / 2),
        (sk.AllReduce, "copy_engine", 1),
        (sk.Reduce, "push", 3),
        (sk.Reduce, "copy_engine", 4),
        (sk.Gather, "push", 3 / 2),
        (sk.Gather, "copy_engine", 1),
        (sk.ReduceScatter, "copy_engine", 1),
        (sk.AllToAll, "copy_engine", 1),
        (sk.AllGather, "copy_staged", 1),
        (sk.AllGather, "copy_push", 1 / 4),
    ],
)
def test_a_method(kind, method, times):
    needed = int(times * SIZE)
    assert fits(kind, method, needed + LITTLE) and not fits(kind, method, needed - 1)


def test_all_reduce_auto(tmp_path, monkeypatch):
    """As on four H200, for 256 MB: the emulator has a table like that, for sizes as much smaller as SIZE is.
    So are the slots of two_shot_ll128: it has some for each of 132 multiprocessors."""
    choices = tuning.find("all_reduce", tuning.Place("NVIDIA H200", 4, 1, 132)).choices
    entry: dict = {"n_ranks": 4, "n_nodes": 1}
    for output, of_output in zip(("private", "symmetric"), choices.values(), strict=True):
        entry[output] = [[limit and limit * SIZE >> 28, method] for limit, method in of_output]
    path = tmp_path / "tuning.json"
    path.write_text(json.dumps({"all_reduce": [{**entry, "gpu": "emulator"}]}))
    monkeypatch.setenv("SHMEMKIT_TUNING", str(path))
    assert fits(sk.AllReduce, "auto", 27 * SIZE // 10)
