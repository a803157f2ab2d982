"""``bench gemm``: the methods of ``sk.Gemm`` on one GPU, compared with cuBLAS.

Random operands, which lie as ``--layout`` says: "tn", as in a linear layer of PyTorch (both by rows of K), or
"nn" (both by rows, as they are). Checked against float32 (float64 for float32), by the relative error of the
norm. All methods of a shape are timed in the same rounds. Float8 has scales of blocks (float8.py).
"""

from shmemkit import gemm
from shmemkit.gemm.problem import FLOAT8, Problem
from shmemkit.gemm.sm90 import Tile
from shmemkit.gemm.sm90_host import Choice
from shmemkit.runtime.symmetric_memory import as_dtype

from .command import Command, Entry
from .float8 import CUBLAS_TWO_LEVELS, Float8Case, ScaledMm
from .measure import Contender, Ours, budgets
from .options import by
from .product_cases import BY_SIZE, GemmCase
from .results import CUBLAS
from .shapes import Shapes, parse_tiles, text_of
from .torch_peer import refusing, stream_of, tensor_of

METHODS = ("auto", *gemm.METHODS)
LAYOUTS = ("tn", "nn")
HALF = "bfloat16"  # what float8 is compared with
DTYPES = ("bfloat16", "float16", "float32", FLOAT8)
SHAPES = (
    "4096x4096x4096,8192x8192x8192,8192x8192x1024,4096x14336x4096,8192x3584x4096,8192x2048x8192,"
    "512x7168x8192,64x7168x8192"
)


class Cublas(Contender):
    """By PyTorch, or without it by CuPy."""

    method = CUBLAS

    def prepared(self, case):
        if self.world.backend.name == "emulator":
            raise ValueError("cuBLAS needs a GPU")
        try:
            import torch
        except ImportError:
            return self._by_cupy
        torch.backends.cuda.matmul.allow_tf32 = False
        stream = stream_of(torch, self.world)
        x, b, out = (tensor_of(torch, array) for array in (case.x, case.b, self.out))

        def run():
            with refusing(), torch.cuda.stream(stream):
                torch.matmul(x, b, out=out)

        return run

    def _by_cupy(self):
        with self.world.stream:
            self.world.xp.matmul(self._case.x, self._case.b, out=self.out)


class Tiled(Contender):
    """The method sm90, by a tile."""

    def __init__(self, world, tile):
        super().__init__(world)
        self.method, self._tile = f"sm90 {text_of(tile)}", Tile(*tile)

    def prepared(self, case):
        problem = Problem(case.x, case.b, self.out, None, None, case.options.get("scales"))
        gpu = gemm.gpu_of(self.world)
        if reason := gemm.METHODS["sm90"].unsupported(problem, gpu):
            raise ValueError(reason)
        return gemm.METHODS["sm90"](problem, gpu, Choice(self._tile, 1))


TILES = {"type": by(parse_tiles), "default": "", "metavar": "MxN,.."}
TILES |= {"help": "sm90 by these tiles, too, as 64x256,128x256; default: none"}


def plan(world, options):
    """Each rank computes on its GPU, and the slowest counts."""
    float8, dtype, layout = options.dtype == FLOAT8, as_dtype(options.dtype), options.layout
    entries = [Entry(Cublas(world))] if "cublas" in options.vs else []
    methods = options.methods
    if float8:
        entries, methods = _peers_of_float8(world, options), [x for x in methods if x in ("auto", "sm90")]
    entries += [Entry(Ours(world, method, sms=sms)) for sms in budgets(options) for method in methods]
    entries += [Entry(Tiled(world, tile)) for tile in options.tiles]
    if not float8:
        return entries, [{None: GemmCase(world, shape, dtype, layout)} for shape in options.shapes]
    return entries, [
        {
            None: Float8Case(world, shape, layout),
            "ones": Float8Case(world, shape, layout, ones=True),
            HALF: GemmCase(world, shape, as_dtype(HALF), layout),
        }
        for shape in options.shapes
    ]


def _peers_of_float8(world, options):
    entries = [Entry(Ours(world), name=f"auto, {HALF}", case=HALF)]
    if "cublas" in options.vs:
        entries += [
            Entry(Cublas(world), name=f"{CUBLAS}, {HALF}", case=HALF),
            Entry(ScaledMm(world, CUBLAS, True), case="ones"),
            Entry(ScaledMm(world, CUBLAS_TWO_LEVELS, False), case="ones"),
        ]
    return entries


_text = "tn: both operands by rows of K, as in a linear layer; nn: both by rows; default %(default)s"
COMMANDS = [
    Command(
        "gemm",
        "every method of Gemm, and cuBLAS, on each rank's GPU",
        plan,
        shapes=Shapes(SHAPES, "32x32x32", "M, N and K of the products"),
        dtypes=DTYPES,
        methods=METHODS,
        default="auto,sm80",
        peers={"cublas": "through PyTorch where it is installed, else CuPy"},
        sms=True,
        iters=BY_SIZE,
        options=[("--tiles", TILES), ("--layout", {"choices": LAYOUTS, "default": "tn", "help": _text})],
    )
]
