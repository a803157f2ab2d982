"""``bench ag_gemm``: ``sk.AllGatherGemm`` beside NCCL's all-gather and then cuBLAS, and beside PyTorch's
fused_all_gather_matmul.

A shape MxNxK is that of the whole layer: each rank has M / n_ranks rows, and N / n_ranks columns of the
weights, stored by columns as in a linear layer of PyTorch. Random operands, checked against float32 by the
relative error of the norm. Alone, in the same run: the products (``Gemm``, cuBLAS) and the gathering (the
copies that overlap takes, NCCL).
"""

import types

import shmemkit as sk
from shmemkit.kernels.all_gather.push_ahead import PushAhead
from shmemkit.memory import as_dtype

from . import gemm
from .cases import AllGatherCase
from .collectives import measure
from .nccl import Nccl
from .refusal import Refused, agreed
from .results import CUBLAS, NCCL, NCCL_CUBLAS
from .timing import Clock
from .torch_peer import TorchCall

METHODS = ("auto", *sk.AllGatherGemm.methods)
PEERS = ("nccl", "torch")  # what --vs takes
DTYPES = ("bfloat16", "float16")
SHAPES = "8192x14336x4096,8192x28672x8192,8192x8192x8192,512x28672x8192"


class Whole(gemm.GemmCase):
    """The product alone: of all rows, as if they were here already."""

    def __init__(self, world, shape, dtype):
        m, n, k = shape
        if m % world.n_ranks or n % world.n_ranks:
            raise SystemExit(f"ag_gemm: {m}x{n}x{k}: M and N that {world.n_ranks} ranks share are allowed")
        super().__init__(world, (m, n // world.n_ranks, k), dtype, "tn")

    def make(self):
        (m, n, k), xp, ranks = self.shape, self.world.xp, self.world.n_ranks

        def random(seed, *shape):
            return xp.random.default_rng(seed).standard_normal(shape, dtype="float32").astype(self.dtype)

        self.x = xp.concatenate([random(rank, m // ranks, k) for rank in range(ranks)])
        self.b, self._sign = random(ranks + self.world.rank, n, k).T, 1

    @property
    def gathered(self):
        """Bytes of all rows."""
        return self.shape[0] * self.shape[2] * self.dtype.itemsize

    @property
    def mine(self):
        rows = self.shape[0] // self.world.n_ranks
        return self.x[self.world.rank * rows : (self.world.rank + 1) * rows]


class Gathering(AllGatherCase):
    """The gathering alone."""

    def __init__(self, whole):
        self.whole = whole
        super().__init__(whole.world, whole.gathered, whole.dtype)
        self.bytes, self.segment = whole.gathered, whole.gathered // self.world.n_ranks

    def make(self):
        self.x = self.whole.mine.reshape(-1).copy()
        self.expected = self.whole.x.reshape(-1).view("uint8").copy()


class AgGemmCase:
    """Both."""

    op = "ag_gemm"

    def __init__(self, whole):
        self.whole, self.world, self.dtype = whole, whole.world, whole.dtype
        self.bytes = whole.gathered
        self.output, self.spoil, self.check = whole.output, whole.spoil, whole.check

    def make(self):
        self.x, self.b = self.whole.mine.copy(), self.whole.b

    def flip(self):
        self.whole.flip()
        self.x[...] = self.whole.mine


class Ours(gemm.Contender):
    """One method of ``sk.AllGatherGemm``."""

    _object = took = None

    def __init__(self, world, method):
        super().__init__(world)
        self.method = method

    def start(self, case):
        super().start(case)
        self._object = sk.AllGatherGemm(self.world, case.bytes, self.method)
        self.took = None
        if self.method == "auto":
            self.took = self._object.method_for(case.x.shape, case.dtype)

    def call(self):
        self._object(self._case.x, self._case.b, self.out)

    def stop(self):
        super().stop()
        if self._object is not None:
            self._object.free()
        self._object = None


class Copies(gemm.Contender):
    """The copies of "overlap", without a product beside them."""

    method, _engine = "copies", None

    def start(self, case):
        self._engine = PushAhead(self.world, case.bytes)
        self.out = self._engine.buffer[: case.bytes].view(case.dtype)
        self._transfer = self._engine.overlap(case.x, self.out)

    def call(self):
        self._transfer.start()
        self._transfer.finish()

    def stop(self):
        super().stop()
        self._transfer = None
        if self._engine is not None:
            self._engine.free()
        self._engine = None


class NcclThenCublas(Nccl):
    """A user's own, in one graph."""

    method = NCCL_CUBLAS

    def start(self, case):
        gathering = Gathering(case.whole)
        gathering.x = case.x
        super().start(gathering)
        gathered = self.out.view(case.dtype).reshape(case.whole.x.shape)
        self._cublas = gemm.Cublas(self.world)
        self._cublas.start(types.SimpleNamespace(x=gathered, b=case.b, output=case.output))
        self.out = self._cublas.out
        self._gathered = gathered

    def call(self):
        self._case.nccl(
            self._comm, self._nccl, self._x.data.ptr, self._gathered.data.ptr, self.world.stream.ptr
        )
        self._cublas.call()

    def stop(self):
        super().stop()
        self._cublas = self._gathered = None


class TorchFused(TorchCall):
    """``torch.ops.symm_mem.fused_all_gather_matmul``, not in a graph, which it cannot be captured in."""

    method = "torch fused_all_gather_matmul, no graph"
    out = _result = None

    def prepare(self):
        import torch.distributed._symmetric_memory as symmetric

        case = self._case
        self._group = self._torch.distributed.group.WORLD.group_name
        symmetric.enable_symm_mem_for_group(self._group)
        self._x, self._b = self._tensor(case.x), self._tensor(case.b.T).T

    def run(self):
        ops = self._torch.ops.symm_mem
        _, (self._result,) = ops.fused_all_gather_matmul(self._x, [self._b], 0, self._group)
        words = self.world.xp.from_dlpack(self._result.view(self._torch.int16))
        self.out = words.view(self._case.dtype)

    def capture(self, iters):
        def replay():
            for _ in range(iters):
                self.call()

        return replay

    def repeat(self, replay):
        replay()

    def stop(self):
        super().stop()
        self.out = self._result = self._b = None

    def _tensor(self, array):
        tensor = self._torch.from_dlpack(array.view("int16"))
        return tensor.view(getattr(self._torch, array.dtype.name))


def run(world, results, options, progress):
    """Fill in the rows. Collective."""
    emulated, dtype = world.backend.name == "emulator", as_dtype(options.dtype)
    if emulated and max(2 * m * n * k for m, n, k in options.shapes) > gemm.EMULATED:
        raise SystemExit(f"ag_gemm: the emulator takes --shapes of up to {gemm.EMULATED} operations")
    alone, gathering = [gemm.Ours(world, "auto")], [Copies(world)]
    both = [Ours(world, method) for method in options.methods]
    if "nccl" in options.vs:
        alone.append(gemm.Cublas(world))
        gathering.append(Nccl(world))
        both.insert(0, NcclThenCublas(world))
    if "torch" in options.vs:
        both.insert(0, TorchFused(world))
    names = {"auto": "Gemm", CUBLAS: CUBLAS, NCCL: NCCL}  # of what is alone
    clock = Clock(world, options.iters, options.replays)
    wholes = [Whole(world, shape, dtype) for shape in options.shapes]
    with progress(len(wholes) * len(alone + gathering + both)) as step:
        for whole, (m, n, k) in zip(wholes, options.shapes, strict=True):
            shape = f"{m}x{n}x{k}"
            for case, part, contenders in (
                (whole, "product", alone),
                (Gathering(whole), "gathering", gathering),
                (AgGemmCase(whole), None, both),
            ):
                refused = None
                try:
                    agreed(world, case.make)
                except Refused as reason:
                    refused = None, f"refused: {reason}"
                for contender in contenders:
                    name = names.get(contender.method, contender.method) if part else contender.method
                    step(f"{shape}, {name}{' alone' if part else ''}")
                    us, note = refused or measure(world, clock, case, contender)
                    row = results.add("ag_gemm", name, whole.gathered, us, note=note, shape=shape, alone=part)
                    if part != "gathering":
                        row.tflops = us and whole.operations / us * 1e-6
                    if isinstance(contender, Ours) and refused is None:
                        row.took = contender.took
    for contender in alone + gathering + both:
        contender.close()
