"""Copy engines as a transport: copies between ranks that a side stream makes, beside the stream of a call.
Nobody stores or loads; copy engines do not wait for multiprocessors, nor kernels for copies.

A copy says nothing when it has ended: its stream goes on. So schedules order streams, and barriers of all
ranks (``runtime.stream_barrier``) tell others. Or they copy to Lamport slots: there each packet of 16 bytes
shows by itself that it has arrived (``schedules/copied.py``).

  stream:       1. barrier of all ranks: what is copied to may be written
  side stream:  2. copies to the ranks me + 1, me + 2, .. modulo the ranks, one after the other
  stream:          beside them, kernels
                3. waits for the copies: what was copied from may be written again

Each rank sends to one rank and receives from one at a time. On H200s, copies to all three peers at once, on a
stream each, took nearly twice as long; two streams to one peer took longer than one. A copy costs some 3
microseconds besides its bytes. A copy that follows a kernel on a stream, or a kernel that follows a copy,
begins 6 microseconds later: so no step waits for a part of a segment by an order of streams. A kernel on half
of the multiprocessors reaches the bandwidth of the memory and hardly slows the copies down; one on all of
them costs a tenth of their speed.

Blocks store a rank's own segment to its output: a copy would delay those to other ranks.
"""

from numba import cuda

from shmemkit.device import copy_block, span
from shmemkit.operations.method import Method


@cuda.jit
def store_segment(out, x):
    """Store x to `out`, uint8, of the same size, in other memory.

    grid  one-dimensional, as the blocks are
    """
    part = (x.size + cuda.gridDim.x - 1) // cuda.gridDim.x + 127 & -128
    begin = min(cuda.blockIdx.x * part, x.size)
    size = min(part, x.size - begin)
    copy_block(span(out, begin, size), span(x, begin, size))


class Copying(Method):
    """A method by copies. Its `barrier` is step 1; `side_streams` is made by ``prepare``.

    own_part    bytes that are worth a block that stores the own segment
    own_blocks  at most: more than keep pace with the copies
    """

    own_part, own_blocks = 1 << 16, 44

    def bind_store(self, out, x):
        """-> run(stream): store x to `out`, both 1-D and of the same size and dtype."""
        blocks = self.within(max(1, min(self.own_blocks, x.nbytes // self.own_part)))
        return self.launch(store_segment, blocks, out.view("uint8"), x.view("uint8"))

    def fork(self, stream):
        """-> handles: of `stream`, and of its side stream, which is ordered after its work so far"""
        main, side = self.world.backend.handle(stream), self.side_streams.of(stream)
        self.world.backend.order(side, main)
        return main, side

    def copying(self, copies, steps, early=(), last=()):
        """-> run(stream): as above, with `steps` beside the `copies`, and `last` at the end. Copies that are
        `early` come first of all, and the steps wait for them."""
        order = self.world.backend.order

        def run(stream):
            self.barrier(stream)
            main, side = self.fork(stream)
            enqueue(early, side)
            if early:
                order(main, side)
            enqueue(copies, side)
            enqueue(steps, stream)
            order(main, side)
            enqueue(last, stream)

        return run


def enqueue(operations, stream):
    for operation in operations:
        operation(stream)


GPU_KERNELS = {"store_segment": store_segment}
