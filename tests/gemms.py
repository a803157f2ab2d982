"""What the tests of matrix products share."""

import math

import numpy as np
from mutations import goes_wrong, seeds

import shmemkit as sk
from shmemkit.emu.stream import Stream
from shmemkit.gemm.problem import arrays_of
from shmemkit.runtime.symmetric_memory import as_dtype

ROWS = ("rows", "rows")
LAYOUTS = [(a, b) for a in ("rows", "columns") for b in ("rows", "columns")]
ERROR = {"bfloat16": 4e-3, "float16": 5e-4, "float32": 1e-5, "float64": 1e-13}
"""Relative, of the norm: rounding the result once gives half of it, or less."""


def operand(rng, rows, columns, dtype, stored="rows", pad=0):
    """Random numbers, (rows, columns), stored by rows or columns, which are `pad` longer than needed."""
    shape = (rows, columns + pad) if stored == "rows" else (columns, rows + pad)
    dtype = as_dtype(dtype)
    x = rng.integers(-9, 9, shape) if dtype.kind in "iu" else rng.standard_normal(shape)
    x = x.astype(dtype)[:, : columns if stored == "rows" else rows]
    return x if stored == "rows" else x.T


def moved(array, how):
    """A copy of `array` that the TMA does not take."""
    rows, columns = array.shape
    room = arrays_of(array).zeros((rows + columns, 2 * (rows + columns) + 9), array.dtype)
    there = {
        "odd rows": room[:rows, 1 : columns + 1],
        "odd columns": room[:columns, 1 : rows + 1].T,
        "backwards": room[rows - 1 :: -1, :columns],
        "apart": room[:rows, : 2 * columns : 2],
        "at an odd address": room.reshape(-1)[1 : array.size + 1].reshape(array.shape),
    }[how]
    there[...] = array
    return there


_erf = np.vectorize(math.erf, otypes=["float64"])
ACTIVATE = {
    None: lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * 0.5 * (1 + _erf(x / math.sqrt(2))),
    "silu": lambda x: x / (1 + np.exp(-x)),
}


def expected(a, b, bias=None, activation=None):
    """In float64, or for integers in int64."""
    wide = "int64" if a.dtype.kind in "iu" else "float64"
    with np.errstate(over="ignore"):
        x = a.astype(wide) @ b.astype(wide)
        return ACTIVATE[activation](x if bias is None else x + bias.astype(wide))


def error(out, reference):
    """Relative, of the norm."""
    return np.linalg.norm(out.astype("float64") - reference) / max(np.linalg.norm(reference), 1e-300)


def check(out, reference):
    if out.dtype.kind in "iu":
        np.testing.assert_array_equal(out, reference.astype(out.dtype))
    else:
        assert error(out, reference) < ERROR[out.dtype.name]


def check_graphs_and_streams(world, product, calls):
    """That `product(a, b, out)`, for each of `calls`, (a, b, out, what it must be), is right in graphs, which
    are captured on two streams, and beside them."""
    other = Stream(world.stream.machine, world.rank)
    graphs = []
    for *arrays, _ in calls:
        product(*arrays)  # binds it
    for stream in (world.stream, other):
        stream.begin_capture()
        for *arrays, _ in calls:
            product(*arrays, stream=stream)
        graphs.append(stream.end_capture())
    for graph, stream in zip(graphs, (None, other), strict=True):
        for *_, out, _ in calls:
            out[:] = np.nan
        graph.launch(world.stream)
        product(*calls[0][:3], stream=stream)
        world.synchronize()
        other.synchronize()
        for *_, out, want in calls:
            np.testing.assert_array_equal(out, want)


def is_missed(compute, args, schedules, gpu=None):
    """Whether ``compute(*args)`` on two ranks, which says of each call whether it is right, is found to be
    wrong in one of some runs."""
    each = {"races": True}, *seeds(schedules)
    return goes_wrong(sk.emu.run, compute, 2, args, delivery="unordered", gpu=gpu, each=each)
