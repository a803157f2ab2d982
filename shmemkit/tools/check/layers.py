"""The other operations as subjects: products, layers of experts, attention, rows, queues, barriers.

Products are of -1, 0 and 1: sums of so few are exact in every dtype. What has an exponential or a root is
compared with float64, within the tolerance that the subject says.
"""

from __future__ import annotations

import functools
import math
import operator

import numpy as np

import shmemkit as sk

from .subjects import Subject, span_of

NEAR = {"bfloat16": 1 / 64, "float16": 1 / 256, "float32": 1e-4}  # of a result that is no integer


class Simple(Subject):
    """A subclass has `shapes` and `out_shapes`, of all arrays, and `span`: how many different numbers, and
    the least. Without, they are -1, 0 and 1."""

    shapes: tuple
    out_shapes: tuple
    span = 3, -1

    def given(self, call, rank):
        (span, low), integers = self.span, self.arrays.integers
        return [
            integers(shape, span, call, rank + 9 * k, low, span == 3) for k, shape in enumerate(self.shapes)
        ]

    def outputs(self):
        shapes = zip(self.out_shapes, self.out_dtypes, strict=True)
        return [self.arrays.empty(*each, self.first) for each in shapes]

    def float64(self, *arrays):
        return [x.astype("float64") for x in arrays]


class OfProduct(Simple):
    slow = True

    def __init__(self, world, arrays, call, sizes, dtype):
        super().__init__(world, arrays)
        self.call, (m, k, n) = call, sizes
        self.shapes, self.out_shapes = ((m, k), (n, k)), ((m, n),)
        self.dtypes, self.out_dtypes, self.name = (dtype, dtype), (dtype,), f"{m} x {k} x {n}"

    def enqueue(self, inputs, outputs):
        a, b = inputs
        self.call(a, b.T, *outputs)

    def products(self, given):
        return [a @ b.T for a, b in (self.float64(*each) for each in given)]


class Product(OfProduct):
    """Of this rank alone."""

    def result(self, given):
        return self.products(given[self.me : self.me + 1])


class Float8Product(Product):
    """Scales are powers of two."""

    def __init__(self, world, arrays, call, sizes, dtype):
        super().__init__(world, arrays, call, sizes, dtype)
        (m, k, n), self.out_dtypes = sizes, ("bfloat16",)
        xp, of_k, of_n = self.xp, -(-k // 128), -(-n // 128)
        self.scales = [xp.full((m, of_k), 2, "float32"), xp.full((of_n, of_k), 0.5, "float32")]

    def enqueue(self, inputs, outputs):
        a, b = inputs
        self.call(a, b.T, *outputs, scales=(self.scales[0], self.scales[1].T))


class SummedProduct(OfProduct):
    """Over the ranks, each of which has a slice of K. `scatter`: a rank gets its rows."""

    def __init__(self, world, arrays, call, sizes, dtype, scatter):
        super().__init__(world, arrays, call, sizes, dtype)
        self.scatter, (m, n) = scatter, self.out_shapes[0]
        self.rows = m // self.n if scatter else m
        self.out_shapes = ((self.rows, n),)

    def result(self, given):
        total = functools.reduce(operator.add, self.products(given))
        return [total[self.me * self.rows :][: self.rows] if self.scatter else total]


class GatheredProduct(OfProduct):
    """(m, k) rows of each rank."""

    def __init__(self, world, arrays, call, sizes, dtype):
        super().__init__(world, arrays, call, sizes, dtype)
        m, _, n = sizes
        self.out_shapes = ((self.n * m, n),)

    def result(self, given):
        x = self.xp.concatenate([a for a, _ in given])
        x, b = self.float64(x, given[self.me][1])
        return [x @ b.T]


class Experts(Simple):
    """Rows of experts: ids that the ranks share are those of rank 0."""

    slow = True

    def __init__(self, world, arrays, call, sizes, dtype):
        super().__init__(world, arrays)
        self.call, (self.m, self.k, self.width, self.experts, self.topk) = call, sizes
        self.name = f"{self.m} tokens, {self.k} x {self.width}, {self.experts} experts"

    def ids(self, tokens, call):
        """-1 stands for none. All of a token differ."""
        first = self.arrays.integers((tokens, 1), self.experts, call, 0)
        step = self.xp.arange(self.topk, dtype="int32")
        ids = (first + step) % self.experts
        ids[:: max(3, tokens // 3), -1] = -1
        return ids

    def multiplied(self, x, w, ids):
        """-> x[pair] @ w[its expert].T, and whether it has one."""
        ids = ids.reshape(-1)
        out = self.xp.zeros((ids.size, w.shape[1]), "float64")
        for e in range(self.experts):
            out = out + (ids == e)[:, None] * (x @ w[e].T)
        return out, self.xp.broadcast_to((ids >= 0)[:, None], out.shape)


class Grouped(Experts):
    def __init__(self, world, arrays, call, sizes, dtype):
        super().__init__(world, arrays, call, sizes, dtype)
        self.shapes = (self.m, self.k), (self.experts, self.width, self.k)
        self.dtypes, self.out_dtypes = (dtype, dtype, "int32"), (dtype,)
        self.out_shapes = ((self.m, self.width),)

    def given(self, call, rank):
        counts = self.arrays.integers((self.experts,), self.m // self.experts, call, rank)
        return [*super().given(call, rank), counts]

    def result(self, given):
        x, w, counts = self.float64(*given[self.me])
        ends = self.xp.cumsum(counts)
        ids = (self.xp.arange(self.m)[:, None] >= ends).sum(axis=1)
        out, _ = self.multiplied(x, w, ids)
        return [(out, self.xp.broadcast_to((ids < self.experts)[:, None], out.shape))]

    def enqueue(self, inputs, outputs):
        self.call(*inputs, *outputs)


class GatheredExperts(Experts):
    """`indexed`: by an ExpertIndex."""

    def __init__(self, world, arrays, call, sizes, dtype, indexed=False):
        super().__init__(world, arrays, call, sizes, dtype)
        self.tokens, self.indexed = self.n * self.m, indexed
        self.shapes = (self.m, self.k), (self.experts, self.width, self.k)
        self.dtypes, self.out_dtypes = (dtype, dtype, "int32"), (dtype,)
        self.out_shapes, self.indexes = ((self.tokens * self.topk, self.width),), {}

    def given(self, call, rank):
        return [*super().given(call, rank), self.ids(self.tokens, call)]

    def result(self, given):
        ids, w = given[0][2], given[self.me][1].astype("float64")
        x = self.xp.concatenate([x for x, _, _ in given]).astype("float64")
        return [self.multiplied(self.xp.repeat(x, self.topk, axis=0), w, ids)]

    def enqueue(self, inputs, outputs):
        x, w, ids = inputs
        if self.indexed:
            key = self.world.backend.address(ids)
            if key not in self.indexes:
                self.indexes[key] = sk.ExpertIndex(self.world, ids, self.experts)
            ids = self.indexes[key]
            ids.update()
        self.call(x, w, ids, *outputs)


class SummedExperts(Experts):
    def __init__(self, world, arrays, call, sizes, dtype):
        super().__init__(world, arrays, call, sizes, dtype)
        self.tokens = self.n * self.m
        self.shapes = (self.tokens * self.topk, self.k), (self.experts, self.width, self.k)
        self.dtypes, self.out_dtypes = (dtype, dtype, "int32", "float32"), (dtype,)
        self.out_shapes = ((self.m, self.width),)

    def given(self, call, rank):
        weights = self.arrays.integers((self.tokens, self.topk), 2, call, 0, 1)
        return [*super().given(call, rank), self.ids(self.tokens, call), weights]

    def result(self, given):
        ids, weights = given[0][2], given[0][3].reshape(-1, 1)
        of_ranks = [self.float64(x, w) for x, w, _, _ in given]
        each = [self.multiplied(x, w, ids)[0] for x, w in of_ranks]
        out = functools.reduce(operator.add, each) * weights
        out = out.reshape(self.tokens, self.topk, self.width).sum(axis=1)
        return [out[self.me * self.m :][: self.m]]

    def enqueue(self, inputs, outputs):
        self.call(*inputs, *outputs)


class Dispatched(Experts):
    """ExpertParallel, there and back, by experts that change nothing: what each expert receives, how much,
    and what comes back; with max_rows, the weights of the rows, too."""

    span = 61, -30

    def __init__(self, world, arrays, call, sizes, dtype):
        super().__init__(world, arrays, call, sizes, dtype)
        self.ep, self.ragged = call, call.max_rows is not None
        self.local, self.capacity = call.n_local_experts, call.capacity
        self.shapes, self.dtypes = ((self.m, self.k),), (dtype, "int32", "float32")
        room = (self.capacity,) if self.ragged else (self.local, self.capacity)
        self.out_shapes = (self.m, self.k), (self.local,), (*room, self.k)
        self.out_dtypes = dtype, "int32", dtype
        if self.ragged:
            self.out_shapes, self.out_dtypes = (
                (*self.out_shapes, (self.m, self.topk)),
                (*self.out_dtypes, "float32"),
            )

    def given(self, call, rank):
        first = self.arrays.integers((self.m, 1), self.experts, call, rank)
        ids = (first + self.xp.arange(self.topk, dtype="int32")) % self.experts
        ids[0, -1] = -1
        return [*super().given(call, rank), ids, self.arrays.integers(ids.shape, 2, call, rank, 1)]

    def result(self, given):
        host, xp = self.world.asnumpy, self.xp
        given = [[host(x) for x in each] for each in given]
        x, ids, weights = given[self.me]
        back = x * (weights * (ids >= 0)).sum(axis=1)[:, None]
        rows, counts = np.zeros(self.out_shapes[2], "int32"), []
        for e in range(self.me * self.local, (self.me + 1) * self.local):
            found = np.concatenate([x[(ids == e).any(axis=1)] for x, ids, _ in given])
            at = rows[sum(counts) :] if self.ragged else rows[e - self.me * self.local]
            at[: len(found)] = found
            counts.append(len(found))
        if self.ragged:
            valid = np.arange(self.capacity) < sum(counts)
        else:
            valid = np.arange(self.capacity) < np.array(counts)[:, None]
        valid = np.broadcast_to(valid[..., None], rows.shape)
        found = xp.asarray(back), xp.asarray(np.array(counts)), (xp.asarray(rows), xp.asarray(valid))
        return [*found, xp.asarray(weights * (ids >= 0))][: len(self.out_shapes)]

    def enqueue(self, inputs, outputs):
        out, counts, rows, *weights = outputs
        received = self.ep.dispatch(*inputs)
        self.copy(counts, received.counts)
        self.copy(rows, received.rows)
        if self.ragged:
            self.ep.combine_weights(received.weights, *weights)
        self.ep.combine(received.rows, out)


class Rows(Simple):
    """AllReduceRMSNorm; "in place" behind the sizes: out is x, and new_residual the residual."""

    eps = 1e-6

    def __init__(self, world, arrays, call, sizes, dtype):
        super().__init__(world, arrays)
        self.call, (tokens, hidden, *self.in_place) = call, sizes
        self.shapes = (tokens, hidden), (tokens, hidden), (hidden,)
        self.name = ", ".join((f"{tokens} x {hidden}", *self.in_place))
        self.dtypes, self.out_dtypes, self.out_shapes = (dtype,) * 3, (dtype,) * 2, self.shapes[:2]
        most = 200 // (self.n + 1)
        self.span, self.tolerance = (2 * most + 1, -most), (NEAR[dtype], 0)

    def given(self, call, rank):
        x, _, _ = super().given(call, rank)
        return [x, *super().given(call, 0)[1:]]  # the residual and the weight are those of all ranks

    def result(self, given):
        _, residual, weight = given[0]
        residual = residual + sum(x for x, _, _ in given)
        mean = (residual.astype("float64") ** 2).mean(axis=1, keepdims=True)
        return [residual / self.xp.sqrt(mean + self.eps) * weight, residual]

    def enqueue(self, inputs, outputs):
        if self.in_place:
            for dst, src in zip(outputs, inputs, strict=False):
                self.copy(dst, src)
            inputs = [*outputs, inputs[2]]
        self.call(*inputs, self.eps, *outputs)


class Attention(Simple):
    """AttentionCombine. `lse` is the same everywhere, so ranks have equal weights."""

    span = 201, -100

    def __init__(self, world, arrays, call, sizes, dtype, form):
        super().__init__(world, arrays)
        self.call, self.form, (batch, heads, dim) = call, form, sizes
        self.own = heads if form == "all_gather" else heads // self.n
        self.shapes, self.dtypes = ((batch, heads, dim),), (dtype, "float32")
        self.out_shapes, self.out_dtypes = ((batch, self.own, dim),), (dtype,)
        self.tolerance, self.name = (NEAR[dtype],), f"{batch} x {heads} x {dim}"

    def given(self, call, rank):
        lse = self.arrays.integers(self.shapes[0][:2], 3, call, rank)
        return [*super().given(call, rank), lse]

    def result(self, given):
        weights = [self.xp.exp(lse.astype("float64"))[..., None] for _, lse in given]
        parts = [w * partial for w, (partial, _) in zip(weights, given, strict=True)]
        out = functools.reduce(operator.add, parts) / functools.reduce(operator.add, weights)
        first = 0 if self.form == "all_gather" else self.me * self.own
        return [out[:, first : first + self.own]]

    def enqueue(self, inputs, outputs):
        self.call(*inputs, out=outputs[0])


class Decode(Simple):
    """FlashDecode."""

    span, slow = (5, -2), True

    def __init__(self, world, arrays, call, sizes, dtype, form):
        super().__init__(world, arrays)
        self.call, self.form, (batch, tokens, heads, group, dim) = call, form, sizes
        self.group, self.own = group, heads * group if form == "all_gather" else heads * group // self.n
        self.shapes = (batch, heads * group, dim), (batch, tokens, heads, dim), (batch, tokens, heads, dim)
        self.dtypes = dtype, dtype, dtype, "int32"
        self.out_shapes, self.out_dtypes = ((batch, self.own, dim),), (dtype,)
        self.tolerance, self.name = (NEAR[dtype],), f"{batch} x {tokens} tokens, {heads * group} heads"

    def given(self, call, rank):
        _, k, v = super().given(call, rank)
        tokens = k.shape[1]
        lengths = tokens - self.arrays.integers(k.shape[:1], min(tokens, 7), call, rank)
        return [super().given(call, 0)[0], k, v, lengths]

    def result(self, given):
        xp, q = self.xp, given[0][0].astype("float64")
        scores, values = [], []
        for _, k, v, lengths in given:
            k, v = (xp.repeat(x.astype("float64"), self.group, axis=2) for x in (k, v))
            score = xp.einsum("bhd,bthd->bth", q, k) / math.sqrt(q.shape[2])
            late = xp.arange(k.shape[1])[None, :, None] >= lengths[:, None, None]
            scores.append(xp.where(late, -np.inf, score))
            values.append(v)
        scores, values = xp.concatenate(scores, axis=1), xp.concatenate(values, axis=1)
        weights = xp.exp(scores - scores.max(axis=1, keepdims=True))
        out = xp.einsum("bth,bthd->bhd", weights / weights.sum(axis=1, keepdims=True), values)
        first = 0 if self.form == "all_gather" else self.me * self.own
        return [out[:, first : first + self.own]]

    def enqueue(self, inputs, outputs):
        self.call(*inputs, out=outputs[0])


class Queued(Simple):
    """Queue, to the next rank."""

    def __init__(self, world, arrays, call, sizes, dtype):
        super().__init__(world, arrays)
        self.call, self.name = call, f"{sizes[0]} items of {sizes[1]}"
        self.shapes = self.out_shapes = (sizes,)
        self.dtypes = self.out_dtypes = (dtype,)
        self.span = span_of(dtype), 0

    def result(self, given):
        return given[self.call.sender]

    def enqueue(self, inputs, outputs):
        self.call(*inputs, *outputs)


class Splits(Simple):
    """AllToAllV of rows whose numbers differ; "unaligned" may stand behind the sizes."""

    def __init__(self, world, arrays, call, sizes, dtype):
        super().__init__(world, arrays)
        self.call, (most, width, *unaligned) = call, sizes
        self.most, self.first = most, len(unaligned)
        self.name = ", ".join((f"{most} rows of {width} for a rank", *unaligned))
        self.shapes, self.dtypes = ((self.n * most, width),), (dtype, "int64")
        self.out_shapes, self.out_dtypes = (*self.shapes, (self.n,)), (dtype, "int64")
        self.span = span_of(dtype), 0

    def given(self, call, rank):
        return [*super().given(call, rank), self.arrays.integers((self.n,), self.most, call, rank)]

    def result(self, given):
        xp, me = self.xp, self.me
        splits = np.array([self.world.asnumpy(s) for _, s in given])
        parts = [x[s[:me].sum() : s[: me + 1].sum()] for (x, _), s in zip(given, splits, strict=True)]
        rows = xp.concatenate(parts)
        out = xp.zeros(self.shapes[0], "int32")
        out[: len(rows)] = rows
        valid = xp.broadcast_to((xp.arange(len(out)) < len(rows))[:, None], out.shape)
        return [(out, valid), xp.asarray(splits[:, me])]

    def enqueue(self, inputs, outputs):
        self.call(*inputs, *outputs)


class Met(Simple):
    """A barrier: what each rank has stored before it, all read behind it."""

    def __init__(self, world, arrays, call, board):
        super().__init__(world, arrays)
        self.call, self.board, self.shapes = call, board, ((board.size,),)
        self.theirs = [world.peer_view(board, rank) for rank in range(self.n)]
        self.dtypes, self.out_dtypes = ("int32",), ("int32",) * self.n
        self.out_shapes, self.span, self.name = self.shapes * self.n, (1000, 0), f"{board.size} elements"

    def result(self, given):
        return [x for (x,) in given]

    def enqueue(self, inputs, outputs):
        self.copy(self.board, inputs[0])
        self.call()
        for out, theirs in zip(outputs, self.theirs, strict=True):
            self.copy(out, theirs)
        self.call()
