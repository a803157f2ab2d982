"""``bench expert_parallel``: dispatch and combine of ``sk.ExpertParallel``, compared with the same by NCCL.

Each token goes to top_k different experts, all equally likely, which do nothing: what is dispatched comes
back and is added up. Three operations are timed: expert_dispatch, expert_combine, and expert_parallel, one
after the other. NCCL sends and receives; what else it takes is done by kernels: rows are put in the order of
their ranks before it, at their experts' places after it (those of ``ExpertParallel.dispatch``), and added up
at the end. Two ways:

  nccl                   a row for each expert of a token, as it is usually done
  nccl, once per rank    a row for each rank that has experts of a token; there it is copied to them, and the
                         sum of theirs comes back: what ExpertParallel does

Both know beforehand how many rows go where, and all their places, which ExpertParallel must find and tell. So
their graphs have no host in them, and send no row too many.

The rate over the busiest link counts a row once for each token and far rank that has experts of it.
"""

import functools
import itertools
from typing import Any

import numpy as np
from numba import cuda

import shmemkit as sk
from shmemkit.device import load_vec16, store_vec16
from shmemkit.device.cuda.weighted_sums import weighted_sum
from shmemkit.runtime.launch import bind
from shmemkit.runtime.symmetric_memory import as_dtype

from .cases import Checked
from .command import Command, Entry
from .measure import Contender
from .nccl import Nccl
from .options import number
from .results import NCCL, NCCL_ONCE

OPS = ("expert_dispatch", "expert_combine", "expert_parallel")


class Data:
    """The tokens of all ranks, which all know: small whole numbers, whose sums every dtype holds exactly."""

    def __init__(self, world, options):
        n, tokens = world.n_ranks, options.tokens
        self.world, self.dtype, self.hidden = world, as_dtype(options.dtype), options.hidden
        self.tokens, self.n_experts, self.top_k = tokens, options.experts, options.top_k
        if self.n_experts % n:
            raise SystemExit(
                f"--experts is {self.n_experts}; it must be a multiple of {n}, the number of ranks"
            )
        if self.top_k > self.n_experts:
            raise SystemExit(
                f"--top-k is {self.top_k}; it must be 1 to {self.n_experts}, the number of experts"
            )
        if self.hidden * self.dtype.itemsize % 16:
            raise SystemExit(f"--hidden is {self.hidden}; its rows must have a multiple of 16 bytes")
        self.n_local, self.capacity, self.max_rows = self.n_experts // n, n * tokens, options.max_rows
        rng = np.random.default_rng(0)
        self.x = rng.integers(1, 3, (n, tokens, self.hidden), "int8")
        self.weights = rng.integers(1, 3, (n, tokens, self.top_k)).astype("float32")
        self.experts = rng.random((n, tokens, self.n_experts)).argsort(axis=2)[..., : self.top_k]
        most = np.bincount(self.experts.ravel() // self.n_local, minlength=n).max()
        if self.max_rows is not None and most > self.max_rows:
            raise SystemExit(f"--max-rows is {self.max_rows}; a rank receives {most} rows here. Give more")

    @property
    def far_bytes(self):
        """Of a row for each far rank that has experts of a token: what the busiest rank sends or receives."""
        owners, n = self.experts // self.n_local, self.world.n_ranks
        to = np.array([[(owners[k] == d).any(axis=1).sum() for d in range(n)] for k in range(n)])
        np.fill_diagonal(to, 0)
        return int(max(to.sum(axis=0).max(), to.sum(axis=1).max())) * self.hidden * self.dtype.itemsize

    @functools.cached_property
    def places(self):
        """{(rank, token, expert): its row, of all that the expert's rank has}, as of ExpertParallel."""
        found, after = {}, 0
        for expert in range(self.n_experts):
            first = expert % self.n_local * self.capacity
            if self.max_rows is not None:
                first = after if expert % self.n_local else 0
            some = np.argwhere((self.experts == expert).any(axis=2)).tolist()
            for i, (rank, t) in enumerate(some):
                found[rank, t, expert] = first + i
            after = first + len(some)
        return found

    def rows_from(self, source, target, once):
        """[(token, [(j, expert), ...]), ...]: what goes from a rank to another, and to which experts."""
        pairs = [
            (t, j, expert)
            for t, of_token in enumerate(self.experts[source].tolist())
            for j, expert in enumerate(of_token)
            if expert // self.n_local == target
        ]
        if not once:
            return [(t, [(j, expert)]) for t, j, expert in sorted(pairs, key=lambda pair: pair[::-2])]
        return [
            (t, [pair[1:] for pair in of_token])
            for t, of_token in itertools.groupby(pairs, key=lambda pair: pair[0])
        ]


class ExpertCase(Checked):
    """One of OPS; `y`: what the experts give back."""

    signs, iters = ("x", "y", "_expected"), 20

    def __init__(self, op, data):
        self.op, self.data, self.world, self.dtype = op, data, data.world, data.dtype
        self.bytes = data.tokens * data.top_k * data.hidden * data.dtype.itemsize

    def make(self):
        data, xp, me = self.data, self.world.xp, self.world.rank
        here = {place: key for key, place in data.places.items() if key[2] // data.n_local == me}
        rows = np.zeros((data.max_rows or data.n_local * data.capacity, data.hidden), self.dtype)
        for place, (rank, t, expert) in here.items():
            rows[place] = data.x[rank, t] * (1 + expert % 2)
        self.y = xp.asarray(rows)
        self.x = xp.asarray(data.x[me].astype(self.dtype))
        self.experts = xp.asarray(data.experts[me].astype("int32"))
        self.weights = xp.asarray(data.weights[me])
        self._at = None
        if self.op == "expert_dispatch":
            self._at = xp.asarray(np.array(sorted(here), "int64"))
            wanted = np.array([data.x[here[place][:2]] for place in sorted(here)])
            wanted = wanted.reshape(-1, data.hidden)
        else:
            factor = 1 + data.experts[me] % 2 if self.op == "expert_combine" else 1
            wanted = (data.weights[me] * factor).sum(axis=1)[:, None] * data.x[me]
        self._expected = xp.asarray(wanted.astype(self.dtype))
        self.expected = self._expected.view("uint8")

    @property
    def text(self):
        return self.op

    @property
    def result(self):
        """The shape of all that the experts here get, or of this rank's tokens."""
        return self.y.shape if self.op == "expert_dispatch" else self.x.shape

    def rates(self, us, entry):
        trips = 2 if self.op == "expert_parallel" else 1
        return {"bus_GBps": trips * self.data.far_bytes / us / 1e3 or None}

    def _found(self, out):
        out = out.reshape(-1, self.data.hidden).view("uint8")
        count = int(((out if self._at is None else out[self._at]) != self.expected).any(axis=1).sum())
        return f"wrong: on rank {self.world.rank} {count} of {len(self.expected)} rows" if count else ""


class Ours(Contender):
    """``sk.ExpertParallel``."""

    method = "ExpertParallel"
    _object: Any = None

    def start(self, case):
        data = case.data
        self._case, shape = case, (data.tokens, data.hidden, data.n_experts, data.top_k)
        bound = {} if data.max_rows is None else {"max_rows": data.max_rows}
        self._object = ep = sk.ExpertParallel(self.world, *shape, case.dtype, **bound)
        self._y = ep.received.rows
        if case.op == "expert_combine":
            self._y = case.y.reshape(self._y.shape)
            ep.dispatch(case.x, case.experts, case.weights)
        self.out = ep.received.rows if case.op == "expert_dispatch" else case.output()

    def call(self):
        case, ep = self._case, self._object
        if case.op != "expert_combine":
            ep.dispatch(case.x, case.experts, case.weights)
        if case.op != "expert_dispatch":
            ep.combine(self._y, self.out)

    def stop(self):
        super().stop()
        if self._object is not None:
            self._object.free()
        self._object = self._y = None


class ByNccl(Nccl):
    """By NCCL and kernels; with `once`, a row for each rank."""

    def __init__(self, world, once, path):
        super().__init__(world, path=path)
        self.once, self.method = once, NCCL_ONCE if once else NCCL

    def start(self, case):
        super().start(case)
        self._run = Steps(case, self.out, self.once, self._exchange)

    def call(self):
        self._run()

    def _exchange(self, rows, counts, out, out_counts):
        size = rows.itemsize * rows.shape[1]
        self._comm.exchange(parts(rows.data.ptr, counts, size), parts(out.data.ptr, out_counts, size))


def parts(address, counts, size):
    """-> [(address, bytes, rank), ...] of counts[rank] rows of `size` bytes, one rank's after the other's"""
    ends = itertools.accumulate(counts)
    return [
        (address + (end - count) * size, count * size, rank)
        for rank, (count, end) in enumerate(zip(counts, ends, strict=True))
        if count
    ]


class Steps:
    """What a case takes, with an all-to-all of rows; called, it enqueues that.

    exchange  (rows, counts, out, out_counts): sends counts[k] of `rows` to rank k, those of rank 0 first, and
              receives out_counts[k] from there in `out`, likewise
    threads   of each block of its kernels, which is for a row
    """

    def __init__(self, case, out, once, exchange, threads=256):
        self._threads = threads
        data, xp, me, ranks = case.data, case.world.xp, case.world.rank, range(case.world.n_ranks)
        self._xp, self._kernel, self._steps = xp, row_sums(case.dtype.name), []
        to_ranks = [data.rows_from(me, k, once) for k in ranks]
        from_ranks = [data.rows_from(k, me, once) for k in ranks]
        counts, came_counts = list(map(len, to_ranks)), list(map(len, from_ranks))
        sent, came = (xp.empty((max(1, sum(c)), data.hidden), case.dtype) for c in (counts, came_counts))
        rows = xp.empty_like(case.y) if case.op == "expert_parallel" else case.y
        places = [  # of each row that came: (its place at an expert, its weight) of all its experts
            [(data.places[k, t, expert], data.weights[k, t, j] if once else 1) for j, expert in pairs]
            for k in ranks
            for t, pairs in from_ranks[k]
        ]
        tokens = [t for part in to_ranks for t, _ in part]  # of each row that is sent
        if case.op != "expert_combine":
            rows = out if case.op == "expert_dispatch" else rows
            placed = [(place, i) for i, of_row in enumerate(places) for place, _ in of_row]
            self._sums(sent, range(len(tokens)), case.x, [[(t, 1)] for t in tokens])
            self._steps.append(functools.partial(exchange, sent, counts, came, came_counts))
            self._sums(rows, [place for place, _ in placed], came, [[(i, 1)] for _, i in placed])
        if case.op != "expert_dispatch":
            parts = [[] for _ in range(data.tokens)]  # of each token: (row that comes back, its weight)
            for i, (t, pairs) in enumerate(itertools.chain(*to_ranks)):
                parts[t].append((i, 1 if once else data.weights[me, t, pairs[0][0]]))
            self._sums(came, range(len(places)), rows, places)
            self._steps.append(functools.partial(exchange, came, came_counts, sent, counts))
            self._sums(out, range(data.tokens), sent, parts)

    def _sums(self, out, to, rows, terms):
        """out[to[i]] = the sum of weight * rows[at], over the (at, weight) of terms[i]"""
        if not terms:
            return
        at = np.full((len(terms), max(map(len, terms))), -1, "int32")
        weights = np.zeros(at.shape, "float32")
        for i, of_row in enumerate(terms):
            at[i, : len(of_row)], weights[i, : len(of_row)] = zip(*of_row, strict=True)
        tables = map(self._xp.asarray, (np.array(to, "int32"), at, weights))
        args = out.view("uint8"), rows.view("uint8"), *tables
        self._steps.append(bind(self._kernel, len(terms), self._threads, args))

    def __call__(self):
        for step in self._steps:
            step()


@functools.cache
def row_sums(dtype):
    """-> a kernel: out[to[i]] = the sum of weights[i, j] * rows[at[i, j]], up to the first at[i, j] below 0;
    a block for each i. Rows are uint8, the bytes of `dtype`."""
    zero, add, result = weighted_sum(dtype)

    @cuda.jit
    def kernel(out, rows, to, at, weights):
        i, w = cuda.blockIdx.x, 16 * cuda.threadIdx.x
        while w < out.shape[1]:
            total, j = zero(), 0
            while j < at.shape[1] and at[i, j] >= 0:
                total = add(total, load_vec16(rows[at[i, j]], w), weights[i, j])
                j += 1
            store_vec16(out[to[i]], w, result(total))
            w += 16 * cuda.blockDim.x

    return kernel


def plan(world, options):
    contenders = [ByNccl(world, peer == "nccl_once", options.nccl) for peer in options.vs] + [Ours(world)]
    data = Data(world, options)
    return [Entry(contender) for contender in contenders], [{None: ExpertCase(op, data)} for op in OPS]


_rows = "rows that a rank receives at most, in one buffer: for a prefill; default: a place for each row"
COMMANDS = [
    Command(
        "expert_parallel",
        "dispatch and combine of ExpertParallel, and by NCCL",
        plan,
        together=False,
        limited=True,
        dtypes=("bfloat16", "float16", "float32"),
        peers={NCCL: "a row for each expert of a token", "nccl_once": "for each rank"},
        options=[
            ("--tokens", number("tokens of each rank", 128)),
            ("--hidden", number("elements of a token", 7168)),
            ("--experts", number("experts of all ranks", 32)),
            ("--top-k", number("experts of a token", 8)),
            ("--max-rows", number(_rows)),
        ],
        emulated={"tokens": 4, "hidden": 64, "experts": 8, "top_k": 2},
    )
]
