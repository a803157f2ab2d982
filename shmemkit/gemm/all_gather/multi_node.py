"""All-gather and matrix product over several nodes: x crosses the network once for each node, while the rows
that are already here are multiplied. Inside the node, rows travel as on a single node (``sm90.py``,
``column_hooks.py``).

Rank (i, l) is the l-th of node i.

Landed    landed[j], on every rank (i, l): the x of rank (j, l), in chunks, one for each block. Written by (j,
          l) only, through the network. The network reads the rank's own x from landed[i]
Signals   landed_full[j, b], on every rank: the last epoch whose chunk b of landed[j] is here; set by the
          network only
Credits   credits[j], on every rank (i, l): the last epoch in which (j, l) has finished with this rank's x;
          set by (j, l) only
Epochs    epochs[0], local. Device-resident, so graph-safe

  stream:
     send, block b:  1. wait until credits[j] is the epoch before, for all nodes j but i
                                                         acquire, also of the network
                     2. copy chunk b of x to landed[i]; put it, with landed_full[i, b], to (j, l), for
                        j = i + 1, i + 2, .. modulo the nodes: the signal follows the data
     product:        3. of the rows of node i: among its ranks, each of which begins with its x
  and for j = i - 1, i - 2, .., i + 1, as they come:
     arrive:         4. wait until landed_full[j, b] >= epoch, for all b
                                                         acquire, also of the network
     product:        5. of the rows of node j: likewise, each begins with its landed[j]
  at the end:
     leave:          6. set credits[i] on (j, l), for all j but i; add 1 to the epochs

All runs on one stream: puts return at once, and the network card carries the data while the products have all
multiprocessors. A kernel on another stream would find no room next to them. (Within a host, as between
logical nodes, the threads that start a put carry it out: nothing is hidden then.) The copies inside the node
run concurrently with the products, as on one node.

No race: the credit lemma (docs/protocols.md). landed[j] is written again in the next epoch, after the credit
of step 6: the products and copies of (i, l), which are on the same stream, have ended. The rank writes its
own landed[i] after the credits of all others: they have received what the network read. No two messages with
one signal are in flight at once: between two signals landed_full there is a credit, and the reverse. x is
read in steps 2 and 3 only.

No deadlock: step 1 waits for step 6 of the epoch before, step 4 for step 2 of this one. A product waits only
for a barrier and copies of the node's ranks. They compute the products in the same order, each after its own
step 4.
"""

from numba import cuda

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
from shmemkit.operations.method import Method

MAX_CHUNKS = 128  # of an x, each with a block, a message for each node, and a signal
SET, GE = SignalOp.SIGNAL_SET, ComparisonType.CMP_GE


@cuda.jit
def send_rows(x, chunk, node, local_size, landed, room, landed_full, credits, epochs):
    """Steps 1 and 2.

    x            uint8, 1-D
    chunk        bytes of a chunk; the last one may be shorter
    node         this rank's; it has local_size consecutive ranks, as all nodes
    landed       uint8 (nodes * room,), symmetric
    room         bytes of a slot in it
    landed_full  uint64 (nodes * MAX_CHUNKS,), symmetric, zeros at first
    credits      uint64 (nodes,), symmetric, zeros at first
    epochs       int64 (1,), zero at first
    grid         a block for each chunk; any number of threads
    """
    b, j, n = cuda.blockIdx.x, cuda.threadIdx.x, num_ranks()
    before, begin = epochs[0], b * chunk
    while j < credits.size:
        if j != node:
            signal_wait_until(span(credits, j, 1), GE, before)
        j += cuda.blockDim.x
    cuda.syncthreads()
    mine = span(landed, node * room + begin, min(chunk, x.size - begin))
    copy_block(mine, span(x, begin, mine.size))
    signal, to = span(landed_full, node * MAX_CHUNKS + b, 1), rank()
    for _ in range(1, credits.size):
        to += local_size
        if to >= n:
            to -= n
        put_signal_nbi_block(mine, mine, signal, before + 1, SET, to)  # it begins with a barrier of the block


@cuda.jit
def await_rows(landed_full, j, chunks, epochs):
    """Step 4, for the rows of node `j`, in so many chunks.

    grid    1; any number of threads
    others  as of ``send_rows``
    """
    b, epoch = cuda.threadIdx.x, epochs[0] + 1
    while b < chunks:
        signal_wait_until(span(landed_full, j * MAX_CHUNKS + b, 1), GE, epoch)
        b += cuda.blockDim.x


@cuda.jit
def leave_rows(node, local_size, credits, epochs):
    """Step 6.

    grid    1; any number of threads
    others  as of ``send_rows``
    """
    j, epoch = cuda.threadIdx.x, epochs[0] + 1
    while j < credits.size:
        if j != node:
            signal_op(span(credits, node, 1), epoch, SET, rank() + (j - node) * local_size)
        j += cuda.blockDim.x
    cuda.syncthreads()  # all threads have read the counter
    if cuda.threadIdx.x == 0:
        epochs[0] = epoch


class Nodes(Method):
    """The exchange between nodes, for x of up to `max_nbytes` bytes. Collective."""

    options = {"chunk": 1 << 16}  # bytes that are worth a message

    def prepare(self, max_nbytes, chunk=options["chunk"]):
        n_nodes, self.chunk = self.world.n_nodes, chunk
        self.room = -(-max(max_nbytes, 1) // 128) * 128
        self.landed = self.empty((n_nodes * self.room,), "uint8", "ag_gemm.landed")
        self.landed_full = self.zeros((n_nodes * MAX_CHUNKS,), "uint64", "ag_gemm.landed_full")
        self.credits = self.zeros((n_nodes,), "uint64", "ag_gemm.credits")
        self.epochs = self.world.xp.zeros(1, "int64")
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
        world, landed_full, credits, epochs = self.world, self.landed_full, self.credits, self.epochs
        chunk = max(self.chunk, -(-x.size // self.within(MAX_CHUNKS))) + 127 & -128
        chunks, position = -(-x.size // chunk), (world.node, world.local_size)
        return (
            self.launch(
                send_rows, chunks, x, chunk, *position, self.landed, self.room, landed_full, credits, epochs
            ),
            [self.launch(await_rows, 1, landed_full, j, chunks, epochs) for j in range(world.n_nodes)],
            self.launch(leave_rows, 1, *position, credits, epochs),
        )


GPU_KERNELS = {"send_rows": send_rows, "await_rows": await_rows, "leave_rows": leave_rows}
