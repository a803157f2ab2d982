"""The cases of a check, made from the package's own tables: a new method, dtype or collective is one by
itself. What is checked of each operation stands in ``OPERATIONS``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import shmemkit as sk
from shmemkit.collectives import tuning
from shmemkit.collectives.registry import collectives
from shmemkit.gemm import METHODS as GEMMS
from shmemkit.gemm.grouped import METHODS as GROUPED
from shmemkit.gemm.problem import HALVES
from shmemkit.gemm.reduce_scatter.host_objects import GemmCollective
from shmemkit.support.dtypes import REDUCIBLE, numpy_dtype

from . import layers
from .collectives import ODD, InPlace, Mixed, Moved, Unaligned, sizes_of
from .subjects import Subject

partial: Any = functools.partial  # names of methods are strings here, not literals
FIRST = "float32", "bfloat16"  # of each method
MOVED = "float32", "uint8", "float64", "bfloat16", "float8_e4m3fn"  # by "auto"; they are moved as bytes
OPS = ("max", "int32"), ("min", "int32"), ("prod", "int32"), ("avg", "float32")
LARGEST, LARGEST_EMULATED = 1 << 26, 1 << 13  # bytes beyond which no choice of "auto" is looked at
SMS = "sms"  # begins the variant of a case with a budget of multiprocessors


@dataclass
class Case:
    """One operation, method and dtype.

    of        its public name
    make      (world, arrays) -> Made, on all ranks; ValueError or MemoryError where it is refused
    protocol  what it shares with other cases
    needed    whether "auto" can take it here, or there is no "auto", so that nothing is passed without it
    """

    of: str
    method: str
    dtype: str
    make: Callable[[Any, Any], Made]
    protocol: str
    needed: bool = False
    variant: str = ""
    thin: bool = False  # one of many alike, for the emulator

    @property
    def name(self):
        return " ".join(filter(None, (self.of, self.method, self.dtype, self.variant)))


@dataclass
class Made:
    """`subjects` of one object; `takes`: the methods that "auto" takes now, if it is that one; `refused`:
    sizes that it does not take, each with the reason."""

    subjects: list
    free: Callable[[], Any]
    takes: tuple = ()
    refused: list = field(default_factory=list)


def by_risk(cases):
    """First what "auto" takes, of the first dtypes; then its other dtypes, and budgets; then each protocol
    once; then all others."""
    usual, protocols, order = {*FIRST, ""}, set(), []
    for case in cases:
        new = case.protocol not in protocols
        first = case.dtype in usual and not case.variant.startswith(SMS)
        risk = (0 if first else 1) if case.needed else 2 if new else 3
        if not case.needed or case.method != "auto":
            protocols.add(case.protocol)
        order.append((risk, len(order), case))
    return [case for _, _, case in sorted(order, key=lambda each: each[:2])]


def cases(world):
    """-> all cases of this World, by risk. Collective."""
    return by_risk([case for of in OPERATIONS for case in of(world)])


# ---- the collectives


def protocol_of(kind, method):
    entry = kind._METHODS.get(method)
    if isinstance(entry, tuple):
        transport = f" {entry[1].name}" if entry[1] is not None else ""
        return getattr(entry[0], "__name__", str(entry[0])) + transport
    return getattr(entry, "__name__", f"{kind.__name__} {method}")


def of_collectives(world):
    for op, what in collectives().items():
        choices = tuning.found_by(world, op).choices
        taken = {method for those in choices.values() for _, method in those}
        # Those that "auto" takes for larger arrays than it is tried with.
        beyond = {m for those in choices.values() for low, m in _intervals(those) if low > _largest(world)}
        for method in ("auto", *what.methods):
            dtypes = [*FIRST] if what._reduces else [*MOVED[:2]]
            if method == "auto" or method in beyond:
                dtypes = list(dict.fromkeys([*dtypes, *(REDUCIBLE if what._reduces else MOVED)]))
            for dtype in dtypes:
                yield _collective(what, method, dtype, choices, taken)
            if not what._rooted:
                yield _collective(what, method, "float32", choices, taken, symmetric=True)
        for op, dtype in OPS if what._reduces else ():
            yield _collective(what, "auto", dtype, choices, taken, op=op)
        yield _collective(what, "auto", "float32", choices, taken, sms=_budget(world))


def _budget(world):
    """A few multiprocessors, but enough for all methods: some have a block for each rank."""
    return max(2 if is_emulated(world) else 16, 2 * world.n_ranks)


def _collective(what, method, dtype, choices, taken, symmetric=False, op="sum", sms=None):
    thin = dtype != "float32" or symmetric or op != "sum" or sms is not None

    def make(world, arrays):
        n, emulated = world.n_ranks, is_emulated(world)
        parts, itemsize = what._segments(n), numpy_dtype(dtype).itemsize
        sizes = sizes_of(what, n, dtype, emulated)
        if thin and emulated:
            del sizes[1:]
        if method == "auto":
            for low, _ in _intervals(choices[symmetric]):
                if low and low <= _largest(world):
                    sizes.append(low // itemsize // parts + (1024 if low >= 1 << 16 else 13))
        elif symmetric:
            sizes = sizes[:: 1 if emulated else 2]
        if method == "auto" and not thin:
            sizes.append(_largest(world) * (2 if emulated else 1) // itemsize // parts)
        if sms is not None:
            sizes = sizes_of(what, n, dtype, emulated)[1 if emulated else 0 : 4]
        root = n - 1 if dtype == "float32" else 1 % n
        largest = max(sizes) * itemsize * parts * (2 if what._reduces and "float8" in dtype else 1)
        made = what._made(world, largest, method, root, op, sms)
        output = made.output if symmetric else None
        subjects: list[Subject] = [
            Moved(world, arrays, what, size, dtype, root, op, made, output) for size in sizes
        ]
        if not thin:  # other arrays for kernels that are compiled by now
            others = [Unaligned] if what._gathers and what._scatters else [Unaligned, InPlace]
            subjects += [kind(world, arrays, what, sizes[1], dtype, root, op, made) for kind in others]
            large = sizes[1 if emulated else 3]
            turn = [Moved(world, arrays, what, size, dtype, root, op, made) for size in (large, ODD, large)]
            subjects.append(Mixed(world, arrays, *turn))
        takes: tuple = ()
        if method == "auto":
            takes = tuple({method for those in made._choices.values() for _, method in those})
        return Made(subjects, made.free, takes)

    variants = op if op != "sum" else "", "symmetric" if symmetric else "", f"{SMS}={sms}" if sms else ""
    variant = " ".join(filter(None, variants))
    needed = method == "auto" or method in taken
    return Case(what.__name__, method, dtype, make, protocol_of(what, method), needed, variant, thin)


def _intervals(choices):
    """-> [(bytes that are too few, method), ..]"""
    lows = [0, *(limit for limit, _ in choices)]
    return [(low, method) for low, (_, method) in zip(lows, choices, strict=False)]


def _largest(world):
    return LARGEST_EMULATED if is_emulated(world) else LARGEST


def of_functions(world):
    """The one-line forms, on one size."""
    for op, what in collectives().items():
        function = getattr(sk, op)

        def make(world, arrays, what=what, function=function):
            root = {"root": world.n_ranks - 1} if what._rooted else {}

            def call(x, out):
                function(x, out=out, **root)

            return Made(
                [Moved(world, arrays, what, 37, "float32", root.get("root", 0), "sum", call)], _nothing
            )

        yield Case(op, "", "float32", make, f"{what.__name__} auto", True)


# ---- all others


def case(world, of, method, dtype, subject, make, sizes, needed=True, variant="", **more):
    """A Case of subject(world, arrays, object, one of `sizes`, dtype, ..); ``make()`` makes the object."""

    def made(world, arrays):
        operation, subjects, refused = make(), [], []
        for size in sizes:
            try:
                if isinstance(operation, GemmCollective):
                    operation.method_for(*size)
                subjects.append(subject(world, arrays, operation, size, dtype, **more))
            except ValueError as error:  # alike on all ranks
                refused.append(f"{size}: {error}")
        free = getattr(operation, "free", _nothing)
        if not subjects:
            free()
            raise ValueError(refused[0])
        return Made(subjects, free, refused=refused)

    return Case(of, method, dtype, made, f"{of} {method} {variant}", needed, variant)


def _nothing():
    pass


def is_emulated(world):
    return world.backend.name == "emulator"


def halves(world):
    """On the emulator one of them: it takes its time, and both have the same kernels."""
    return HALVES[:1] if is_emulated(world) else HALVES


def of_products(world):
    sizes = [(20, 16, 16)] if is_emulated(world) else [(200, 512, 264), (2048, 512, 1032)]
    of_float8 = [(24, 128, 32)] if is_emulated(world) else [(200, 512, 264)]
    others = {"simt": ("float32", "float64", "int32"), "auto": (*FIRST, "float16", "float64", "int32")}
    for method in ("auto", *GEMMS):
        make = partial(sk.Gemm, method)
        for dtype in others.get(method, halves(world)):
            yield case(world, "Gemm", method, dtype, layers.Product, make, sizes)
        if method in ("auto", "sm90"):
            yield case(world, "Gemm", method, "float8_e4m3fn", layers.Float8Product, make, of_float8)
    yield case(world, "matmul", "", "bfloat16", layers.Product, lambda: sk.matmul, sizes[:1])
    sizes = [(9, 16, 8, 2, 1)] if is_emulated(world) else [(300, 256, 264, 8, 1)]
    for method in ("auto", *GROUPED):
        for dtype in halves(world):
            make = partial(sk.GroupedGemm, method)
            yield case(world, "GroupedGemm", method, dtype, layers.Grouped, make, sizes)
    yield case(world, "grouped_matmul", "", "bfloat16", layers.Grouped, lambda: sk.grouped_matmul, sizes)


def of_shared_products(world):
    n = world.n_ranks
    sizes = [(4 * n, 8, 16)] if is_emulated(world) else [(32 * n, 128, 264), (256 * n, 128, 1024)]
    for kind, scatter in ((sk.GemmReduceScatter, True), (sk.GemmAllReduce, False)):
        for method in ("auto", *kind.methods):
            for dtype in ("bfloat16", "float32") if method in ("auto", "sequential") else ("bfloat16",):
                make = partial(kind, world, sizes[-1][0], sizes[-1][2], dtype, None, method)
                given = world, kind.__name__, method, dtype, layers.SummedProduct, make, sizes
                yield case(*given, _can_be_taken(kind, method, world), scatter=scatter)
        make = partial(kind, world, sizes[-1][0], sizes[-1][2], "bfloat16", sms=_budget(world))
        given = world, kind.__name__, "auto", "bfloat16", layers.SummedProduct, make, sizes[:1]
        yield case(*given, variant=f"{SMS}={_budget(world)}", scatter=scatter)
    sizes = [(4, 16, 16)] if is_emulated(world) else [(96, 256, 264), (512, 512, 1024)]
    kind = sk.AllGatherGemm
    for method in ("auto", *kind.methods):
        for dtype in FIRST if method == "auto" else ("bfloat16",):
            make = partial(kind, world, 4 * n * sizes[-1][0] * sizes[-1][1], method)
            given = world, "AllGatherGemm", method, dtype, layers.GatheredProduct, make, sizes
            yield case(*given, _can_be_taken(kind, method, world))
    make = partial(kind, world, 4 * n * sizes[-1][0] * sizes[-1][1], sms=_budget(world))
    given = world, "AllGatherGemm", "auto", "bfloat16", layers.GatheredProduct, make, sizes[:1]
    yield case(*given, variant=f"{SMS}={_budget(world)}")


def _can_be_taken(kind, method, world):
    return method == "auto" or method in kind.methods_for(world.n_nodes)


def of_experts(world):
    n = world.n_ranks
    m, k, width, experts, topk = size = (2, 16, 8, 2, 2) if is_emulated(world) else (96, 256, 264, 8, 2)
    kind = sk.AllGatherGroupedGemm
    for method in ("auto", *kind.methods):
        make = partial(kind, world, 2 * n * m * k, method)
        given = world, kind.__name__, method, "bfloat16", layers.GatheredExperts, make, [size]
        yield case(*given, method in ("auto", "sequential"))
    make = partial(kind, world, 2 * n * m * k)
    yield case(world, "ExpertIndex", "", "bfloat16", layers.GatheredExperts, make, [size], indexed=True)
    kind = sk.GroupedGemmReduceScatter
    for method in ("auto", *kind.methods):
        make = partial(kind, world, n * m, topk, width, "bfloat16", method)
        given = world, kind.__name__, method, "bfloat16", layers.SummedExperts, make, [size]
        yield case(*given, method in ("auto", "sequential"))
    m, k, width, experts, topk = size = (5, 16, 0, 2 * n, 2) if is_emulated(world) else (50, 512, 0, 4 * n, 4)
    for rows, sms in ((None, None), (n * m * topk, None), (None, _budget(world))):
        make = partial(sk.ExpertParallel, world, m, k, experts, topk, "bfloat16", max_rows=rows, sms=sms)
        given = world, "ExpertParallel", "", "bfloat16", layers.Dispatched, make, [size]
        yield case(*given, variant="max_rows" if rows else f"{SMS}={sms}" if sms else "")


def of_attention(world):
    n = world.n_ranks
    heads, dim = (n, 16) if is_emulated(world) else (8 * n, 128)
    batches = (2,) if is_emulated(world) else (3, 40)
    sizes, kind = [(batch, heads, dim) for batch in batches], sk.AttentionCombine
    tokens, group, decoded = (20, 1, 64) if is_emulated(world) else (300, 4, 128)
    for form in ("all_gather", "all_to_all"):
        for dtype in (*halves(world), "float32"):
            make = partial(kind, world, batches[-1], heads, dim, dtype, form)
            yield case(world, "AttentionCombine", form, dtype, layers.Attention, make, sizes, form=form)
        of_dtypes: list[tuple[str, int | None]] = [(dtype, None) for dtype in halves(world)]
        if form == "all_gather" and not is_emulated(world):
            of_dtypes.append(("bfloat16", _budget(world)))
        for dtype, sms in of_dtypes:
            size = 2, tokens, n, group, decoded
            make = partial(sk.FlashDecode, world, 2, group * n, n, decoded, dtype, form, sms=sms)
            given = world, "FlashDecode", form, dtype, layers.Decode, make, [size]
            yield case(*given, variant=f"{SMS}={sms}" if sms else "", form=form)
    given = world, "attention_combine", "", "bfloat16", layers.Attention, lambda: sk.attention_combine
    yield case(*given, sizes[:1], form="all_gather")


def of_rows(world):
    for hidden, tokens in ((40, (3,)),) if is_emulated(world) else ((4096, (1, 33)), (520, (64,))):
        for method in ("auto", *sk.AllReduceRMSNorm.methods):
            for dtype in halves(world):
                sizes: list = [(rows, hidden) for rows in tokens]
                sizes, variant = [*sizes, (*sizes[-1], "in place")], f"of {hidden}"
                make = partial(sk.AllReduceRMSNorm, world, tokens[-1], hidden, dtype, method)
                yield case(
                    *(world, "AllReduceRMSNorm", method, dtype, layers.Rows, make, sizes), variant=variant
                )


def of_exchanges(world):
    size = (6, 12) if is_emulated(world) else (50, 96)
    few = {"n_producers": 2, "n_consumers": 1, "block": 8} if is_emulated(world) else {}
    for dtype in FIRST:
        make = partial(sk.Queue, world, 4, size[1], dtype, **few)
        yield case(world, "Queue", "", dtype, layers.Queued, make, [size])
    sizes = (
        [(5, 7), (5, 4, "unaligned")] if is_emulated(world) else [(40, 33), (100, 512), (40, 32, "unaligned")]
    )
    for dtype in ("float32", "uint8"):
        make = partial(
            sk.AllToAllV, world, 4 * world.n_ranks * max(most * width for most, width, *_ in sizes)
        )
        yield case(world, "AllToAllV", "", dtype, layers.Splits, make, sizes)
    for of in ("Barrier", "World"):
        yield Case(of, "" if of == "Barrier" else "barrier", "", partial(_met, of == "Barrier"), of, True)


def _met(by_object, world, arrays):
    board = world.zeros(100 if is_emulated(world) else 5000, "int32", "check.board")
    barrier = sk.Barrier(world) if by_object else None

    def free():
        if barrier is not None:
            barrier.free()
        world.free(board)

    return Made([layers.Met(world, arrays, barrier or world.barrier, board)], free)


def of_groups(world):
    """Collectives in two groups at once; where ranks share a GPU, there are none."""
    alone = not getattr(world.backend, "shares_gpus", False)
    for by in ("halves", "every second rank") if world.n_ranks > 1 else ():
        for kind in (sk.AllReduce, sk.ReduceScatter, sk.AllGather):
            make, name = partial(_grouped, by, kind), kind.__name__
            yield Case("Group", name, "float32", make, f"Group {name}", alone, by)


def _grouped(by, what, world, arrays):
    if getattr(world.backend, "shares_gpus", False):
        raise ValueError("ranks share a GPU, and groups need one for each")
    color = 2 * world.rank // world.n_ranks if by == "halves" else world.rank % 2
    group = world.split(color, heap="64M")
    sizes = sizes_of(what, group.n_ranks, "float32", is_emulated(world))[:4]
    made = what._made(group, 4 * max(sizes) * what._segments(group.n_ranks))

    def free():
        made.free()
        group.finalize()

    return Made([Moved(group, arrays, what, size, "float32", 0, "sum", made) for size in sizes], free)


OPERATIONS = (
    of_collectives,
    of_functions,
    of_shared_products,
    of_products,
    of_experts,
    of_attention,
    of_rows,
    of_exchanges,
    of_groups,
)
