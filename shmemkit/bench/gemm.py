"""``bench gemm``: the methods of ``sk.Gemm`` on one GPU, beside cuBLAS.

Random operands, which lie as ``--layout`` says: "tn", as in a linear layer of PyTorch (both by rows of K), or
"nn" (both by rows, as they are). Checked against float32 (float64 for float32), by the relative error of the
norm.
"""

import math

import shmemkit as sk
from shmemkit.kernels import gemm
from shmemkit.memory import as_dtype

from .collectives import measure
from .refusal import Refused, agreed
from .results import CUBLAS
from .timing import Clock

METHODS = ("auto", *gemm.METHODS)
PEERS = ("cublas",)  # what --vs takes
LAYOUTS = ("tn", "nn")
DTYPES = ("bfloat16", "float16", "float32")
SHAPES = (
    "4096x4096x4096,8192x8192x8192,8192x8192x1024,4096x14336x4096,8192x3584x4096,8192x2048x8192,"
    "512x7168x8192,64x7168x8192"
)
WORK = 2e12  # operations that a graph has, about
EMULATED = 1 << 24  # operations that are emulated without waiting too long
ERROR = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-17}
"""Relative, of the norm, that is allowed: twice what rounding once gives; of float32, adding."""


def parse_shapes(text):
    """ "MxNxK,MxNxK" -> [(m, n, k), ...]"""
    shapes = []
    for part in text.split(","):
        sizes = part.lower().split("x")
        if len(sizes) != 3 or not all(size.strip().isdecimal() and int(size) for size in sizes):
            raise ValueError(f"{part!r}: MxNxK, of integers of 1 or more, is allowed")
        shapes.append(tuple(map(int, sizes)))
    return shapes


class GemmCase:
    """A product of one shape, like the cases of ``cases.py``."""

    op = "gemm"

    def __init__(self, world, shape, dtype, layout):
        self.world, self.shape, self.dtype, self.layout = world, shape, dtype, layout
        m, n, k = shape
        self.name, self.operations = f"{m}x{n}x{k}", 2 * m * n * k
        self.bytes = (m * k + n * k + m * n) * dtype.itemsize

    def make(self):
        (m, n, k), xp = self.shape, self.world.xp
        rng = xp.random.default_rng(self.world.rank)
        a, b = (
            rng.standard_normal(shape, dtype="float32").astype(self.dtype)
            for shape in ((m, k), (n, k) if self.layout == "tn" else (k, n))
        )
        self.x, self.b = a, b.T if self.layout == "tn" else b
        self._sign = 1

    def output(self):
        return self.world.xp.empty((self.shape[0], self.shape[1]), self.dtype)

    def spoil(self, out):
        """Make all of `out` NaN."""
        out.view("uint8").fill(0xFF)
        self.world.synchronize()
        self.world.host_barrier()

    def flip(self):
        """All signs change."""
        words = self.x.view(f"uint{8 * self.dtype.itemsize}")
        words ^= words.dtype.type(1 << 8 * self.dtype.itemsize - 1)
        self._sign = -self._sign

    def check(self, out):
        """-> "", or what is wrong, the same on every rank. Collective."""
        self.world.synchronize()
        found = agreed(self.world, lambda: self._found(out))
        return next(filter(None, self.world.host_allgather(found)), "")

    def _found(self, out):
        """Some of the rows, from all over it."""
        xp, wide = self.world.xp, "float64" if self.dtype == "float32" else "float32"
        step = max(1, self.shape[0] // 64)
        reference = self.x[::step].astype(wide) @ self.b.astype(wide)
        difference = out[::step].astype(wide) - reference
        error = float(xp.linalg.norm(difference) / xp.linalg.norm(reference))
        return "" if error <= ERROR[self.dtype.name] else f"wrong: relative error {error:.1e}"


class Contender:
    """What the two have in common. A subclass has call()."""

    capture = out = None

    def __init__(self, world):
        self.world = world

    def start(self, case):
        self._case, self.out = case, case.output()

    def repeat(self, replay):
        replay()

    def stop(self):
        self._case = self.out = None

    def close(self):
        pass


class Ours(Contender):
    """``sk.Gemm``."""

    def __init__(self, world, method):
        super().__init__(world)
        self.method = method

    def start(self, case):
        super().start(case)
        self._gemm = sk.Gemm(self.method)

    def call(self):
        self._gemm(self._case.x, self._case.b, self.out)

    def stop(self):
        super().stop()
        self._gemm = None


class Cublas(Contender):
    """By PyTorch, or without it by CuPy."""

    method = CUBLAS

    def start(self, case):
        if self.world.backend.name == "emulator":
            raise ValueError("cuBLAS needs a GPU")
        super().start(case)
        try:
            import torch
        except ImportError:
            self._run = lambda: self._by_cupy()
            return
        self._torch, stream = torch, torch.cuda.ExternalStream(self.world.stream.ptr)
        torch.backends.cuda.matmul.allow_tf32 = False
        tensors = [self._tensor(array) for array in (case.x, case.b, self.out)]

        def run():
            with torch.cuda.stream(stream):
                torch.matmul(tensors[0], tensors[1], out=tensors[2])

        self._run = run

    def call(self):
        self._run()

    def stop(self):
        super().stop()
        self._run = None

    def _tensor(self, array):
        """The same memory."""
        by_row = array if array.flags.c_contiguous else array.T
        tensor = self._torch.from_dlpack(by_row.view(f"int{8 * array.itemsize}"))
        tensor = tensor.view(getattr(self._torch, array.dtype.name))
        return tensor if by_row is array else tensor.T

    def _by_cupy(self):
        with self.world.stream:
            self.world.xp.matmul(self._case.x, self._case.b, out=self.out)


def run(world, results, options, progress):
    """Fill in the rows. Collective: each rank computes on its GPU, and the slowest counts."""
    emulated, dtype = world.backend.name == "emulator", as_dtype(options.dtype)
    if emulated and max(2 * math.prod(shape) for shape in options.shapes) > EMULATED:
        raise SystemExit(f"gemm: the emulator takes --shapes of up to {EMULATED} operations, as 128x128x128")
    contenders = [Cublas(world)] if "cublas" in options.vs else []
    contenders += [Ours(world, method) for method in options.methods]
    with progress(len(options.shapes) * len(contenders)) as step:
        for shape in options.shapes:
            case, refused = GemmCase(world, shape, dtype, options.layout), None
            iters = 1 if emulated else max(2, min(50, math.ceil(WORK / case.operations)))
            clock = Clock(world, options.iters or iters, options.replays)
            try:
                agreed(world, case.make)
            except Refused as reason:
                refused = None, f"refused: {reason}"
            for contender in contenders:
                step(f"{case.name}, {contender.method}")
                us, note = refused or measure(world, clock, case, contender)
                row = results.add("gemm", contender.method, case.bytes, us, note=note, shape=case.name)
                row.tflops = us and case.operations / us * 1e-6
