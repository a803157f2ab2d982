"""Reduce-scatter by push in two dimensions: inside the node, then once across nodes. For several nodes.

Rank (i, l) is the l-th of node i. For each node j, there are three stages. The ranks of node i scatter the
segments for node j: that of (j, l') goes to (i, l'). Each combines what it has received. Then (i, l) sends
this partial result to (j, l), by NVSHMEM, which combines the partial results of all nodes. So a segment
crosses the network once for each node, not for each rank, and all ranks use the network equally.

Segments  x is n_ranks segments, one for each rank. Each is handled as words of its own: a segment may begin
          anywhere. It is cut into as many parts as there are pairs of blocks, a part into chunks
Staged    staged[buffer, j, b, k], on every rank (i, l): part b of the segment of (j, l), of (i, k)'s x.
          Written by (i, k) only; the rank's own data stay in x
Outbox    outbox[buffer, j, b], on every rank (i, l): part b of node i's partial result for (j, l), for the
          network to read. float16, bfloat16 and float8 travel as float32 (``device/cuda/partial_results.py``)
Inbox     inbox[buffer, j, b], on every rank (i, l): part b of node j's partial result. Written by (j, l) only
Signals   staged_full[k, j, b, q], on every rank (i, l): the last epoch whose chunk q of (i, k)'s part b for
          (j, l) is here (only (i, k) sets it). inbox_full[buffer, j, b, q], on every rank: likewise of
          inbox[buffer, j, b] (only the network sets it)
Epochs    epochs[role, b], local: of block (b, role); the epoch selects the buffer. Device-resident, so
          graph-safe

  block (b, 0), for the nodes j = i + 1, i + 2, ..., i modulo the nodes, for each chunk q of part b:
          1. copy it to staged[buffer, j, b, l] on (i, l + 1), (i, l + 2), ... modulo the node's ranks;
             syncthreads; set staged_full[l, j, b, q] there           release, sys: publishes the chunk
  block (b, 1), for the same nodes and chunks:
          2. wait until staged_full[k, j, b, q] is the epoch, for all k    acquire, sys: sees their chunks
          3. combine the node's chunks, of x and staged, in the order of its ranks; store the total to
             outbox[buffer, j, b] or, for the own node, which is the last, to inbox[buffer, i, b]
          4. put the chunk to inbox[buffer, i, b] on (j, l)
     and then, for each chunk:
          5. wait until inbox_full[buffer, j, b, q] is the epoch, for all j
          6. combine the partial results, in the order of the nodes, and store the result

The order is always the same, and so are the bits: that of the ranks in a node, then that of the nodes.

In each part of step 1, a rank sends to one rank and receives from one. The stages of several nodes overlap,
and so do those of chunks: while one is on the network, others are combined and scattered. The own node comes
last, so that the network has work as soon as possible.

Why one kernel with a role for each block, and not copy engines on one stream and kernels on another? A signal
in memory passes a chunk on; the end of a copy and the start of a kernel would cost some microseconds each.
And calls alternate between two buffers; a graph's copies have fixed addresses, so they would need credits.
The kernel takes few multiprocessors, too: see ``budget``.

No race: the double-buffer lemma and the put lemma (docs/protocols.md), for part b of staged, outbox and
inbox. All ranks give it the same slot and count its epochs alike, whatever the sizes of the calls. The
readers' own parts come directly to the writer: the ranks of a node send to each other, and so do (i, l) and
(j, l). out may be the rank's own segment of x: it is sent to no rank. The threads that read it in step 3
store the result in step 6.

No deadlock: blocks (b, 0) wait for no rank. Blocks (b, 1) wait in step 2 for blocks (b, 0), in step 5 for
step 4 of other nodes, which comes before their step 5.
"""

import functools

from numba import cuda

from shmemkit.device import (
    copy_block,
    n_words,
    notify,
    num_ranks,
    reduction,
    store_word,
    symm_at,
    wait,
)
from shmemkit.device.cuda.combine_rows import combining
from shmemkit.device.cuda.partial_results import merging, shares, totals
from shmemkit.operations.method import Method, cut, parts_of

from ..network import after, put, ranks_in_reach, wait_for, where

NETWORK = 50  # GB/s of a GPU, each way: 400 Gb/s
NVLINK = {8: 300, 9: 450, 10: 900}  # the same, by the major compute capability
SENDS, COMBINES = 40, 25  # GB/s that a block of step 1 sends, that one of step 3 loads and stores; on H200


def budget(compute_capability, multiprocessors, nodes, local_size):
    """-> how many pairs of blocks do their work as fast as the slower one of NVLink and network does its own.

    For each byte of a segment, and node, NVLink carries local_size - 1, the network one, and combining loads
    local_size bytes and stores one. At least 1, at most half of the multiprocessors.
    """
    major = min(max(compute_capability[0], min(NVLINK)), max(NVLINK))
    sent, combined = local_size - 1, local_size + 1
    slower = max(sent / NVLINK[major], (nodes > 1) / NETWORK)
    if slower == 0:  # one rank
        return 1
    needed = max(sent / SENDS, combined / COMBINES) / slower
    return max(1, min(-int(-needed // 1), multiprocessors // 2))


@cuda.jit(device=True)
def scatter(x, size, unit, begin, end, chunk, local_size, staged, stride, staged_full, epoch):
    """Step 1 of words begin .. end - 1 of all segments, of `size` elements."""
    b, buffer, nodes = cuda.blockIdx.x, epoch & 1, staged_full.shape[1]
    node, local = where(local_size)
    hops = 1
    while hops <= nodes:
        j = after(node, hops, nodes)
        q, start = 0, begin
        while start < end:
            stop = min(start + chunk, end)
            y = 1
            while y < local_size:
                k = after(local, y, local_size)
                first = (j * local_size + k) * size
                mine = x[first + start * unit : first + min(stop * unit, size)]
                there = symm_at(staged[buffer, j, b], node * local_size + k)
                copy_block(there[(local * stride + start - begin) * unit :], mine)
                y += 1
            cuda.syncthreads()
            y = 1 + cuda.threadIdx.x
            while y < local_size:
                k = after(local, y, local_size)
                notify(staged_full[local, j, b, q:], node * local_size + k, epoch, "set", "sys")
                y += cuda.blockDim.x
            q += 1
            start = stop
        hops += 1


def _combining(op, dtype):
    """-> a device function: steps 2 to 4."""
    width, _, store = totals(op, dtype)
    one, four = combining(op, dtype)

    @cuda.jit(device=True)
    def combine(x, size, unit, begin, end, chunk, local_size, staged, stride, staged_full, boxes, epoch):
        b, t, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
        buffer, nodes, (outbox, inbox, inbox_full) = epoch & 1, staged_full.shape[1], boxes
        node, local = where(local_size)
        hops = 1
        while hops <= nodes:
            j = after(node, hops, nodes)
            to = j * local_size + local
            q, start = 0, begin
            while start < end:
                stop = min(start + chunk, end)
                k = t
                while k < local_size:
                    if k != local:
                        wait(staged_full[k, j, b, q:], 1, "sys", "acquire", epoch)
                    k += threads
                cuda.syncthreads()
                mine = x[to * size + start * unit : to * size + min(stop * unit, size)]
                rows, at, length = staged[buffer, j, b], start - begin, stop - start
                box = outbox if j != node else inbox
                row = box[buffer, j, b, width * at : width * (at + length)]
                i = t
                while i + 3 * threads < length:
                    words = four(mine, rows, at, stride, local, local_size, i, threads)
                    store(row, i, length, words[0])
                    store(row, i + threads, length, words[1])
                    store(row, i + 2 * threads, length, words[2])
                    store(row, i + 3 * threads, length, words[3])
                    i += 4 * threads
                while i < length:
                    store(row, i, length, one(mine, rows, at, stride, local, local_size, i))
                    i += threads
                if j != node:  # the put begins with a barrier of the block
                    there = inbox[buffer, node, b, width * at : width * (at + length)]
                    put(there, row, inbox_full[buffer, node, b, q:], epoch, to)
                q += 1
                start = stop
            hops += 1

    return combine


def _finishing(op, dtype):
    """-> a device function: steps 5 and 6."""
    result, (width, load, _), merge = reduction(op, dtype).result, totals(op, dtype), merging(op, dtype)

    @cuda.jit(device=True)
    def finish(out, begin, end, chunk, local_size, inbox, inbox_full, epoch):
        b, t, threads = cuda.blockIdx.x, cuda.threadIdx.x, cuda.blockDim.x
        buffer, n, nodes = epoch & 1, num_ranks(), inbox_full.shape[1]
        node, _ = where(local_size)
        q, start = 0, begin
        while start < end:
            stop = min(start + chunk, end)
            j = 0
            while j < nodes:
                if j != node:
                    wait_for(inbox_full[buffer, j, b, q:], epoch)
                j += 1
            i, at, length = t, width * (start - begin), stop - start
            while i < length:
                total, j = load(inbox[buffer, 0, b], at + i, length), 1
                while j < nodes:
                    total = merge(total, inbox[buffer, j, b], at + i, length)
                    j += 1
                store_word(out, start + i, result(total, n))
                i += threads
            q += 1
            start = stop

    return finish


@functools.cache
def push_2d_kernel(op, dtype):
    """-> the kernel that reduces `dtype`, a name as "float16", by `op`, as "sum"."""
    combine, finish = _combining(op, dtype), _finishing(op, dtype)

    @cuda.jit(max_registers=128)  # of 512 threads; only where words are bytes some are spilled
    def push_reduce_scatter_2d(
        x, out, unit, part, chunk, local_size, staged, stride, staged_full, outbox, inbox, inbox_full, epochs
    ):
        """Combine the segments of this rank, of the `x` of all ranks, in `out`.

        x, out         uint64 or uint8 (the bytes of elements of `dtype`), 1-D, x n_ranks times as large; out
                       may be x's segment of this rank
        unit           of their elements are a word
        part, chunk    words of a part, gridDim.x of which are out; and of a chunk
        local_size     ranks of a node
        staged         as x, (2, nodes, parts at most, local_size * words of a part at most), symmetric
        stride         words of a part at most
        staged_full    uint64 (local_size, nodes, parts at most, chunks at most), symmetric, zeros at first
        outbox, inbox  uint64 (2, nodes, parts at most, words of a part at most; twice as many for float16 and
                       bfloat16, four times as many for float8), symmetric
        inbox_full     uint64 (2, nodes, parts at most, chunks at most), symmetric, zeros at first
        epochs         uint64 (2, parts at most), zeros at first
        grid           (parts, 2), as the blocks are; any number of threads
        """
        b, role = cuda.blockIdx.x, cuda.blockIdx.y
        begin, end = b * part, min((b + 1) * part, n_words(out))
        epoch = epochs[role, b] + 1
        if role == 0:
            scatter(x, out.size, unit, begin, end, chunk, local_size, staged, stride, staged_full, epoch)
        else:
            of_node, boxes = (local_size, staged, stride, staged_full), (outbox, inbox, inbox_full)
            combine(x, out.size, unit, begin, end, chunk, *of_node, boxes, epoch)
            finish(out, begin, end, chunk, local_size, inbox, inbox_full, epoch)
        if cuda.threadIdx.x == 0:  # after a barrier, at least: all threads have read the counter
            epochs[role, b] = epoch

    return push_reduce_scatter_2d


class Push2D(Method):
    """The method "push_2d" of ``ReduceScatter``.

    part, chunk  bytes that are worth two blocks, and a signal
    max_parts    of a segment; default: what ``budget`` says
    max_chunks   of a part
    """

    part, chunk, max_parts, max_chunks = 1 << 14, 1 << 16, None, 8

    counts = staticmethod(shares)

    def prepare(self, max_nbytes, op):
        world, backend = self.world, self.world.backend
        self.op, self.local_size = op, ranks_in_reach(world)
        nodes, local_size = world.n_ranks // self.local_size, self.local_size
        gpu = min(world.host_allgather((backend.compute_capability, backend.multiprocessors)))
        most = self.within(self.max_parts or budget(*gpu, nodes, local_size), 2)
        self.parts, room = parts_of(max_nbytes, world.n_ranks, most, self.part)
        self.room = room // 8
        name = "reduce_scatter.push_2d"
        of_parts, of_chunks = (nodes, self.parts), (nodes, self.parts, self.max_chunks)
        self.staged = self.empty((2, *of_parts, local_size * self.room), "uint64", f"{name}.staged")
        self.outbox = self.empty((2, *of_parts, 2 * self.room), "uint64", f"{name}.outbox")
        self.inbox = self.empty((2, *of_parts, 2 * self.room), "uint64", f"{name}.inbox")
        self.staged_full = self.zeros((local_size, *of_chunks), "uint64", f"{name}.staged_full")
        self.inbox_full = self.zeros((2, *of_chunks), "uint64", f"{name}.inbox_full")
        self.epochs = world.xp.zeros((2, self.parts), "uint64")

    def bind(self, x, out, in_place, dtype):
        words, times = -(-out.nbytes // 8), shares(dtype.name)
        part = cut(8 * times * words, self.parts, self.part)[1] // (8 * times)
        chunk = max(self.chunk // 8, -(-part // self.max_chunks)) + 15 & -16
        args = x, out, 8 // x.itemsize, part, chunk, self.local_size
        args += self.staged.view(x.dtype), self.room, self.staged_full
        args += self.outbox, self.inbox, self.inbox_full, self.epochs
        kernel = push_2d_kernel(self.op, dtype.name)
        return self.launch(kernel, (-(-words // part), 2), *args)


GPU_KERNELS = {
    f"push_reduce_scatter_2d[{op},{dtype},{words}]": (
        push_2d_kernel(op, dtype),
        {"x out staged": words},
        *[(9, 0)] * (op == "avg" and dtype == "float64"),  # on sm_80, its divisions spill registers
    )
    for op, dtype, words in (
        ("sum", "bfloat16", "uint64"),
        ("avg", "float16", "uint8"),
        ("max", "float32", "uint64"),
        ("avg", "float64", "uint64"),
        ("prod", "int8", "uint64"),
        ("sum", "float8_e4m3fn", "uint64"),
        ("avg", "float8_e5m2", "uint64"),
    )
}
