"""``bench attention_combine``: ``sk.AttentionCombine`` in both forms, beside AllGather and AllToAll of as
many bytes by the same packets, and beside NCCL's all-gather with what PyTorch combines, in one graph.

A shape is BATCHxHEADSxHEAD_DIM, the rows of a rank. Its bytes are those of the rows and their lse. Checked
against float32, by the relative error of the norm. All of a shape are timed in the same rounds.
"""

import math
from typing import Any

import numpy as np

import shmemkit as sk
from shmemkit.runtime.symmetric_memory import as_dtype

from . import collectives
from .cases import CASES, Checked, negate
from .measure import Contender, measure_all
from .product_cases import found
from .refusal import Refused, agreed
from .results import METHOD_OF_ROUNDS, TORCH_COMBINE
from .torch_peer import TorchCall, tensor_of

OP, DTYPES = "attention_combine", ("bfloat16", "float16", "float32")
SHAPES, PACKETS = "1x32x128,8x32x128,64x32x128,1x128x512,16x128x512", "lamport"
FORMS = {"all_gather": "AllGather", "all_to_all": "AllToAll"}  # the collective that moves the same bytes
ERROR = {"bfloat16": 2**-7, "float16": 2**-10, "float32": 2**-18}


class CombineCase(Checked):
    """This rank's rows `x` and their `lse`, both in the bytes `packed`."""

    op = OP
    packed: Any
    x: Any
    lse: Any
    expected: Any

    def __init__(self, world, shape, dtype):
        self.world, self.shape, self.dtype = world, shape, dtype
        self.of_rows = math.prod(shape) * dtype.itemsize
        self.bytes = self.of_rows + 4 * math.prod(shape[:2])

    def make(self):
        xp, ranks = self.world.xp, range(self.world.n_ranks)
        x, lse = zip(*map(self._random, ranks), strict=True)
        self.packed = xp.empty(self.bytes, "uint8")
        self.x = self.packed[: self.of_rows].view(self.dtype).reshape(self.shape)
        self.lse = self.packed[self.of_rows :].view("float32").reshape(self.shape[:2])
        self.x[:], self.lse[:] = xp.asarray(x[self.world.rank]), xp.asarray(lse[self.world.rank])
        weights = np.exp(np.array(lse) - np.max(lse, 0))
        weights = (weights / weights.sum(0))[..., None]
        self.expected = xp.asarray((np.array(x, "float32") * weights).sum(0))

    def _random(self, rank):
        rng = np.random.default_rng([rank, *self.shape])
        x: Any = rng.standard_normal(self.shape, "float32")
        return x.astype(self.dtype), 2 * rng.standard_normal(self.shape[:2], "float32")

    def output(self, empty=None, form="all_gather"):
        batch, heads, head_dim = self.shape
        heads = heads if form == "all_gather" else heads // self.world.n_ranks
        return (empty or self.world.xp.empty)((batch, heads, head_dim), self.dtype)

    def flip(self):
        """All signs change."""
        negate(self.x)
        negate(self.expected)

    def _found(self, out):
        wanted = self.expected
        if out.shape != wanted.shape:  # of an all-to-all
            first = self.world.rank * out.shape[1]
            wanted = wanted[:, first : first + out.shape[1]]
        return found(self.world.xp, out, wanted, ERROR[self.dtype.name])


class Ours(Contender):
    """``sk.AttentionCombine`` in one form."""

    _object: Any = None

    def __init__(self, world, form="all_gather"):
        super().__init__(world)
        self.method = form

    def start(self, case):
        self._case = case
        self._object = sk.AttentionCombine(self.world, *case.shape, dtype=case.dtype, form=self.method)
        self.out = case.output(form=self.method)

    def call(self):
        self._object(self._case.x, self._case.lse, self.out)

    def stop(self):
        super().stop()
        if self._object is not None:
            self._object.free()
        self._object = None


class TorchCombine(TorchCall):
    """One all-gather of NCCL's, and PyTorch's softmax of the lse, product and sum."""

    method = TORCH_COMBINE
    out: Any = None
    _mine: Any = None
    _all: Any = None
    _out: Any = None

    def prepare(self):
        torch, case = self._torch, self._case
        self.out = case.output()
        self._out = tensor_of(torch, self.out)
        self._mine = self.packed(torch, case)
        self._all = self._mine.new_empty((self.world.n_ranks, self._mine.numel()))

    def packed(self, torch, case):
        """The bytes that this rank sends."""
        return torch.from_dlpack(case.packed)

    def run(self):
        self._torch.distributed.all_gather_into_tensor(self._all, self._mine)
        self._out.copy_(self.combined(self._torch, *self.unpacked(self._torch)))

    def unpacked(self, torch):
        """-> rows and lse of all ranks"""
        shape, dtype = self._out.shape, self._out.dtype
        n, of_rows = len(self._all), self._out.numel() * self._out.element_size()
        rows = self._all[:, :of_rows].view(dtype).reshape(n, *shape)
        return rows, self._all[:, of_rows:].view(torch.float32).reshape(n, *shape[:2])

    @staticmethod
    def combined(torch, rows, lse):
        return (rows * torch.softmax(lse, 0)[..., None]).sum(0)

    def stop(self):
        super().stop()
        self.out = self._out = self._mine = self._all = None


PEERS = {"torch_nccl": TorchCombine}  # what --vs takes


def run(world, results, options, progress):
    """Fill in the rows. Collective."""
    emulated, dtype = world.backend.name == "emulator", as_dtype(options.dtype)
    timer = sk.Timer(world, options.iters, options.replays)
    contenders = [PEERS[name](world) for name in options.vs]
    contenders += [Ours(world, form) for form in options.methods or FORMS]
    alone = [(form, collectives.Ours(world, PACKETS)) for form in options.methods or FORMS]
    if not emulated:
        results.method = METHOD_OF_ROUNDS
    with progress(len(options.shapes) * (len(contenders) + len(alone))) as step:
        for shape in options.shapes:
            case, name = CombineCase(world, shape, dtype), "x".join(map(str, shape))
            sizes = {"all_gather": case.bytes * world.n_ranks, "all_to_all": case.bytes}
            pairs = [(CASES[form](world, sizes[form], dtype), contender) for form, contender in alone]
            pairs += [(case, contender) for contender in contenders]
            names = [FORMS[form] for form, _ in alone] + [contender.method for contender in contenders]
            try:
                for of in dict.fromkeys(of for of, _ in pairs):
                    agreed(world, of.make)
            except Refused as reason:
                measured = [(None, f"refused: {reason}")] * len(pairs)
            else:
                tell = [f"{name}, {method}" for method in names]
                measured = measure_all(world, timer, pairs, lambda i, tell=tell: step(tell[i]))
            for i, (us, note) in enumerate(measured):
                part = "exchange" if i < len(alone) else None
                rooms = pairs[i][1].rooms
                results.add(OP, names[i], case.bytes, us, note=note, shape=name, alone=part, rooms=rooms)
    for contender in contenders:
        contender.close()
