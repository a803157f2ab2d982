"""Blocks store a rank's own segment to its output. A copy by the driver would delay those to other ranks."""

from numba import cuda, types

from shmemkit.device import copy_block, span

from .method import Method


@cuda.jit
def store_segment(out, x):
    """Store x to `out`, uint8, of the same size, in other memory.

    grid  one-dimensional, as the blocks are
    """
    part = (x.size + cuda.gridDim.x - 1) // cuda.gridDim.x + 127 & -128
    begin = min(cuda.blockIdx.x * part, x.size)
    size = min(part, x.size - begin)
    copy_block(span(out, begin, size), span(x, begin, size))


class StoresOwn(Method):
    """A method whose blocks store the own segment.

    own_part    bytes that are worth a block
    own_blocks  at most: more than keep pace with the copies
    """

    own_part, own_blocks = 1 << 16, 44

    def bind_store(self, out, x):
        """-> run(stream): store x to `out`, both 1-D and of the same size and dtype."""
        blocks = max(1, min(self.own_blocks, x.nbytes // self.own_part))
        return self.launch(store_segment, blocks, out.view("uint8"), x.view("uint8"))


GPU_KERNELS = {"store_segment": (store_segment, (types.uint8[::1],) * 2)}
