"""``bench all_reduce_rms_norm``: every method of ``sk.AllReduceRMSNorm``, beside our AllReduce alone, and
PyTorch's all-reduces (NCCL's, and that of its symmetric memory) with what follows, in
one graph.
"""

from collections.abc import Callable
from typing import Any

import shmemkit as sk
from shmemkit.runtime.symmetric_memory import as_dtype

from . import collectives, product_cases
from .cases import AllReduceCase, Checked, negate
from .measure import Contender, measure_all
from .results import TORCH_NCCL_NORM, TORCH_ONE_SHOT_NORM
from .torch_peer import TorchCall

DTYPES = ("bfloat16", "float16")
SHAPES, EPS = "1x4096,8x4096,32x4096,128x4096,512x4096,1x8192,8x8192,32x8192,128x8192,512x8192", 1e-5
METHODS = ("auto", *sk.AllReduceRMSNorm.methods)
ERROR = 4e-3  # relative, of bfloat16


def parse_shapes(text):
    """ "TOKENSxHIDDEN,.." -> [(tokens, hidden), ...]"""
    shapes = [tuple(part.strip().lower().split("x")) for part in text.split(",")]
    for shape in shapes:
        if len(shape) != 2 or not all(size.isdecimal() and int(size) for size in shape):
            raise ValueError(
                f"it has {'x'.join(shape)!r}; it must be TOKENSxHIDDEN, of integers of 1 or more"
            )
    return [(int(tokens), int(hidden)) for tokens, hidden in shapes]


class NormCase(Checked):
    """Rows `x` of each rank, `residual`, `weight`. The result is the normalized rows."""

    def __init__(self, world, shape, dtype):
        self.world, self.shape, self.dtype = world, shape, dtype
        self.bytes = shape[0] * shape[1] * dtype.itemsize
        self.sums = AllReduceCase(world, self.bytes, dtype, unit=1)

    def make(self):
        xp, rng = self.world.xp, self.sums.random(self.world.n_ranks)
        self.sums.make()
        self.x = self.sums.x.reshape(self.shape)
        self.residual = xp.asarray(rng.integers(1, 8, self.shape).astype(self.dtype))
        self.weight = xp.asarray(rng.uniform(0.5, 2, self.shape[1]).astype(self.dtype))
        new = (self.sums.total.reshape(self.shape) + self.residual).astype("float32")
        rms = xp.sqrt((new**2).mean(axis=1, keepdims=True) + EPS)
        self.expected = new / rms * self.weight.astype("float32")

    def output(self, empty=None):
        return (empty or self.world.xp.empty)(self.shape, self.dtype)

    def flip(self):
        """All signs change, with those of `sums`."""
        for array in (self.residual, self.expected):
            negate(array)

    def _found(self, out):
        return product_cases.found(self.world.xp, out, self.expected, ERROR)


class Ours(Contender):
    """One method of the host object."""

    _object = None

    def __init__(self, world, method):
        super().__init__(world)
        self.method = method

    def start(self, case):
        tokens, hidden = case.shape
        self._object = sk.AllReduceRMSNorm(self.world, tokens, hidden, case.dtype, self.method)
        super().start(case)
        self._new = case.output()
        self.took = self._object.method_for(tokens) if self.method == "auto" else None

    def call(self):
        case = self._case
        self._object(case.x, case.residual, case.weight, EPS, out=self.out, new_residual=self._new)

    def stop(self):
        super().stop()
        if self._object is not None:
            self._object.free()
        self._object = self._new = None


class _Torch(TorchCall):
    """A subclass has sums(x) -> the tensor of the sums."""

    sums: Callable
    out: Any = None
    _out: Any = None
    _x: Any

    def prepare(self):
        torch, case = self._torch, self._case
        self.out = case.output()
        dtype = getattr(torch, case.dtype.name)
        arrays = case.x, case.residual, case.weight, self.out
        self._given, self._residual, self._weight, self._out = (
            torch.from_dlpack(array.view("int16")).view(dtype) for array in arrays
        )
        self._x = x = self.place(self._given)
        x.copy_(self._given)

    def place(self, x):
        return x.clone()

    def run(self):
        torch = self._torch
        new = torch.add(self._residual, self.sums(self._x))
        self._out.copy_(torch.nn.functional.rms_norm(new, (new.shape[-1],), self._weight, EPS))

    def repeat(self, replay):
        """A call changes what it adds up: so single ones are checked."""
        with self._torch.cuda.stream(self._stream):
            self._x.copy_(self._given)
        self.call()

    def stop(self):
        super().stop()
        self.out = self._given = self._residual = self._weight = self._out = None


class TorchNccl(_Torch):
    """``torch.distributed.all_reduce``, in place."""

    method = TORCH_NCCL_NORM

    def sums(self, x):
        self._torch.distributed.all_reduce(x)
        return x


class TorchOneShot(_Torch):
    """``torch.ops.symm_mem.one_shot_all_reduce``."""

    method = TORCH_ONE_SHOT_NORM

    def place(self, x):
        import torch.distributed._symmetric_memory as symmetric

        self._group = self._torch.distributed.group.WORLD.group_name
        place = symmetric.empty(*x.shape, dtype=x.dtype, device=x.device)
        symmetric.rendezvous(place, self._group)
        return place

    def sums(self, x):
        return self._torch.ops.symm_mem.one_shot_all_reduce(x, "sum", self._group)


PEERS = {"torch_nccl": TorchNccl, "torch_one_shot": TorchOneShot}  # what --vs takes


def run(world, results, options, progress):
    """Fill in the rows. Collective."""
    timer, dtype = sk.Timer(world, options.iters, options.replays), as_dtype(options.dtype)
    alone = collectives.Ours(world, "auto")
    contenders = [PEERS[name](world) for name in options.vs]
    contenders += [Ours(world, method) for method in options.methods or METHODS]
    with progress(len(options.shapes) * (len(contenders) + 1)) as step:
        for shape in options.shapes:
            case, name = NormCase(world, shape, dtype), "x".join(map(str, shape))
            case.make()
            pairs = [(case.sums, alone), *((case, contender) for contender in contenders)]
            names = ["AllReduce", *(contender.method for contender in contenders)]
            measured = measure_all(world, timer, pairs, lambda i, of=names, to=name: step(f"{to}, {of[i]}"))
            for method, (_, contender), (us, note) in zip(names, pairs, measured, strict=True):
                part = "all_reduce" if contender is alone else None
                about = contender.about if us else {}
                results.add(
                    "all_reduce_rms_norm", method, case.bytes, us, note=note, shape=name, alone=part, **about
                )
    for contender in contenders:
        contender.close()
