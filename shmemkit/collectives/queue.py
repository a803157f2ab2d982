"""A queue from every rank to another: producer blocks push items, the receiver's consumer blocks pop them.

Slots     slots[s], on the receiver: item i travels in slot s = i % n_slots, in round r = i // n_slots.
          Written only by the sender's producers, over NVLink; read only by the receiver's consumers
Signals   full[s], on the receiver: how often slot s has been filled (only the sender sets it)
          empty[s], on the sender: how often slot s has been emptied (only the receiver sets it)
          each side waits on its own memory and notifies the other's: no polling over NVLink
State     state = [items sent, items received, blocks done], local, in device memory, so that a replayed graph
          counts on

  producer of item i:  1. wait until empty[s] >= r         acquire, sys: what was in the slot has been read
                       2. write slots[s] on the receiver, syncthreads
                       3. set full[s] = r + 1 there        release, sys: publishes the whole block's writes
  consumer of item i:  4. wait until full[s] >= r + 1      acquire, sys: sees the item
                       5. read slots[s], syncthreads
                       6. set empty[s] = r + 1 at the sender  release, sys: its reads are over
  last block to end:   7. add this launch's items to the state, set blocks done to 0

Items are numbered through all launches, so the signals only grow and are never reset. The n_slots slots are
the buffer: a sender can be n_slots items ahead.

No race: step 1 of the next round needs step 6 of this one, which follows 5; and two sets of one signal are
ordered by the waits between them (6 before 1, 2, 3 and 4 of the next round), whichever blocks work on them.
No deadlock: the lowest item that has not been consumed can always be produced (its slot was emptied in the
round before) and then consumed, as long as all blocks of both ranks are resident, which the launch checks,
and the receiver pops as many items as the sender pushes.

After: "Distributed Notify and Wait", a tutorial of Triton-distributed.
"""

from __future__ import annotations

from numba import cuda, types

from shmemkit.device import copy_block, notify, symm_at, threadfence, wait_block
from shmemkit.operations.method import agree
from shmemkit.operations.operation import Given, Operation
from shmemkit.runtime.launch import bind
from shmemkit.runtime.symmetric_memory import as_dtype
from shmemkit.runtime.world import World
from shmemkit.support.arrays import new_array
from shmemkit.support.renamed import renamed
from shmemkit.support.settings import integer
from shmemkit.typing import AnyStream, ArrayT, DType

# ---- pieces for users' kernels; all threads of a block, of any shape, call them


@cuda.jit(device=True)
def producer_acquire(empty, n_slots, item):
    """Wait until the slot of `item` (its number since the beginning) may be written. -> the slot."""
    slot = item % n_slots
    wait_block(empty[slot:], 1, "sys", "acquire", item // n_slots)
    return slot


@cuda.jit(device=True)
def producer_commit(full, n_slots, item, receiver):
    """`item` is in its slot on rank `receiver`: its consumer may read it."""
    cuda.syncthreads()
    if cuda.threadIdx.x + cuda.threadIdx.y + cuda.threadIdx.z == 0:
        notify(full[item % n_slots :], receiver, item // n_slots + 1, "set", "sys")


@cuda.jit(device=True)
def consumer_wait(full, n_slots, item):
    """Wait until `item` has arrived. -> its slot."""
    slot = item % n_slots
    wait_block(full[slot:], 1, "sys", "acquire", item // n_slots + 1)
    return slot


@cuda.jit(device=True)
def consumer_release(empty, n_slots, item, sender):
    """`item` has been read: rank `sender` may write its slot again."""
    cuda.syncthreads()
    if cuda.threadIdx.x + cuda.threadIdx.y + cuda.threadIdx.z == 0:
        notify(empty[item % n_slots :], sender, item // n_slots + 1, "set", "sys")


# ---- the kernel


@cuda.jit
def queue_kernel(inputs, outputs, slots, full, empty, state, receiver, sender, n_producers):
    """Blocks 0 .. n_producers - 1 push the rows of `inputs`, the others pop into the rows of `outputs`.

    Grid and blocks are one-dimensional.
    """
    block, n_slots = cuda.blockIdx.x, slots.shape[0]
    if block < n_producers:
        there = symm_at(slots, receiver)
        sent = state[0]
        for i in range(block, inputs.shape[0], n_producers):
            slot = producer_acquire(empty, n_slots, types.int64(sent) + i)
            copy_block(there[slot], inputs[i])
            producer_commit(full, n_slots, types.int64(sent) + i, receiver)
    else:
        received = state[1]
        for i in range(block - n_producers, outputs.shape[0], cuda.gridDim.x - n_producers):
            slot = consumer_wait(full, n_slots, types.int64(received) + i)
            copy_block(outputs[i], slots[slot])
            consumer_release(empty, n_slots, types.int64(received) + i, sender)
    cuda.syncthreads()  # every thread has read the state
    if cuda.threadIdx.x == 0:
        threadfence("gpu", "acq_rel")
        if cuda.atomic.add(state, 2, 1) == cuda.gridDim.x - 1:
            threadfence("gpu", "acq_rel")  # in every block
            state[0] += inputs.shape[0]
            state[1] += outputs.shape[0]
            state[2] = 0


# ---- the host object


class Queue(Operation):
    """A queue from this rank to rank `to`. Every rank sends to one rank and receives from one. Collective.

    ``queue = sk.Queue(world, n_slots, item_size)``, then ``queue(x)``, which enqueues one transfer:
    blocks push rows into slots in the receiver's memory, other blocks pop what arrives here.

    world        the World
    n_slots      items that the queue can hold, 1 or more
    item_size    elements of an item, 1 or more
    dtype        of the elements: any that symmetric arrays have
    to           the receiving rank, another one for each rank, within reach of stores. Default: the next
                 rank
    n_producers  blocks that push, 1 or more
    n_consumers  blocks that pop, 1 or more
    block        threads of each block
    name         appears in reports

    Transfers may follow each other, also in CUDA graphs and with different numbers of items. The program
    enqueues the transfers of one queue on one stream, or orders them by events, also with collectives.
    `sender` is the rank that sends to this one.

    TypeError or ValueError, on all ranks, if one rank's arguments are wrong, or its GPU cannot hold all
    blocks at once; MemoryError, on all ranks, if the symmetric heap is full.
    """

    ARRAYS = {
        "x": Given("n item_size", align=1),
        "out": Given("m item_size", align=1, new=True),
    }
    n_slots: int
    item_size: int
    receiver: int

    def __init__(
        self,
        world: World,
        n_slots: int,
        item_size: int,
        dtype: DType = "float32",
        to: int | None = None,
        n_producers: int = 16,
        n_consumers: int = 4,
        block: int = 128,
        name: str = "queue",
    ):
        given = {"n_slots": n_slots, "item_size": item_size, "n_producers": n_producers}
        given |= {"n_consumers": n_consumers, "block": block}

        def check():
            for label, value in given.items():
                given[label] = integer("Queue", label, value, 1)
            self.dtype = as_dtype(dtype, "Queue: ")
            self.n_slots, self.item_size = given["n_slots"], given["item_size"]
            following = (world.rank + 1) % world.n_ranks
            self.receiver = integer("Queue", "to", following if to is None else to, 0, world.n_ranks - 1)
            return {"n_slots": self.n_slots, "item_size": self.item_size, "dtype": self.dtype.name}

        super().__init__(world, check)
        agree(world, lambda: self._prepare(**given, name=name), self.free)

    def _prepare(self, n_slots, item_size, n_producers, n_consumers, block, name):
        world = self.world
        receivers = world.host_allgather(self.receiver)
        if sorted(receivers) != list(range(world.n_ranks)):
            raise ValueError(
                f"Queue: to is {receivers} on ranks 0 to {world.n_ranks - 1}; each rank must be the receiver "
                "of one other rank"
            )
        self.sender = receivers.index(world.rank)
        self._outputs.append(world.empty((n_slots, item_size), self.dtype, name=f"{name}.slots"))
        for signals in ("full", "empty"):
            self._outputs.append(world.signals(n_slots, f"{name}.{signals}"))
        self.slots, self.full, self.empty = self._outputs
        state = world.xp.zeros(3, "uint64")
        ranks = self.receiver, self.sender
        self._rest = as_words(self.slots), self.full, self.empty, state, *ranks, n_producers
        nothing = as_words(new_array(world.xp, (0, item_size), self.dtype))
        blocks, args = n_producers + n_consumers, (nothing, nothing, *self._rest)
        self._launch = bind(queue_kernel, blocks, block, args, co_resident=True, group=world)

    @renamed(inputs="x", outputs="out")
    def __call__(self, x: ArrayT, out: ArrayT | None = None, *, stream: AnyStream | None = None) -> ArrayT:
        """Enqueue one transfer: push the rows of x to rank `to`, and pop what is sent here. -> out

        x        (n, item_size), C-contiguous, of the queue's dtype; n may be 0 and differ from call to call
        out      (m, item_size), likewise; m is the sender's n. Default: a new array like x
        stream   default: PyTorch's current one if any array is a tensor on a GPU, else the World's

        Arrays are as of ``help(sk.collectives)``. When the stream has run it, row i of out is row i of the
        sender's x, and x may be written again. TypeError or ValueError for other arrays,
        RuntimeError after ``free``.
        """
        return self._enqueue({"x": x, "out": out}, stream)["out"]

    def _new_shape(self, name, arrays):
        return arrays["x"].shape

    def _in_order(self, stream, arrays):
        """The program orders transfers: see above."""

    def _bind(self, x, out):
        bound = self._launch.with_args(as_words(x), as_words(out), *self._rest)
        bound.forget_arrays()
        return bound


def as_words(array):
    """`array` as kernels take it: float8 as uint8."""
    return array.view("uint8") if "float8" in array.dtype.name else array


GPU_KERNELS = {
    f"queue_kernel[{dtype}]": (queue_kernel, {"inputs outputs slots": dtype})
    for dtype in ("float32", "uint8")
}
