"""Two graphs that are launched at once, on two streams: those of two objects are right, in every schedule;
those of one object, whose slots and epochs both would use, are refused on the emulator."""

import numpy as np
import pytest
from numba import cuda
from specification import ALL, full

import shmemkit as sk

pytestmark = pytest.mark.slow


def at_once(name, method, n_objects, size=1):
    what, world = ALL[name], sk.init()
    n, me = world.n_ranks, world.rank
    nbytes = full(what, n, size, "float64")
    made = [what.make(world, nbytes, method) for _ in range(n_objects)]
    given = [what.given(call, size, "float64", n) for call in range(2)]
    xs = [array[me].copy() for array in given]
    outs = [np.zeros((n, size) if what.gathers else size) for _ in given]
    streams = [cuda.stream() for _ in given]
    graphs = []
    for k, stream in enumerate(streams):
        stream.begin_capture()
        what.call(made[k % n_objects], xs[k], outs[k], stream)
        graphs.append(stream.end_capture())
    for graph, stream in zip(graphs, streams, strict=True):
        graph.launch(stream)
    for stream in streams:
        stream.synchronize()
    if what.gets(me, 0):
        for k, out in enumerate(outs):
            np.testing.assert_array_equal(out, what.wanted(given[k], method, me).reshape(out.shape))


ways = pytest.mark.parametrize(
    ("name", "method"), [(name, method) for name, what in ALL.items() for method in what.kind.methods]
)


@ways
def test_of_two_objects(name, method):
    found = sk.emu.explore(at_once, 2, (name, method, 2), exhaustive=True)
    assert found.finished and found.failure is None, str(found)


@ways
def test_of_one_object(name, method):
    with pytest.raises(sk.emu.RaceError, match="the kernels run on different streams"):
        sk.emu.run(at_once, 2, (name, method, 1), races=True)
