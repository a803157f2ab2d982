"""Emulated products of a warpgroup (``shmemkit.device.cuda.wgmma``).

A product is under way until nothing else can happen, or the schedule says so: it reads its tiles then. What
is changed meanwhile is reported, and accumulators that are touched before they are waited for.
"""

import functools
from typing import Any

import numpy as np

from shmemkit.support.dtypes import numpy_dtype

from .device_arrays import address
from .errors import EmulatorError
from .participation import WARPGROUP, Part
from .tensor_maps import Snapshot, check_fenced, swizzled, tile_bytes, under_way

ROWS, TILE = 64, 8192  # rows; bytes of 64 of them
ROW_BYTES, DEPTH_BYTES = 128, 32  # of a row; and of those that an instruction multiplies
COLUMNS = 64  # that the BLAS library gets at a time
KEPT = 13  # bits behind the first one of the largest number, of sums of float8


@functools.cache
def _rows_and_columns(n):
    """Where the accumulators of each thread are: two arrays (128, n / 2)."""
    t, i = np.arange(WARPGROUP)[:, None], np.arange(n // 2)[None, :]
    return t // 32 * 16 + t % 32 // 4 + i // 2 % 2 * 8, i // 4 * 8 + t % 4 * 2 + i % 2


class Operand:
    """A tile and how the tensor cores are told of it: `descriptor`, a matrix descriptor (see
    ``shmemkit.device.cuda.wgmma``), in which `step` leads to what the next instruction multiplies.

    They take no more than the descriptor: what it describes is read, and must lie in `tile`.
    """

    def __init__(self, tile, descriptor, step, major, extent, dtype):
        self.descriptor, self.step, self.major, self.extent = descriptor, step, major, extent
        self.dtype = numpy_dtype(dtype)
        n_bytes = extent * ROW_BYTES if major == "k" else -(-extent // ROWS) * TILE
        self.view = tile_bytes(tile, n_bytes, 1024, "wgmma")

    def under_way(self):
        self.snapshot = Snapshot(self.view, "a product")
        return self

    def matrix(self):
        """-> (extent, 64), of float8 (extent, 128), float32"""
        first, size = ((self.descriptor & 0x3FFF) << 4) - address(self.view) & 0x3FFFF, self.dtype.itemsize
        of_elements, end = _of_elements(self.descriptor & ~0x3FFF, self.step, self.major, self.extent, size)
        view = self.snapshot.read().view(self.dtype)
        if first + end > self.view.nbytes:
            raise EmulatorError(
                f"wgmma: the matrix descriptor {self.descriptor:#x} of a tile of {self.view.nbytes} bytes "
                f"leads to byte {first + end - 1} of it"
            )
        return view[of_elements + first // size].astype(np.float32)


@functools.cache
def _of_elements(descriptor, step, major, extent, size):
    """-> for an operand at address 0, which element, of `size` bytes, of shared memory each is: (extent, 64)
    or (extent, 128); and where they end, in bytes."""
    leading, stride = (descriptor >> 16 & 0x3FFF) << 4, (descriptor >> 32 & 0x3FFF) << 4
    row, k, depth = np.arange(extent)[:, None], np.arange(ROW_BYTES // size)[None, :], DEPTH_BYTES // size
    at, k = k // depth * (step << 4), k % depth
    if major == "k":
        at = at + row // 8 * stride + row % 8 * ROW_BYTES + k * size
    else:
        at = at + row // ROWS * leading + k // 8 * stride + k % 8 * ROW_BYTES + row % ROWS * size
    at = swizzled(at, ROW_BYTES)
    return at // size, int(at.max()) + size


def shared_address(thread, tile):
    """Where `tile` begins, as instructions on shared memory take it: 18 bits, and from bit 24 on the block's
    number in its cluster."""
    return thread.block.in_cluster << 24 | address(np.asarray(tile)) & 0x3FFFF


class Product:
    """One `multiply`: its result is there when it is `done`."""

    def __init__(self, before, a, b, n):
        self.before, self.n = before, n
        self.a: Any = a.under_way()
        self.b: Any = b.under_way()
        self.result = None

    def compute(self):
        before = self.before.result if isinstance(self.before, Product) else self.before
        add_product = _add_product if self.a.dtype.itemsize > 1 else _add_product_of_float8
        with np.errstate(all="ignore"):
            self.result = add_product(before, self.a.matrix(), self.b.matrix())
        self.before = self.a = self.b = None


def _add_product(before, a, b):
    # In parts, for which the BLAS library takes no threads: they would wait for each other longer.
    parts = [a @ b[i : i + COLUMNS].T for i in range(0, len(b), COLUMNS)]
    return before + np.concatenate(parts, axis=1)


def _add_product_of_float8(before, a, b):
    """Each instruction adds up 32 products and what was there as fixed-point numbers: they have KEPT bits
    behind the first one of the largest of them, and lose the others."""
    sums = before
    for k in range(0, a.shape[1], DEPTH_BYTES):
        terms = a[:, None, k : k + DEPTH_BYTES] * b[None, :, k : k + DEPTH_BYTES]
        terms = np.concatenate([terms, sums[:, :, None]], axis=2)
        _, exponents = np.frexp(np.abs(terms).max(axis=2))
        unit = np.ldexp(np.float32(1), np.maximum(exponents - 1 - KEPT, -126))
        sums = np.trunc(terms / unit[:, :, None]).sum(axis=2) * unit
    return sums


class UnderWay:
    """Accumulators of a thread that no `wait` has brought yet."""

    def __init__(self, product):
        self.product = product

    def _refuse(self, *_):
        raise EmulatorError(
            "the accumulators are used before their products are complete. Call wait(acc) first"
        )

    __getitem__ = __iter__ = __len__ = _refuse


def zeros(n):
    return (np.float32(0),) * (n // 2)


def _warpgroup(thread):
    if thread.block.n_threads % WARPGROUP:
        n = thread.n_threads
        raise EmulatorError(f"wgmma: the block has {n} threads; it must have a multiple of {WARPGROUP}")
    return thread.thread_id // WARPGROUP


def multiply(thread, acc, a, b, add, n):
    """`a`, `b`: Operands; `acc` is used if `add`."""
    block, group = thread.block, _warpgroup(thread)
    key = "warpgroup", group
    if key not in block.rendezvous:
        block.rendezvous[key] = Part(block, group * WARPGROUP, (1 << WARPGROUP) - 1, "wgmma", False)

    def begin(values):
        accumulators = [values[group * WARPGROUP + t] for t in range(WARPGROUP)]
        before = _before(accumulators, bool(add), n)
        for operand in a, b:
            check_fenced(block, operand.view, "wgmma")
        product = Product(before, a, b, n)
        products = block.asynchronous.products[group]

        def arrive(_):
            product.compute()
            products.remove(message)
            block.scheduler.wake(_key(block, group))

        message = under_way(thread, arrive, products[-1:])
        products.append(message)
        return product

    thread.turn()
    return UnderWay(block.rendezvous[key].join(thread, acc, begin))


def _before(accumulators, add, n):
    """What a product adds to: the Product before, or a matrix."""
    if not add:
        return np.zeros((ROWS, n), np.float32)
    if isinstance(accumulators[0], UnderWay):
        return accumulators[0].product
    matrix = np.empty((ROWS, n), np.float32)
    matrix[_rows_and_columns(n)] = np.array(accumulators, np.float32)
    return matrix


def _key(block, group):
    return "products", id(block), group


def wait_group(thread, n):
    """Until all but the last `n` products of the warpgroup are done."""
    group = _warpgroup(thread)
    products = thread.block.asynchronous.products[group]
    waited = products[: max(0, len(products) - n)]
    thread.wait_until(
        _key(thread.block, group), lambda: all(m.done for m in waited), lambda: "its products to be done"
    )


def settled(thread, acc):
    """The accumulators of a thread, whose products are done."""
    if not isinstance(acc, UnderWay):
        return acc
    rows, columns = _rows_and_columns(acc.product.n)
    t = thread.thread_id % WARPGROUP
    return tuple(acc.product.result[rows[t], columns[t]])
