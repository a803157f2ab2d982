"""All-gather and matrix product: each rank multiplies the activations of all ranks by its part of the
weights, as in the first layer of a tensor-parallel block.

    ag_gemm = sk.AllGatherGemm(world, max_nbytes)             # of the gathered activations
    y = ag_gemm(x, w)                                         # all rows of x, by rank, @ w
    q, k, v = ag_gemm(x, (w_q, w_k, w_v))                     # gathered once

Methods:

  push        one kernel, some of whose blocks store the rank's rows into the memory of the others: push.py
  overlap     the product starts with the rows that are already here, while copy engines bring the others:
              sm90.py. A product of few tiles starts with the columns that arrive first: column_hooks.py
  overlap_2d  several nodes: as overlap, for the rows of one node after another. The rank's own node comes
              first, while the rows of the others cross the network: multi_node.py
  sequential  ``AllGather``, then ``Gemm``: for small sizes, and where the others cannot be used
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

from shmemkit.collectives.all_gather import AllGather
from shmemkit.collectives.all_gather.copy_engine import CopyPush
from shmemkit.collectives.all_gather.push_ahead import PushAhead
from shmemkit.operations.operation import Given
from shmemkit.runtime.symmetric_memory import as_dtype, as_shape
from shmemkit.runtime.world import World
from shmemkit.support.renamed import renamed
from shmemkit.support.settings import integer, one_of, shown
from shmemkit.typing import Activation, AllGatherGemmMethod, AnyArray, AnyStream, ArrayT, DType, Shape

from .. import METHODS as GEMMS
from .. import OfProducts, bind_product, check_activation, gpu_of
from ..distributed import Products, multiprocessors_of_all
from ..epilogue import ACTIVATIONS
from ..problem import Problem
from ..sm90_host import CLOCK, choose, estimate
from . import column_hooks
from .multi_node import Nodes
from .push import Push, plan_of
from .sm90_host import Fused

__all__ = ["AllGatherGemm"]

SMALL = 1 << 22  # bytes of gathered rows, up to which "auto" is sequential: not measured yet (docs/tuning.md)
# Likewise, up to which it may be "push": no more was measured, benchmarks/results/ag_gemm_h200x{2,4}.json
PUSHED = 1 << 27
TUNED = {"tile": None, "splits": None, "by_columns": None}
COPIES = 20e-6  # seconds that copy engines take longer than the product


class AllGatherGemm(OfProducts, Products):
    """Gather the rows of all ranks, and multiply them by this rank's weights. Collective.

    ``ag_gemm = sk.AllGatherGemm(world, max_nbytes)``, then ``ag_gemm(x, w)``. The product begins with
    this rank's rows while the others arrive. ``help(sk.collectives)`` has the rules for calls, arrays,
    streams, order, graphs, memory and errors.

    world       the World
    max_nbytes  bytes of the largest gathered rows: n_ranks times an x
    method      "auto", or (docs/products.md says what each needs and takes, and what "auto" chooses)
                  push        one kernel, some of whose blocks send the rows: Hopper, bfloat16 or float16,
                              one node
                  overlap     copy engines send the rows, one kernel multiplies: Hopper, one node
                  overlap_2d  as overlap, for several nodes
                  sequential  `AllGather`, then `matmul`: everywhere
    options     numbers of the methods, for tuning; None: those that are chosen. All ranks give the same
                  tile        (rows, columns) of a tile: 64 or 128, and a multiple of 16 up to 256
                  splits      parts of K
                  by_columns  whether x comes by columns or by rows: not for "overlap" with `gathered`
                  senders     "push": blocks that send: 1, 2, 4, 8 or 16
                  part_bytes  "push" by columns: bytes of a row in a part, a multiple of 128
                  chunk       "overlap_2d": bytes of a message, 65536 by default
    sms         the most multiprocessors that its kernels use, 1 or more; None: as many as are tuned

    `refused` is {method: the reason why "auto" never uses it here}.
    """

    methods = ("push", "overlap", "overlap_2d", "sequential")
    options = {**TUNED, **Push.options, **Nodes.options}
    ARRAYS = {
        "x": Given("m k", align=0),
        "gathered": Given("n_ranks*m k", "x", align=0, optional=True, written=True, may_be="x"),
        "w": Given("k n#", "x", contiguous=False, align=0),
        "out": Given("n_ranks*m n#", contiguous=False, align=0, new=True),
        "bias": Given("n#", contiguous=False, align=0, optional=True),
    }
    max_nbytes: int
    _or_same = ", or x must be this rank's rows of gathered"

    def __init__(
        self,
        world: World,
        max_nbytes: int,
        method: AllGatherGemmMethod = "auto",
        *,
        options: dict[str, Any] | None = None,
        sms: int | None = None,
    ):
        def check():
            self.max_nbytes = integer("AllGatherGemm", "max_nbytes", max_nbytes, 0)
            return {"max_nbytes": self.max_nbytes}

        super().__init__(world, method, options, check, sms)
        self._gpu, self.refused = gpu_of(world).limited(self.sms), {}
        self._push: Any = None
        self._ahead = self._given = self._nodes = self._gather = None
        self._rooms = {}  # where each method has the gathered rows, from the beginning on
        self._preferred = method  # if it is large
        if method == "auto":
            self._preferred = "overlap" if world.n_nodes == 1 else "overlap_2d"
        try:
            self._prepare()
        except (ValueError, MemoryError) as error:  # on all ranks
            self.free()
            kind = MemoryError if isinstance(error, MemoryError) else ValueError
            given = f"max_nbytes={max_nbytes}, method={method!r}"
            raise kind(f"AllGatherGemm: {given}: {error}") from None

    @staticmethod
    def methods_for(n_nodes: int) -> tuple[str, ...]:
        """The names of the methods that are for so many nodes: what "auto" takes one of."""
        return ("push", "overlap", "sequential") if n_nodes == 1 else ("overlap_2d", "sequential")

    def _prepare(self):
        world, capacity = self.world, self.max_nbytes
        names = self.methods_for(world.n_nodes) if self.method == "auto" else (self.method,)
        for name in names:
            if name == "sequential":
                continue
            made = len(self._parts)
            try:
                prepare = self._prepare_push if name == "push" else self._prepare_overlap
                prepare(capacity)
            except (ValueError, MemoryError) as error:
                if self.method != "auto":
                    raise
                self.refused[name] = str(error)
                while len(self._parts) > made:
                    self._parts.pop().free()
        if "sequential" in names:
            if self._preferred in self._rooms and world.backend.name != "emulator":
                capacity = min(capacity, SMALL)
            self._gather = self._part(AllGather, world, capacity)
            self._rooms["sequential"] = self._gather.output(capacity, "uint8")

    def _prepare_push(self, capacity):
        if self.method == "auto":
            capacity = min(capacity, PUSHED)
        self._push = self._part(Push, self.world, capacity, self.options)
        self._rooms["push"] = self._push.staged

    def _prepare_overlap(self, capacity):
        world, ranks = self.world, None
        if self._preferred == "overlap_2d" and world.n_nodes == 1:
            raise ValueError("there is one node; 'overlap_2d' is for several. Use 'overlap'")
        self._gpu = self._gpu._replace(multiprocessors=multiprocessors_of_all(world, "overlap", sms=self.sms))
        if self._preferred == "overlap_2d":
            self._nodes = self._part(Nodes, world, capacity // world.n_ranks, self.options["chunk"])
            ranks, capacity = world.node_ranks, capacity // world.n_nodes
        self._ahead = self._part(PushAhead, world, capacity, ranks)
        self._given = self._part(CopyPush, world, capacity, ranks)
        self._rooms[self._preferred] = self._ahead.buffer

    @overload
    def __call__(
        self,
        x: ArrayT,
        w: AnyArray,
        out: ArrayT | None = None,
        *,
        gathered: AnyArray | None = None,
        bias: AnyArray | None = None,
        activation: Activation | None = None,
        stream: AnyStream | None = None,
    ) -> ArrayT: ...
    @overload
    def __call__(
        self,
        x: ArrayT,
        w: Sequence[AnyArray],
        out: Sequence[ArrayT | None] | None = None,
        *,
        gathered: AnyArray | None = None,
        bias: Sequence[AnyArray | None] | None = None,
        activation: Activation | None = None,
        stream: AnyStream | None = None,
    ) -> tuple[ArrayT, ...]: ...
    @renamed(weight="w")
    def __call__(
        self,
        x: ArrayT,
        w: AnyArray | Sequence[AnyArray],
        out: ArrayT | Sequence[ArrayT | None] | None = None,
        *,
        gathered: AnyArray | None = None,
        bias: AnyArray | Sequence[AnyArray | None] | None = None,
        activation: Activation | None = None,
        stream: AnyStream | None = None,
    ) -> ArrayT | tuple[ArrayT, ...]:
        """Enqueue ``out = activation(X @ w + bias)``, X being the rows x of all ranks, by rank. -> out

        x           (m, K), C-contiguous, of the same shape and dtype on all ranks
        w           (K, N), of x's dtype, of any strides, of the same shape on all ranks; or a tuple of
                    several, each with its own N, which share one gather. Then out, bias and the result are
                    tuples, too
        out         (n_ranks * m, N), as of `matmul`. Default, also in a tuple: a new array of x's dtype and
                    kind
        gathered    (n_ranks * m, K), C-contiguous, of x's dtype: gets the gathered rows. In symmetric
                    memory, of ``output()`` or other, on all ranks (the same part of the same array), which
                    saves a copy, but by "push"; or in private memory on all ranks. Ranks that differ may
                    wait forever. x may be its own part of it. Default: they are kept nowhere
        bias        (N,), as of `matmul`, or None; for several weights a tuple of those
        activation  None, "relu", "gelu" or "silu", as of `matmul`
        stream      default: PyTorch's current one if any array is a tensor on a GPU, else the World's

        When the stream has run it, later work on it sees out and gathered, and x may be written again. The
        first call for arrays at new addresses binds kernels, and may compile them: it cannot be in the
        capture of a graph. The caller keeps the arrays and this object alive until the call has run, and as
        long as graphs that have captured it are used.

        TypeError or ValueError for what this rank can see to be wrong; then nothing is enqueued.
        """
        one_of("AllGatherGemm", "activation", activation, ACTIVATIONS)
        several = isinstance(w, (tuple, list))
        weights = list(w) if several else [w]
        if not weights:
            raise ValueError("AllGatherGemm: w is an empty tuple; it must have one (k, n) array or more")
        arrays = {"x": x, "gathered": gathered}
        outs, biases = (
            self._as_list(name, given, weights, several) for name, given in (("out", out), ("bias", bias))
        )
        for name, those in (("w", weights), ("out", outs), ("bias", biases)):
            arrays |= {(f"{name}[{i}]" if several else name): array for i, array in enumerate(those)}
        arrays = self._enqueue(arrays, stream, activation=activation)
        outs = tuple(array for name, array in arrays.items() if name.startswith("out"))
        return outs if several else outs[0]

    def method_for(self, shape: Shape, dtype: DType, n: int) -> str:
        """-> the name of the method for an x of this shape and dtype, and weights of `n` columns in all.
        ValueError if there is none.
        """
        who = type(self).__name__
        shape, dtype, n = as_shape(shape, f"{who}: "), as_dtype(dtype, f"{who}: "), integer(who, "n", n, 0)
        if len(shape) != 2:
            raise ValueError(f"{who}: shape is {shape}; it must be (m, K)")
        rows, k = shape
        unpushed = Push.refuses(k, dtype, n)
        if self.method == "push" and unpushed:
            raise ValueError(f"AllGatherGemm: method 'push' cannot be used: {unpushed}. Use method='auto'")
        if self.method != "auto":
            return self.method
        n_ranks = self.world.n_ranks
        n_bytes = n_ranks * rows * k * dtype.itemsize
        emulated = self.world.backend.name == "emulator"  # whose times mean nothing
        if emulated or n_bytes <= SMALL:
            return "sequential"
        large = self._preferred if self._preferred in self._rooms else "sequential"
        if "push" not in self._rooms or n_bytes > PUSHED or unpushed:
            return large
        sms = self._gpu.multiprocessors
        given = self.options["tile"], self.options["splits"]
        product = estimate(n_ranks * rows, n, k, choose(n_ranks * rows, n, k, sms, *given), sms) / CLOCK
        pushed = plan_of(rows, k, n, n_ranks, sms, self.options).seconds
        return "push" if pushed < product + COPIES or large == "sequential" else large

    # -- inside
    def _as_list(self, name, given, weights, several):
        """`given` for each weight, or None"""
        if given is None:
            return [None] * len(weights)
        if not several:
            return [given]
        a_tuple = isinstance(given, (tuple, list))
        if not a_tuple or len(given) != len(weights):
            what = f"a {type(given).__name__} of {len(given)}" if a_tuple else shown(given)
            raise (ValueError if a_tuple else TypeError)(
                f"AllGatherGemm: {name} is {what}; it must be a tuple of {len(weights)}, one for each weight"
            )
        return list(given)

    def _is_same(self, x, y):
        """Whether y may lie in x, the gathered rows: as its own part."""
        address = self.world.backend.address
        return address(y) == address(x) + self.world.rank * y.nbytes

    def _bind(self, x, gathered, activation, **others):
        check_activation("AllGatherGemm", activation, x.dtype)
        world, n_bytes = self.world, self.world.n_ranks * x.nbytes
        if n_bytes > self.max_nbytes:
            raise ValueError(
                f"AllGatherGemm: the rows of all ranks have {n_bytes} bytes, more than max_nbytes="
                f"{self.max_nbytes}. Make an AllGatherGemm with a larger max_nbytes"
            )
        weights, outs, biases = (
            [array for name, array in others.items() if name.startswith(kind)]
            for kind in ("w", "out", "bias")
        )
        n = sum(weight.shape[1] for weight in weights)
        method = self.method_for(x.shape, x.dtype, n)
        room = self._rooms[method]

        def problems(part=0, parts=1):
            """The Problems of part number `part` of `parts` of the rows."""
            m, k = world.n_ranks * x.shape[0] // parts, x.shape[1]
            rows = slice(part * m, (part + 1) * m)
            if gathered is None:
                whole = room[: m * k * x.itemsize].view(x.dtype).reshape(m, k)
            else:
                whole = gathered[rows]
            of_rows = zip(weights, outs, biases, strict=True)
            return [Problem(whole, weight, out[rows], bias, activation) for weight, out, bias in of_rows]

        if method == "push" and x.size:
            return self._push.bind(x, problems(), gathered)
        if method == "sequential" or not x.size:
            return _Sequential(self._gather if x.size else None, x, problems(), self._gpu)
        engine = self._ahead if gathered is None else self._given
        if self._nodes is None:
            return _Overlapped(engine, x, problems(), self._gpu, self.options)
        return self._nodes.bind(
            x, lambda j, mine: _Overlapped(engine, mine, problems(j, world.n_nodes), self._gpu, self.options)
        )


class _Sequential:
    """A bound call: gather, then multiply."""

    def __init__(self, gather, x, problems, gpu):
        self._gather, self._x, self._whole = gather, x, problems[0].a
        self._products = [bind_product(problem, gpu) for problem in problems]

    def __call__(self, stream):
        if self._gather is not None:
            self._gather(self._x, self._whole, stream=stream)
        for product in self._products:
            product(stream)


class _Overlapped:
    """A bound call: multiply the rows that have arrived while the others are on their way. The largest
    product comes first, since it may start before all rows are here. Products that the kernel cannot compute
    come last."""

    def __init__(self, engine, x, problems: list[Problem], gpu, options):
        self._fused, self._others, how = [], [], {}
        given = options["tile"], options["splits"]
        if isinstance(engine, PushAhead):  # of which all ranks decide alike
            how["by_columns"] = options["by_columns"]
            if how["by_columns"] is None:
                how["by_columns"] = rounds_of(problems, gpu, *given) <= column_hooks.ROUNDS
        for problem in sorted(problems, key=lambda p: -p.out.size):
            if problem.out.size and GEMMS["sm90"].unsupported(problem, gpu) is None:
                self._fused.append(Fused(x, problem, engine, gpu, *given, **how))
            else:
                self._others.append(bind_product(problem, gpu))
        own = "first"
        if not self._others and all(fused.reads_x for fused in self._fused):
            own = "never" if isinstance(engine, PushAhead) else "last"
        self._transfer = engine.overlap(x, problems[0].a, own, **how)

    def __call__(self, stream):
        transfer = self._transfer
        transfer.start(stream)
        for fused in self._fused:
            fused(stream)
        if self._others:
            transfer.wait(stream)
        for product in self._others:
            product(stream)
        transfer.finish(stream, awaited=True)  # each product waits for all rows, or comes after the wait


def rounds_of(problems, gpu, *given):
    """How many rounds of tiles the multiprocessors compute for the largest product; `given`: tile, splits."""
    m, n, k = max(problem.size for problem in problems)
    if not n:
        return 0
    tile, splits = choose(m, n, k, gpu.multiprocessors, *given)
    return tile.count(m, n) * splits / gpu.multiprocessors
