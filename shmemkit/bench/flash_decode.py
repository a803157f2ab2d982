"""``bench flash_decode``: ``sk.FlashDecode``, compared on each rank's GPU with PyTorch's attention to the
rank's part of the KV cache, and with a copy of half of it. The copy reads and writes as many bytes as the
cache has: it shows what the memory allows.

A shape is TOKENSxKV_HEADSxGROUP: tokens of a sequence in each rank's cache, heads of k and v, heads of q for
each of them. Checked against float32, by the relative error of the norm. All of a shape are timed in the
same rounds. With several ranks, PyTorch's attention is without the exchange.
"""

import math
from typing import Any

import numpy as np

import shmemkit as sk
from shmemkit.runtime.symmetric_memory import as_dtype

from .cases import Checked, negate
from .measure import Contender, measure_all
from .product_cases import found, random
from .refusal import Refused, agreed
from .results import COPY, METHOD_OF_ROUNDS, SDPA
from .torch_peer import refusing, stream_of, tensor_of

OP, DTYPES, HEAD_DIMS = "flash_decode", ("bfloat16", "float16"), (64, 128)
PEERS = (SDPA, COPY)  # what --vs takes
SHAPES = ",".join(f"{1 << log}x{heads}" for log in (10, 13, 15, 17) for heads in ("12x1", "8x4", "8x8"))
MOST = 50  # calls in a graph
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


class Sdpa(Contender):
    """PyTorch's scaled_dot_product_attention, by itself."""

    method = SDPA
    _run: Any = None

    def start(self, case):
        if self.world.backend.name == "emulator":
            raise ValueError("PyTorch's attention needs a GPU")
        super().start(case)
        try:
            import torch
        except ImportError as error:
            raise ValueError(f"PyTorch is not installed ({error}): pip install torch") from error
        stream = stream_of(torch, self.world)
        attend = torch.nn.functional.scaled_dot_product_attention
        q, k, v = (tensor_of(torch, array) for array in (case.q, case.k, case.v))
        q, k, v, out = q[:, :, None], k.transpose(1, 2), v.transpose(1, 2), tensor_of(torch, self.out)

        def run():
            with refusing(), torch.cuda.stream(stream), torch.no_grad():
                self._kept = attend(q, k, v, enable_gqa=case.group > 1)
                out.copy_(self._kept[:, :, 0])

        self._run = run

    def call(self):
        self._run()

    def stop(self):
        super().stop()
        self._run = self._kept = None

    def capture(self, iters):
        import torch

        graph, stream = torch.cuda.CUDAGraph(), stream_of(torch, self.world)
        with refusing(), torch.cuda.graph(graph, stream=stream):
            for _ in range(iters):
                self._run()

        def replay():
            with torch.cuda.stream(stream):
                graph.replay()

        return replay


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


def run(world, results, options, progress):
    """Fill in the rows. Collective."""
    emulated, dtype = world.backend.name == "emulator", as_dtype(options.dtype)
    kinds = {SDPA: Sdpa, COPY: Copy}
    contenders = [kinds[name](world) for name in options.vs] + [Ours(world)]
    if not emulated:
        results.method = METHOD_OF_ROUNDS
    with progress(len(options.shapes) * len(contenders)) as step:
        for shape in options.shapes:
            name = "x".join(map(str, shape))
            whole = DecodeCase(world, shape, dtype, options.head_dim, options.batch)
            part = DecodeCase(world, shape, dtype, options.head_dim, options.batch, whole)
            cases = [part if isinstance(contender, Sdpa) else whole for contender in contenders]
            iters = 1 if emulated else min(MOST, max(2, (1 << 30) // whole.bytes))
            timer = sk.Timer(world, options.iters or iters, options.replays)
            try:
                for case in (whole, part):
                    agreed(world, case.make)
            except Refused as reason:
                measured = [(None, f"refused: {reason}")] * len(contenders)
            else:
                pairs = list(zip(cases, contenders, strict=True))
                measured = measure_all(
                    world, timer, pairs, lambda i, name=name: step(f"{name}, {contenders[i].method}")
                )
            for contender, (us, note) in zip(contenders, measured, strict=True):
                rate = us and whole.bytes / us * 1e-3
                results.add(OP, contender.method, whole.bytes, us, note=note, shape=name, bus_GBps=rate)
    for contender in contenders:
        contender.close()
