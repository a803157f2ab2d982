"""``shmemkit.kernels``: what its kernels compute when Numba launches them, that they are those which the host
objects bind, and what they refuse; and their device functions. On GPUs: ``mpirun -n 4 python3 -m pytest -m
gpu -k test_kernels``."""

import re
from unittest import mock

import numpy as np
import pytest
from gpu import on_gpus
from numba import cuda
from numba.core.errors import TypingError
from numba.cuda import types
from pages import ROOT
from ptx import HOPPER, compile_ptx, resources
from specification import ALL

import shmemkit as sk
from shmemkit import kernels
from shmemkit.emu.launch_hook import Configured
from shmemkit.runtime.symmetric_memory import as_dtype

MAKERS = {
    "AllReduce": kernels.all_reduce,
    "AllGather": kernels.all_gather,
    "ReduceScatter": kernels.reduce_scatter,
    "AllToAll": kernels.all_to_all,
}
WAYS = [(name, m) for name in MAKERS for m in kernels.available(ALL[name].kind)]
TILED = [(name,) for name in ("one_shot", "one_shot_ll128", "one_shot_lamport")]


def made(name, n, method, op="sum", dtype="float32"):
    schedule, transport = kernels.available(ALL[name].kind)[method]
    of = (op, dtype) if ALL[name].reduces else ()
    return MAKERS[name](n, *of, schedule=schedule, transport=transport)


def arrays(world, name, size, dtype, call=0):
    """-> x, out, and what all ranks give, for segments of so many elements"""
    what, n, dtype = ALL[name], world.n_ranks, as_dtype(dtype)
    given = what.given(call, size, dtype, n)
    x = world.xp.asarray(given[world.rank].view("uint8")).view(dtype)
    out = world.xp.full((n if what.gathers else 1) * size * dtype.itemsize, 0xFF, "uint8").view(dtype)
    return x, out.reshape(n, size) if what.gathers else out, given


def each_way(ways, *values):
    """-> each of `ways` with one of `values` and a number of ranks; slow with the others"""
    found = []
    for i, way in enumerate(ways):
        for k in range(len(values)):
            marks = [
                pytest.mark.ranks(1 + (i + k) % 4, fast=True, delivery="unordered"),
                *[pytest.mark.slow] * (k > 0),
            ]
            found.append(pytest.param(*way, *values[(i + k) % len(values)], marks=marks))
    return found


@pytest.mark.parametrize(
    "name, method, dtype, size",
    each_way(WAYS, ("float32", 1), ("bfloat16", 37), ("uint8", 250), ("float64", 64), ("float32", 1001)),
)
def test_launched_by_numba(world, name, method, dtype, size):
    k = made(name, world.n_ranks, method, "sum", dtype)
    scratch = k.scratch(world, arrays(world, name, size, dtype)[0].nbytes)
    for call in range(3):
        x, out, given = arrays(world, name, size, dtype, call)
        k[scratch.grid, scratch.block, world.stream](x, out, *scratch)
        wanted = ALL[name].wanted(given, method, world.rank)
        np.testing.assert_array_equal(world.asnumpy(out), wanted)
    scratch.free()


@pytest.fixture
def launches():
    """[(rank, kernel, grid, block, types of its arguments)] of the emulator"""
    found, launch = [], Configured.__call__

    def noting(configured, *arguments):
        kernel, kinds = configured.kernel, map(configured.kernel.typeof_pyval, arguments)
        found.append((sk.current().rank, kernel, configured.grid, configured.block, *kinds))
        launch(configured, *arguments)

    with mock.patch.object(Configured, "__call__", noting):
        yield found


@pytest.mark.parametrize("name, method", each_way(WAYS, ()))
def test_they_are_what_host_objects_bind(world, launches, name, method):
    """The same kernel, launched with the same grid and types, so by the same machine code."""
    (x, out, _), n = arrays(world, name, 48, "float32"), world.n_ranks
    host = ALL[name].make(world, max(x.nbytes, out.nbytes), method)
    k = made(name, n, method)
    scratch = k.scratch(world, x.nbytes)
    host(x, out)
    compiled = set(k.kernel.overloads)
    k[scratch.grid, scratch.block, world.stream](x, out, *scratch)
    world.synchronize()
    first, *others = [launch for launch in launches if launch[:2] == (world.rank, k.kernel)] or [()]
    assert others == on_gpus([], [first])
    assert set(k.kernel.overloads) == compiled and len(compiled) >= on_gpus(1, 0)
    host.free()
    scratch.free()


@pytest.mark.ranks(3, fast=True)
def test_in_a_graph(world):
    k = made("AllReduce", world.n_ranks, "two_shot_ll128")
    x, out, again = (world.xp.empty(on_gpus(1000, 40), "float32") for _ in range(3))
    scratch = k.scratch(world, x.nbytes)
    launch = k[scratch.grid, scratch.block, world.stream]
    launch(x, out, *scratch)
    world.stream.begin_capture()
    launch(x, out, *scratch)
    launch(out, again, *scratch)
    graph = world.stream.end_capture()
    for call in range(3):
        x.fill(world.rank + call)
        world.synchronize()
        graph.launch(world.stream)
        total = sum(range(world.n_ranks)) + world.n_ranks * call
        assert (world.asnumpy(out) == total).all()
        assert (world.asnumpy(again) == world.n_ranks * total).all()
    scratch.free()


@pytest.mark.parametrize("method", ["one_shot_ll128", "ring"])
@pytest.mark.ranks(2, fast=True)
def test_one_scratch_for_several_sizes(world, method):
    k = made("AllReduce", world.n_ranks, method)
    large = k.scratch(world, 400)
    small = large.of(20)
    assert large.of(20) is small and large.of(400) is large
    for call in range(4):
        for scratch, size in ((large, 100), (small, 5)):
            x = world.xp.full(size, world.rank + call, "float32")
            k[scratch.grid, scratch.block, world.stream](x, x, *scratch)
            assert (world.asnumpy(x) == sum(range(world.n_ranks)) + world.n_ranks * call).all()
    with pytest.raises(
        ValueError,
        match=r"this scratch is for 400 bytes, and not for 800. Make another one: scratch\(world, 800\)",
    ):
        large.of(800)
    x = world.xp.ones(5, "float32")
    with pytest.raises(ValueError, match=r"x has 20 bytes, and this scratch is for 400.*scratch.of\(20\)"):
        k[large.grid, large.block](x, x, *large)
    large.free()
    with pytest.raises(RuntimeError, match="^kernels.all_reduce: it was freed; make a new one"):
        small.of(40)
    for scratch in (large, small):
        with pytest.raises(ValueError, match="the scratch was freed. Make another one"):
            k[large.grid, large.block](x, x, *scratch)


@pytest.mark.ranks(3, fast=True)
def test_barrier(world):
    k, counts = kernels.barrier(world.n_ranks), world.zeros(world.n_ranks, "int64")
    scratch = k.scratch(world)
    for call in range(1, 4):
        there = world.peer_view(counts, (world.rank + 1) % world.n_ranks)
        there[world.rank] = call
        k[scratch.grid, scratch.block, world.stream](*scratch)
        assert world.asnumpy(counts)[world.rank - 1] == call
        k[scratch.grid, scratch.block, world.stream](*scratch)
    scratch.free()
    world.free(counts)


@pytest.mark.ranks(3, fast=True)
@pytest.mark.parametrize("name", ["uint8", "float8_e4m3fn"])
def test_queue(world, name):
    k, dtype = kernels.queue(world.n_ranks), as_dtype(name)
    scratch = k.scratch(world, 3, 5, dtype, n_producers=2, n_consumers=1, block=32)
    for n in (7, 0, 4):
        x, out = (world.xp.full((n, 5), value, "uint8").view(dtype) for value in (world.rank, 99))
        k[scratch.grid, scratch.block, world.stream](x, out, *scratch)
        assert (world.asnumpy(out).view("uint8") == (world.rank - 1) % world.n_ranks).all()
    scratch.free()


@pytest.mark.parametrize("method, dtype", [("simt", "float32"), ("sm80", "float16"), ("sm90", "float16")])
@pytest.mark.ranks(1, fast=True)
def test_gemm(world, launches, method, dtype):
    """Launched by Numba, it computes what Gemm computes, by the same kernel, grid and types."""
    xp, rng = world.xp, np.random.default_rng(0)
    x, w = (xp.asarray(rng.integers(-3, 4, shape).astype(dtype)) for shape in ((5, 24), (24, 16)))
    bias, out, wanted = xp.ones(16, dtype), xp.zeros((5, 16), dtype), xp.zeros((5, 16), dtype)
    try:
        sk.Gemm(method)(x, w, wanted, bias=bias, activation="relu")
        g = kernels.gemm(world, x, w, out, bias=bias, activation="relu", method=method)
    except ValueError as refusal:
        assert "cannot be used" in str(refusal)
        pytest.skip(str(refusal))
    compiled = set(g.kernel.overloads)
    g.kernel[g.grid, g.block, world.stream, g.shared](*g.args)
    np.testing.assert_array_equal(world.asnumpy(out), world.asnumpy(wanted))
    assert world.asnumpy(out).any() and "bias" in g.arguments
    first, *others = launches or [()]
    assert others == on_gpus([], [first])
    assert set(g.kernel.overloads) == compiled and len(compiled) >= on_gpus(1, 0)
    with pytest.raises(ValueError, match="Gemm: w is .*must be"):
        kernels.gemm(world, x, x, out)


# ---- in kernels of others


def scaled(k):
    """-> a kernel whose block b makes its tile of y, a * b, and then of out, of so many elements"""
    reduce_tile = k.device

    @cuda.jit
    def scaled(a, b, y, out, size, scratch):
        tile, thread, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
        first, last = tile * size, min(tile * size + size, y.size)
        for i in range(first + thread, last, threads):
            y[i] = a[i] * b[i]
        reduce_tile(y[first:last], out[first:last], tile, scratch)
        for i in range(first + thread, last, threads):
            a[i] = out[last - 1 - i + first]  # what another thread has stored

    return scaled


@pytest.mark.parametrize(
    "method, dtype, n", each_way(TILED, ("float32", 37), ("float16", 24), ("int64", 16), ("uint8", 65))
)
def test_a_kernel_that_ends_with_its_tile(world, method, dtype, n):
    k, size = made("AllReduce", world.n_ranks, method, "sum", dtype), 16
    kernel, tiles, xp = scaled(k), -(-n // size), world.xp
    scratch = k.tiles(world, size * np.dtype(dtype).itemsize, tiles)
    b = xp.full(n, world.rank + 1, dtype)
    for call in range(3):
        before = (np.arange(n) + call) % 11
        a, y, out = xp.asarray(before.astype(dtype)), xp.empty(n, dtype), xp.zeros(n, dtype)
        kernel[tiles, 32, world.stream](a, b, y, out, size, scratch.args)
        wanted = before * sum(range(world.n_ranks + 1))
        np.testing.assert_array_equal(world.asnumpy(out), wanted.astype(dtype))
        turned = [wanted[first : first + size][::-1] for first in range(0, n, size)]
        np.testing.assert_array_equal(world.asnumpy(a), np.concatenate(turned).astype(dtype))
    scratch.free()


@pytest.mark.parametrize(
    "name, method", [("AllGather", "ll128"), ("AllGather", "lamport"), ("ReduceScatter", "ll")]
)
@pytest.mark.ranks(3, fast=True)
def test_tiles_of_others(world, name, method):
    k, what, size = made(name, world.n_ranks, method), ALL[name], 12

    @cuda.jit
    def kernel(x, out, scratch):
        tile_of(x[cuda.blockIdx.x], out[cuda.blockIdx.x], cuda.blockIdx.x, scratch)

    tile_of, n = k.device, world.n_ranks
    scratch = k.tiles(world, 4 * size * (n if what.scatters else 1), 2)
    tiles = [what.given(tile, size, "float32", n) for tile in range(2)]
    x = world.xp.asarray(np.stack([given[world.rank].reshape(-1) for given in tiles]))
    out = world.xp.empty((2, size * (n if what.gathers else 1)), "float32")
    kernel[2, 32, world.stream](x, out, scratch.args)
    for got, given in zip(world.asnumpy(out), tiles, strict=True):
        np.testing.assert_array_equal(got, what.wanted(given, method, world.rank).reshape(-1))
    scratch.free()


@pytest.mark.slow
@pytest.mark.parametrize(("method",), TILED)
def test_tiles_compile(method):
    array, i64 = types.float32[::1], types.int64
    scratch = types.Tuple((i64, types.uint64[::1], i64, i64, i64, types.uint32[::1]))
    ptx = compile_ptx(scaled(made("AllReduce", 4, method)), (*(array,) * 4, i64, scratch), HOPPER)
    assert resources(ptx, HOPPER).spills == 0 and "NRT_" not in ptx


# ---- errors, and the page


def test_the_page_lists_what_there_is():
    page, name, listed = (ROOT / "docs" / "kernels.md").read_text(), "", {}
    for row in re.findall(r"^\|(.*\| `.*)\|$", page, re.M):
        first, schedules, transports, *_ = map(str.strip, row.split("|"))
        name = re.sub(r"`(\w+)\(.*", r"\1", first) or name
        words = [re.findall(r"`(\w+)`", text) for text in (schedules, transports)]
        listed.setdefault(name, set()).update((s, t) for s in words[0] for t in words[1] or [None])
    for make in MAKERS.values():  # their docstrings, too
        words = {word for pair in listed[make.__name__] for word in pair if word}
        assert set(re.findall(r'"(\w+)"', make.__doc__)) == words
    assert listed == {make.__name__: {*kernels.available(ALL[k].kind).values()} for k, make in MAKERS.items()}


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: kernels.all_reduce(0, "sum", "float32"), "all_reduce: n_ranks is 0; it must be 1 or more"),
        (
            lambda: kernels.all_reduce(17, "sum", "float32", transport="ll128"),
            "n_ranks is 17; it must be 1 to 16",
        ),
        (lambda: kernels.all_reduce(2, "total", "float32"), "op is 'total'; it must be 'sum'"),
        (
            lambda: kernels.all_reduce(2, "sum", "bool"),
            "all_reduce: x has dtype bool, which cannot be reduced",
        ),
        (lambda: kernels.all_reduce(2, "avg", "int32"), "all_reduce: op"),
        (
            lambda: kernels.all_gather(2, schedule="pul"),
            "schedule is 'pul'; it must be None, 'rows', 'exchange', 'pull'",
        ),
        (
            lambda: kernels.all_to_all(2, transport="ll12"),
            "transport is 'll12'; it must be None, 'll', 'll128' or",
        ),
        (
            lambda: kernels.all_reduce(2, "sum", "float32", schedule="two_shot", transport="ll"),
            "'two_shot' has no transport 'll'; there are one_shot by ll, .* by ll128, ring and double_tree",
        ),
        (
            lambda: kernels.all_gather(2, schedule="pull").device,
            "pull has no form for tiles; ll128 or lamport have one",
        ),
        (lambda: kernels.barrier(0), "barrier: n_ranks is 0"),
    ],
)
def test_wrong_kernels(make, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make()


@pytest.mark.ranks(2, fast=True)
def test_wrong_calls(world):
    n, xp = world.n_ranks, world.xp
    k = kernels.all_reduce(n, "sum", "float32", transport="ll")
    for make, message in (
        (
            lambda: kernels.all_reduce(n + 1, "sum", "float32").scratch(world, 4),
            "has 2 ranks. Make the kernel with",
        ),
        (lambda: k.scratch(world, 6), "nbytes is 6; it must be a multiple of 4"),
        (lambda: k.scratch(world, 0), "nbytes is 0; it must be 1 or more"),
        (lambda: k.scratch(world, 4 + 4 * world.rank), "needs the same nbytes on all ranks"),
        (
            lambda: kernels.all_to_all(n).scratch(world, 1 + 2 * n),
            f"a multiple of {n}, whole elements for each",
        ),
        (lambda: k.tiles(world, 4, 0), "n is 0; it must be 1 or more"),
        (lambda: k.scratch(3, 4), "world is 3; it must be the World"),
    ):
        with pytest.raises((TypeError, ValueError), match=re.sub("has 2", f"has {n}", message)):
            make()
    scratch, x, out = k.scratch(world, 64), xp.zeros(16, "float32"), xp.zeros(16, "float32")
    launch = k[scratch.grid, scratch.block, world.stream]
    for given, message in (
        ((x, out, *scratch.args[1:]), "a launch takes .x, out, .scratch.; the scratch is of another kernel"),
        ((x, out), "no scratch is given"),
        ((x, *scratch), "no out is given"),
        ((x, out, scratch), "a Scratch is given as one argument. Write a star before it"),
        ((x[:0], out[:0], *scratch), "x has 0 bytes.* Launch nothing"),
        ((x.view("int32"), out.view("int32"), *scratch), "x is int32; it must be float32"),
        ((x, out[:15], *scratch), "^kernels.all_reduce: .*out must be float32 with 16 elements"),
        ((x.reshape(4, 4).T, out, *scratch), "x.*contiguous"),
        ((x, "out", *scratch), "out is 'out'; it must be"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            launch(*given)
    scratch.free()
    k = kernels.all_reduce(n, "sum", "float32", transport="ll128")
    scratch = k.scratch(world, 64)
    with pytest.raises(ValueError, match="x begins at 0x.*4; it must be a multiple of 16 bytes"):
        k[scratch.grid, scratch.block, world.stream](xp.zeros(17, "float32")[1:], out, *scratch)
    scratch.free()


@pytest.mark.parametrize("name, method", each_way(WAYS, ()))
def test_wrong_grids(world, name, method):
    """Of packets, a row may have fewer blocks; else a part of the result would be missing."""
    k, any_blocks = made(name, world.n_ranks, method), method.startswith("one_shot") or "l" == method[0]
    x, out, given = arrays(world, name, on_gpus(20000, 200) if any_blocks else 40000, "float32")
    scratch = k.scratch(world, x.nbytes)
    (blocks, *rows), (threads, *_) = scratch.grid, scratch.block
    fewer = blocks - 1, *rows
    for grid, block in (
        ((blocks + 1, *rows), threads),
        ((blocks, rows[0] + 1), threads),
        (scratch.grid, threads + 1),
        (scratch.grid, (threads // 2, 2)),
        *[(fewer, threads)] * (not any_blocks),
    ):
        with pytest.raises(
            ValueError, match=r"the grid is .*, the block .* Give \[scratch.grid, scratch.block"
        ):
            k[grid, block, world.stream](x, out, *scratch)
    if any_blocks:
        k[fewer, threads, world.stream](x, out, *scratch)
        np.testing.assert_array_equal(world.asnumpy(out), ALL[name].wanted(given, method, world.rank))
    scratch.free()


@pytest.mark.ranks(2, fast=True)
def test_ranks_make_the_same_kernel(world):
    dtype, op = ("float32", "int32")[world.rank == 0], ("sum", "max")[world.rank == 0]
    for k, differ in (
        (kernels.all_reduce(world.n_ranks, "sum", dtype), "dtype"),
        (kernels.all_reduce(world.n_ranks, op, "float32"), "op"),
    ):
        for make in (lambda k=k: k.scratch(world, 64), lambda k=k: k.tiles(world, 64, 1)):
            with pytest.raises(
                ValueError, match=f"kernels.all_reduce: .* needs the same {differ} on all ranks"
            ):
                make()


@pytest.mark.parametrize("which", ["two scratches", "two sizes", "a barrier"])
def test_launches_in_another_order(which):
    def main():
        world = sk.init()
        k, barrier = kernels.all_reduce(2, "sum", "float32"), kernels.barrier(2)
        a, x, y = k.scratch(world, 64), np.ones(16, "float32"), np.ones(8, "float32")
        b, z = (a.of(32), y) if which == "two sizes" else (k.scratch(world, 32), y)
        waits = barrier.scratch(world)
        launches = [
            lambda: k[a.grid, a.block, world.stream](x, x, *a),
            lambda: (
                k[b.grid, b.block, world.stream](z, z, *b)
                if which != "a barrier"
                else barrier[waits.grid, waits.block, world.stream](*waits)
            ),
        ]
        for launch in launches[:: 1 - 2 * world.rank]:
            launch()
        world.synchronize()

    with pytest.raises(ValueError, match=r"ranks disagree: rank 0 calls kernels.all_reduce of 16 float32 \("):
        sk.emu.run(main, 2)


@pytest.mark.parametrize("kind", ["all_reduce", "barrier", "queue"])
def test_after_free_and_after_the_end(kind):
    def main():
        for end in ("freed", "finalized"):
            world = sk.init()
            x, out = np.zeros((2, 4), "float32"), np.zeros((2, 4), "float32")
            given = () if kind == "barrier" else (x, out)
            k = getattr(kernels, kind)(2, *("sum", "float32")[: 2 * (kind == "all_reduce")])
            scratch = k.scratch(world, *{"all_reduce": [32], "queue": [2, 4]}.get(kind, []))
            launch = k[scratch.grid, scratch.block, world.stream]
            launch(*given, *scratch)
            if end == "freed":
                scratch.free()
                scratch.free()
            else:
                world.finalize()
            with pytest.raises((ValueError, RuntimeError), match=f"^kernels.{kind}: .* {end}"):
                launch(*given, *scratch)
            world.finalize()

    sk.emu.run(main, 2)


@pytest.mark.ranks(2, fast=True)
def test_x_and_out_lie_apart(world):
    """Also where the host object allows the own segment: it launches another grid for that."""
    n, me, xp = world.n_ranks, world.rank, world.xp
    for k, nbytes, given in (
        (kernels.all_gather(n), 16, lambda x: (x[4 * me :][:4], x)),
        (kernels.all_gather(n, schedule="pull"), 16, lambda x: (x[4 * me :][:4], x)),
        (
            kernels.reduce_scatter(n, "sum", "float32", schedule="push"),
            16 * n,
            lambda x: (x, x[4 * me :][:4]),
        ),
        (kernels.all_to_all(n), 16 * n, lambda x: (x, x)),
    ):
        scratch = k.scratch(world, nbytes)
        with pytest.raises(ValueError, match=r"^kernels.\w+: x and out overlap; they must lie apart"):
            k[scratch.grid, scratch.block, world.stream](*given(xp.zeros(4 * n, "float32")), *scratch)
        scratch.free()


@pytest.mark.ranks(2, fast=True)
def test_it_refuses_groups(world):
    group = world.split(0)
    with pytest.raises(ValueError, match=r"world is a group; .* sk.AllReduce\(group"):
        kernels.all_reduce(world.n_ranks, "sum", "float32").scratch(group, 64)
    group.finalize()


def test_a_barrier_of_several_nodes_is_another_kernel():
    def main():
        with pytest.raises(
            ValueError, match="it is for ranks that reach each other by stores. Use sk.Barrier"
        ):
            kernels.barrier(4).scratch(sk.init())

    sk.emu.run(main, 4, local_size=2)


@pytest.mark.ranks(2, fast=True)
def test_it_refuses_outputs_of_other_kernels(world):
    k = kernels.all_gather(world.n_ranks, schedule="push_1d")
    scratch, out = k.scratch(world, 16), world.empty(16 * world.n_ranks, "uint8")
    with pytest.raises(ValueError, match="another kernel .* for an out in symmetric memory"):
        k[scratch.grid, scratch.block, world.stream](world.xp.zeros(16, "uint8"), out, *scratch)
    scratch.free()
    world.free(out)


@pytest.mark.parametrize("transport", ["ll", "ll128", "lamport"])
@pytest.mark.parametrize(
    ("dtype", "begin", "size", "number", "block", "message"),
    [
        ("float32", 1, 4, 0, 32, "tile.*: x begins at .*; it must begin at a multiple of 16 bytes"),
        ("float64", 0, 4, 0, 32, "tile: x has elements of float64 .*; they must be float32"),
        ("float32", 0, 4, 2, 32, "tile: its number is 2; the scratch is for 0 to 1"),
        ("float32", 0, 4000, 0, 32, "tile: it has 16000 bytes; the scratch is for .* at most"),
        (
            "float32",
            0,
            4,
            0,
            48,
            r"tile: the block is \(48, 1, 1\); it must be one-dimensional, of whole warps",
        ),
        ("float32", 0, 4, 0, (16, 2), r"tile: the block is \(16, 2, 1\); it must be one-dimensional"),
    ],
)
def test_wrong_tiles(transport, dtype, begin, size, number, block, message):
    def main():
        world = sk.init()
        k = kernels.all_reduce(1, "sum", "float32", transport=transport)
        scratch, tile_of = k.tiles(world, 16, 2), k.device

        @cuda.jit
        def kernel(x, out, number, scratch):
            tile_of(x, out, number, scratch)

        x = world.zeros(begin + size, dtype)[begin:]
        kernel[1, block, world.stream](x, world.zeros(size, dtype), number, scratch.args)
        world.synchronize()

    with pytest.raises((sk.emu.EmulatorError, TypingError), match=message):
        sk.emu.run(main, 1)
