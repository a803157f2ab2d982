"""Expert parallelism of many tokens, as in a prefill or in training: rows in one buffer without gaps.

  plan.py      how many tokens go where, and so where each row goes
  dispatch.py  rows go there
  combine.py   and come back
  weights.py   gradients of the weights come back

Calls bind several kernels, which run one after another on the stream.
"""

from shmemkit.operations.method import Method

from ..calls import words_of
from ..routing import divide_blocks, reciprocal_of
from . import combine, dispatch
from .plan import PLANNERS, copy_routes, meet, report_address, route_tokens
from .weights import send_weights, take_weights

THREADS = 512  # with 64 registers each, two blocks fit on a multiprocessor
MEETING = 256  # threads of the block that meets other ranks: it fits beside such a block
MOVERS = 32  # blocks that copy routes, or move weights


class Ragged(Method):
    """Launches the kernels, and owns their memory.

    rows, scales, weights, counts   as of ``ExpertParallel.dispatch``
    local, shared                   int32, 1-D: what the last dispatch has agreed on, here and in symmetric
                                    memory; all that a cached dispatch, or combine, needs
    """

    threads = THREADS

    def prepare(self, sizes):
        world, n, xp = self.world, self.world.n_ranks, self.world.xp
        world.check_reach("expert_parallel", nvlink=True)
        most, topk, n_experts, group = sizes.max_tokens, sizes.topk, n * sizes.n_local, self.threads // 32
        n_groups = -(-most // group)
        self.sending = divide_blocks(self, dispatch.SENDING, n_groups, n * n_groups, 1)
        self.summing = self.within(min(n * n_groups, world.backend.multiprocessors))
        self.planners = self.within(max(1, min(PLANNERS, most // 4)))
        self.movers = self.within(min(MOVERS, -(-n * most * topk // self.threads)))
        self.sizes, max_rows, self.reciprocal = sizes, sizes.max_rows, reciprocal_of(sizes.n_local)
        n_pairs, out_words = most * topk, sizes.hidden * sizes.dtype.itemsize // 16

        def named(what):
            return f"expert_parallel.{what}"

        self.rows = self.empty((max_rows, sizes.hidden), sizes.dispatch_dtype, named("rows"))
        n_scales = max_rows * sizes.n_scales
        self.scales = self.empty((max(1, n_scales),), "float32", named("scales"))[:n_scales]
        self.shared = self.zeros((2 * n * n_pairs,), "int32", named("routes"))
        self.returned = self.zeros((n_pairs,), "float32", named("weights"))
        self.sums = self.empty((n * most * out_words,), "complex128", named("sums"))
        self.full = self.zeros((n * most,), "uint64", named("full"))
        self.all_counts = self.zeros((2 * n * (n_experts + 1),), "int32", named("counts"))
        self.met = self.zeros((n,), "uint64", named("met"))
        lengths = n_pairs, n_pairs, self.planners * n_experts, n_experts, n, sizes.n_local
        self.local = xp.zeros(sum(lengths), "int32")
        parts, at = [], 0
        for length in lengths:
            parts.append(self.local[at : at + length])
            at += length
        self.codes, shares, self.base, self.place, self.tokens, self.counts = parts
        self.shares = shares.view("float32")
        self.routes, self.factors = self.shared[: n * n_pairs], self.shared[n * n_pairs :].view("float32")
        self.weights, self.epochs = xp.empty(max_rows, "float32"), xp.zeros(1, "uint64")
        self.ones = xp.ones((most, topk), "float32")
        self.report = 0 if world.backend.name == "emulator" else report_address()
        self.kernel = combine.combine_kernel(sizes.dtype.name)
        nothing = xp.empty(0, "complex128")
        for dtype in ("int32", "int64"):
            self.bind_routing(xp.empty((0, topk), dtype), xp.empty((0, topk), "float32"))
        self.bind_meeting()
        self.bind_copy(self.local, self.shared, self.local, self.shared)
        self.bind_rows(0, nothing, xp.empty((0, sizes.n_scales), "uint32"))
        self.bind_sums(nothing, nothing, True)
        self.bind_weights(self.weights, xp.empty((0, topk), "float32"))

    def per_block(self, tokens):
        """Tokens of a block that routes, where the rank has so many."""
        return max(1, -(-tokens // self.planners))

    def bind_dispatch(self, x, scales, topk_ids=None, weights=None):
        """-> run(stream): send rows, of words; without topk_ids, where those of the last dispatch went"""
        agree = self.bind_meeting() if topk_ids is None else self.bind_routing(topk_ids, weights)
        return one_after_another(agree, self.bind_rows(scales.shape[0], x, scales))

    def bind_combine(self, y, out, weighted=True):
        """-> run(stream): bring the sums of rows, of words, back"""
        return one_after_another(self.bind_meeting(), self.bind_sums(y, out, weighted))

    def bind_routing(self, topk_ids, weights):
        """-> run(stream): all ranks agree on where rows go"""
        tokens, topk = topk_ids.shape
        n_experts, per_block = self.place.size, self.per_block(tokens)
        args = topk_ids.reshape(-1), weights.reshape(-1), topk, n_experts, per_block
        args = *args, self.codes, self.shares, self.base
        route = self.launch(route_tokens, self.planners, *args, pdl=True)
        return one_after_another(route, self.bind_meeting(True, tokens))

    def bind_meeting(self, routed=False, tokens=0):
        """-> run(stream): all ranks have come so far"""
        args = int(routed), tokens, self.sizes.max_tokens, self.sizes.max_rows
        args = *args, self.base, self.place, self.tokens, self.counts
        args = *args, self.all_counts, self.met, self.epochs, self.report
        return self.launch(meet, 1, *args, pdl=True, threads=min(MEETING, self.threads))

    def bind_copy(self, *arrays):
        """local, shared, to_local, to_shared -> run(stream)"""
        return self.launch(copy_routes, self.movers, *arrays, pdl=True)

    def bind_weights(self, values, out):
        """-> run(stream): bring a number of each row back to the pairs of this rank's tokens"""
        args = values, self.sizes.topk, self.tokens, self.routes, self.returned
        send = self.launch(send_weights, self.movers, *args, pdl=True)
        args = out.reshape(-1), self.codes, self.place, self.returned
        take, agree = self.launch(take_weights, self.movers, *args, pdl=True), self.bind_meeting()

        def run(stream):
            agree(stream)
            send(stream)
            agree(stream)
            take(stream)

        return run

    def bind_rows(self, tokens, x, scales):
        """-> run(stream): send the rows of so many tokens"""
        sizes, rows = self.sizes, words_of(self.rows)
        args = x, scales.reshape(-1), rows, self.scales.view("uint32"), self.weights
        args = *args, sizes.row // 16, sizes.n_scales, sizes.topk, sizes.max_tokens
        senders, blocks = self.sending
        args = *args, self.per_block(tokens), self.reciprocal, senders
        args = *args, self.codes, self.shares, self.base, self.place, self.tokens
        args = *args, self.routes, self.factors, self.full, self.epochs
        return self.launch(dispatch.send_rows, blocks, *args, pdl=True)

    def bind_sums(self, y, out, weighted):
        """-> run(stream): bring the sums back"""
        sizes = self.sizes
        words = sizes.hidden * sizes.dtype.itemsize // 16
        args = y, out, words, sizes.topk, sizes.max_tokens
        args = *args, self.per_block(out.size // words), self.reciprocal, int(weighted)
        args = *args, self.codes, self.base, self.place, self.tokens
        args = *args, self.routes, self.factors, self.sums, self.full, self.epochs
        return self.launch(self.kernel, self.summing, *args, pdl=True, shared=self.threads * combine.RING)


def one_after_another(*steps):
    def run(stream):
        for step in steps:
            step(stream)

    return run
