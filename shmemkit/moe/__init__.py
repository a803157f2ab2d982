"""Expert parallelism: the ranks share the experts of a mixture-of-experts layer. Tokens travel to their
experts and back.

  dispatch   sends each token's row once to each rank that has experts of it; that rank copies it to the
  experts combine    returns the rows of the experts, and sums them with weights on the way

dispatch.py and combine.py explain them. Both are made for few tokens, where latency counts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from shmemkit.collectives.collective import check_contiguous, plans_of
from shmemkit.collectives.method import agree, agree_on
from shmemkit.device import TILE_BYTES
from shmemkit.device.cuda.weighted_sums import DTYPES
from shmemkit.runtime.budget import checked_sms
from shmemkit.runtime.stream_order import shared_order
from shmemkit.runtime.symmetric_memory import as_dtype
from shmemkit.runtime.world import World, check_world
from shmemkit.support.arrays import call_on, converted, is_tensor, keyed, new_output, tensor_of, with_shape
from shmemkit.support.settings import array_text, integer, listed, options_of
from shmemkit.typing import AnyArray, AnyStream, ArrayT, DType

from .combine import Combine
from .dispatch import Dispatch
from .routing import MAX_EXPERTS, MAX_RANKS, MAX_TOKENS, MAX_TOP_K, MAX_UNITS, THREADS

__all__ = ["ExpertParallel", "Received"]


class Received(NamedTuple):
    """What ``ExpertParallel.dispatch`` returns, and describes."""

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
                      threads  of a block: a multiple of 32 up to 256
    sms             the most multiprocessors that a call uses, 2 or more; None: as many as are tuned

    Calls are enqueued, on any stream or in a graph; ``help(sk.collectives)`` has the rules for arrays,
    streams, order and graphs. The number of tokens may differ from call to call and from rank to rank. The
    host never waits, and never knows how many tokens go where. ``combine`` belongs to the last ``dispatch``
    before it; the next dispatch overwrites the state that it needs. For two batches at a time, use two
    objects: the experts of one may compute while the other dispatches or combines. While a kernel waits for
    those of other ranks, it holds up to half of each multiprocessor.

    The program may read `received`, `n_local_experts`, and `capacity`: the rows that each expert has room
    for.

    It allocates symmetric memory for 4 * n_ranks * max_tokens rows, of 512 bytes for each 480 or part of
    them, and private memory, of `received`, for n_experts * max_tokens. TypeError or ValueError for wrong
    arguments, MemoryError where one rank has too little memory: on all ranks.
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
        options: dict[str, Any] | None = None,
        sms: int | None = None,
    ):
        check_world("ExpertParallel", world)
        self._dispatch: Any = None
        self._combine: Any = None
        given = max_tokens, hidden, n_experts, top_k, dtype, dispatch_dtype, n_scales
        sizes: Any = None

        def check():
            nonlocal sizes
            sizes = _sizes(world.n_ranks, *given)
            self.options = options_of("ExpertParallel", self.options, options)
            threads = self.options["threads"]
            if threads is not None and integer("ExpertParallel", "threads", threads, 32, THREADS) % 32:
                raise ValueError(f"ExpertParallel: threads is {threads}; it must be a multiple of 32")
            names = {name: getattr(value, "name", value) for name, value in sizes._asdict().items()}
            self.sms = checked_sms("ExpertParallel", sms)
            return {**names, "options": self.options, "sms": self.sms}

        agree_on(world, "ExpertParallel", check)
        self.world, self.sizes, self.n_local_experts = world, sizes, sizes.n_local
        self.capacity = world.n_ranks * sizes.max_tokens
        self._plans, self._order, self._tensors = plans_of(world), shared_order(world), None
        self._tokens, self._captured = None, False  # of the last dispatch; whether one was ever captured
        try:
            settings = {name: value for name, value in self.options.items() if value is not None}
            settings["sms"] = self.sms
            self._dispatch = Dispatch(world, sizes, **settings)
            self._combine = Combine(world, sizes, self._dispatch, **settings)
        except (TypeError, ValueError, MemoryError):  # on all ranks
            self.free()
            raise
        agree(world, self._allocate, self.free)

    def _allocate(self):
        """Allocate private memory. One rank alone may have too little of it."""
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

    def dispatch(
        self,
        x: AnyArray,
        experts: AnyArray,
        weights: AnyArray | None = None,
        scales: AnyArray | None = None,
        stream: AnyStream | None = None,
    ) -> Received:
        """Enqueue: send the rows of `x` to their experts. -> Received

        x        (tokens, hidden), of dispatch_dtype, at an address that is a multiple of 16 bytes. tokens is
                 0 to max_tokens, and may differ between ranks
        experts  int32 or int64 (tokens, top_k): the experts of each token, all different. A number that is
                 no expert's, such as -1, stands for none
        weights  float32 (tokens, top_k): the factors of ``combine``; default: ones
        scales   float32 (tokens, n_scales)
        stream   default: PyTorch's current one if any array is a tensor on a GPU, else the World's

        All are C-contiguous. When the stream has run it, later work on it sees Received, and x, experts,
        weights and scales may be written again. Received has `rows`, (n_local_experts, n_ranks * max_tokens,
        hidden): rows[e, :counts[e]] are those of local expert e, by rank and token, what follows is
        undefined; `counts`, int32 (n_local_experts,), on the GPU; and `scales`, float32 (n_local_experts,
        n_ranks * max_tokens, n_scales), or None. They belong to the object, which has them as `received`,
        too; each dispatch writes the same arrays. If x is a PyTorch tensor, they are tensors of that memory.

        TypeError or ValueError for wrong arrays; then nothing is enqueued.
        """
        self._check_alive()
        world = self.world
        stream, waits = call_on(world, stream, x, experts, weights, scales)
        rows = with_shape("ExpertParallel", "x", x, world.xp)
        tokens = rows.shape[0] if rows.ndim else 0
        weights = self._ones[:tokens] if weights is None else weights
        scales = self._no_scales[:tokens] if scales is None and not self.sizes.n_scales else scales
        run, _ = self._planned("dispatch", x=rows, experts=experts, weights=weights, scales=scales)
        self._run(run, stream, waits)
        self._tokens = tokens
        self._captured = self._captured or world.backend.capture_of(stream) is not None
        if not is_tensor(x):
            return self.received
        if self._tensors is None:
            self._tensors = Received(*(a if a is None else tensor_of(a, x.device) for a in self.received))
        return self._tensors

    def combine(self, y: ArrayT, out: ArrayT | None = None, stream: AnyStream | None = None) -> ArrayT:
        """Enqueue: bring the experts' rows back to the tokens of the last dispatch, and sum them. -> out

        y       (n_local_experts, n_ranks * max_tokens, hidden), of dtype: the results of the experts for
                ``Received.rows``, at the same positions; it may be ``Received.rows`` itself
        out     (tokens, hidden), of dtype; it must not overlap y. It has as many tokens as were dispatched.
                That is not checked after a dispatch has been captured, because the host does not see the
                launches of a graph. Default: a new array of y's kind, for the last call of ``dispatch``
        stream  default: PyTorch's current one if any array is a tensor on a GPU, else the World's

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
        if out is None:
            if self._tokens is None:
                raise ValueError("ExpertParallel: combine before any dispatch; it needs `out` then")
            shape, dtype = (self._tokens, self.sizes.hidden), self.sizes.dtype
            out = new_output(y, shape, dtype, world.xp, stream, world.backend.follow)
        run, arrays = self._planned("combine", y=rows, out=out)
        tokens = arrays["out"].shape[0]
        if tokens != self._tokens and self._tokens is not None and not self._captured:
            raise ValueError(
                f"ExpertParallel: out has {tokens} tokens; it must have {self._tokens}, as the last dispatch"
            )
        self._run(run, stream, waits)
        return out

    def free(self) -> None:
        """Free the symmetric memory; the object cannot be used afterwards. Its private memory is freed with
        the object. Collective."""
        methods, self._dispatch, self._combine = (self._combine, self._dispatch), None, None
        self._plans.clear()
        for method in methods:
            if method is not None:
                method.free()

    # -- inside
    def _run(self, run, stream, waits):
        self._order.before(stream, "ExpertParallel")
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

    def _check_alive(self):
        if self._dispatch is None:
            raise RuntimeError("ExpertParallel: it was freed; make a new one")
        check_world("ExpertParallel", self.world)


def _pieces(rows):
    """-> `rows` as words of 16 bytes, 1-D."""
    return rows.reshape(-1).view("uint8").view("complex128")


def _sizes(n_ranks, max_tokens, hidden, n_experts, top_k, dtype, dispatch_dtype, n_scales):
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
    if units >= MAX_UNITS:
        raise ValueError(
            f"ExpertParallel: max_tokens={max_tokens}, hidden={hidden} and n_scales={n_scales} take {units} "
            f"slots, of {TILE_BYTES} bytes of a row or of two scales; it must be less than {MAX_UNITS}"
        )
    max_tokens, hidden, n_experts, top_k = map(int, (max_tokens, hidden, n_experts, top_k))
    return Sizes(max_tokens, hidden, n_experts, top_k, dtype, moved, int(n_scales), n_experts // n_ranks)
