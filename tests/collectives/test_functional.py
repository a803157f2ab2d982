"""sk.all_gather and its kin: right, and one object for each size."""

import json

import ml_dtypes
import numpy as np
import pytest

import shmemkit as sk


def test_in_one_line(pes):
    def main():
        world = sk.init()
        n, me = world.n_ranks, world.rank
        for call in range(3):
            x = np.full((2, 3), 10 * call + me, "float32")
            everything, total = sk.all_gather(x), sk.all_reduce(x)
            least, sent = sk.all_reduce(x, "min"), sk.broadcast(x.copy(), root=n - 1)
            parts = sk.all_to_all(np.arange(n) + 10 * me + call)
            mine = sk.reduce_scatter(np.arange(2 * n) + call, "max")
            gathered = sk.gather(x, root=1)
            out = np.zeros((n, 2, 3), "float32")
            assert sk.all_gather(x, out=out) is out
            world.synchronize()
            assert (
                everything.shape == (n, 2, 3)
                and (everything == 10 * call + np.arange(n)[:, None, None]).all()
            )
            assert (out == everything).all() and (sent == 10 * call + n - 1).all()
            assert gathered is None if me != 1 else (gathered == everything).all()
            assert total.shape == (2, 3) and (total == 10 * call * n + sum(range(n))).all()
            assert mine.tolist() == [2 * me + call, 2 * me + 1 + call]
            assert (least == 10 * call).all() and (parts == 10 * np.arange(n) + me + call).all()

    pes(3).run(main)


@pytest.mark.slow
def test_one_object_for_a_size(pes):
    def main():
        world = sk.init()
        for size in (1, 1000, 8 << 10, 20 << 10, 10 << 10):  # of float64: two of them are above 64 KB
            sk.all_reduce(np.zeros(size))
        sk.all_reduce(np.zeros(1), "max")
        kept = [key for key in world.kept if isinstance(key, tuple)]
        assert sorted(nbytes for _, nbytes, _ in kept) == [1 << 16, 1 << 16, 1 << 17, 1 << 18]

    pes(2).run(main)


def test_without_a_world():
    with pytest.raises(RuntimeError, match="init"):
        sk.all_reduce(np.zeros(1))


def test_of_no_array(pes):
    def main():
        sk.init()
        with pytest.raises(TypeError, match=r"all_reduce\(\): x is a list; it must be a NumPy array"):
            sk.all_reduce([1, 2])
        with pytest.raises(
            TypeError, match=r"all_reduce\(\): op is a numpy.ndarray; give `out` and `stream` by name"
        ):
            sk.all_reduce(np.zeros(2), np.zeros(2))

    pes(1).run(main)


@pytest.mark.parametrize("call", [sk.broadcast, sk.gather])
def test_a_root_that_equals_one_that_was_given(pes, call):
    def main():
        sk.init()
        call(np.zeros(2), 1)
        for root in (True, 1.0):
            with pytest.raises(
                TypeError, match=rf"{call.__name__}\(\): root is {root}; it must be an integer"
            ):
                call(np.zeros(2), root)

    pes(2).run(main)


def test_the_first_call_is_not_captured(pes):
    """It allocates; those after it are."""

    def main():
        world, x = sk.init(), np.ones(4, "float32")
        world.stream.begin_capture()
        with pytest.raises(
            RuntimeError, match=r"all_reduce\(\): the stream captures .* up to 65536 bytes allocates"
        ):
            sk.all_reduce(x)
        world.stream.end_capture()
        out = sk.all_reduce(x)
        world.stream.begin_capture()
        sk.all_reduce(x, out=out)
        graph = world.stream.end_capture()
        world.synchronize()
        out[:] = 0
        graph.launch(world.stream)
        world.synchronize()
        assert (out == 2).all()

    pes(2).run(main)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ring", "double_tree"])
def test_float8_by_methods_whose_totals_are_float32(pes, method, monkeypatch, tmp_path):
    """Also on one node: a full power of 2."""
    row = {"gpu": "emulator", "n_ranks": 2, "n_nodes": 1, "private": [[None, method]]}
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"all_reduce": [{**row, "symmetric": row["private"]}]}))
    monkeypatch.setenv("SHMEMKIT_TUNING", str(table))

    def main():
        world = sk.init()
        total = sk.all_reduce(np.ones(1 << 16, ml_dtypes.float8_e4m3fn))
        world.synchronize()
        return set(total.astype("float32").tolist())

    assert pes(2).run(main) == [{2.0}] * 2


TWO, FOUR = np.ones(2), np.ones(4)
WRONG_ON_ROOT = [  # the call on the root and on all others, and what they raise
    (sk.scatter, {"x": None, "out": TWO}, {"out": TWO}, "Scatter: x is None on rank 1, the root"),
    (
        sk.scatter,
        {},
        {"out": TWO},
        r"scatter\(\): x and out are None; the root gives x, all other ranks give",
    ),
    (sk.scatter, {"x": [1, 2]}, {"out": TWO}, r"scatter\(\): x is a list; it must be a NumPy array"),
    (sk.scatter, {"x": FOUR, "out": FOUR[:1]}, {"out": TWO}, r"Scatter: x is .*\(4,\), and out is .*\(1,\)"),
    (sk.scatter, {"x": np.ones(1 << 14)}, {"out": TWO}, "Scatter needs the same max_nbytes on all ranks"),
    (sk.reduce, {"x": TWO, "out": FOUR}, {"x": TWO}, r"Reduce: x is float64 \(2,\), and out is .*\(4,\)"),
    (sk.reduce, {"x": None}, {"x": TWO}, r"reduce\(\): x is None; it must be a NumPy array"),
    (sk.gather, {"x": TWO, "out": TWO}, {"x": TWO}, r"Gather: x is .*; out must be float64 with 4 elements"),
    (sk.broadcast, {"x": FOUR[::2]}, {"x": TWO}, "Broadcast: x is .* with strides .* must be C-contiguous"),
]


@pytest.mark.parametrize("call, on_root, elsewhere, why", WRONG_ON_ROOT)
def test_what_the_root_alone_gives_wrong_is_raised_on_all_ranks(pes, call, on_root, elsewhere, why):
    """In the first call, before anything is enqueued; so a right one may follow."""

    def main():
        world = sk.init()
        with pytest.raises((TypeError, ValueError), match=why):
            call(**(on_root if world.rank == 1 else elsewhere), root=1)
        x = np.arange(4.0) if call is not sk.scatter or world.rank == 1 else None
        out = call(x, 1, **({"out": np.zeros(2)} if call is sk.scatter else {}))
        world.synchronize()
        return None if out is None else out.sum()

    right = {"scatter": [1, 5], "reduce": [None, 12], "gather": [None, 12], "broadcast": [6, 6]}
    assert pes(2).run(main) == right[call.__name__]
