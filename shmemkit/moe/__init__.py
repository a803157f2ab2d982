"""Expert parallelism: the ranks share the experts of a mixture-of-experts layer. Tokens travel to their
experts and back.

  dispatch   sends each token's row once to each rank that has experts of it; that rank copies it to the
             experts
  combine    returns the rows of the experts, and sums them with weights on the way

dispatch.py and combine.py explain them; both are made for few tokens, where latency counts. For many tokens,
ragged/ has others, whose rows lie in one buffer without gaps.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np

from shmemkit.device import TILE_BYTES
from shmemkit.device.cuda.weighted_sums import DTYPES
from shmemkit.operations.method import agree, agree_on
from shmemkit.operations.plans import plans_of
from shmemkit.runtime.budget import checked_sms
from shmemkit.runtime.stream_order import shared_order
from shmemkit.runtime.symmetric_memory import as_dtype
from shmemkit.runtime.world import World, check_world
from shmemkit.support.arrays import (
    call_on,
    check_contiguous,
    converted,
    is_tensor,
    keyed,
    new_array,
    new_output,
    tensor_of,
    with_shape,
)
from shmemkit.support.settings import array_text, integer, listed, options_of, shown
from shmemkit.typing import AnyArray, AnyStream, ArrayT, DType

from .combine import Combine
from .dispatch import Dispatch
from .ragged import THREADS as RAGGED_THREADS
from .ragged import Ragged
from .routing import MAX_EXPERTS, MAX_RANKS, MAX_TOKENS, MAX_TOP_K, MAX_UNITS, THREADS

__all__ = ["ExpertParallel", "Handle", "Received", "ReceivedRows"]

MAX_ROWS = (1 << 31) - 1


class Received(NamedTuple):
    """What ``ExpertParallel.dispatch`` returns, and describes."""

    rows: Any
    counts: Any
    scales: Any


class ReceivedRows(NamedTuple):
    """What ``ExpertParallel.dispatch`` returns, and describes, of an object with `max_rows`."""

    rows: Any
    counts: Any
    scales: Any
    weights: Any


class Handle:
    """A routing that ``ExpertParallel.keep`` has kept. `tokens`: how many of this rank it has."""

    def __init__(self, ragged):
        self.ragged, self.tokens, xp = ragged, 0, ragged.world.xp
        kept, there = (
            (xp.empty_like(ragged.local), xp.empty_like(ragged.shared)),
            (ragged.local, ragged.shared),
        )
        self.keep, self.restore = ragged.bind_copy(*there, *kept), ragged.bind_copy(*kept, *there)
        self._arrays = kept


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
    """Dispatch tokens to the ranks of their experts, and combine the results of the experts. Collective.

        received = ep.dispatch(x, experts, weights)
        y = ...               # of received.rows[e, : received.counts[e]], for each local expert e
        out = ep.combine(y)

    world           the World. Its ranks, 72 at most, reach each other over NVLink, as in one node
    max_tokens      the most tokens of a rank in a call: 1 to 65536
    hidden          elements of a token's row; a row is a multiple of 16 bytes
    n_experts       experts of all ranks: a multiple of n_ranks, up to 1024. Rank r has n_local_experts =
                    n_experts / n_ranks of them, from number r * n_local_experts on
    top_k           experts of a token: 1 to 32, and not more than n_experts
    dtype           dtype of the rows that are combined: float16, bfloat16 or float32
    dispatch_dtype  dtype of the rows that are dispatched: `dtype` (default), or "uint8" for any bytes, such
                    as fp8
    n_scales        how many float32 go with each dispatched row, such as the scales of fp8
    options         numbers of the kernels, for tuning; None: the default. All ranks give the same
                      threads  of a block: a multiple of 32 up to 256, or 512 with max_rows
    max_rows        for many tokens, as in a prefill or in training: how many rows this rank's experts
                    receive in a dispatch, at most. Rows of all experts then lie in one buffer without gaps,
                    as ``sk.grouped_matmul`` takes them. Default: a place for each row that could come. All
                    ranks give the same
    sms             the most multiprocessors that a call uses, 2 or more; None: as many as are tuned

    Calls are enqueued, on any stream or in a graph; ``help(sk.collectives)`` has the rules for arrays,
    streams, order and graphs. The number of tokens may differ from call to call and from rank to rank. The
    host never waits, and never knows how many tokens go where. ``combine`` belongs to the last ``dispatch``
    before it; the next dispatch overwrites the state that it needs. For two batches at a time, use two
    objects: the experts of one may compute while the other dispatches or combines. While a kernel waits for
    those of other ranks, it holds up to half of each multiprocessor.

    The program may read `received`, `n_local_experts`, and `capacity`: the rows that each expert has room
    for, with `max_rows` that all have together.

    With `max_rows`: if a dispatch would bring more rows to any rank, all ranks find that in their kernels.
    They send nothing, counts are 0, and ``combine`` gives zeros. ValueError is raised on each rank when its
    program next waits for the GPU (`World.synchronize`, `World.asnumpy`, ...), so at the same place on all
    ranks; the emulator raises EmulatorError. ``keep`` keeps a routing: calls with it exchange no counts, as
    those of a backward pass.

    It allocates symmetric memory for 4 * n_ranks * max_tokens rows, of 512 bytes for each 480 or part of
    them, and private memory, of `received`, for n_experts * max_tokens. With `max_rows` it allocates
    symmetric memory for max_rows rows that are dispatched, with their scales, and n_ranks * max_tokens rows
    that are combined; about 8 * n_ranks * max_tokens * top_k bytes for routes, and as many private ones for
    each handle. TypeError or ValueError for wrong arguments, MemoryError where one rank has too little
    memory: on all ranks.
    """

    options: dict[str, Any] = {"threads": None}
    sms: int | None

    def __init__(
        self,
        world: World,
        max_tokens: int,
        hidden: int,
        n_experts: int,
        top_k: int,
        dtype: DType = "bfloat16",
        dispatch_dtype: DType | None = None,
        n_scales: int = 0,
        *,
        max_rows: int | None = None,
        options: dict[str, Any] | None = None,
        sms: int | None = None,
    ):
        check_world("ExpertParallel", world)
        self._dispatch: Any = None
        self._combine: Any = None
        self._ragged: Any = None
        given = max_tokens, hidden, n_experts, top_k, dtype, dispatch_dtype, n_scales, max_rows
        sizes: Any = None

        def check():
            nonlocal sizes
            sizes = _sizes(world.n_ranks, *given)
            self.options = options_of("ExpertParallel", self.options, options)
            threads, most = self.options["threads"], RAGGED_THREADS if max_rows else THREADS
            if threads is not None and integer("ExpertParallel", "threads", threads, 32, most) % 32:
                raise ValueError(f"ExpertParallel: threads is {threads}; it must be a multiple of 32")
            names = {name: getattr(value, "name", value) for name, value in sizes._asdict().items()}
            self.sms = checked_sms("ExpertParallel", sms)
            return {**names, "max_rows": max_rows, "options": self.options, "sms": self.sms}

        agree_on(world, "ExpertParallel", check)
        self.world, self.sizes, self.n_local_experts = world, sizes, sizes.n_local
        self.max_rows, self.capacity = max_rows, max_rows or world.n_ranks * sizes.max_tokens
        self._plans, self._order, self._tensors = plans_of(world), shared_order(world), None
        self._tokens, self._captured = None, False  # of the last dispatch; whether one was ever captured
        try:
            settings = {name: value for name, value in self.options.items() if value is not None}
            settings.update(sms=self.sms, name="ExpertParallel")
            if max_rows:
                self._dispatch = self._ragged = Ragged(world, sizes, max_rows, **settings)
            else:
                self._dispatch = Dispatch(world, sizes, **settings)
                self._combine = Combine(world, sizes, self._dispatch, **settings)
        except (TypeError, ValueError, MemoryError):  # on all ranks
            self.free()
            raise
        agree(world, self._allocate, self.free)

    def _allocate(self):
        """Allocate private memory. One rank alone may have too little of it."""
        sizes, xp, ragged = self.sizes, self.world.xp, self._ragged
        self.received: Received | ReceivedRows
        if ragged is not None:
            scales = ragged.scales.reshape(self.capacity, sizes.n_scales)
            of_rows = scales if sizes.n_scales else None
            self.received = ReceivedRows(ragged.rows, ragged.counts, of_rows, ragged.weights)
        else:
            rows = sizes.n_local, self.capacity
            scales = xp.empty((*rows, sizes.n_scales), "float32")
            self.received = Received(
                new_array(xp, (*rows, sizes.hidden), sizes.dispatch_dtype),
                xp.zeros(sizes.n_local, "int32"),
                scales if sizes.n_scales else None,
            )
        self._scales, self._no_scales = scales, xp.empty((sizes.max_tokens, 0), "float32")
        self._ones = xp.ones((sizes.max_tokens, sizes.top_k), "float32")

    def dispatch(
        self,
        x: AnyArray,
        experts: AnyArray | None = None,
        weights: AnyArray | None = None,
        scales: AnyArray | None = None,
        stream: AnyStream | None = None,
        *,
        handle: Handle | None = None,
    ) -> Received | ReceivedRows:
        """Enqueue: send the rows of `x` to their experts. -> Received, or with `max_rows` ReceivedRows

        x        (tokens, hidden), of dispatch_dtype, at an address that is a multiple of 16 bytes. tokens is
                 0 to max_tokens, and may differ between ranks
        experts  int32 or int64 (tokens, top_k): the experts of each token, all different. A number that is
                 no expert's, such as -1, stands for none
        weights  float32 (tokens, top_k): the factors of ``combine``; default: ones
        scales   float32 (tokens, n_scales)
        stream   default: PyTorch's current one if any array is a tensor on a GPU, else the World's
        handle   instead of experts and weights: those of the dispatch that ``keep`` kept. All ranks give one
                 of the same dispatch. Only with `max_rows`

        All are C-contiguous. When the stream has run it, later work on it sees Received, and x, experts,
        weights and scales may be written again. Received has `rows`, (n_local_experts, n_ranks * max_tokens,
        hidden): rows[e, :counts[e]] are those of local expert e, by rank and token, what follows is
        undefined; `counts`, int32 (n_local_experts,), on the GPU; and `scales`, float32 (n_local_experts,
        n_ranks * max_tokens, n_scales), or None. They belong to the object, which has them as `received`,
        too; each dispatch writes the same arrays. If x is a PyTorch tensor, they are tensors of that memory.

        ReceivedRows has `rows`, (max_rows, hidden): the counts[0] rows of local expert 0, then the counts[1]
        of expert 1, and so on, each by rank and token; what follows the last is undefined. `counts` is as
        above. `scales` is (max_rows, n_scales), or None. `weights`, float32 (max_rows,), has the factor of
        each row.

        TypeError or ValueError for wrong arrays; then nothing is enqueued.
        """
        self._check_alive()
        world = self.world
        stream, waits = call_on(world, stream, x, experts, weights, scales)
        rows = with_shape("ExpertParallel", "x", x, world.xp)
        tokens = rows.shape[0] if rows.ndim else 0
        scales = self._no_scales[:tokens] if scales is None and not self.sizes.n_scales else scales
        if handle is not None:
            self._check_handle(handle)
            if experts is not None or weights is not None:
                raise ValueError("ExpertParallel: a handle is given; then experts and weights must be None")
            if tokens != handle.tokens:
                raise ValueError(
                    f"ExpertParallel: x has {tokens} tokens; it must have {handle.tokens}, as the handle"
                )
            run, _ = self._planned("again", x=rows, scales=scales)
        else:
            weights = self._ones[:tokens] if weights is None else weights
            run, _ = self._planned("dispatch", x=rows, experts=experts, weights=weights, scales=scales)
        self._run(run, stream, waits, handle)
        self._tokens = tokens
        self._captured = self._captured or world.backend.capture_of(stream) is not None
        if not is_tensor(x):
            return self.received
        if self._tensors is None:
            self._tensors = type(self.received)(
                *(a if a is None else tensor_of(a, x.device) for a in self.received)
            )
        return self._tensors

    def combine(
        self,
        y: ArrayT,
        out: ArrayT | None = None,
        stream: AnyStream | None = None,
        *,
        handle: Handle | None = None,
        weighted: bool = True,
    ) -> ArrayT:
        """Enqueue: bring the experts' rows back to the tokens of the last dispatch, and sum them. -> out

        y       (n_local_experts, n_ranks * max_tokens, hidden), or with `max_rows` (max_rows, hidden), of
                dtype: the results of the experts for ``Received.rows``, at the same positions; it may be
                ``Received.rows`` itself
        out     (tokens, hidden), of dtype; it must not overlap y. It has as many tokens as were dispatched.
                That is not checked after a dispatch has been captured, because the host does not see the
                launches of a graph. Default: a new array of y's kind, for the last call of ``dispatch``
        stream  default: PyTorch's current one if any array is a tensor on a GPU, else the World's
        handle  of the dispatch whose rows these are, instead of the last one. Only with `max_rows`
        weighted  False: weights are 1, as for the gradients of what was dispatched. Only with `max_rows`

        y and out are C-contiguous, at addresses that are multiples of 16 bytes. When the stream has run it,
        out[t] is the sum of weights[t, j] times the row of expert experts[t, j] for token t, and y may be
        written again. Each rank sums the rows of its own experts in the order of j, in float32, and rounds
        the sum to dtype; one row comes back from it. The sums of the ranks are then added in the order of
        ranks, in float32, and rounded to dtype. A token without experts gets zeros. Equal calls give equal
        bits.

        TypeError or ValueError for wrong arrays; then nothing is enqueued.
        """
        self._check_alive()
        world = self.world
        stream, waits = call_on(world, stream, y, out)
        rows = with_shape("ExpertParallel", "y", y, world.xp)
        known, captured = self._tokens, self._captured
        if handle is not None:
            self._check_handle(handle)
            known, captured = handle.tokens, False
        if not weighted and self._ragged is None:
            raise ValueError("ExpertParallel: weighted is False; it must be True where max_rows is None")
        if out is None:
            if known is None:
                raise ValueError(
                    "ExpertParallel: combine() before any dispatch; call dispatch first, or give out"
                )
            shape, dtype = (known, self.sizes.hidden), self.sizes.dtype
            out = new_output(y, shape, dtype, world.xp, stream, world.backend.follow)
        run, arrays = self._planned("combine" if weighted else "sum", y=rows, out=out)
        self._check_tokens(arrays["out"], known, captured, handle)
        self._run(run, stream, waits, handle)
        return out

    def combine_weights(
        self,
        values: AnyArray,
        out: ArrayT | None = None,
        stream: AnyStream | None = None,
        *,
        handle: Handle | None = None,
    ) -> ArrayT:
        """Enqueue: bring a number of each row back to the token and the expert that it is of. -> out

        values  float32 (max_rows,), at the positions of ``ReceivedRows.rows``: for the gradients of weights,
                the products of each row of y with its row of out_gradient, as dispatched
        out     float32 (tokens, top_k): out[t, j] is the number of the row of experts[t, j] for token t, 0 if
                that is no expert. Default: a new array of values' kind
        stream, handle   as of ``combine``

        Both are C-contiguous, and must not overlap. TypeError or ValueError for wrong arrays, and without
        `max_rows`; then nothing is enqueued.
        """
        self._check_alive()
        world = self.world
        if self._ragged is None:
            raise ValueError("ExpertParallel: combine_weights() needs max_rows, which is None. Give max_rows")
        stream, waits = call_on(world, stream, values, out)
        given = with_shape("ExpertParallel", "values", values, world.xp)
        known, captured = self._tokens, self._captured
        if handle is not None:
            self._check_handle(handle)
            known, captured = handle.tokens, False
        if known is None:
            raise ValueError("ExpertParallel: combine_weights() before any dispatch; call dispatch first")
        if out is None:
            shape = known, self.sizes.top_k
            new: Any = new_output(values, shape, np.dtype("float32"), world.xp, stream, world.backend.follow)
            out = new
        run, arrays = self._planned("weights", values=given, out=out)
        self._check_tokens(arrays["out"], known, captured, handle)
        self._run(run, stream, waits, handle)
        return cast(Any, out)

    def keep(self, into: Handle | None = None, stream: AnyStream | None = None) -> Handle:
        """Enqueue: keep where the rows of the last dispatch went, for later calls. -> Handle

        into    a Handle of this object to overwrite. Default: a new one, whose memory is allocated: not while
                a stream is captured
        stream  default: the World's

        A call with the handle exchanges no numbers of experts and no counts, even after other dispatches; its
        routing is then that of the last dispatch. The handle must live as long as graphs that captured such
        calls. The gradients of a layer are such calls:

            received = ep.dispatch(x, experts, weights)
            handle = ep.keep()
            out = ep.combine(y)                                # y: of received.rows
            ...
            received = ep.dispatch(out_gradient, handle=handle)
            y_gradient = received.rows * received.weights[:, None]
            weights_gradient = ep.combine_weights((received.rows * y).sum(axis=1))
            x_gradient = ep.combine(rows_gradient, handle=handle, weighted=False)

        ValueError before any dispatch, or without `max_rows`.
        """
        self._check_alive()
        if self._ragged is None:
            raise ValueError("ExpertParallel: keep() needs max_rows, which is None. Give max_rows")
        if self._tokens is None:
            raise ValueError("ExpertParallel: keep() before any dispatch; call dispatch first")
        stream, waits = call_on(self.world, stream)
        if into is None:
            into = Handle(self._ragged)
        self._check_handle(into)
        into.tokens = self._tokens
        self._run(into.keep, stream, waits)
        return into

    def free(self) -> None:
        """Free the symmetric memory; the object cannot be used afterwards. Its private memory is freed with
        the object. Collective."""
        methods, self._dispatch, self._combine = (self._combine, self._dispatch), None, None
        self._plans.clear()
        for method in methods:
            if method is not None:
                method.free()

    # -- inside
    def _run(self, run, stream, waits, handle=None):
        self._order.before(stream, "ExpertParallel")
        if handle is not None:
            handle.restore(stream)
            self._tokens = handle.tokens
        run(stream)
        if waits:
            self.world.stream.synchronize()

    def _planned(self, call, **arrays):
        """-> (run, arrays): the call bound for these arrays, and the arrays as ``keyed`` returns them. Bound
        calls are kept by address."""
        key, arrays = keyed("ExpertParallel", arrays, self.world.xp)
        key = call, *key
        run = self._plans.get(key)
        if run is None:
            plan, known = getattr(self, f"_plan_{call}"), converted("ExpertParallel", arrays, self.world.xp)
            run = plan(**known)
            self._plans.keep(key, run)
        return run, arrays

    def _plan_dispatch(self, x, experts, weights, scales):
        sizes, tokens = self.sizes, self._tokens_of("x", x)
        self._check("experts", experts, (tokens, sizes.top_k), ("int32", "int64"))
        self._check("weights", weights, (tokens, sizes.top_k), ("float32",))
        self._check_rows(x, scales)
        if self._ragged is not None:
            route = self._ragged.bind_routing(experts, weights)
            return _one_after_another(route, self._bind_rows(x, scales))
        rows = self.received.rows
        row_scales = self._scales.reshape(self.n_local_experts * self.capacity, sizes.n_scales)
        return self._dispatch.bind(
            *(_pieces(x), experts, weights.view("int32"), scales.view("uint32")),
            *(_pieces(rows), row_scales.view("uint32"), self.received.counts),
        )

    def _plan_again(self, x, scales):
        self._check_rows(x, scales)
        return _one_after_another(self._ragged.bind_meeting(), self._bind_rows(x, scales))

    def _check_rows(self, x, scales):
        sizes, tokens = self.sizes, self._tokens_of("x", x)
        self._check("x", x, (tokens, sizes.hidden), (sizes.dispatch_dtype,), aligned=True)
        self._check("scales", scales, (tokens, sizes.n_scales), ("float32",))
        self._check_apart("x", x, "Received.rows", self.received.rows)

    def _bind_rows(self, x, scales):
        return self._ragged.bind_rows(x.shape[0], _pieces(x), scales.view("uint32"))

    def _plan_combine(self, y, out, weighted=True):
        sizes, tokens = self.sizes, self._tokens_of("out", out)
        of_rows = *self.received.rows.shape[:-1], sizes.hidden
        self._check("y", y, of_rows, (sizes.dtype,), aligned=True)
        self._check("out", out, (tokens, sizes.hidden), (sizes.dtype,), aligned=True)
        self._check_apart("y", y, "out", out)
        if self._ragged is not None:
            sums = self._ragged.bind_sums(tokens, _pieces(y), _pieces(out), weighted)
            return _one_after_another(self._ragged.bind_meeting(), sums)
        return self._combine.bind(_pieces(y), _pieces(out))

    def _plan_weights(self, values, out):
        self._check("values", values, (self.capacity,), ("float32",))
        tokens = out.shape[0] if out.ndim else 0
        self._check("out", out, (min(tokens, self.sizes.max_tokens), self.sizes.top_k), ("float32",))
        self._check_apart("values", values, "out", out)
        return self._ragged.bind_weights(values, out)

    def _plan_sum(self, y, out):
        return self._plan_combine(y, out, False)

    def _tokens_of(self, name, array):
        """-> the number of tokens of `array`; ValueError unless it is 2-D with max_tokens rows at most."""
        if array.ndim != 2:
            raise ValueError(
                f"ExpertParallel: {name} has shape {array.shape}; it must be (tokens, {self.sizes.hidden})"
            )
        if array.shape[0] > self.sizes.max_tokens:
            raise ValueError(
                f"ExpertParallel: {name} has {array.shape[0]} tokens, more than max_tokens="
                f"{self.sizes.max_tokens}. Make an ExpertParallel with a larger max_tokens"
            )
        return array.shape[0]

    def _check(self, name, array, shape, dtypes, aligned=False):
        if array.shape != shape or array.dtype not in dtypes:
            needed = " or ".join(np.dtype(dtype).name for dtype in dtypes)
            raise ValueError(f"ExpertParallel: {name} is {array_text(array)}; it must be {needed} {shape}")
        check_contiguous("ExpertParallel", name, array)
        if aligned and array.size and (at := self.world.backend.address(array)) % 16:
            raise ValueError(
                f"ExpertParallel: {name} begins at address {at:#x}; it must be a multiple of 16. Give a copy"
            )

    def _check_apart(self, name, array, other_name, other):
        at, to = map(self.world.backend.address, (array, other))
        if array.nbytes and other.nbytes and at < to + other.nbytes and to < at + array.nbytes:
            raise ValueError(f"ExpertParallel: {name} and {other_name} overlap; they must lie apart")

    @staticmethod
    def _check_tokens(out, known, captured, handle):
        tokens = out.shape[0]
        if tokens != known and known is not None and not captured:
            last = "the last dispatch" if handle is None else "the handle"
            raise ValueError(f"ExpertParallel: out has {tokens} tokens; it must have {known}, as {last}")

    def _check_handle(self, handle):
        if not isinstance(handle, Handle) or handle.ragged is not self._ragged:
            raise ValueError(
                f"ExpertParallel: handle is {shown(handle)}; it must be one that keep() of this object has "
                "returned"
            )

    def _check_alive(self):
        if self._dispatch is None:
            raise RuntimeError("ExpertParallel: it was freed; make a new one")
        check_world("ExpertParallel", self.world)


def _pieces(rows):
    """-> `rows` as words of 16 bytes, 1-D."""
    return rows.reshape(-1).view("uint8").view("complex128")


def _one_after_another(*steps):
    def run(stream):
        for step in steps:
            step(stream)

    return run


def _sizes(n_ranks, max_tokens, hidden, n_experts, top_k, dtype, dispatch_dtype, n_scales, max_rows):
    """-> Sizes; TypeError or ValueError for wrong arguments."""
    numbers = {
        "max_tokens": (max_tokens, 1, MAX_TOKENS),
        "hidden": (hidden, 1, 1 << 20),
        "n_experts": (n_experts, 1, MAX_EXPERTS),
        "top_k": (top_k, 1, MAX_TOP_K),
        "n_scales": (n_scales, 0, 1 << 20),
    }
    for name, (number, least, most) in numbers.items():
        integer("ExpertParallel", name, number, least, most)
    if max_rows is not None:
        integer("ExpertParallel", "max_rows", max_rows, 1, MAX_ROWS)
    if n_ranks > MAX_RANKS:
        raise ValueError(f"ExpertParallel: there are {n_ranks} ranks; at most {MAX_RANKS} can be")
    if top_k > n_experts:
        raise ValueError(f"ExpertParallel: top_k is {top_k}; it must be at most n_experts, {n_experts}")
    if n_experts % n_ranks:
        raise ValueError(
            f"ExpertParallel: n_experts is {n_experts}; it must be a multiple of {n_ranks}, the ranks"
        )
    dtype = as_dtype(dtype)
    moved = dtype if dispatch_dtype is None else as_dtype(dispatch_dtype)
    if dtype.name not in DTYPES:
        raise ValueError(f"ExpertParallel: dtype is {dtype.name}; it must be {listed(DTYPES)}")
    if moved.name not in (dtype.name, "uint8"):
        raise ValueError(
            f"ExpertParallel: dispatch_dtype is {moved.name}; it must be {dtype.name}, the dtype, or uint8"
        )
    for kind in (dtype, moved):
        if hidden * kind.itemsize % 16:
            raise ValueError(
                f"ExpertParallel: hidden is {hidden}, and a row of {kind.name} has {hidden * kind.itemsize} "
                "bytes; it must have a multiple of 16"
            )
    if n_experts * max_tokens >= 1 << 31:
        raise ValueError(
            f"ExpertParallel: n_experts * max_tokens is {n_experts * max_tokens}; it must be less than 2**31"
        )
    units = 2 * n_ranks * max_tokens * max(-(-hidden * dtype.itemsize // TILE_BYTES), -(-n_scales // 2))
    if units >= MAX_UNITS and max_rows is None:
        raise ValueError(
            f"ExpertParallel: max_tokens={max_tokens}, hidden={hidden} and n_scales={n_scales} take {units} "
            f"slots, of {TILE_BYTES} bytes of a row or of two scales; it must be less than {MAX_UNITS}"
        )
    max_tokens, hidden, n_experts, top_k = map(int, (max_tokens, hidden, n_experts, top_k))
    return Sizes(max_tokens, hidden, n_experts, top_k, dtype, moved, int(n_scales), n_experts // n_ranks)
