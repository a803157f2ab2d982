"""``bench attention_combine``: ``sk.AttentionCombine`` in both forms, beside AllGather and AllToAll of as
many bytes by the same packets, and beside NCCL's all-gather with what PyTorch combines, in one graph.

A shape is BATCHxHEADSxHEAD_DIM, the rows of a rank. Its bytes are those of the rows and their lse. Checked
against float32, by the relative error of the norm. All of a shape are timed in the same rounds.
"""

import math
from typing import Any

import numpy as np

from shmemkit.runtime.symmetric_memory import as_dtype

from .cases import CASES, Checked
from .command import Command, Entry
from .measure import Ours
from .product_cases import found
from .results import TORCH_COMBINE
from .shapes import Shapes, text_of
from .torch_peer import TorchCall

SHAPES, PACKETS = "1x32x128,8x32x128,64x32x128,1x128x512,16x128x512", "lamport"
FORMS = {"all_gather": "AllGather", "all_to_all": "AllToAll"}  # the collective that moves the same bytes
ERROR = {"bfloat16": 2**-7, "float16": 2**-10, "float32": 2**-18}


class CombineCase(Checked):
    """This rank's rows `x` and their `lse`, both in the bytes `packed`. The method is the form."""

    op, signs, host = "attention_combine", ("x", "expected"), "AttentionCombine"
    given = "x", "lse"
    packed: Any
    lse: Any
    expected: Any

    def __init__(self, world, shape, dtype):
        self.world, self.result, self.dtype, self.shape_text = world, shape, dtype, text_of(shape)
        self.of_rows, self.made_of = math.prod(shape) * dtype.itemsize, (world, *shape, dtype)
        self.bytes = self.of_rows + 4 * math.prod(shape[:2])

    def object(self, method, **chosen):
        return super().object(form="all_gather" if method == "auto" else method, **chosen)

    def output_for(self, host, symmetric):
        batch, _, head_dim = self.result
        return self.world.xp.empty((batch, host.own_heads, head_dim), self.dtype)

    def make(self):
        xp, ranks = self.world.xp, range(self.world.n_ranks)
        x, lse = zip(*map(self._random, ranks), strict=True)
        self.packed = xp.empty(self.bytes, "uint8")
        self.x = self.packed[: self.of_rows].view(self.dtype).reshape(self.result)
        self.lse = self.packed[self.of_rows :].view("float32").reshape(self.result[:2])
        self.x[:], self.lse[:] = xp.asarray(x[self.world.rank]), xp.asarray(lse[self.world.rank])
        weights = np.exp(np.array(lse) - np.max(lse, 0))
        weights = (weights / weights.sum(0))[..., None]
        self.expected = xp.asarray((np.array(x, "float32") * weights).sum(0))

    def _random(self, rank):
        rng = np.random.default_rng([rank, *self.result])
        x: Any = rng.standard_normal(self.result, "float32")
        return x.astype(self.dtype), 2 * rng.standard_normal(self.result[:2], "float32")

    def _found(self, out):
        wanted = self.expected
        if out.shape != wanted.shape:  # of an all-to-all
            first = self.world.rank * out.shape[1]
            wanted = wanted[:, first : first + out.shape[1]]
        return found(self.world.xp, out, wanted, ERROR[self.dtype.name])


class TorchCombine(TorchCall):
    """One all-gather of NCCL's, and PyTorch's softmax of the lse, product and sum."""

    method = TORCH_COMBINE

    def prepare(self, torch, case):
        return self.combining(torch, case, torch.from_dlpack(case.packed))

    def combining(self, torch, case, mine):
        """-> run: what all ranks have in `mine`, the bytes of their rows and their lse, is combined"""
        out, n = self.writes(torch, case), self.world.n_ranks
        gathered = mine.new_empty((n, mine.numel()))
        shape, of_rows = out.shape, out.numel() * out.element_size()

        def run():
            torch.distributed.all_gather_into_tensor(gathered, mine)
            rows = gathered[:, :of_rows].view(out.dtype).reshape(n, *shape)
            lse = gathered[:, of_rows:].view(torch.float32).reshape(n, *shape[:2])
            out.copy_(self.combined(torch, rows, lse))

        return run

    def combined(self, torch, rows, lse):
        return (rows * torch.softmax(lse, 0)[..., None]).sum(0)


PEERS = {"torch_nccl": TorchCombine}  # what --vs takes


def plan(world, options):
    forms, dtype = options.methods or FORMS, as_dtype(options.dtype)
    entries = [Entry(Ours(world, PACKETS), "exchange", FORMS[form], case=form) for form in forms]
    entries += [Entry(PEERS[name](world)) for name in options.vs]
    entries += [Entry(Ours(world, form)) for form in forms]

    def cases(shape):
        whole = CombineCase(world, shape, dtype)
        sizes = {"all_gather": whole.bytes * world.n_ranks, "all_to_all": whole.bytes}
        return {**{form: CASES[form](world, sizes[form], dtype) for form in forms}, None: whole}

    return entries, [cases(shape) for shape in options.shapes]


COMMANDS = [
    Command(
        "attention_combine",
        "AttentionCombine, AllGather and AllToAll of as many bytes, and NCCL and PyTorch's operations",
        plan,
        shapes=Shapes(SHAPES, "2x8x64", "batch, heads, elements of a row", "BATCHxHEADSxHEAD_DIM"),
        dtypes=tuple(ERROR),
        methods=tuple(FORMS),
        without="both",
        peers=dict.fromkeys(PEERS, ""),
        iters="20",
    )
]
