"""Expert parallelism: the ranks share the experts of a mixture-of-experts layer. Tokens travel to their
experts and back.

  dispatch   sends each token's row once to each rank that has experts of it; that rank copies it to the
             experts
  combine    returns the rows of the experts, and sums them with weights on the way

dispatch.py and combine.py explain them; both are made for few tokens, where latency counts. For many tokens,
ragged/ has others, whose rows lie in one buffer without gaps.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from shmemkit.device import TILE_BYTES
from shmemkit.device.cuda.weighted_sums import DTYPES
from shmemkit.operations.operation import Operation
from shmemkit.runtime.symmetric_memory import as_dtype
from shmemkit.runtime.world import World
from shmemkit.support.arrays import is_tensor, tensor_of
from shmemkit.support.renamed import renamed
from shmemkit.support.settings import integer, listed, options_of, shown
from shmemkit.typing import AnyArray, AnyStream, ArrayT, DType

from .calls import CombineCall, DispatchCall, HandleCall, Last, RaggedCombineCall, WeightsCall
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
    topk: int
    dtype: np.dtype
    dispatch_dtype: np.dtype
    n_scales: int
    n_local: int  # experts of a rank
    max_rows: int | None

    @property
    def row(self):
        """Bytes of a row that is dispatched."""
        return self.hidden * self.dispatch_dtype.itemsize


class ExpertParallel(Operation):
    """Dispatch tokens to the ranks of their experts, and combine the results of the experts. Collective.

        received = ep.dispatch(x, topk_ids, weights)
        y = ...               # of received.rows[e, : received.counts[e]], for each local expert e
        out = ep.combine(y)

    world           the World. Its ranks, 72 at most, reach each other over NVLink, as in one node
    max_tokens      the most tokens of a rank in a call: 1 to 65536
    hidden          elements of a token's row; a row is a multiple of 16 bytes
    n_experts       experts of all ranks: a multiple of n_ranks, up to 1024. Rank r has n_local_experts =
                    n_experts / n_ranks of them, from number r * n_local_experts on
    topk            experts of a token: 1 to 32, and not more than n_experts
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
    that are combined; about 8 * n_ranks * max_tokens * (topk + 1) bytes for routes and signals, and about as
    many private ones for each handle. TypeError or ValueError for wrong arguments, MemoryError where one rank
    has too little memory: on all ranks.
    """

    options: dict[str, Any] = {"threads": None}
    sizes: Any  # Sizes
    _ragged: Any = None

    @renamed(top_k="topk")
    def __init__(
        self,
        world: World,
        max_tokens: int,
        hidden: int,
        n_experts: int,
        topk: int,
        dtype: DType = "bfloat16",
        dispatch_dtype: DType | None = None,
        n_scales: int = 0,
        *,
        max_rows: int | None = None,
        options: dict[str, Any] | None = None,
        sms: int | None = None,
    ):
        given = max_tokens, hidden, n_experts, topk, dtype, dispatch_dtype, n_scales, max_rows

        def check():
            self.sizes = _sizes(world.n_ranks, *given)
            self.options = options_of("ExpertParallel", self.options, options)
            threads, most = self.options["threads"], RAGGED_THREADS if max_rows else THREADS
            if threads is not None and integer("ExpertParallel", "threads", threads, 32, most) % 32:
                raise ValueError(f"ExpertParallel: threads is {threads}; it must be a multiple of 32")
            names = {name: getattr(value, "name", value) for name, value in self.sizes._asdict().items()}
            return {**names, "options": self.options}

        super().__init__(world, check, sms)
        self.n_local_experts, self.max_rows = self.sizes.n_local, max_rows
        self.capacity = max_rows or world.n_ranks * self.sizes.max_tokens
        self.received: Received | ReceivedRows
        self.last, self._tensors = Last(), None
        try:
            self.calls = self._made()
        except (TypeError, ValueError, MemoryError):  # on all ranks
            self.free()
            raise
        self._parts += self.calls.values()

    def _made(self):
        """Make all that takes memory. -> {name: Call}"""
        world, sizes = self.world, self.sizes
        settings = {name: value for name, value in self.options.items() if value is not None}
        settings["name"] = "ExpertParallel"
        if self.max_rows is None:
            source = self._part(Dispatch, world, sizes, **settings)
            target = self._part(Combine, world, sizes, source, **settings)
            scales = source.scales.reshape(*source.rows.shape[:2], -1) if sizes.n_scales else None
            self.received = Received(source.rows, source.counts, scales)
            return {
                "dispatch": DispatchCall(self, source.bind, source.ones),
                "combine": CombineCall(self, target.bind),
            }
        ragged = self._ragged = self._part(Ragged, world, sizes, **settings)
        scales = ragged.scales.reshape(self.max_rows, -1) if sizes.n_scales else None
        self.received = ReceivedRows(ragged.rows, ragged.counts, scales, ragged.weights)
        return {
            "dispatch": DispatchCall(self, ragged.bind_dispatch, ragged.ones),
            "dispatch with a handle": HandleCall(self, ragged.bind_dispatch, ragged.ones),
            "combine": RaggedCombineCall(self, ragged.bind_combine),
            "sum": RaggedCombineCall(self, partial(ragged.bind_combine, weighted=False)),
            "combine_weights": WeightsCall(self, ragged.bind_weights),
        }

    @renamed(experts="topk_ids")
    def dispatch(
        self,
        x: AnyArray,
        topk_ids: AnyArray | None = None,
        weights: AnyArray | None = None,
        scales: AnyArray | None = None,
        *,
        stream: AnyStream | None = None,
        handle: Handle | None = None,
    ) -> Received | ReceivedRows:
        """Enqueue: send the rows of `x` to their experts. -> Received, or with `max_rows` ReceivedRows

        x         (tokens, hidden), of dispatch_dtype, at an address that is a multiple of 16 bytes. tokens is
                  0 to max_tokens, and may differ between ranks
        topk_ids  int32 or int64 (tokens, topk): the experts of each token, all different. A number that is
                  no expert's, such as -1, stands for none
        weights   float32 (tokens, topk): the factors of ``combine``; default: ones
        scales    float32 (tokens, n_scales); None if n_scales is 0
        stream    default: PyTorch's current one if any array is a tensor on a GPU, else the World's
        handle    instead of topk_ids and weights: those of the dispatch that ``keep`` kept. All ranks give
                  one of the same dispatch. Only with `max_rows`

        All are C-contiguous, apart from Received. When the stream has run it, later work on it sees Received,
        and x, topk_ids, weights and scales may be written again. Received has `rows`, (n_local_experts,
        n_ranks * max_tokens, hidden): rows[e, :counts[e]] are those of local expert e, by rank and token,
        what follows is undefined; `counts`, int32 (n_local_experts,), on the GPU; and `scales`, float32
        (n_local_experts, n_ranks * max_tokens, n_scales), or None. They belong to the object, which has them
        as `received`, too; each dispatch writes the same arrays. If x is a PyTorch tensor, they are tensors
        of that memory.

        ReceivedRows has `rows`, (max_rows, hidden): the counts[0] rows of local expert 0, then the counts[1]
        of expert 1, and so on, each by rank and token; what follows the last is undefined. `counts` is as
        above. `scales` is (max_rows, n_scales), or None. `weights`, float32 (max_rows,), has the factor of
        each row.

        TypeError or ValueError for wrong arrays; then nothing is enqueued.
        """
        if handle is None:
            given = {"x": x, "topk_ids": topk_ids, "weights": weights, "scales": scales}
            self.calls["dispatch"]._enqueue(given, stream)
        elif topk_ids is not None or weights is not None:
            raise ValueError("ExpertParallel: a handle is given; then topk_ids and weights must be None")
        else:
            handle = self._checked(handle)
            call = self.calls["dispatch with a handle"]
            call.handle = handle
            call._enqueue({"x": x, "scales": scales}, stream)
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
        *,
        stream: AnyStream | None = None,
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
        out[t] is the sum of weights[t, j] times the row of expert topk_ids[t, j] for token t, and y may be
        written again. Each rank sums the rows of its own experts in the order of j, in float32, and rounds
        the sum to dtype; one row comes back from it. The sums of the ranks are then added in the order of
        ranks, in float32, and rounded to dtype. A token without experts gets zeros. Equal calls give equal
        bits.

        TypeError or ValueError for wrong arrays; then nothing is enqueued.
        """
        if not weighted and self._ragged is None:
            raise ValueError("ExpertParallel: weighted is False; it must be True where max_rows is None")
        call = self.calls["combine" if weighted else "sum"]
        call.handle = handle if handle is None else self._checked(handle)
        return call._enqueue({"y": y, "out": out}, stream)["out"]

    def combine_weights(
        self,
        values: AnyArray,
        out: ArrayT | None = None,
        *,
        stream: AnyStream | None = None,
        handle: Handle | None = None,
    ) -> ArrayT:
        """Enqueue: bring a number of each row back to the token and the expert that it is of. -> out

        values  float32 (max_rows,), at the positions of ``ReceivedRows.rows``: for the gradients of weights,
                the products of each row of y with its row of out_gradient, as dispatched
        out     float32 (tokens, topk): out[t, j] is the number of the row of topk_ids[t, j] for token t, 0
                if that is no expert. Default: a new array of values' kind
        stream, handle   as of ``combine``

        Both are C-contiguous, and must not overlap. TypeError or ValueError for wrong arrays, and without
        `max_rows`; then nothing is enqueued.
        """
        self._needs_max_rows("combine_weights")
        call = self.calls["combine_weights"]
        call.handle = handle if handle is None else self._checked(handle)
        return call._enqueue({"values": values, "out": out}, stream)["out"]

    def keep(self, into: Handle | None = None, *, stream: AnyStream | None = None) -> Handle:
        """Enqueue: keep where the rows of the last dispatch went, for later calls. -> Handle

        into    a Handle of this object to overwrite. Default: a new one, whose memory is allocated: not while
                a stream is captured
        stream  default: the World's

        A call with the handle exchanges no numbers of experts and no counts, even after other dispatches; its
        routing is then that of the last dispatch. The handle must live as long as graphs that captured such
        calls. The gradients of a layer are such calls:

            received = ep.dispatch(x, topk_ids, weights)
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
        self._needs_max_rows("keep")
        if self.last.tokens is None:
            raise ValueError("ExpertParallel: keep() before any dispatch; call dispatch first")
        handle: Handle = Handle(self._ragged) if into is None else self._checked(into)
        handle.tokens = self.last.tokens
        stream = None if stream is self.world.stream else stream
        self._order.before(stream, "ExpertParallel.keep")
        handle.keep(stream)
        return handle

    # -- inside
    def _needs_max_rows(self, call):
        if self._ragged is None:
            raise ValueError(f"ExpertParallel: {call}() needs max_rows, which is None. Give max_rows")

    def _checked(self, handle):
        if not isinstance(handle, Handle) or handle.ragged is not self._ragged:
            raise ValueError(
                f"ExpertParallel: handle is {shown(handle)}; it must be one that keep() of this object has "
                "returned"
            )
        return handle


def _sizes(n_ranks, max_tokens, hidden, n_experts, topk, dtype, dispatch_dtype, n_scales, max_rows):
    """-> Sizes; TypeError or ValueError for wrong arguments."""
    max_tokens, hidden, n_experts, topk, n_scales = (
        integer("ExpertParallel", *each)
        for each in (
            ("max_tokens", max_tokens, 1, MAX_TOKENS),
            ("hidden", hidden, 1, 1 << 20),
            ("n_experts", n_experts, 1, MAX_EXPERTS),
            ("topk", topk, 1, MAX_TOP_K),
            ("n_scales", n_scales, 0, 1 << 20),
        )
    )
    if max_rows is not None:
        integer("ExpertParallel", "max_rows", max_rows, 1, MAX_ROWS)
    if n_ranks > MAX_RANKS:
        raise ValueError(f"ExpertParallel: there are {n_ranks} ranks; at most {MAX_RANKS} can be")
    if topk > n_experts:
        raise ValueError(f"ExpertParallel: topk is {topk}; it must be at most n_experts, {n_experts}")
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
    n_local = n_experts // n_ranks
    return Sizes(max_tokens, hidden, n_experts, topk, dtype, moved, n_scales, n_local, max_rows)
