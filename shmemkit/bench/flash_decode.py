"""``bench flash_decode``: ``sk.FlashDecode``, compared with what others do in its place: PyTorch's attention
(or FlashInfer's) to the rank's part of the KV cache, NCCL's all-gather of the results, and a combination of
them, in one graph.

Beside it are parts: PyTorch's attention to the rank's part alone, and ``sk.AttentionCombine`` alone, of as
many rows as the ranks exchange. A copy of half of the cache reads and writes as many bytes as the cache has:
it shows what the memory allows.

A shape is TOKENSxKV_HEADSxGROUP: tokens of a sequence in each rank's cache, heads of k and v, heads of q for
each of them. Checked against float32, by the relative error of the norm. All of a shape are timed in the
same rounds.
"""

import math
from typing import Any

import numpy as np

from shmemkit.runtime.symmetric_memory import as_dtype

from . import options
from .attention_combine import CombineCase, TorchCombine
from .cases import Checked
from .command import Command, Entry
from .measure import Contender, Ours
from .product_cases import BY_SIZE, MOST, found, random
from .results import COPY, FLASHINFER, SDPA, SDPA_COMBINE
from .shapes import Shapes, text_of
from .torch_peer import TorchCall, tensor_of

SHAPES = ",".join(f"{1 << log}x{heads}" for log in range(10, 18) for heads in ("12x1", "8x4", "8x8"))
PAGE = 16  # tokens of a page of FlashInfer's cache, at most
ERROR = {"bfloat16": 2**-7, "float16": 2**-10}


class DecodeCase(Checked):
    """`q`, the same on all ranks, and the rank's `k` and `v`; `own`, of the rank's tokens only."""

    op, host, given = "flash_decode", "FlashDecode", ("q", "k", "v", "lengths")
    q: Any
    k: Any
    v: Any
    lengths: Any

    def __init__(self, world, shape, dtype, head_dim, batch, own=None):
        self.world, self.shape_text, self.dtype, self.own = world, text_of(shape), dtype, own
        self.tokens, self.kv_heads, self.group = shape
        self.head_dim, self.batch, self.heads = head_dim, batch, self.kv_heads * self.group
        self.made_of = world, batch, self.heads, self.kv_heads, head_dim, dtype
        self.result, self.signs = (batch, self.heads, head_dim), () if own else ("v",)
        self.bytes = 2 * batch * self.tokens * self.kv_heads * head_dim * dtype.itemsize
        self.iters = min(MOST, max(2, (1 << 30) // self.bytes))

    def object(self, method, **chosen):
        return super().object(**chosen)

    def rates(self, us, entry):
        if entry.alone == "exchange":
            return {}
        rate, memory = self.bytes / us * 1e-3, memory_of(self.world)
        return {"bus_GBps": rate, "of_memory": memory and rate / memory}

    def make(self):
        if self.own is not None:  # the same data
            self.q, self.k, self.v, self.lengths = self.own.arguments
            return
        xp, heads = self.world.xp, (self.kv_heads, self.head_dim)
        (self.q,) = random(xp, 0, self.dtype, self.result)
        shape = self.batch, self.tokens, *heads
        self.k, self.v = random(xp, 1 + self.world.rank, self.dtype, shape, shape)
        self.lengths = xp.full(self.batch, self.tokens, "int32")

    def _found(self, out):
        """Of the first sequence; a copy has no result."""
        if out is None:
            return ""
        xp, scale = self.world.xp, 1 / math.sqrt(self.head_dim)
        q = self.q[0].reshape(self.kv_heads, self.group, self.head_dim).astype("float32")
        sums, weights = xp.zeros(q.shape, "float32"), xp.zeros(q.shape[:2], "float32")
        for h in range(self.kv_heads):  # one by one: in float32 all would take much memory
            p = xp.exp(q[h] @ self.k[0, :, h].astype("float32").T * scale)
            sums[h], weights[h] = p @ self.v[0, :, h].astype("float32"), p.sum(1)
        if self.own is None:
            of_all = [self.world.host_allgather(self.world.asnumpy(x)) for x in (sums, weights)]
            sums, weights = (xp.asarray(np.sum(x, 0)) for x in of_all)
        wanted = (sums / weights[..., None]).reshape(out.shape[1:])
        return found(xp, out[0], wanted, ERROR[self.dtype.name])


class Sdpa(TorchCall):
    """PyTorch's scaled_dot_product_attention to the rank's part, by itself."""

    method, distributed = SDPA, False

    def prepare(self, torch, case):
        (q, k, v), out = tensors_of(torch, case), self.writes(torch, case)
        attend, grouped = torch.nn.functional.scaled_dot_product_attention, case.group > 1

        def run():
            out.copy_(attend(q, k, v, enable_gqa=grouped)[:, :, 0])

        return run


def tensors_of(torch, case):
    """-> q, k and v, as PyTorch takes them"""
    q, k, v = (tensor_of(torch, array) for array in (case.q, case.k, case.v))
    return q[:, :, None], k.transpose(1, 2), v.transpose(1, 2)


class SdpaCombine(TorchCombine):
    """PyTorch's flash attention, which scaled_dot_product_attention takes, with the lse that it returns, and
    what NCCL gathers and PyTorch combines."""

    method = SDPA_COMBINE

    def prepare(self, torch, case):
        attend = self.attention(torch, case)
        of_rows, of_lse = math.prod(case.result) * case.dtype.itemsize, 4 * case.batch * case.heads
        mine = torch.empty(of_rows + of_lse, dtype=torch.uint8, device="cuda")
        combine = self.combining(torch, case, mine)

        def run():
            parts = [part.contiguous().view(-1).view(torch.uint8) for part in attend()]
            torch.cat(parts, out=mine)
            combine()

        return run

    def attention(self, torch, case):
        """-> a function without arguments: the rank's rows and their lse"""
        given = tensors_of(torch, case)
        return lambda: torch.ops.aten._scaled_dot_product_flash_attention(*given)[:2]


class FlashInfer(SdpaCombine):
    """FlashInfer's decode of a paged cache, NCCL's all-gather, and FlashInfer's merge_states."""

    method = FLASHINFER

    def attention(self, torch, case):
        try:
            import flashinfer
        except ImportError as error:
            raise ValueError(
                f"FlashInfer is not installed ({error}): pip install flashinfer-python"
            ) from error
        self._flashinfer = flashinfer
        q, k, v = (tensor_of(torch, array) for array in (case.q, case.k, case.v))
        page = math.gcd(case.tokens, PAGE)
        of_sequence, room = case.tokens // page, torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
        decode = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            room, "NHD", use_tensor_cores=case.group >= 4
        )  # as FlashInfer's own documentation advises
        numbers = torch.arange((case.batch + 1) * of_sequence, dtype=torch.int32, device="cuda")
        first = numbers[: case.batch + 1] * of_sequence
        last = torch.full((case.batch,), page, dtype=torch.int32, device="cuda")
        pages = first, numbers[: case.batch * of_sequence], last
        heads = case.heads, case.kv_heads, case.head_dim
        decode.plan(*pages, *heads, page, q_data_type=q.dtype, kv_data_type=k.dtype)
        paged = tuple(x.view(-1, page, case.kv_heads, case.head_dim) for x in (k, v))
        return lambda: decode.run(q, paged, return_lse=True)

    def combined(self, torch, rows, lse):
        """Of lse to base 2, as FlashInfer returns them."""
        rows, lse = rows.transpose(0, 1).contiguous(), lse.transpose(0, 1).contiguous()
        return self._flashinfer.merge_states(rows, lse)[0]


class Copy(Contender):
    """Half of k and v, which are copied."""

    method = COPY

    def prepared(self, case):
        self.out, to = None, self.world.xp.empty_like(case.k)

        def run():
            with self.world.stream:
                to[:] = case.k

        return run


def memory_of(world):
    """10**9 bytes per second that the GPU's memory has by its clock and width; None where nobody says."""
    if world.backend.name == "emulator":
        return None
    attributes = world.xp.cuda.Device().attributes
    clock, width = attributes.get("MemoryClockRate"), attributes.get("GlobalMemoryBusWidth")  # kHz, bits
    return clock and width and 2 * clock * 1e3 * width / 8 * 1e-9


_combined = "PyTorch's attention to a rank's part, NCCL's all-gather, PyTorch's combination"
PEERS = {  # what --vs takes: its contender, what it does alone of all that FlashDecode does, and what it is
    "sdpa_nccl": (SdpaCombine, None, _combined),
    "flashinfer": (FlashInfer, None, "likewise"),
    SDPA: (Sdpa, "attention", "PyTorch's attention alone"),
    COPY: (Copy, "memory", "of half of k and v"),
}


def plan(world, given):
    entries = [Entry(kind(world), part) for kind, part, _ in (PEERS[name] for name in given.vs)]
    entries += [Entry(Ours(world), "exchange", "AttentionCombine"), Entry(Ours(world), name="FlashDecode")]

    def cases(shape):
        about = world, shape, as_dtype(given.dtype), given.head_dim, given.batch
        whole = DecodeCase(*about)
        exchange = CombineCase(world, whole.result, as_dtype("float32"))
        part = DecodeCase(*about, own=whole)
        return {None: whole, "memory": whole, "attention": part, "exchange": exchange}

    return entries, [cases(shape) for shape in given.shapes]


_dims = {"type": int, "choices": (64, 128), "default": 128, "help": options.DEFAULT}
_shape = "tokens of a rank, heads of k and v, heads of q for each of them"
COMMANDS = [
    Command(
        "flash_decode",
        "FlashDecode, and attention of PyTorch's and FlashInfer's with NCCL",
        plan,
        shapes=Shapes(SHAPES, "16x8x1", _shape, "TOKENSxKV_HEADSxGROUP"),
        dtypes=tuple(ERROR),
        peers={word: what for word, (*_, what) in PEERS.items()},
        iters=BY_SIZE,
        options=[("--batch", options.number("sequences", 1)), ("--head-dim", _dims)],
    )
]
