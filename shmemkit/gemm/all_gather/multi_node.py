"""All-gather and matrix product over several nodes: x crosses the network once for each node, behind the
products of rows that are here; in the node it goes on as on a single one (``sm90.py``, ``column_hooks.py``).

Rank (i, l) is the l-th of node i.

Landed    landed[j], on every rank (i, l): the x of rank (j, l), in chunks, one for each block. Written by
          (j, l) only, through the network; my own, landed[i], is where the network reads it
Signals   arrived[j, b], on every rank: the last call whose chunk b of landed[j] is here; set by the network
          only
          taken[j], on every rank (i, l): the last call in which (j, l) is done with my x; set by (j, l) only
Counter   calls[0], local: how many calls have ended, and so the number of a call. In device memory, so that a
          replayed graph counts on

  stream:
     send, block b:  1. wait until taken[j] is the call before, for all nodes j but i
                                                         acquire, also of the network
                     2. copy chunk b of x to landed[i]; put it, and arrived[i, b], to (j, l), for j = i + 1,
                        i + 2, .. modulo the nodes: the signal follows the data
     product:        3. of the rows of node i: among its ranks, each of which begins with its x
  and for j = i - 1, i - 2, .., i + 1, as they come:
     arrive:         4. wait until arrived[j, b] is at least the call's number, for all b
                                                         acquire, also of the network
     product:        5. of the rows of node j: likewise, each begins with its landed[j]
  at the end:
     leave:          6. set taken[i] on (j, l), for all j but i; count the call

One stream: puts return at once, and the network card carries the data while the products have all
multiprocessors. A kernel of another stream would find no room beside them. (Within a host, as between logical
nodes, the threads that ask for a put carry it out: nothing is hidden then.) The copies inside the node are
beside the products, as on one node.

No race. landed[j] is written again in the next call, after (i, l) has said in step 6 that its products and
copies have ended, which are on the same stream; so is landed[i] here, after all others have said so, and thus
have got what the network read. No two messages with one signal are under way at once: between two arrived
comes a taken, and between two taken an arrived. x is read in steps 2 and 3 only.

No deadlock: step 1 waits for step 6 of the call before, step 4 for step 2 of this one; a product waits for a
barrier and copies of the node's ranks only, which compute the products in the same order, each behind its own
step 4.
"""

from numba import cuda, types

from shmemkit.collectives.method import Method
from shmemkit.device import (
    ComparisonType,
    SignalOp,
    copy_block,
    num_ranks,
    put_signal_nbi_block,
    rank,
    signal_op,
    signal_wait_until,
)
from shmemkit.device.cuda.subarrays import span

CHUNK = 1 << 16  # bytes that are worth a message
MAX_CHUNKS = 128  # of an x, each with a block, a message for each node, and a signal
SET, GE = SignalOp.SIGNAL_SET, ComparisonType.CMP_GE


@cuda.jit
def send_rows(x, chunk, node, local_size, landed, room, arrived, taken, calls):
    """Steps 1 and 2.

    x           uint8, 1-D
    chunk       bytes of a chunk; the last one may be shorter
    node        mine; it has local_size consecutive ranks, as all nodes
    landed      uint8 (nodes * room,), symmetric
    room        bytes of a place in it
    arrived     uint64 (nodes * MAX_CHUNKS,), symmetric, zeros at first
    taken       uint64 (nodes,), symmetric, zeros at first
    calls       int64 (1,), zero at first
    grid        a block for each chunk; any number of threads
    """
    b, j, n = cuda.blockIdx.x, cuda.threadIdx.x, num_ranks()
    before, begin = calls[0], b * chunk
    while j < taken.size:
        if j != node:
            signal_wait_until(span(taken, j, 1), GE, before)
        j += cuda.blockDim.x
    cuda.syncthreads()
    mine = span(landed, node * room + begin, min(chunk, x.size - begin))
    copy_block(mine, span(x, begin, mine.size))
    signal, to = span(arrived, node * MAX_CHUNKS + b, 1), rank()
    for _ in range(1, taken.size):
        to += local_size
        if to >= n:
            to -= n
        put_signal_nbi_block(mine, mine, signal, before + 1, SET, to)  # it begins with a barrier of the block


@cuda.jit
def await_rows(arrived, j, chunks, calls):
    """Step 4, for the rows of node `j`, in so many chunks.

    grid    1; any number of threads
    others  as of ``send_rows``
    """
    b, call = cuda.threadIdx.x, calls[0] + 1
    while b < chunks:
        signal_wait_until(span(arrived, j * MAX_CHUNKS + b, 1), GE, call)
        b += cuda.blockDim.x


@cuda.jit
def leave_rows(node, local_size, taken, calls):
    """Step 6.

    grid    1; any number of threads
    others  as of ``send_rows``
    """
    j, call = cuda.threadIdx.x, calls[0] + 1
    while j < taken.size:
        if j != node:
            signal_op(span(taken, node, 1), call, SET, rank() + (j - node) * local_size)
        j += cuda.blockDim.x
    cuda.syncthreads()  # all threads have read the counter
    if cuda.threadIdx.x == 0:
        calls[0] = call


class Nodes(Method):
    """What goes between nodes, for x of up to `max_nbytes` bytes. Collective."""

    def prepare(self, max_nbytes):
        n_nodes = self.world.n_nodes
        self.room = -(-max(max_nbytes, 1) // 128) * 128
        self.landed = self.empty((n_nodes * self.room,), "uint8", "ag_gemm.landed")
        self.arrived = self.zeros((n_nodes * MAX_CHUNKS,), "uint64", "ag_gemm.arrived")
        self.taken = self.zeros((n_nodes,), "uint64", "ag_gemm.taken")
        self.calls = self.world.xp.zeros(1, "int64")
        self._steps(self.world.xp.empty(1, "uint8"))

    def bind(self, x, product_of):
        """-> run(stream), for products of these rows and those of other nodes.

        x           C-contiguous, at least one byte, of the same size on all ranks
        product_of  (j, x) -> run(stream): the product of the rows of node j, of which x are this rank's
        """
        node, n_nodes = self.world.node, self.world.n_nodes
        send, arrive, leave = self._steps(x.reshape(-1).view("uint8"))
        steps = [send, product_of(node, x)]
        for hops in range(1, n_nodes):
            j = (node - hops) % n_nodes
            landed = self.landed[j * self.room :][: x.nbytes].view(x.dtype).reshape(x.shape)
            steps += [arrive[j], product_of(j, landed)]
        steps.append(leave)

        def run(stream):
            for step in steps:
                step(stream)

        return run

    def _steps(self, x):
        """-> send, [arrive of each node], leave"""
        world, arrived, taken, calls = self.world, self.arrived, self.taken, self.calls
        chunk = max(CHUNK, -(-x.size // MAX_CHUNKS)) + 127 & -128
        chunks, place = -(-x.size // chunk), (world.node, world.local_size)
        return (
            self.launch(send_rows, chunks, x, chunk, *place, self.landed, self.room, arrived, taken, calls),
            [self.launch(await_rows, 1, arrived, j, chunks, calls) for j in range(world.n_nodes)],
            self.launch(leave_rows, 1, *place, taken, calls),
        )


_words, _number = types.Array(types.uint64, 1, "C"), types.int64
_bytes, _counter = types.Array(types.uint8, 1, "C"), types.Array(types.int64, 1, "C")
GPU_KERNELS = {
    "send_rows": (send_rows, (_bytes, *[_number] * 3, _bytes, _number, _words, _words, _counter)),
    "await_rows": (await_rows, (_words, _number, _number, _counter)),
    "leave_rows": (leave_rows, (_number, _number, _words, _counter)),
}
