"""Gather and reduce by copy engines: the exchange of ``copied.py``, in which the root alone receives.

  stream:         1. barrier of all ranks: the root's slots are empty
  side stream:    2. all but the root: copy x to slots[me] on the root
  stream:         3. all but the root: a kernel sends what is not copied, beside the copy. That is all of an x
                     that does not begin at a multiple of 16 bytes, or a last packet of less than 16
                     the root: the kernel of the exchange takes the packets of all others. It stores them, or
                     combines them with all of its own x
                  4. waits for the copy: x may be written again

No race, no deadlock: as in ``copied.py``. The root has read all packets when its stream goes on, so before
it reaches the barrier of the next call, after which the others write them again.
"""

from numba import cuda, types

from shmemkit.device import PIECE_BYTES, lamport_store, load_piece
from shmemkit.device.packets.transports import LAMPORT

from .copied import CopiedExchange

u32 = types.uint32


@cuda.jit
def send_to_root(x, packets, copied, slots, first, low, high, root):
    """Store the packets of x from number `copied` on to the slots from `first` on of the root.

    x          complex128, uint64 or uint8, as of ``load_piece``
    packets    of 16 bytes, of x
    slots      uint64, symmetric, the sentinel everywhere
    low, high  the sentinel
    grid       any, one-dimensional, as the blocks are
    """
    i = u32(copied + cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
    while i < packets:
        lamport_store(slots, u32(first + i), load_piece(x, i), low, high, root)
        i = u32(i + cuda.blockDim.x * cuda.gridDim.x)


class CopiedToRoot(CopiedExchange):
    """Gather, or reduce: then its argument is the op, too."""

    t = LAMPORT

    def prepare(self, max_nbytes, root, op=None):
        self.root = root
        super().prepare(max_nbytes * (self.world.n_ranks if op else 1), op)
        self.bind_kinds(self.sending)

    def bind(self, x, out, in_place, dtype=None):
        world, root = self.world, self.root
        if world.rank != root:
            segments = self.segments_of(x)
            rest = x.nbytes > self.copied(segments) * PIECE_BYTES
            return self.copying(self.copies(segments, [root]), [self.sending(x, x)] if rest else [])
        if self.op:
            return self.copying([], [self.combining(x, out, dtype)])
        own = [] if in_place else [self.bind_store(out[root * x.size : (root + 1) * x.size], x)]
        return self.copying([], [*own, self.storing(x, out)])

    def copied(self, segments):
        """The root sends nothing."""
        sends = self.world.rank != self.root
        return super().copied(segments) if sends else -(-segments[0].nbytes // PIECE_BYTES)

    def sending(self, x, out):
        """-> run(stream): send the root what is not copied of x."""
        copied, packets = self.copied([x]), -(-x.nbytes // PIECE_BYTES)
        x, _ = self.t.wide(self.world, x, out, x.nbytes)
        numbers = packets, copied, self.slots, self.world.rank * self.row, *self.sentinel, self.root
        return self._launch(send_to_root, packets - copied, x, *numbers)


GPU_KERNELS = {
    f"send_to_root[{words}]": (send_to_root, {"x": words}) for words in ("complex128", "uint64", "uint8")
}
