"""What every operation takes and refuses, by the arrays that it declares: one test for all of them. A wrong
array raises on the rank that gives it, before anything is enqueued; so a right call may follow.

A new operation that is no collective needs a right call in ``made``, and its name in NAMES."""

import functools
import importlib.util
import re

import ml_dtypes
import numpy as np
import pytest
from emulated import spmd

import shmemkit as sk
from shmemkit.collectives.registry import collectives
from shmemkit.operations.operation import Declared

RANKS = 2
COLLECTIVES = {kind.__name__: kind for kind in collectives().values()}
ONES = np.ones


def made(world, name):
    """-> (the object, the arrays of a right call on this rank)"""
    kind = getattr(sk, name.partition(".")[0])
    x, part, half = ONES(8, "float32"), ONES(4, "float32"), "float16"
    rows, experts = ONES((4, 16), half), ONES((3, 8, 16), half)
    ids, factors = np.zeros((8, 1), "int32"), ONES((8, 1), "float32")
    match name:
        case _ if name in COLLECTIVES:
            of_x, of_out = (x if many else part for many in (kind._scatters, kind._gathers))
            arrays = {"x": of_x} if kind._gives(world.rank, 0) else {}
            return kind(world, 64), arrays | ({"out": of_out.copy()} if kind._gets(world.rank, 0) else {})
        case "AllToAllV":
            splits = np.full(RANKS, 2)
            return kind(world, 64), {"x": x, "splits": splits, "out": x.copy(), "out_splits": splits.copy()}
        case "Barrier":
            return kind(world), {}
        case "Gemm":
            arrays = {"x": rows, "w": ONES((16, 8), half), "out": ONES((4, 8), half), "bias": ONES(8, half)}
            return kind(), arrays
        case "GroupedGemm":
            arrays = {"x": rows, "w": ONES((2, 8, 16), half), "counts": np.full(2, 2, "int32")}
            return kind(), {**arrays, "out": ONES((4, 8), half), "bias": ONES((2, 8), half)}
        case "Queue":
            return kind(world, 2, 4), {"x": x.reshape(2, 4), "out": ONES((2, 4), "float32")}
        case "AttentionCombine":
            heads = ONES((2, 2, 64), "float16")
            return kind(world, 2, 2, 64, "float16"), {
                "partial": heads,
                "lse": ONES((2, 2), "float32"),
                "out": heads.copy(),
            }
        case "FlashDecode":
            q, cache = ONES((2, 2, 64), "float16"), ONES((3, 8, 1, 64), "float16")
            arrays = {"q": q, "k": cache, "v": cache.copy(), "lengths": np.full(2, 3, "int32")}
            arrays |= {"block_table": np.zeros((2, 1), "int32"), "out": q.copy()}
            return kind(world, 2, 2, 1, 64, "float16"), arrays
        case "AllReduceRMSNorm":
            x = ONES((2, 128), "float16")
            arrays = {"x": x, "residual": x.copy(), "weight": ONES(128, "float16"), "new_residual": x.copy()}
            arrays |= {"out": ONES((2, 128), ml_dtypes.float8_e4m3fn), "scales": ONES((2, 1), "float32")}
            return kind(world, 2, 128, "float16"), arrays
        case "AllGatherGemm":
            arrays = {"x": rows, "gathered": ONES((8, 16), half), "w": ONES((16, 8), half)}
            return kind(world, 256), {**arrays, "out": ONES((8, 8), half), "bias": ONES(8, half)}
        case "GemmReduceScatter" | "GemmAllReduce":
            out = ONES((2 if name == "GemmReduceScatter" else 4, 8), half)
            return kind(world, 4, 8, half), {"x": rows, "w": ONES((16, 8), half), "out": out}
        case "AllGatherGroupedGemm":
            out = ONES((8, 8), half)
            return kind(world, 256), {"x": rows, "w": experts, "topk_ids": ids, "out": out}
        case "GroupedGemmReduceScatter":
            arrays = {"x": ONES((8, 16), half), "w": experts, "topk_ids": ids, "weights": factors}
            return kind(world, 8, 1, 8, half), {**arrays, "out": ONES((4, 8), half)}
        case "ExpertParallel.dispatch" | "ExpertParallel.combine":
            return of_experts(kind(world, 4, 16, 4, 2, half, n_scales=3), name, (2, 8, 16))
        case _ if kind is sk.ExpertParallel:
            return of_experts(kind(world, 4, 16, 4, 2, half, n_scales=3, max_rows=16), name, (16, 16))
    raise AssertionError(f"{name} declares arrays; this test needs a right call of it")


def of_experts(ep, name, of_rows):
    """-> (a call of an ExpertParallel, its arrays)"""
    x, ids, factors = ONES((3, 16), "float16"), np.tile(np.arange(2), (3, 1)), ONES((3, 2), "float32")
    given = {"x": x, "topk_ids": ids, "weights": factors, "scales": ONES((3, 3), "float32")}
    name = name.partition(".")[2].removesuffix(", max_rows")
    if name == "dispatch":
        return CallOf(ep, name, ep.dispatch), given
    ep.dispatch(**given)
    if name == "dispatch with a handle":
        call = functools.partial(ep.dispatch, handle=ep.keep())
        return CallOf(ep, name, call), {"x": x, "scales": given["scales"]}
    if name == "combine":
        return CallOf(ep, name, ep.combine), {"y": ONES(of_rows, "float16"), "out": x.copy()}
    return CallOf(ep, name, ep.combine_weights), {"values": ONES(16, "float32"), "out": factors.copy()}


class CallOf:
    """One of several calls of an operation."""

    def __init__(self, owner, name, call):
        self.owner, self.declared, self.call = owner, owner.calls[name], call

    def __call__(self, **given):
        result = self.call(**given)
        return result if "out" in self.ARRAYS else None

    def free(self):
        self.owner.free()

    def __getattr__(self, name):
        return getattr(self.declared, name)


def name_of(op):
    return type(getattr(op, "owner", op)).__name__


def operations(kind=Declared):
    """The names of all public ones."""
    for each in kind.__subclasses__():
        yield from operations(each)
        if getattr(sk, each.__name__, None) is each:
            yield each.__name__


def shifted(x):
    """The same, one byte behind a multiple of 16."""
    room = np.zeros(x.nbytes + 32, "uint8")
    at = -room.__array_interface__["data"][0] % 16 + 1
    return room[at : at + x.nbytes].view(x.dtype).reshape(x.shape)


def spread(x):
    """Of the same shape, with gaps between the elements."""
    return np.ones((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)[..., ::2]


def read_only(x):
    x = x.copy()
    x.flags.writeable = False
    return x


def overlapping(x, y, begin):
    """Of the same shapes and dtypes in the same memory, y's `begin` bytes behind x's."""
    room = np.ones(max(x.nbytes, begin + y.nbytes), "uint8")
    return [room[at:][: z.nbytes].view(z.dtype).reshape(z.shape) for at, z in ((0, x), (begin, y))]


class ByInterface:
    """An array that hides all but its memory: it has no shape."""

    def __init__(self, array):
        self.array, self.__array_interface__ = array, array.__array_interface__


def of_others(arrays):
    """`arrays`, in turn as another library's; but NumPy's interface has no dtypes of ml_dtypes."""
    own = {name: x.dtype.isbuiltin != 1 for name, x in arrays.items()}
    return {name: x if own[name] else ByInterface(x) for name, x in arrays.items()}


@pytest.fixture(scope="module")
def torch():
    """PyTorch, or None"""
    return importlib.import_module("torch") if importlib.util.find_spec("torch") else None


def of_records(x):
    """Of the same shape, with a byte behind each element."""
    return np.zeros(x.shape, [("x", x.dtype), ("more", "uint8")])["x"]


def broadcast(x):
    """Of the same shape, whose elements share their memory."""
    return np.lib.stride_tricks.as_strided(x, x.shape, (0,) * x.ndim)


def is_written(op, name):
    return op.ARRAYS[name].new or op.ARRAYS[name].written


def faults(op, name, arrays, torch):
    """Yields what is wrong, what to give instead, the exception, and what it says."""
    given, x, who = op.ARRAYS[name], arrays[name], name_of(op)
    errors = TypeError, ValueError
    yield "no array", {name: {}}, TypeError, f"{who}: {name} is a dict; it must be a NumPy array"
    yield "objects", {name: x.astype(object)}, errors, f"{name} (has|is) .*(object|numbers|must have)"
    if not (given.new or given.optional):
        yield "None", {name: None}, errors, f"{who}: {name} is None"
    if given.dtype is not None or len(arrays) > 1:
        yield "a dtype", {name: x.astype("complex64")}, ValueError, ".* (is|and) .*complex64"
    if given.dims:
        yield "a dimension", {name: x[None]}, ValueError, rf"{who}: {name} is .*\(1, .*; it must be "
    if is_known(op, name, arrays):
        yield "a size", {name: x[..., :-1].copy()}, ValueError, f"({who}|Gemm): "
    if given.contiguous and x.ndim:
        said = f"{who}: {name} is .* with strides .* it must be C-contiguous"
        yield "strides", {name: spread(x)}, ValueError, said
    elif x.ndim and x.itemsize > 1:
        said = f"{who}: {name} has strides .* must be multiples of its elements' {x.itemsize} bytes"
        yield "a byte between elements", {name: of_records(x)}, ValueError, said
    if is_written(op, name) and not given.contiguous:
        yield "one element for all", {name: broadcast(x)}, ValueError, f"{who}: {name} is a broadcast array"
    if given.align != 1 and x.itemsize > 1:
        said = f"{who}: {name} begins at address 0x.*; it must be a mult"
        yield "an address", {name: shifted(x)}, ValueError, said
    if torch:
        no_memory = torch.empty(x.shape, device="meta")
        yield "no memory", {name: no_memory}, TypeError, f"{who}: {name} is a META torch.Tensor"
    if is_written(op, name):
        yield "read-only", {name: read_only(x)}, ValueError, f"{who}: {name} is a read-only array"
        for other in arrays if given.may_be != "any" else ():
            if other != name:
                begin = (given.align or x.itemsize) if other == given.may_be else 0
                both = dict(zip((name, other), overlapping(x, arrays[other], begin), strict=True))
                yield f"the memory of {other}", both, ValueError, f"{who}: .* overlap; they must lie apart"


def limits(op, arrays):
    """As ``faults``: the first array of each dimension that has a limit, with more."""
    who = name_of(op)
    for dim, (most, what) in op.LIMITS.items():
        name = next(name for name in arrays if dim in (op.ARRAYS[name].dims or "").split())
        axis, n = op.ARRAYS[name].dims.split().index(dim), getattr(op, most) + 1
        shape = (*arrays[name].shape[:axis], n, *arrays[name].shape[axis + 1 :])
        said = f"{who}: {name} has {n} {what}, more than {most}={n - 1}. Make an? {who} with a larger {most}"
        yield name, f"{n} {what}", {name: ONES(shape, arrays[name].dtype)}, ValueError, said


def is_known(op, name, arrays):
    """Whether the other arrays decide on the last dimension of this one."""
    given = op.ARRAYS[name]
    if not given.dims:
        return len(arrays) > 1 and not isinstance(op, sk.AllToAllV)  # each rank has rows of its own
    others = " ".join(op.ARRAYS[other].dims or "" for other in arrays if other != name).split()
    dim = given.dims.split()[-1]
    return dim in others or hasattr(op, dim) or dim == "n_ranks"


def test_all_are_here():
    """Operations that are imported from here on are found, too."""
    for name in sk.__all__:
        getattr(sk, name)
    assert {name.partition(".")[0] for name in NAMES} == set(operations())


NAMES = (
    *COLLECTIVES,
    *("AllToAllV", "Queue", "AllReduceRMSNorm", "AttentionCombine", "FlashDecode", "AllGatherGemm"),
    "Barrier",
    *("GemmAllReduce", "GemmReduceScatter", "AllGatherGroupedGemm", "GroupedGemmReduceScatter"),
    *("ExpertParallel.dispatch", "ExpertParallel.combine", "ExpertParallel.dispatch, max_rows"),
    *("ExpertParallel.dispatch with a handle", "ExpertParallel.combine, max_rows"),
    "ExpertParallel.combine_weights",
    *("Gemm", "GroupedGemm"),
)
OF_ALL_RANKS = [name for name in NAMES if name not in ("Gemm", "GroupedGemm")]


def run(main, name):
    spmd(RANKS if name in OF_ALL_RANKS else 1, main)


@pytest.mark.parametrize("name", NAMES)
def test_wrong_arrays(name, torch):
    def main(world):
        op, arrays = made(world, name)
        wrong = [(each, *fault) for each in arrays for fault in faults(op, each, arrays, torch)]
        for each, what, instead, kind, said in [*wrong, *limits(op, arrays)]:
            with pytest.raises(kind, match=said):
                op(**{**arrays, **instead})
                pytest.fail(f"{name} takes {each} with {what}")
        with pytest.raises(TypeError, match="stream is 'x'"):
            op(**arrays, stream="x")
        op(**arrays)
        world.synchronize()

    run(main, name)


@pytest.mark.parametrize("name", OF_ALL_RANKS)
def test_what_is_over(name):
    """Also calls of arrays that a freed one was bound for before."""

    def main(world):
        (op, arrays), (kept, _) = made(world, name), made(world, name)
        op(**arrays)
        world.synchronize()
        op.free()
        who = name_of(op)
        with pytest.raises(RuntimeError, match=f"{who}: it was freed; make a new one"):
            op(**arrays)
        world.finalize()
        for each in (op, kept):
            with pytest.raises(RuntimeError, match=f"{who}: its World is finalized"):
                each(**arrays)

    spmd(RANKS, main)


@pytest.mark.parametrize("name", NAMES)
def test_other_arrays(name):
    """Another library's, read-only ones where a call writes none: with the same results, in the arrays that
    were given."""

    def main(world):
        op, arrays = made(world, name)
        same = {each: x.copy() if is_written(op, each) else read_only(x) for each, x in arrays.items()}
        given = of_others(same)
        op(**arrays)
        for result in results_of(op(**given)):
            assert any(result is each for each in given.values())
        world.synchronize()
        for each, x in same.items():
            np.testing.assert_array_equal(x.view("uint8"), arrays[each].view("uint8"))

    run(main, name)


# But those whose receivers alone know how much room they have, and Broadcast, which returns x
@pytest.mark.parametrize(
    "name", [name for name in NAMES if name not in ("AllToAllV", "Scatter", "Broadcast")]
)
def test_left_out(name):
    """What a call may leave out it makes itself: of the right shape and dtype, also where the others do not
    say theirs."""

    def main(world):
        op, arrays = made(world, name)
        new = [each for each in arrays if op.ARRAYS[each].new]
        found = op(**of_others({each: array for each, array in arrays.items() if each not in new}))
        world.synchronize()
        kinds = [(array.size, array.dtype) for array in results_of(found)]
        assert all((arrays[each].size, arrays[each].dtype) in kinds for each in new)

    run(main, name)


def results_of(found):
    """The arrays that a call has returned."""
    found = found if isinstance(found, tuple) else (found,)
    return [each for each in found if each is not None]


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in OF_ALL_RANKS
        if not name.startswith(("AllToAllV", "Queue", "ExpertParallel", "Barrier"))
    ],
)
def test_ranks_that_disagree(name):
    """The emulator compares what all ranks must give alike."""

    def main(world):
        op, arrays = made(world, name)
        if world.rank == 1:
            shared = {*op.LIMITS, (next(iter(op.ARRAYS.values())).dims or "").partition(" ")[0]}
            arrays = {each: halved(array, op.ARRAYS[each].dims, shared) for each, array in arrays.items()}
        op(**arrays)
        world.synchronize()

    with pytest.raises(ValueError, match="ranks disagree: rank 0 calls"):
        spmd(RANKS, main)


def halved(array, dims, shared):
    """The first half of it in each dimension that is made of one of those `shared` by the arrays."""
    names = dims.split() if dims is not None else [""] * array.ndim
    cut = [
        slice(n // 2 if shared & set(re.split(r"[*/]", dim)) else n)
        for dim, n in zip(names, array.shape, strict=True)
    ]
    return array[tuple(cut)].copy()
