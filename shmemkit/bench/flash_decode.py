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

import shmemkit as sk
from shmemkit.runtime.symmetric_memory import as_dtype

from .attention_combine import CombineCase, TorchCombine
from .attention_combine import Ours as Exchange
from .cases import Checked, negate
from .measure import Contender, measure_all
from .product_cases import found, random
from .refusal import Refused, agreed
from .results import COPY, FLASHINFER, METHOD_OF_ROUNDS, SDPA, SDPA_COMBINE
from .torch_peer import TorchCall, tensor_of

OP, DTYPES, HEAD_DIMS = "flash_decode", ("bfloat16", "float16"), (64, 128)
SHAPES = ",".join(f"{1 << log}x{heads}" for log in range(10, 18) for heads in ("12x1", "8x4", "8x8"))
MOST, PAGE = 50, 16  # calls in a graph; tokens of a page of FlashInfer's cache, at most
ERROR = {"bfloat16": 2**-7, "float16": 2**-10}


class DecodeCase(Checked):
    """`q`, the same on all ranks, and the rank's `k` and `v`; `own`, of the rank's tokens only."""

    op = OP
    q: Any
    k: Any
    v: Any
    lengths: Any

    def __init__(self, world, shape, dtype, head_dim, batch, own=None):
        self.world, self.shape, self.dtype, self.own = world, shape, dtype, own
        self.tokens, self.kv_heads, self.group = shape
        self.head_dim, self.batch = head_dim, batch
        self.bytes = 2 * batch * self.tokens * self.kv_heads * head_dim * dtype.itemsize

    def make(self):
        if self.own is not None:  # the same data
            self.q, self.k, self.v, self.lengths = (
                getattr(self.own, name) for name in "q k v lengths".split()
            )
            return
        xp, heads = self.world.xp, (self.kv_heads, self.head_dim)
        (self.q,) = random(xp, 0, self.dtype, (self.batch, self.kv_heads * self.group, self.head_dim))
        shape = self.batch, self.tokens, *heads
        self.k, self.v = random(xp, 1 + self.world.rank, self.dtype, shape, shape)
        self.lengths = xp.full(self.batch, self.tokens, "int32")

    def output(self, empty=None):
        return (empty or self.world.xp.empty)(self.q.shape, self.dtype)

    def flip(self):
        """Of all results the signs change."""
        if self.own is None:
            negate(self.v)

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


class Ours(Contender):
    """``sk.FlashDecode``."""

    method = "FlashDecode"
    _op: Any = None

    def start(self, case):
        super().start(case)
        heads = case.kv_heads * case.group, case.kv_heads
        self._op = sk.FlashDecode(self.world, case.batch, *heads, case.head_dim, case.dtype)

    def call(self):
        case = self._case
        self._op(case.q, case.k, case.v, case.lengths, out=self.out)

    def stop(self):
        super().stop()
        if self._op is not None:
            self._op.free()
        self._op = None


class Sdpa(TorchCall):
    """PyTorch's scaled_dot_product_attention to the rank's part, by itself."""

    method, distributed = SDPA, False
    out: Any = None
    _given: Any = None

    def prepare(self):
        self.out = self._case.output()
        self._given = *tensors_of(self._torch, self._case), tensor_of(self._torch, self.out)

    def run(self):
        q, k, v, out = self._given
        attend = self._torch.nn.functional.scaled_dot_product_attention
        out.copy_(attend(q, k, v, enable_gqa=self._case.group > 1)[:, :, 0])

    def stop(self):
        super().stop()
        self.out = self._given = None


def tensors_of(torch, case):
    """-> q, k and v, as PyTorch takes them"""
    q, k, v = (tensor_of(torch, array) for array in (case.q, case.k, case.v))
    return q[:, :, None], k.transpose(1, 2), v.transpose(1, 2)


class SdpaCombine(TorchCombine):
    """PyTorch's flash attention, which scaled_dot_product_attention takes, with the lse that it returns, and
    what NCCL gathers and PyTorch combines."""

    method = SDPA_COMBINE
    _given: Any = None

    def packed(self, torch, case):
        self._given = self.given(torch, case)
        of_lse = 4 * case.batch * case.kv_heads * case.group
        return torch.empty(self.out.nbytes + of_lse, dtype=torch.uint8, device="cuda")

    def given(self, torch, case):
        return tensors_of(torch, case)

    def attend(self, torch):
        """-> the rank's rows and their lse"""
        return torch.ops.aten._scaled_dot_product_flash_attention(*self._given)[:2]

    def run(self):
        parts = [part.contiguous().view(-1).view(self._torch.uint8) for part in self.attend(self._torch)]
        self._torch.cat(parts, out=self._mine)
        super().run()

    def stop(self):
        super().stop()
        self._given = None


class FlashInfer(SdpaCombine):
    """FlashInfer's decode of a paged cache, NCCL's all-gather, and FlashInfer's merge_states."""

    method = FLASHINFER

    def given(self, torch, case):
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
        heads = case.kv_heads * case.group, case.kv_heads, case.head_dim
        pages = first, numbers[: case.batch * of_sequence], last
        decode.plan(*pages, *heads, page, q_data_type=q.dtype, kv_data_type=k.dtype)
        paged = tuple(x.view(-1, page, case.kv_heads, case.head_dim) for x in (k, v))
        return decode, q, paged

    def attend(self, torch):
        decode, q, paged = self._given
        return decode.run(q, paged, return_lse=True)

    def combined(self, torch, rows, lse):
        """Of lse to base 2, as ``attend`` returns them."""
        rows, lse = rows.transpose(0, 1).contiguous(), lse.transpose(0, 1).contiguous()
        return self._flashinfer.merge_states(rows, lse)[0]


class Copy(Contender):
    """Half of k and v, which are copied."""

    method = COPY
    _to: Any = None

    def start(self, case):
        self._case, self._to = case, self.world.xp.empty_like(case.k)

    def call(self):
        with self.world.stream:
            self._to[:] = self._case.k

    def stop(self):
        super().stop()
        self._to = None


PEERS = {"sdpa_nccl": SdpaCombine, "flashinfer": FlashInfer, SDPA: Sdpa, COPY: Copy}  # what --vs takes


def memory_of(world):
    """10**9 bytes per second that the GPU's memory has by its clock and width; None where nobody says."""
    if world.backend.name == "emulator":
        return None
    attributes = world.xp.cuda.Device().attributes
    clock, width = attributes.get("MemoryClockRate"), attributes.get("GlobalMemoryBusWidth")  # kHz, bits
    return clock and width and 2 * clock * 1e3 * width / 8 * 1e-9


def run(world, results, options, progress):
    """Fill in the rows. Collective."""
    emulated, dtype = world.backend.name == "emulator", as_dtype(options.dtype)
    contenders = [PEERS[name](world) for name in options.vs] + [Exchange(world), Ours(world)]
    memory, alone = memory_of(world), {Exchange: "exchange", Sdpa: "attention", Copy: "memory"}
    if not emulated:
        results.method = METHOD_OF_ROUNDS
    with progress(len(options.shapes) * (1 + len(contenders))) as step:
        for shape in options.shapes:
            name = "x".join(map(str, shape))
            step(f"{name}, its data")
            whole = DecodeCase(world, shape, dtype, options.head_dim, options.batch)
            part = DecodeCase(world, shape, dtype, options.head_dim, options.batch, whole)
            rows = options.batch, shape[1] * shape[2], options.head_dim
            of = {Sdpa: part, Exchange: CombineCase(world, rows, as_dtype("float32"))}
            cases = [of.get(type(contender), whole) for contender in contenders]
            iters = 1 if emulated else min(MOST, max(2, (1 << 30) // whole.bytes))
            timer = sk.Timer(world, options.iters or iters, options.replays)
            try:
                for case in (whole, part, of[Exchange]):
                    agreed(world, case.make)
            except Refused as reason:
                measured = [(None, f"refused: {reason}")] * len(contenders)
            else:
                pairs = list(zip(cases, contenders, strict=True))
                measured = measure_all(
                    world, timer, pairs, lambda i, name=name: step(f"{name}, {contenders[i].method}")
                )
            for contender, (us, note) in zip(contenders, measured, strict=True):
                kind, method = type(contender), contender.method
                rate = whole.bytes / us * 1e-3 if us and kind is not Exchange else None
                found = {"bus_GBps": rate, "of_memory": rate and memory and rate / memory}
                found["rooms"] = contender.rooms
                method = "AttentionCombine" if kind is Exchange else method
                results.add(
                    OP, method, whole.bytes, us, note=note, shape=name, alone=alone.get(kind), **found
                )
    for contender in contenders:
        contender.close()
