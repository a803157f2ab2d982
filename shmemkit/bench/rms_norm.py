"""``bench all_reduce_rms_norm``: every method of ``sk.AllReduceRMSNorm``, beside our AllReduce alone, and
PyTorch's all-reduces (NCCL's, and that of its symmetric memory) with what follows, in
one graph.
"""

from collections.abc import Callable
from typing import Any

import shmemkit as sk
from shmemkit.runtime.symmetric_memory import as_dtype

from . import product_cases
from .cases import AllReduceCase, Checked
from .command import Command, Entry
from .measure import Ours
from .results import TORCH_NCCL_NORM, TORCH_ONE_SHOT_NORM
from .shapes import Shapes, text_of
from .torch_peer import TorchCall, symmetric_empty, tensor_of

SHAPES, EPS = "1x4096,8x4096,32x4096,128x4096,512x4096,1x8192,8x8192,32x8192,128x8192,512x8192", 1e-5
ERROR = 4e-3  # relative, of bfloat16


class NormCase(Checked):
    """Rows `x` of each rank, which `sums` has made, `residual`, `weight`. The result is the normalized rows.
    All signs change, with those of `sums`."""

    op, signs, host = "all_reduce_rms_norm", ("residual", "expected"), "AllReduceRMSNorm"
    given = "x", "residual", "weight"
    residual: Any
    weight: Any
    expected: Any

    def __init__(self, world, shape, dtype):
        self.world, self.result, self.dtype, self.shape_text = world, shape, dtype, text_of(shape)
        self.bytes, self.made_of = shape[0] * shape[1] * dtype.itemsize, (world, *shape, dtype)
        self.sums = AllReduceCase(world, self.bytes, dtype, unit=1)

    def choice(self, host, symmetric):
        return host.method_for(self.result[0])

    def make(self):
        xp, rng, shape = self.world.xp, self.sums.random(self.world.n_ranks), self.result
        self.x = self.sums.x.reshape(shape)
        self.residual = xp.asarray(rng.integers(1, 8, shape).astype(self.dtype))
        self.weight = xp.asarray(rng.uniform(0.5, 2, shape[1]).astype(self.dtype))
        new = (self.sums.total.reshape(shape) + self.residual).astype("float32")
        rms = xp.sqrt((new**2).mean(axis=1, keepdims=True) + EPS)
        self.expected = new / rms * self.weight.astype("float32")
        self.options = {"eps": EPS, "new_residual": self.output()}

    def _found(self, out):
        return product_cases.found(self.world.xp, out, self.expected, ERROR)


class _Torch(TorchCall):
    """A subclass has place(torch, x) -> a tensor like x, and its sums(), a function: -> the tensor of the
    sums. A call changes what it adds up."""

    place: Callable
    in_place = True

    def prepare(self, torch, case):
        given, residual, weight = (tensor_of(torch, x) for x in (case.x, case.residual, case.weight))
        out = self.writes(torch, case)
        x, sums = self.place(torch, given)
        self.fill = lambda: x.copy_(given)
        self.fill()

        def run():
            new = torch.add(residual, sums())
            out.copy_(torch.nn.functional.rms_norm(new, (new.shape[-1],), weight, EPS))

        return run


class TorchNccl(_Torch):
    """``torch.distributed.all_reduce``, in place."""

    method = TORCH_NCCL_NORM

    def place(self, torch, given):
        x = given.clone()

        def sums():
            torch.distributed.all_reduce(x)
            return x

        return x, sums


class TorchOneShot(_Torch):
    """``torch.ops.symm_mem.one_shot_all_reduce``."""

    method = TORCH_ONE_SHOT_NORM

    def place(self, torch, given):
        x, group = symmetric_empty(torch, *given.shape, dtype=given.dtype, device=given.device)
        return x, lambda: torch.ops.symm_mem.one_shot_all_reduce(x, "sum", group)


PEERS = {"torch_nccl": TorchNccl, "torch_one_shot": TorchOneShot}  # what --vs takes


def plan(world, options):
    entries = [Entry(Ours(world), "all_reduce", "AllReduce")]
    entries += [Entry(PEERS[name](world)) for name in options.vs]
    methods = options.methods or ("auto", *sk.AllReduceRMSNorm.methods)
    entries += [Entry(Ours(world, method)) for method in methods]
    cases = [NormCase(world, shape, as_dtype(options.dtype)) for shape in options.shapes]
    return entries, [{"all_reduce": case.sums, None: case} for case in cases]


COMMANDS = [
    Command(
        "all_reduce_rms_norm",
        "every method of AllReduceRMSNorm, AllReduce alone, and PyTorch's all-reduces and then rms_norm",
        plan,
        shapes=Shapes(SHAPES, "4x128", "tokens and elements of a row", "TOKENSxHIDDEN"),
        dtypes=("bfloat16", "float16"),
        host="AllReduceRMSNorm",
        without="all",
        peers=dict.fromkeys(PEERS, ""),
        iters="20",
    )
]
