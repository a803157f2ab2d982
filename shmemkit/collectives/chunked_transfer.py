"""Chunked copy by stores: a transport for larger messages. A block stores its part of an array into a peer's
memory, chunk by chunk. After a chunk it sets a full signal: one release for many bytes, whose stores need no
flag. A schedule (``schedules/push_exchange.py``, ``schedules/push_rooted.py``, ``broadcast/scatter.py``) says
who sends what to whom. It is no ``Transport`` of packets: those pass units in registers, this one arrays in
memory.

Segment   a rank's share of an array
Part      a block's share of a segment: block b has part b. A multiple of 128 bytes: others are half as fast
Chunk     what one full signal announces. CHUNKS or fewer of them are a part
Scratch   scratch[buffer, row, b], symmetric: room for part b. A row has one writer, which the schedule names
Full      full[row, b], symmetric: how much of part b is there. The writer of the row sets it:
            CHUNKS * epoch + s        the first s chunks of this epoch
            CHUNKS * (epoch + 1)      all of the part, with its last chunk
          A receiver waits for "at least": it need not know how many chunks the sender makes of a part
Empty     empty[row, b], symmetric: the last epoch whose part b the reader has read, where the schedule needs
          credits. Only the reader sets it
Epochs    epochs[y, b], local: of block (b, y). The epoch selects the buffer: epoch & 1. Device-resident, so
          graph-safe

  to send, a block:     1. copies a chunk of its part to the peer's scratch; syncthreads
                        2. sets full there                      release, sys: publishes the chunk
  to receive, a block:  3. waits for the chunk at full          acquire, sys: sees it
                        4. copies the chunk from its scratch to the output
  both, at the end:     5. syncthreads, and add 1 to the epoch

An empty part is announced, too: all parts of a call are sent in each of its epochs. Capacities, parts and
epochs are those of the slot, alike on all ranks, whatever the size of a call. So the double-buffer and the
credit lemma (docs/protocols.md) apply to part b of a row. No deadlock: all blocks are co-resident, senders
wait for credits of earlier epochs at most, and receivers wait for senders.
"""

from numba import cuda

from shmemkit.device import copy_block, notify, num_ranks, rank, span, symm_at, wait, wait_block
from shmemkit.device.packets.transports import rank_after
from shmemkit.operations.method import Method, cut, parts_of

CHUNKS = 32  # of a part, at most

device = cuda.jit(device=True)


# ---- sizes


def senders_of(world, most):
    """-> how many blocks send, alike on all ranks: one for each multiprocessor of the GPU that has fewest,
    `most` at most. Collective."""
    return min(most, *world.host_allgather(world.backend.multiprocessors))


def chunk_of(part, least, most, unit):
    """-> bytes of a chunk of a part of so many, of which `most` or fewer are a part: `least` or more, a
    multiple of `unit`; 512 threads copy 8192 bytes at once."""
    return max(least, -(-part // (most * unit)) * unit)


# ---- in kernels, by a block


@device
def part_of_block(part, segment):
    """-> where the block's part of a segment begins, and its size; the last ones may be empty."""
    begin = min(cuda.blockIdx.x * part, segment)
    return begin, min(part, segment - begin)


@device
def row_of(k, at):
    """The row of rank k on rank `at`, where all ranks but `at` have one."""
    return k - 1 if k > at else k


@device
def put(dst, src, signal, value, chunk, peer, announces=True):
    """Copy `src` to rank `peer`'s `dst`, in chunks of `chunk` elements. If it `announces`, it announces each
    in signal[0] there: release, sys. `value` is CHUNKS * epoch."""
    there, begin, announced = symm_at(dst, peer), 0, value
    while True:
        length = min(chunk, src.size - begin)
        copy_block(span(there, begin, length), span(src, begin, length))
        begin += length
        if announces:
            announced = announced + 1 if begin < src.size else value + CHUNKS
            cuda.syncthreads()
            if cuda.threadIdx.x == 0:
                notify(signal, peer, announced, "set", "sys")
        if begin >= src.size:
            break


@device
def receive(dst, src, signal, value, chunk):
    """Copy all of `src` to `dst`, as ``put`` delivers it: acquire, sys."""
    begin = 0
    while True:
        value += 1
        wait_block(signal, 1, "sys", "acquire", value)
        length = min(chunk, dst.size - begin)
        copy_block(span(dst, begin, length), span(src, begin, length))
        begin += length
        if begin >= dst.size:
            break


@device
def notify_all(signal, value):
    """Set signal[0], symmetric, on all others to `value`: release, sys. The threads share the ranks."""
    me, n, y = rank(), num_ranks(), cuda.threadIdx.x + 1
    while y < n:
        notify(signal, rank_after(me, y), value, "set", "sys")
        y += cuda.blockDim.x


@device
def block_barrier(arrivals, b, value):
    """Meet blocks b of all other ranks: release and acquire, sys. The threads share the ranks.

    arrivals  uint64 (n_ranks, blocks), symmetric: arrivals[k, b], on every rank, is the `value` of the last
              barrier that block b of rank k has reached. Only rank k sets it

    The caller adds syncthreads between the barrier and the accesses that it orders, before and after.
    """
    me, n, y = rank(), num_ranks(), cuda.threadIdx.x + 1
    notify_all(arrivals[me, b:], value)
    while y < n:
        wait(arrivals[rank_after(me, y), b:], 1, "sys", "acquire", value)
        y += cuda.blockDim.x


# ---- on the host


class ChunkedMethod(Method):
    """A method by this transport. A subclass, or its entry in METHODS, has

    name         of it, as "gather push"
    part, chunk  bytes that are worth a block, and a signal
    senders      blocks that send, at most: one for each of H200's multiprocessors
    """

    part, chunk, senders = 1 << 13, 1 << 14, 132
    _fewest = 8

    def make(self, max_nbytes, segments, blocks, rows, full, empty=0, grid_rows=2):
        """Scratch of so many `rows`, rows of `full` and `empty` signals, and epochs of so many rows of the
        grid, for an array of `max_nbytes` at most, in so many segments; of each, so many `blocks` at most
        have a part. Collective.

        channel  (scratch, full, empty if there are any, epochs): the last arguments of kernels
        """
        self.segment = max(1, -(-max_nbytes // segments))
        self.parts, capacity = parts_of(max_nbytes, segments, blocks, self.part)
        scratch = self.empty((2, rows, self.parts, capacity), "uint8", self.array_name("scratch"))
        signals = [self.zeros((full, self.parts), "uint64", self.array_name("full"))]
        if empty:
            signals.append(self.zeros((empty, self.parts), "uint64", self.array_name("empty")))
        self.channel = scratch, *signals, self.world.xp.zeros((grid_rows, self.parts), "uint64")

    def launch_parts(self, kernel, rows, segment, *args, chunks=(CHUNKS, 8192), threads=None):
        """-> ``kernel(*args, part, chunk, *channel)`` bound to a grid of so many rows, a block for each part
        of a segment of so many bytes; `chunks` as of ``chunk_of``."""
        parts, part = cut(segment, self.parts, self.part)
        sizes = part, chunk_of(part, self.chunk, *chunks)
        return self.launch(kernel, (parts, rows), *args, *sizes, *self.channel, threads=threads)
