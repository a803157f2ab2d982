"""Products by the TMA of arrays that it does not take, such as rows at odd addresses. They are copied through
private arrays that it takes. So other ranks need not know how an array lies on one of them.

    stream:     1. copy such operands
                2. the product
                3. copy the result, if it went to a private array
"""

from numba import cuda, types

from shmemkit.runtime.budget import within
from shmemkit.runtime.launch import bind

from .problem import arrays_of
from .sm90_host import ALIGNED, as_rows, rows_that_cannot_be_stored, taken

THREADS = 256


@cuda.jit
def copy_rows(to, source):
    """to[...] = source, 2-D arrays of any strides, of 16- or 32-bit words.

    grid    any number of blocks, which take a row each, and threads
    """
    i = cuda.blockIdx.x
    while i < to.shape[0]:
        j = cuda.threadIdx.x
        while j < to.shape[1]:
            to[i, j] = source[i, j]
            j += cuda.blockDim.x
        i += cuda.gridDim.x


def aligned(product_of, a, b, out, rows=0, sms=None):
    """-> run(stream): what ``product_of(a, b, out)`` gives, where these are of any strides and addresses.

    a, b    (M, K) and (K, N)
    out     (M, N); if product_of is given another one, its rows may be longer
    rows    where tiles of A begin, besides rows that are a multiple of 64: at multiples of so many
    sms     the budget of multiprocessors of the copies, or None
    """
    before, after, kept = [], [], []

    def room_like(by_rows):
        """-> an array instead of `by_rows`; and all of its rows, up to a multiple of 16 bytes"""
        (rows, columns), step = by_rows.shape, ALIGNED // by_rows.dtype.itemsize
        kept.append(arrays_of(by_rows).empty((rows, -(-columns // step) * step), by_rows.dtype))
        return kept[-1][:, :columns], kept[-1]

    def operand(array, rows=0):
        by_rows = as_rows(array)
        if rows * array.dtype.itemsize % ALIGNED:  # no place in columns for the TMA to begin at
            by_rows = array
        if taken(by_rows):
            return array
        room, _ = room_like(by_rows)
        before.append(copying(room, by_rows, sms))
        return room if by_rows is array else room.T

    result = out
    if not taken(out) or rows_that_cannot_be_stored(out):
        room, result = room_like(out)
        after.append(copying(out, room, sms))
    product = product_of(operand(a, rows), operand(b.T).T, result)
    if not kept:
        return product
    steps = [*before, product, *after]

    def run(stream):
        for step in steps:
            step(stream)

    run.kept = kept  # the steps have their addresses only
    return run


def copying(to, source, sms=None):
    """-> the launch of `copy_rows` for these 2-D arrays."""
    word = f"uint{8 * to.dtype.itemsize}"
    copy = bind(copy_rows, within("copy", sms, to.shape[0]), THREADS, (to.view(word), source.view(word)))
    copy.forget_arrays()
    return copy


_any = [types.Array(word, 2, "A") for word in (types.uint16, types.uint32)]
GPU_KERNELS = {f"copy_rows {ty.dtype}": (copy_rows, (ty, ty)) for ty in _any}
