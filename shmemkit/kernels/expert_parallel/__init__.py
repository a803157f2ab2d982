"""Expert parallelism: the experts of a mixture-of-experts layer are spread over the ranks, and the tokens go
to theirs and come back.

  dispatch   each token's row to the ranks of its experts, once to each, and there to the experts
  combine    the experts' rows back, added up on the way, with weights

A file each, which says how it works: made for few tokens, whose latency counts.
"""

import operator
from typing import Any, NamedTuple

import numpy as np

from shmemkit.device import TILE_BYTES
from shmemkit.kernels.method import agree
from shmemkit.memory import as_dtype
from shmemkit.stream_order import shared_order
from shmemkit.world import World

from .combine import Combine
from .dispatch import Dispatch
from .routing import MAX_EXPERTS, MAX_RANKS, MAX_TOKENS, MAX_TOP_K, MAX_UNITS
from .weighted import DTYPES

__all__ = ["ExpertParallel", "Received"]

PLANS = 64  # bound calls that are kept


class Received(NamedTuple):
    """What ``ExpertParallel.dispatch`` returns: arrays of the object, the same at each call.

    rows    (n_local_experts, n_ranks * max_tokens, hidden): rows[e, :counts[e]] are those of local expert e,
            by rank and token; what is behind them is undefined
    counts  int32 (n_local_experts,), on the GPU
    scales  float32 (n_local_experts, n_ranks * max_tokens, n_scales), of the same rows; None without scales
    """

    rows: Any
    counts: Any
    scales: Any


class Sizes(NamedTuple):
    """The arguments of ``ExpertParallel`` that all ranks share."""

    max_tokens: int
    hidden: int
    n_experts: int
    top_k: int
    dtype: np.dtype
    dispatch_dtype: np.dtype
    n_scales: int
    n_local: int  # experts of a rank

    @property
    def row(self):
        """Bytes of a row that is dispatched."""
        return self.hidden * self.dispatch_dtype.itemsize


class ExpertParallel:
    """Dispatch tokens to the ranks of their experts, and combine what the experts make of them. Collective.

    world           the World; all ranks reach each other over NVLink, as in one node, up to 72 of them
    max_tokens      of each rank in a call: 1 to 65536
    hidden          elements of a token's row; a row is a multiple of 16 bytes
    n_experts       of all ranks: a multiple of n_ranks, up to 1024. Rank r has the n_local_experts =
                    n_experts / n_ranks from r * n_local_experts on
    top_k           experts of a token: 1 to 32, and not more than n_experts
    dtype           of the rows that are combined: float16, bfloat16 or float32
    dispatch_dtype  of those that are dispatched: `dtype` (default), or "uint8", bytes of anything, as of fp8
    n_scales        float32 that go with each dispatched row, such as the scales of fp8

        received = ep.dispatch(x, experts, weights)
        y = ...               # of received.rows[e, : received.counts[e]], for each local expert e
        out = ep.combine(y)

    Calls are enqueued, on any stream, also in graphs, in the same order on all ranks. The host waits for
    nothing, and never knows how many tokens go where. ``combine`` is for the last ``dispatch`` before it: the
    next dispatch overwrites what one leaves in the object. For two batches at a time, take two objects: what
    the experts do may go on beside the other's calls. These, and those of all collectives, run one after
    another, in the order in which the host makes them, the same on all ranks, whatever their streams: a
    kernel waits for those of the other ranks, and keeps up to half of each multiprocessor meanwhile.

    received, n_local_experts, and capacity, the rows that each has room for, may be read.

    It takes symmetric memory for 4 * n_ranks * max_tokens rows, of 512 bytes for each 480 begun, and private
    memory, of `received`, for n_experts * max_tokens. Where one rank has too little, all raise MemoryError.
    """

    def __init__(
        self,
        world,
        max_tokens,
        hidden,
        n_experts,
        top_k,
        dtype="bfloat16",
        dispatch_dtype=None,
        n_scales=0,
    ):
        if not isinstance(world, World):
            raise TypeError(
                f"ExpertParallel: the first argument is the World, of shmemkit.init(), not {world!r}"
            )
        self._dispatch = self._combine = None
        given = max_tokens, hidden, n_experts, top_k, dtype, dispatch_dtype, n_scales
        sizes = refusal = None
        try:
            sizes = _sizes(world.n_ranks, *given)
        except (TypeError, ValueError) as error:
            refusal = error
        of_all = world.host_allgather(str(refusal) if sizes is None else tuple(map(str, sizes)))
        if refusal is not None:
            raise refusal
        if len(set(of_all)) > 1:
            raise ValueError(
                f"ExpertParallel: {_differences(of_all)} over the ranks: the same arguments are allowed"
            )
        self.world, self.sizes, self.n_local_experts = world, sizes, sizes.n_local
        self.capacity = world.n_ranks * sizes.max_tokens
        self._plans, self._order = {}, shared_order(world)
        self._tokens, self._captured = None, False  # of the last dispatch; whether one was ever captured
        try:
            self._dispatch = Dispatch(world, sizes)
            self._combine = Combine(world, sizes, self._dispatch)
        except (TypeError, ValueError, MemoryError):  # on all ranks
            self.free()
            raise
        agree(world, self._allocate, self.free)

    def _allocate(self):
        """Private memory, of which one rank alone may have too little."""
        sizes, xp = self.sizes, self.world.xp
        rows = sizes.n_local, self.capacity
        scales = xp.empty((*rows, sizes.n_scales), "float32")
        self.received = Received(
            xp.empty((*rows, sizes.hidden), sizes.dispatch_dtype),
            xp.zeros(sizes.n_local, "int32"),
            scales if sizes.n_scales else None,
        )
        self._scales, self._no_scales = scales, xp.empty((sizes.max_tokens, 0), "float32")
        self._ones = xp.ones((sizes.max_tokens, sizes.top_k), "float32")

    def dispatch(self, x, experts, weights=None, scales=None, stream=None):
        """Send the rows of `x` to their experts. -> Received

        x        (tokens, hidden), of dispatch_dtype, at a multiple of 16 bytes: up to max_tokens, also 0, on
                 each rank as many as it has
        experts  int32 or int64 (tokens, top_k): the experts of each token; a number that is no expert's, as
                 -1, is none. A token's experts differ
        weights  float32 (tokens, top_k), by which ``combine`` multiplies; default: ones
        scales   float32 (tokens, n_scales)
        stream   default: the World's

        All are C-contiguous. Enqueued: when the stream has run it, Received is filled in, and x, experts,
        weights and scales may be written again.
        """
        self._check_alive()
        tokens = x.shape[0] if getattr(x, "ndim", 0) else 0
        weights = self._ones[:tokens] if weights is None else weights
        scales = self._no_scales[:tokens] if scales is None and not self.sizes.n_scales else scales
        run = self._planned("dispatch", x=x, experts=experts, weights=weights, scales=scales)
        self._run(run, stream)
        self._tokens = tokens
        self._captured = self._captured or self.world.backend.capture_of(stream) is not None
        return self.received

    def combine(self, y, out=None, stream=None):
        """Bring the experts' rows back to the tokens of the last dispatch, and add them up. -> out

        y       (n_local_experts, n_ranks * max_tokens, hidden), of dtype: what the experts have made of
                ``Received.rows``, in the same places; may be those themselves
        out     (tokens, hidden), of dtype, apart from y; as many tokens as were dispatched, which is not
                checked once a dispatch was captured: the host knows nothing of graphs' launches. Default: a
                new array, for those of the last call of ``dispatch``
        stream  default: the World's

        y and out are C-contiguous, at multiples of 16 bytes. Enqueued: when the stream has run it, out[t] is
        the sum of weights[t, j] times the row that expert experts[t, j] has for token t. What the experts of
        one rank have is added up there, by j, in float32, and rounded to dtype; the sums of the ranks then
        likewise, by rank. A token without experts gets zeros. Equal calls give equal bits.
        """
        self._check_alive()
        if out is None:
            if self._tokens is None:
                raise ValueError("ExpertParallel: combine: a dispatch comes before it, or `out` is given")
            out = self.world.xp.empty((self._tokens, self.sizes.hidden), self.sizes.dtype)
            if stream not in (None, self.world.stream):  # what used the memory before may be under way
                self.world.backend.follow(stream, None)
        run = self._planned("combine", y=y, out=out)
        if out.shape[0] != self._tokens and self._tokens is not None and not self._captured:
            raise ValueError(
                f"ExpertParallel: out has {out.shape[0]} tokens, the last dispatch had {self._tokens}: as "
                "many are allowed"
            )
        self._run(run, stream)
        return out

    def free(self):
        """Give the symmetric memory back; the object cannot be used any more. Its private memory goes with
        the object. Collective."""
        methods, self._dispatch, self._combine = (self._combine, self._dispatch), None, None
        self._plans = {}
        for method in methods:
            if method is not None:
                method.free()

    # -- inside
    def _run(self, run, stream):
        if stream is self.world.stream:
            stream = None
        self._order.before(stream, "ExpertParallel")
        run(stream)

    def _planned(self, call, **arrays):
        """Bind the call for these arrays; bound calls are kept by address."""
        address = self.world.backend.address
        try:
            key = call, *((address(a), a.shape, a.strides, a.dtype) for a in arrays.values())
        except AttributeError:
            array = self.world.xp.ndarray
            raise TypeError(
                f"ExpertParallel: {call}: {', '.join(arrays)} must be of {array.__module__}."
                f"{array.__name__}, given {', '.join(type(a).__name__ for a in arrays.values())}"
            ) from None
        run = self._plans.get(key)
        if run is None:
            if len(self._plans) == PLANS:
                self._plans.clear()
            run = self._plans[key] = getattr(self, f"_plan_{call}")(**arrays)
        return run

    def _plan_dispatch(self, x, experts, weights, scales):
        sizes, tokens = self.sizes, self._tokens_of("x", x)
        self._check("x", x, (tokens, sizes.hidden), (sizes.dispatch_dtype,), aligned=True)
        self._check("experts", experts, (tokens, sizes.top_k), ("int32", "int64"))
        self._check("weights", weights, (tokens, sizes.top_k), ("float32",))
        self._check("scales", scales, (tokens, sizes.n_scales), ("float32",))
        rows = self.received.rows
        self._check_apart("x", x, "Received.rows", rows)
        row_scales = self._scales.reshape(self.n_local_experts * self.capacity, sizes.n_scales)
        return self._dispatch.bind(
            *(_pieces(x), experts, weights.view("int32"), scales.view("uint32")),
            *(_pieces(rows), row_scales.view("uint32"), self.received.counts),
        )

    def _plan_combine(self, y, out):
        sizes, tokens = self.sizes, self._tokens_of("out", out)
        self._check("y", y, (self.n_local_experts, self.capacity, sizes.hidden), (sizes.dtype,), aligned=True)
        self._check("out", out, (tokens, sizes.hidden), (sizes.dtype,), aligned=True)
        self._check_apart("y", y, "out", out)
        return self._combine.bind(_pieces(y), _pieces(out))

    def _tokens_of(self, name, array):
        """-> how many it has, when they are rows and not too many."""
        if array.ndim != 2:
            raise ValueError(
                f"ExpertParallel: {name} is {array.ndim}-D: 2-D, (tokens, {self.sizes.hidden}), is allowed"
            )
        if array.shape[0] > self.sizes.max_tokens:
            raise ValueError(
                f"ExpertParallel: {name} has {array.shape[0]} tokens, max_tokens={self.sizes.max_tokens}: "
                "make a larger one"
            )
        return array.shape[0]

    def _check(self, name, array, shape, dtypes, aligned=False):
        if array.shape != shape or array.dtype not in dtypes:
            allowed = " or ".join(np.dtype(dtype).name for dtype in dtypes)
            raise ValueError(
                f"ExpertParallel: {name} is {array.dtype} {array.shape}: {allowed} {shape} is allowed"
            )
        if not array.flags.c_contiguous:
            raise ValueError(
                f"ExpertParallel: {name} {array.shape} has strides {array.strides}: C-contiguous arrays are "
                "allowed; copy it"
            )
        if aligned and array.size and self.world.backend.address(array) % 16:
            raise ValueError(
                f"ExpertParallel: {name} begins at no multiple of 16 bytes, which rows are moved by; copy it"
            )

    def _check_apart(self, name, array, other_name, other):
        at, to = map(self.world.backend.address, (array, other))
        if array.nbytes and other.nbytes and at < to + other.nbytes and to < at + array.nbytes:
            raise ValueError(
                f"ExpertParallel: {name} and {other_name} overlap: arrays that lie apart are allowed"
            )

    def _check_alive(self):
        if self._dispatch is None:
            raise RuntimeError("ExpertParallel: it was freed; make a new one")
        if self.world.finalized:
            raise RuntimeError("ExpertParallel: its World is finalized; call shmemkit.init() again")


def _pieces(rows):
    """They as words of 16 bytes, 1-D."""
    return rows.reshape(-1).view("uint8").view("complex128")


def _sizes(n_ranks, max_tokens, hidden, n_experts, top_k, dtype, dispatch_dtype, n_scales):
    """-> Sizes; ValueError, or TypeError, for what is not allowed."""
    numbers = {
        "max_tokens": (max_tokens, 1, MAX_TOKENS),
        "hidden": (hidden, 1, 1 << 20),
        "n_experts": (n_experts, 1, MAX_EXPERTS),
        "top_k": (top_k, 1, MAX_TOP_K),
        "n_scales": (n_scales, 0, 1 << 20),
    }
    for name, (number, least, most) in numbers.items():
        try:
            number = operator.index(number)
        except TypeError:
            raise TypeError(f"ExpertParallel: {name}={number!r}: an integer is allowed") from None
        if not least <= number <= most:
            raise ValueError(f"ExpertParallel: {name}={number}: {least} to {most} are allowed")
    if n_ranks > MAX_RANKS:
        raise ValueError(f"ExpertParallel: {n_ranks} ranks: up to {MAX_RANKS} are allowed")
    if top_k > n_experts:
        raise ValueError(f"ExpertParallel: top_k={top_k}: up to {n_experts}, n_experts, are allowed")
    if n_experts % n_ranks:
        raise ValueError(
            f"ExpertParallel: n_experts={n_experts}: a multiple of {n_ranks}, the ranks, is allowed"
        )
    dtype = as_dtype(dtype)
    moved = dtype if dispatch_dtype is None else as_dtype(dispatch_dtype)
    if dtype.name not in DTYPES:
        raise ValueError(f"ExpertParallel: dtype={dtype.name}: {', '.join(DTYPES)} are allowed")
    if moved.name not in (dtype.name, "uint8"):
        raise ValueError(
            f"ExpertParallel: dispatch_dtype={moved.name}: {dtype.name}, the dtype, or uint8 is allowed"
        )
    for kind in (dtype, moved):
        if hidden * kind.itemsize % 16:
            raise ValueError(
                f"ExpertParallel: hidden={hidden}: rows of {hidden * kind.itemsize} bytes, of {kind.name}; "
                "multiples of 16 bytes are allowed"
            )
    if n_experts * max_tokens >= 1 << 31:
        raise ValueError(
            f"ExpertParallel: n_experts * max_tokens = {n_experts * max_tokens}: less than 2**31 is allowed"
        )
    units = 2 * n_ranks * max_tokens * max(-(-hidden * dtype.itemsize // TILE_BYTES), -(-n_scales // 2))
    if units >= MAX_UNITS:
        raise ValueError(
            f"ExpertParallel: max_tokens={max_tokens}, hidden={hidden}, n_scales={n_scales}: {units} lines, "
            f"of {TILE_BYTES} bytes of a row or of two scales: less than {MAX_UNITS} are allowed"
        )
    sizes = *map(int, (max_tokens, hidden, n_experts, top_k)), dtype, moved, int(n_scales)
    return Sizes(*sizes, n_experts // n_ranks)


def _differences(of_all):
    """What differs, of what the ranks were given: their Sizes as texts, or why they are refused."""
    refused = [f"rank {k}: {given}" for k, given in enumerate(of_all) if isinstance(given, str)]
    columns = zip(Sizes._fields, *of_all, strict=True) if not refused else ()
    return "; ".join(refused or [f"{n}={', '.join(given)}" for n, *given in columns if len({*given}) > 1])
