"""GEMM and reduce-scatter, or all-reduce, over several nodes: inside the node by the kernel of ``fused.py``,
then once across nodes, while the product for the next node is computed.

Rank (i, l) is the l-th of node i. The rows of node j are the rows of the result that its ranks get. For these
rows, the ranks of node i add their products, (i, l) for the rows of (j, l): this is node i's partial result
for (j, l). So a row crosses the network once for each node, not for each rank, and all ranks use the network
equally.

Outbox    outbox[j], on every rank (i, l): node i's partial result for (j, l), rounded to `part_dtype`; the
          network reads it, but for j = i
Inbox     inbox[buffer, j], on every rank (i, l): node j's partial result for it, in chunks, one for each
          block. Written by (j, l) only, through the network
Signals   inbox_full[j, b], on every rank: the last epoch whose chunk b of node j's partial result is here;
          set by the network only
Epochs    epochs[0], local: the epoch selects the buffer. Device-resident, so graph-safe. done[0]: blocks of
          this launch that have ended

  stream, for the nodes j = i + 1, i + 2, .., i modulo the nodes:
     product:        1. of the rows of node j, reduced among the ranks of node i; into outbox[j]
     send, block b, unless j is i:
                     2. put chunk b of outbox[j] to inbox[buffer, i] on (j, l), with inbox_full[i, b]: the
                        signal follows the data
  add up, block b:   3. block 0: quiet                  all puts of this rank have arrived
                     4. wait until inbox_full[j, b] >= epoch, for all j but i
                                                         acquire, also of the network
                     5. add chunk b of outbox[i] and of the inbox[buffer, j], in the order of the nodes, in
                        float32; round, and store it to out
                     6. the last block: add 1 to the epochs

The order is always the same, and so are the bits: that of ``fused.py`` in a node, then that of the nodes.

All runs on one stream. Between two products, a kernel only starts the puts: it ends at once, and the network
card carries the data while the next product has all multiprocessors. A kernel on another stream would find no
room beside a product, whose blocks take all shared memory. If it came first, it would keep room from blocks
that ranks wait for. (Within a host, as between logical nodes, the threads that start a put carry it out:
nothing is hidden then.) The own node comes last, so that the last partial result, too, travels while a
product is computed.

No race.

- outbox[j] is written again in the next epoch, after step 3 of this one: it has been read.
- The inbox has two buffers: the double-buffer lemma (docs/protocols.md).
- inbox_full may be one epoch ahead. Its sender has ended this epoch then; by its step 3, all its puts had
  arrived. For the same reason, no two puts with one signal are in flight at once.

No deadlock: a product waits only for the ranks of the node, which compute the products of the same nodes in
the same order. Sending waits for no rank, step 3 for the network alone. Step 4 waits for sends of others,
which come before their step 4. So all products of an epoch end, and then the epoch does.
"""

import functools

from numba import cuda

from shmemkit.collectives.all_gather import AllGather
from shmemkit.device import (
    ComparisonType,
    SignalOp,
    put_signal_nbi_block,
    quiet,
    reduction,
    signal_wait_until,
)
from shmemkit.device.cuda.combine_rows import combining
from shmemkit.device.cuda.partial_results import floats
from shmemkit.device.cuda.subarrays import span
from shmemkit.operations.method import Method
from shmemkit.runtime.symmetric_memory import as_dtype
from shmemkit.support.settings import listed

from .. import bind_product, gpu_of
from ..aligned_copies import aligned
from ..last_block import is_last_block
from ..problem import HALVES, Problem
from .methods import Fused

MAX_CHUNKS = 128  # of a partial result, each with a block, a message for each node, and a signal
LEAST = 1 << 22  # elements of the result that are worth it: not measured yet (docs/tuning.md)
SET, GE = SignalOp.SIGNAL_SET, ComparisonType.CMP_GE


@cuda.jit
def send_partial(outbox, inbox, inbox_full, epochs, room, words, chunk, j, node, n_nodes, to):
    """Step 2, to rank `to`, of node `j`.

    outbox      uint64 (n_nodes * room,), symmetric
    inbox       uint64 (2 * n_nodes * room,), symmetric
    inbox_full  uint64 (n_nodes * MAX_CHUNKS,), symmetric, zeros at first
    epochs      int64 (1,), zero at first
    room        words of a slot in these; `words` of it are used, in chunks of `chunk`, the last perhaps
                shorter
    node        this rank's node, of n_nodes
    grid        a block for each chunk; any number of threads
    """
    b = cuda.blockIdx.x
    begin = b * chunk
    size, buffer = min(chunk, words - begin), (epochs[0] + 1) & 1
    source = span(outbox, j * room + begin, size)
    there = span(inbox, (buffer * n_nodes + node) * room + begin, size)
    put_signal_nbi_block(there, source, span(inbox_full, node * MAX_CHUNKS + b, 1), epochs[0] + 1, SET, to)


def _adding_halves(dtype):
    """-> ``add(out, mine, rows, at, stride, me, n, begin, end)``: words begin to end - 1 of out are the sums
    of the `n` rows, as of ``combining``."""
    one, four = combining("sum", dtype)
    _, _, rounded = reduction("sum", dtype)

    @cuda.jit(device=True)
    def add(out, mine, rows, at, stride, me, n, begin, end):
        i, step = begin + cuda.threadIdx.x, cuda.blockDim.x
        while i + 3 * step < end:
            p, q, r, s = four(mine, rows, at, stride, me, n, i, step)
            out[i] = rounded(p, 1)
            out[i + step] = rounded(q, 1)
            out[i + 2 * step] = rounded(r, 1)
            out[i + 3 * step] = rounded(s, 1)
            i += 4 * step
        while i < end:
            out[i] = rounded(one(mine, rows, at, stride, me, n, i), 1)
            i += step

    return add


def _adding_floats(dtype):
    """-> the same of rows of float32, two words for each of out, which has an even number of them."""
    _, four = combining("sum", "float32")
    _, _, word_of = reduction("sum", "float32")
    _, _, rounded = reduction("sum", dtype)

    @cuda.jit(device=True)
    def add(out, mine, rows, at, stride, me, n, begin, end):
        i, step = begin + 2 * cuda.threadIdx.x, 2 * cuda.blockDim.x
        while i < end:
            p, q, r, s = four(mine, rows, at, stride, me, n, 2 * i, 1)
            out[i] = rounded(floats(word_of(p, 1), word_of(q, 1)), 1)
            out[i + 1] = rounded(floats(word_of(r, 1), word_of(s, 1)), 1)
            i += step

    return add


@functools.cache
def adding_kernel(dtype, part_dtype):
    """-> the kernel of steps 3 to 6 for results of `dtype`, "bfloat16" or "float16"."""
    add = (_adding_halves if part_dtype == dtype else _adding_floats)(dtype)

    @cuda.jit
    def add_partials(out, outbox, inbox, inbox_full, epochs, done, room, chunk, node, n_nodes):
        """out = the sum of all nodes' partial results for this rank.

        out     uint64, 1-D: an even number of words
        chunk   words of it that a block adds up, an even number
        done    int32 (1,), zero at first
        others  as of ``send_partial``
        """
        b, t = cuda.blockIdx.x, cuda.threadIdx.x
        epoch = epochs[0] + 1
        if b == 0 and t == 0:
            quiet()  # 3
        j = t
        while j < n_nodes:
            if j != node:
                signal_wait_until(span(inbox_full, j * MAX_CHUNKS + b, 1), GE, epoch)  # 4
            j += cuda.blockDim.x
        cuda.syncthreads()
        mine, at = span(outbox, node * room, room), (epoch & 1) * n_nodes * room
        add(out, mine, inbox, at, room, node, n_nodes, b * chunk, min((b + 1) * chunk, out.size))  # 5
        if t == 0 and is_last_block(done):  # all have read the counter
            epochs[0] = epoch  # 6

    return add_partials


class Fused2D(Method):
    """The method "fused_2d" of ``GemmReduceScatter``. With one rank per node the products are those of
    ``Gemm``."""

    several_nodes, fused = True, None
    options = {**Fused.options, "chunk": 1 << 13}  # words that are worth a message

    def prepare(self, max_tokens, max_n, dtype, part_dtype, options=options):
        world, n_nodes, self.options = self.world, self.world.n_nodes, options
        if n_nodes == 1:
            raise ValueError("fused_2d: there is one node; it is for several. Use 'fused'")
        if dtype not in HALVES:
            raise ValueError(
                f"fused_2d: dtype is {dtype}; it is for {listed(HALVES, 'and')}. 'sequential' takes others"
            )
        self.part_dtype = as_dtype(part_dtype)
        self.width = self.part_dtype.itemsize // 2  # words of a partial result for one of the result
        if world.local_size > 1:
            sizes = -(-max_tokens // n_nodes), max_n, dtype, part_dtype
            self.fused = Fused(world, *sizes, options, world.node_ranks, sms=self.sms)
        rows = -(-max_tokens // world.n_ranks)
        self.room = -(-rows * max_n * self.part_dtype.itemsize // 128) * 16
        self.outbox = self.empty((n_nodes * self.room,), "uint64", "gemm.outbox")
        self.inbox = self.empty((2 * n_nodes * self.room,), "uint64", "gemm.inbox")
        self.inbox_full = self.zeros((n_nodes * MAX_CHUNKS,), "uint64", "gemm.inbox_full")
        self.epochs, self.done = world.xp.zeros(1, "int64"), world.xp.zeros(1, "int32")
        self.adding = adding_kernel(dtype, part_dtype)
        self._sending(2, 2, 0)
        self._adding(world.xp.empty(2, "uint64"), 2)

    def refuses(self, m, k, n):
        """-> why it does not compute that, alike on all ranks, or None"""
        n_ranks = self.world.n_ranks
        if m % n_ranks or n % 8:
            return (
                f"M is {m} and N is {n}; M must be a multiple of the number of ranks, {n_ranks}, and N a "
                "multiple of 8"
            )
        return None

    def is_for(self, m, k, n):
        """Whether it is the faster choice, for what it computes. Arrays of other sizes must be copied."""
        emulated = self.world.backend.name == "emulator"  # which takes its time
        return k % 8 == m // self.world.n_nodes % 8 == 0 and m * n >= LEAST and not emulated

    def bind(self, a, b, out):
        """-> run(stream)"""
        return aligned(self._bind, a, b, out, a.shape[0] // self.world.n_ranks, self.sms)

    def _bind(self, a, b, out):
        world, node, n_nodes = self.world, self.world.node, self.world.n_nodes
        m, n = a.shape[0], b.shape[1]
        rows, of_node, words = m // world.n_ranks, m // n_nodes, m // world.n_ranks * n // 4
        chunk = max(self.options["chunk"], -(-words // self.within(MAX_CHUNKS))) + 1 & -2
        steps = []
        for hops in range(1, n_nodes + 1):
            j = (node + hops) % n_nodes
            partial = self.outbox[j * self.room :][: words * self.width]
            partial = partial.view(self.part_dtype).reshape(rows, n)
            steps.append(self._product(a[j * of_node : (j + 1) * of_node], b, partial))
            if j != node:
                steps.append(self._sending(words, chunk, j))
        steps.append(self._adding(out.reshape(-1).view("uint64"), chunk))

        def run(stream):
            for step in steps:
                step(stream)

        return run

    def _product(self, a, b, out):
        if self.fused is not None:
            return self.fused.bind(a, b, out)
        return bind_product(Problem(a, b, out, None, None), gpu_of(self.world).limited(self.sms))

    def _sending(self, words, chunk, j):
        world, width = self.world, self.width
        to = j * world.local_size + world.local_rank
        return self.launch(
            *(send_partial, -(-words // chunk), self.outbox, self.inbox, self.inbox_full, self.epochs),
            *(self.room, width * words, width * chunk, j, world.node, world.n_nodes, to),
        )

    def _adding(self, out, chunk):
        world = self.world
        return self.launch(
            *(self.adding, -(-out.size // chunk), out, self.outbox, self.inbox, self.inbox_full),
            *(self.epochs, self.done, self.room, chunk, world.node, world.n_nodes),
        )

    def free(self):
        fused, self.fused = self.fused, None
        if fused is not None:
            fused.free()
        super().free()


class Fused2DEverywhere(Fused2D):
    """The method "fused_2d" of ``GemmAllReduce``: then an all-gather of the rows, in out."""

    gather = None

    def prepare(self, max_tokens, max_n, *others):
        self.gather = AllGather(self.world, max_tokens * max_n * 2, sms=self.sms)
        super().prepare(max_tokens, max_n, *others)

    def bind(self, a, b, out):
        rows, rank = out.shape[0] // self.world.n_ranks, self.world.rank
        mine, gather = out[rank * rows : (rank + 1) * rows], self.gather
        step = super().bind(a, b, mine)

        def run(stream):
            step(stream)
            gather(mine, out, stream=stream)

        return run

    def free(self):
        gather, self.gather = self.gather, None
        if gather is not None:
            gather.free()
        super().free()


GPU_KERNELS = {
    "send_partial": send_partial,
    "add_partials[bfloat16,bfloat16]": adding_kernel("bfloat16", "bfloat16"),
    "add_partials[float16,float32]": adding_kernel("float16", "float32"),
}
