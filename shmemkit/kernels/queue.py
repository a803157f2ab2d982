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

import operator

from numba import cuda, types

from shmemkit.device import copy_block, notify, symm_at, threadfence, wait_block
from shmemkit.kernels.method import agree
from shmemkit.launch import bind
from shmemkit.memory import as_dtype
from shmemkit.world import World

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


class Queue:
    """A queue from this rank to rank `to`, and from the rank that sends to this one. Collective.

    world        the World
    n_slots      items that fit into the queue
    item_size    elements of an item
    dtype        any that symmetric arrays have
    to           the receiving rank; default: the next rank. Every rank has one sender
    n_producers, n_consumers   blocks that push and pop, 1 or more each; `block` threads each

    ``queue(inputs)`` enqueues one transfer; any number may follow each other, also in CUDA graphs and with
    different numbers of items. Transfers of one queue are enqueued on one stream, or ordered by events.

    ValueError, on all ranks, where one rank's arguments are wrong, or its GPU has no room for all blocks at
    once; MemoryError on all ranks.
    """

    def __init__(
        self,
        world,
        n_slots,
        item_size,
        dtype="float32",
        to=None,
        n_producers=16,
        n_consumers=4,
        block=128,
        name="queue",
    ):
        if not isinstance(world, World):
            raise TypeError(f"Queue: the first argument is the World, of shmemkit.init(), not {world!r}")
        self.world, self._arrays, self._launch = world, [], None
        numbers = dict(
            n_slots=n_slots,
            item_size=item_size,
            n_producers=n_producers,
            n_consumers=n_consumers,
            block=block,
        )
        agree(world, lambda: self._take(numbers, dtype, to), self.free)
        agree(world, lambda: self._prepare(**numbers, name=name), self.free)

    def _take(self, numbers, dtype, to):
        """The arguments, which one rank alone may have wrong."""
        for label, value in numbers.items():
            if not hasattr(value, "__index__") or value < 1:
                raise ValueError(f"Queue: {label}={value!r}: an integer of 1 or more is allowed")
        if not (to is None or hasattr(to, "__index__")):
            raise ValueError(f"Queue: to={to!r}: a rank or None is allowed")
        world, self.dtype = self.world, as_dtype(dtype)
        self.n_slots, self.item_size = numbers["n_slots"], numbers["item_size"]
        self.receiver = (world.rank + 1) % world.n_ranks if to is None else operator.index(to)

    def _prepare(self, n_slots, item_size, n_producers, n_consumers, block, name):
        world = self.world
        receivers = world.host_allgather(self.receiver)
        if sorted(receivers) != list(range(world.n_ranks)):
            raise ValueError(
                f"Queue: to={receivers} over the ranks: each of 0 to {world.n_ranks - 1} must be there once"
            )
        self.sender = receivers.index(world.rank)
        self._arrays.append(world.empty((n_slots, item_size), self.dtype, name=f"{name}.slots"))
        for signals in ("full", "empty"):
            self._arrays.append(world.signals(n_slots, f"{name}.{signals}"))
        self.slots, self.full, self.empty = self._arrays
        state = world.xp.zeros(3, "uint64")
        nothing = world.xp.empty((0, item_size), self.dtype)
        signals = (self.full, self.empty, state)
        args = (nothing, nothing, self.slots, *signals, self.receiver, self.sender, n_producers)
        self._launch = bind(queue_kernel, n_producers + n_consumers, block, args, co_resident=True)

    def __call__(self, inputs, outputs=None, stream=None):
        """Push the rows of `inputs` to rank `to` and pop what is sent to this rank. -> outputs

        inputs     (n, item_size), C-contiguous, of the queue's dtype; n may be 0 and differ from call to call
        outputs    likewise, (m, item_size): m is the sender's n. Default: a new array like `inputs`
        stream     default: the World's

        Enqueued; row i of `outputs` is row i of the sender's inputs when the stream has run it. ValueError
        for other arrays.
        """
        if self._launch is None:
            raise RuntimeError("Queue: it was freed; make a new one")
        self._check("inputs", inputs)
        if outputs is None:
            outputs = self.world.xp.empty_like(inputs)
        self._check("outputs", outputs)
        self._launch.set("inputs", inputs)
        self._launch.set("outputs", outputs)
        self._launch(stream=stream)
        return outputs

    def _check(self, label, array):
        if (
            getattr(array, "ndim", None) != 2
            or array.shape[1] != self.item_size
            or array.dtype != self.dtype
            or not array.flags.c_contiguous
        ):
            raise ValueError(
                f"Queue: {label} is {getattr(array, 'dtype', type(array))} {getattr(array, 'shape', '')}: "
                f"a C-contiguous {self.dtype} array of shape (n, {self.item_size}) is allowed"
            )

    def free(self):
        """Give the symmetric memory back; the Queue cannot be used any more. Collective."""
        self._launch = None
        while self._arrays:
            self.world.free(self._arrays.pop(0))


def _signature(dtype):
    rows, signals = types.Array(dtype, 2, "C"), types.Array(types.uint64, 1, "C")
    return (rows, rows, rows, signals, signals, signals, types.int64, types.int64, types.int64)


# What the kernels are compiled for where there is no GPU, to check registers and spills.
GPU_KERNELS = {
    f"queue_kernel[{dtype}]": (queue_kernel, _signature(dtype)) for dtype in (types.float32, types.uint8)
}
