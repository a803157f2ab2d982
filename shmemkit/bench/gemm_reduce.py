"""``bench gemm_rs`` and ``gemm_ar``: ``sk.GemmReduceScatter`` and ``sk.GemmAllReduce`` beside cuBLAS and then
NCCL's collective operation, the first one beside PyTorch's fused_matmul_reduce_scatter, too.

A shape MxNxK is that of the whole layer, as in ``bench ag_gemm``, which comes before it: each rank has M rows
of N / n_ranks, and as much of the weights, stored by columns; the result is M by K. Random operands, checked
against float32 by the relative error of the norm. Alone, in the same run: the products (``Gemm``, cuBLAS) and
the reduction (our collective operation by "auto", NCCL's).
"""

import types

import shmemkit as sk
from shmemkit.memory import as_dtype

from . import collectives, gemm
from .ag_gemm import SHAPES, TorchFused  # noqa: F401  (SHAPES: the same layers)
from .cases import CASES
from .collectives import measure
from .nccl import Nccl
from .refusal import Refused, agreed
from .results import CUBLAS, NCCL, NCCL_CUBLAS
from .timing import Clock

OPS = {
    "gemm_rs": ("reduce_scatter", sk.GemmReduceScatter),
    "gemm_ar": ("all_reduce", sk.GemmAllReduce),
}
METHODS = ("auto", *sk.GemmReduceScatter.methods)
PEERS = ("nccl", "torch")  # what --vs takes
DTYPES = ("bfloat16", "float16")
ERROR = 3  # times that of a product: each rank's part is rounded, too


class Part(gemm.GemmCase):
    """The product of one rank alone."""

    def __init__(self, world, op, shape, dtype):
        m, n, k = shape
        if m % world.n_ranks or n % world.n_ranks:
            raise SystemExit(f"{op}: {m}x{n}x{k}: M and N that {world.n_ranks} ranks share are allowed")
        super().__init__(world, (m, k, n // world.n_ranks), dtype, "tn")
        self.result_bytes = m * k * dtype.itemsize


class Both:
    """The product and its reduction."""

    def __init__(self, op, part):
        self.op, self.part, self.world, self.dtype = op, part, part.world, part.dtype
        self.bytes, self.spoil = part.result_bytes, part.spoil

    def make(self):
        (m, n, k), world, xp = self.part.shape, self.world, self.world.xp
        rows = range(m)
        if self.op == "gemm_rs":
            rows = rows[world.rank * m // world.n_ranks :][: m // world.n_ranks]
        self.shape = len(rows), n
        self._checked = slice(None, None, max(1, len(rows) // 64))
        rows, self._expected, self._sign = rows[self._checked], 0, 1
        for rank in range(world.n_ranks):
            rng = xp.random.default_rng(rank)
            a, b = (rng.standard_normal(s, dtype="float32").astype(self.dtype) for s in ((m, k), (n, k)))
            if rank == world.rank:
                self.x, self.b = a, b.T
            product = a[rows.start : rows.stop : rows.step].astype("float32") @ b.T.astype("float32")
            self._expected = self._expected + product

    def output(self):
        return self.world.xp.empty(self.shape, self.dtype)

    def flip(self):
        words = self.x.view(f"uint{8 * self.dtype.itemsize}")
        words ^= words.dtype.type(1 << 8 * self.dtype.itemsize - 1)
        self._sign = -self._sign

    def check(self, out):
        """-> "", or what is wrong, the same on every rank. Collective."""
        self.world.synchronize()
        found = agreed(self.world, lambda: self._found(out))
        return next(filter(None, self.world.host_allgather(found)), "")

    def _found(self, out):
        norm = self.world.xp.linalg.norm
        difference = out[self._checked].astype("float32") - self._sign * self._expected
        error = float(norm(difference) / norm(self._expected))
        return "" if error <= ERROR * gemm.ERROR[self.dtype.name] else f"wrong: relative error {error:.1e}"


class Ours(gemm.Contender):
    """One method of the host object."""

    _object = took = None

    def __init__(self, world, method):
        super().__init__(world)
        self.method = method

    def start(self, case):
        super().start(case)
        m, n, k = case.part.shape
        self._object = OPS[case.op][1](self.world, m, n, case.dtype, method=self.method)
        self.took = self._object.method_for(m, k, n) if self.method == "auto" else None
        if case.op == "gemm_ar":
            self.out = self._object.output(case.shape)

    def call(self):
        self._object(self._case.x, self._case.b, self.out)

    def stop(self):
        super().stop()
        if self._object is not None:
            self._object.free()
        self._object = None


class CublasThenNccl(Nccl):
    """A user's own, in one graph."""

    method = NCCL_CUBLAS

    def start(self, case):
        m, n, _ = case.part.shape
        reduction = CASES[OPS[case.op][0]](case.world, case.bytes, case.dtype)
        product = case.world.xp.empty((m, n), case.dtype)
        super().start(types.SimpleNamespace(x=product, output=case.output, nccl=reduction.nccl))
        self._cublas = gemm.Cublas(self.world)
        self._cublas.start(types.SimpleNamespace(x=case.x, b=case.b, output=lambda: product))

    def call(self):
        self._cublas.call()
        super().call()

    def stop(self):
        super().stop()
        self._cublas = None


class TorchReduced(TorchFused):
    """``torch.ops.symm_mem.fused_matmul_reduce_scatter``, not in a graph, which it cannot be captured in."""

    method = "torch fused_matmul_reduce_scatter, no graph"

    def run(self):
        fused = self._torch.ops.symm_mem.fused_matmul_reduce_scatter
        self._result = fused(self._x, self._b, "sum", 0, self._group)
        words = self.world.xp.from_dlpack(self._result.view(self._torch.int16))
        self.out = words.view(self._case.dtype)


def run(world, results, options, progress):
    """Fill in the rows. Collective."""
    op, emulated, dtype = options.command, world.backend.name == "emulator", as_dtype(options.dtype)
    if emulated and max(2 * m * n * k for m, n, k in options.shapes) > gemm.EMULATED:
        raise SystemExit(f"{op}: the emulator takes --shapes of up to {gemm.EMULATED} operations")
    alone, reducing = [gemm.Ours(world, "auto")], [collectives.Ours(world, "auto", False)]
    both = [Ours(world, method) for method in options.methods]
    if "nccl" in options.vs:
        alone.append(gemm.Cublas(world))
        reducing.append(Nccl(world))
        both.insert(0, CublasThenNccl(world))
    if "torch" in options.vs and op == "gemm_rs":
        both.insert(0, TorchReduced(world))
    clock = Clock(world, options.iters, options.replays)
    parts = [Part(world, op, shape, dtype) for shape in options.shapes]
    reduction = OPS[op][0]
    names = {"product": {"auto": "Gemm", CUBLAS: CUBLAS}, "reduction": {"auto": reduction, NCCL: NCCL}}
    with progress(len(parts) * len(alone + reducing + both)) as step:
        for part, (m, n, k) in zip(parts, options.shapes, strict=True):
            shape = f"{m}x{n}x{k}"
            for case, kind, contenders in (
                (part, "product", alone),
                (CASES[reduction](world, part.result_bytes, dtype), "reduction", reducing),
                (Both(op, part), None, both),
            ):
                refused = None
                try:
                    agreed(world, case.make)
                except Refused as reason:
                    refused = None, f"refused: {reason}"
                for contender in contenders:
                    name = names[kind][contender.method] if kind else contender.method
                    step(f"{shape}, {name}{' alone' if kind else ''}")
                    us, note = refused or measure(world, clock, case, contender)
                    row = results.add(op, name, part.result_bytes, us, note=note, shape=shape, alone=kind)
                    if kind != "reduction":
                        row.tflops = us and part.operations / us * 1e-6
                    if isinstance(contender, Ours) and refused is None:
                        row.took = contender.took
                case.x = None
    for contender in alone + reducing + both:
        contender.close()
