"""Matrix product by mma.sync: any GPU from compute capability 8.0 on.

    out[M, N] = activation(A[M, K] @ B[N, K].T + bias[N])

The operands are float16 or bfloat16, each stored by rows ("k": K is contiguous) or by columns ("mn"); the
sums are float32. As many blocks as run at once compute the tiles of out, one after another; each warp
computes a part of a tile, in registers. They go through K in slabs. cp.async brings the slabs to shared
memory, into a ring of `stages` slabs. A slab is computed in steps of 16 of K; the operands of a step are
loaded into registers during the step before.

  before: start the copies of slabs 0 to stages - 2, one group of copies each (an empty group beyond the end).
          Slab 0 is the end of K, where there may be less than a slab; slab i is all of it from i - 1 slabs
          on.
          Wait for slab 0, syncthreads, load the operands of its first step
  slab i: 1. wait until all but the latest stages - 3 groups are there: this thread's copies of slab i + 1;
             syncthreads: all threads' copies
          2. spread over the steps: start the copies of slab i + stages - 1, into the slot of slab i - 1
          3. in the last step: load the operands of the first step of slab i + 1
  after:  syncthreads, start the copies of the first slabs of the next tile as before, store this tile

No race: the copies of step 2 overwrite a slot that was last read during slab i - 1, before the syncthreads of
slab i. Slab i has been there since the syncthreads of slab i - 1, which comes before that slab's last step. A
tile's first copies come after the syncthreads that follows all reads of the tile before.

No deadlock: no block waits for another.

The tensor cores keep busy during step 1: the operands of the first step are in registers already, and those
of the next have all of it to come. At a slab's end all warps would wait for each other and for their loads at
once.

Shared memory: rows of 16-byte chunks, of an operand's row ("k") or of one k ("mn"). The chunks of a row are
permuted by exclusive or with the row's number. So the 8 rows of a matrix that ldmatrix loads lie in different
banks.

Stores: mma leaves two neighbouring columns in each lane, so four lanes have 16 bytes of bfloat16, half a
sector of memory. Even and odd lanes exchange theirs of two such groups, so that four lanes write a sector of
32 bytes.

Edges: operands are zero beyond their rows or K; nothing is stored beyond out's rows or columns.

The machine code must keep (docs/machine_code.md): whole warp.
"""

import functools
import math
from typing import Any, NamedTuple

from numba import cuda, types

from shmemkit.device.cuda.float_storage import element
from shmemkit.device.cuda.mma import (
    MAX_GROUPS,
    cp_async,
    cp_async_commit,
    cp_async_wait,
    ldmatrix,
    ldmatrix_trans,
    warp_mma,
)
from shmemkit.device.cuda.register_tuples import for_each_part
from shmemkit.device.swizzle import grouped
from shmemkit.runtime.launch import bind
from shmemkit.support.arrays import address_of

from .epilogue import finishing, inline
from .problem import check_order, flat, not_of_tensor_cores

CHUNK = 8  # elements of 16 bits in 16 bytes
GROUP_ROWS = 2048  # of out, whose tiles are computed together: their operands fit the L2 cache
RESERVED = 1024  # bytes of shared memory that each block takes besides
REGISTERS = 65536  # of a multiprocessor


class Tile(NamedTuple):
    """Sizes of a block's tile, its slabs of K in shared memory, its warps."""

    m: int
    n: int
    k: int
    stages: int
    warps_m: int
    warps_n: int

    @property
    def threads(self):
        return 32 * self.warps_m * self.warps_n

    @property
    def shared_bytes(self):
        return 2 * self.stages * self.k * (self.m + self.n)


class _Operand(NamedTuple):
    """How a tile of rows by `k` of an operand comes to shared memory and to the warps' registers.

    begin(ld, row, rows)    -> first, left, to: of the slab at K = 0, of the rows from `row` on, of `rows`:
                            the index of the first chunk that the thread copies; how many rows there are from
                            its row on ("k"), or elements in it ("mn"); where it goes in the slab
    fill(shared, to, array, ld, first, left, part)        start to copy a part of a slab with all of its K
    fill_end(shared, to, array, ld, first, left, depth)   start to copy a slab with `depth` of its K
    along(ld)               elements from one K to the next
    offset(lane, row)       where the lane's rows begin, for the warp's first row
    load(shared, offset, step)  the lane's registers, for the `step`-th 16 of K
    """

    begin: Any
    fill: Any
    fill_end: Any
    along: Any
    offset: Any
    load: Any


@functools.cache
def _operand(is_b, major, width, tile_rows, tile_k, warp_rows, threads, parts):
    by_k = major == "k"
    per_row = (tile_k if by_k else tile_rows) // CHUNK  # chunks of a row in shared memory
    chunk_rows = tile_rows if by_k else tile_k
    log_per_row = per_row.bit_length() - 1
    at_once = threads // per_row  # rows of chunks that the block copies at once
    rounds = chunk_rows // at_once
    # Rows shorter than the 128 bytes of all banks share them: two such rows count as one.
    shift, mask = (1, 3) if per_row == 4 else (0, 7)
    if per_row & (per_row - 1) or at_once % 8 or rounds * at_once != chunk_rows:
        raise ValueError(f"a slab of {tile_rows} by {tile_k} is not copied evenly by {threads} threads")
    round_bytes = 16 * per_row * at_once
    group_bytes = 16 * per_row * 16  # from a row of chunks to the 16th after it
    copy = _chunk_copy(width)

    @inline
    def key(chunk_row):
        return (chunk_row >> shift) & mask

    @inline
    def mine():
        return cuda.threadIdx.x & (per_row - 1), cuda.threadIdx.x >> log_per_row

    @inline
    def begin(ld, row, rows):
        chunk, chunk_row = mine()
        to = ((chunk_row << log_per_row) + (chunk ^ key(chunk_row))) << 4
        if by_k:
            row += chunk_row
            return row * ld + CHUNK * chunk, types.int32(min(rows - row, tile_rows)), to
        row += CHUNK * chunk
        return row + chunk_row * ld, types.int32(max(0, min(rows - row, CHUNK))), to

    @inline
    def fill(shared, to, array, ld, first, left, part):
        for i in range(part * rounds // parts, (part + 1) * rounds // parts):
            there = left
            if by_k:
                there = CHUNK if i * at_once < left else 0
            copy(shared, to + i * round_bytes, array, first + i * (at_once * ld), there)

    @inline
    def fill_end(shared, to, array, ld, first, left, depth):
        chunk, chunk_row = mine()
        for i in range(rounds):
            if by_k:
                there = depth - CHUNK * chunk if i * at_once < left else 0
            else:
                there = left if chunk_row + i * at_once < depth else 0
            copy(shared, to + i * round_bytes, array, first + i * (at_once * ld), there)

    @inline
    def along(ld):
        return 1 if by_k else ld

    @inline
    def offset(lane, row):
        # Lanes 8 * i to 8 * i + 7 name the rows of matrix i: quarters by rows, then columns; of B the other
        # way round.
        inner, outer = (lane >> 3) & 1, lane >> 4
        half_of_rows, half_of_k = (outer, inner) if is_b else (inner, outer)
        if by_k:
            chunk_row, chunk = row + (lane & 7) + 8 * half_of_rows, half_of_k
        else:
            chunk_row, chunk = (lane & 7) + 8 * half_of_k, (row >> 3) + half_of_rows
        return ((chunk_row << log_per_row) + (chunk ^ key(chunk_row))) << 4

    # Of the chunk's number only its low bits are in a step of 16 along the row: exclusive or adds them.
    if by_k:

        @inline
        def sixteen(shared, offset, step, i):
            return ldmatrix(shared, (offset ^ step * 32) + i * group_bytes)
    else:

        @inline
        def sixteen(shared, offset, step, i):
            return ldmatrix_trans(shared, (offset ^ i * 32) + step * group_bytes)

    def loading(n):  # of n times 16 rows
        @inline
        def first(shared, offset, step):
            return sixteen(shared, offset, step, 0)

        before = loading(n - 1) if n > 1 else None

        @inline
        def load(shared, offset, step):
            return before(shared, offset, step) + sixteen(shared, offset, step, n - 1)

        return load if n > 1 else first

    return _Operand(begin, fill, fill_end, along, offset, loading(warp_rows // 16))


@functools.cache
def _chunk_copy(width):
    """-> copy(shared, to, array, first, there), which brings 16 bytes to byte `to` of shared memory, in
    pieces of `width` bytes: `there` elements from array[first] on, zeros for the others."""
    pieces, step = 16 // width, width // 2

    if width == 2:  # which cp.async does not do

        @inline
        def copy(shared, to, array, first, there):
            for i in range(pieces):
                value = types.uint16(0)
                if i < there:
                    value = array[first + i]
                shared[(to >> 1) + i] = value

        return copy

    @inline
    def copy(shared, to, array, first, there):
        for i in range(pieces):
            n_bytes = max(0, min(2 * there - i * width, width))
            cp_async(shared, to + i * width, array, first + i * step, n_bytes, width)

    return copy


@functools.cache
def _storing(columns, out_dtype, width, bias_dtype, activation, whole):
    """``store(acc, (out, bias, start, at, step, row, column, m, n))``: a warp's part of out, of `columns`
    columns, `width` elements at once. row and column are those of the lane's first element; out[at] is where
    it stores first, and step is from row to row, in units of `width`; bias[start] is that of column 0.
    `whole`: all of it is there."""
    finish, out_element = finishing(bias_dtype, activation), element(out_dtype)
    narrow, pack = out_element.narrow, out_element.pack
    per_row = columns // 16

    @inline
    def one(out, bias, start, at, row, column, m, n, x):
        if whole or (row < m and column < n):
            out[types.uint64(at)] = narrow(finish(x, bias, start + column))

    @inline
    def two(bias, start, column, n, x, y):
        if not whole:
            column = min(column, n - 2)  # beyond the last column there is no bias
        column += start
        return pack(finish(x, bias, column), finish(y, bias, column + 1))

    # w, x are of two columns, y, z of those 8 columns further.
    @inline
    def singly(out, bias, start, at, row, column, m, n, w, x, y, z):
        one(out, bias, start, at, row, column, m, n, w)
        one(out, bias, start, at + 1, row, column + 1, m, n, x)
        one(out, bias, start, at + 8, row, column + 8, m, n, y)
        one(out, bias, start, at + 9, row, column + 9, m, n, z)

    @inline
    def by_two(out, bias, start, at, row, column, m, n, w, x, y, z):
        if whole or (row < m and column < n):
            out[types.uint64(at)] = two(bias, start, column, n, w, x)
        if whole or (row < m and column + 8 < n):
            out[types.uint64(at + 4)] = two(bias, start, column + 8, n, y, z)

    @inline
    def by_four(out, bias, start, at, row, column, m, n, w, x, y, z):
        # Of two neighbours the even lane takes what both have of the first columns, the odd one the second.
        odd = cuda.threadIdx.x & 1
        first, second = two(bias, start, column, n, w, x), two(bias, start, column + 8, n, y, z)
        given = types.int32(first if odd else second)
        got = types.uint32(cuda.shfl_xor_sync(0xFFFFFFFF, given, 1))
        low, high = (got, second) if odd else (first, got)
        if whole or (row < m and column + 6 * odd < n):
            out[types.uint64(at)] = types.uint64(high) << types.uint64(32) | types.uint64(low)

    put = {1: singly, 2: by_two, 4: by_four}[width]

    @inline
    def store(part, i, arguments):
        out, bias, start, at, step, row, column, m, n = arguments
        down, right = 16 * (i // per_row), 16 * (i % per_row)
        row, column, at = row + down, column + right, at + down * step + right // width
        put(out, bias, start, at, row, column, m, n, part[0], part[1], part[4], part[5])
        put(out, bias, start, at + 8 * step, row + 8, column, m, n, part[2], part[3], part[6], part[7])

    return for_each_part(8, store)


@functools.cache
def grouping(group):
    """-> the order ``grouped`` of `group` tile rows"""

    @inline
    def order(turn, n_m, n_n):
        return grouped(turn, n_m, n_n, group)

    return order


@functools.cache
def gemm_body(dtype, out_dtype, width, a_layout, b_layout, tile, place, bias_dtype=None, activation=None):
    """-> the kernel as a device function, which takes what the kernel does, then how many rows of tiles there
    are, and `extra`, a tuple for `place`. See ``sm80_kernel`` for the other arguments.

    place(turn, n_m, n_n, m, extra)  -> (row, end, column, first of B, first of the bias): a device function:
                                     where the tile begins that comes after `turn` others, of n_m by n_n; the
                                     row at which its rows end; how many elements its B, and its bias, are
                                     behind the first ones. Each block has a tile
    """
    tile_m, tile_n, tile_k, stages, warps_m, warps_n = tile
    threads, steps = tile.threads, tile_k // 16
    rows, columns = tile_m // warps_m, tile_n // warps_n  # of a warp
    log_warps_m, log_tile_k = warps_m.bit_length() - 1, tile_k.bit_length() - 1
    if tile_k not in (32, 64) or not 3 <= stages <= MAX_GROUPS + 1:
        raise ValueError(f"the tile is {tile}; k must be 32 or 64, and stages 3 to {MAX_GROUPS + 1}")
    of_a = _operand(False, *a_layout, tile_m, tile_k, rows, threads, steps)
    of_b = _operand(True, *b_layout, tile_n, tile_k, columns, threads, steps)
    begin_a, fill_a, end_a, along_a, offset_a, load_a = of_a
    begin_b, fill_b, end_b, along_b, offset_b, load_b = of_b
    zero, mma = warp_mma(rows // 16, columns // 8, dtype)
    store, store_edge = (
        _storing(columns, out_dtype, width, bias_dtype, activation, whole) for whole in (True, False)
    )
    a_bytes, slab_bytes = 2 * tile_m * tile_k, 2 * tile_k * (tile_m + tile_n)
    ahead, but_first, but_second, ring = stages - 1, stages - 2, stages - 3, stages * slab_bytes

    @inline
    def ask(part, shared, slab, a, b, lda, ldb, mine_a, mine_b):
        first, left, to = mine_a
        fill_a(shared, slab + to, a, lda, first, left, part)
        first, left, to = mine_b
        fill_b(shared, slab + to, b, ldb, first, left, part)

    @inline
    def begin(shared, a, b, lda, ldb, n, k, row, end, column, first_b):
        """Ask for the first slabs of a tile. -> what is to be asked for next"""
        from_a, left_a, to_a = begin_a(lda, row, end)
        from_b, left_b, to_b = begin_b(ldb, column, n)
        from_b += first_b
        to_b += a_bytes
        whole = whole_slabs(k)
        end_a(shared, to_a, a, lda, from_a + whole * along_a(lda), left_a, k - whole)
        end_b(shared, to_b, b, ldb, from_b + whole * along_b(ldb), left_b, k - whole)
        cp_async_commit()
        for slab in range(1, ahead):
            mine_a, mine_b = (from_a, left_a, to_a), (from_b, left_b, to_b)
            if (slab - 1) * tile_k < whole:
                for part in range(steps):
                    ask(part, shared, slab * slab_bytes, a, b, lda, ldb, mine_a, mine_b)
            cp_async_commit()
            from_a += tile_k * along_a(lda)
            from_b += tile_k * along_b(ldb)
        return (from_a, left_a, to_a), (from_b, left_b, to_b)

    @inline
    def whole_slabs(k):
        return (k - 1 >> log_tile_k) << log_tile_k

    @inline
    def gemm(a, b, out, bias, m, n, k, lda, ldb, ldo, n_m, extra):
        shared = cuda.shared.array(0, types.uint16, alignment=128)
        n_n = (n + tile_n - 1) // tile_n
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        warp_row, warp_column = (warp & (warps_m - 1)) * rows, (warp >> log_warps_m) * columns
        my_a, my_b = offset_a(lane, warp_row), offset_b(lane, warp_column) + a_bytes
        whole = whole_slabs(k)
        turn = cuda.blockIdx.x
        row0, end, column0, first_b, _ = place(turn, n_m, n_n, m, extra)
        mine_a, mine_b = begin(shared, a, b, lda, ldb, n, k, row0, end, column0, first_b)
        while turn < n_m * n_n:
            from_a, left_a, to_a = mine_a
            from_b, left_b, to_b = mine_b
            cp_async_wait(but_first)
            cuda.syncthreads()
            acc = zero()
            a_now, b_now = load_a(shared, my_a, 0), load_b(shared, my_b, 0)
            here, empty = 0, ahead * slab_bytes
            left = whole + tile_k
            while left > 0:
                following = here + slab_bytes
                if following == ring:
                    following = 0
                more = left > ahead * tile_k
                mine_a, mine_b = (from_a, left_a, to_a), (from_b, left_b, to_b)
                # Each step is written out: in a loop over them, the registers of two would be moved around.
                cp_async_wait(but_second)
                cuda.syncthreads()
                a_next, b_next = load_a(shared, here + my_a, 1), load_b(shared, here + my_b, 1)
                if more:
                    ask(0, shared, empty, a, b, lda, ldb, mine_a, mine_b)
                acc = mma(acc, a_now, b_now)
                if steps == 4:
                    a_now, b_now = load_a(shared, here + my_a, 2), load_b(shared, here + my_b, 2)
                    if more:
                        ask(1, shared, empty, a, b, lda, ldb, mine_a, mine_b)
                    acc = mma(acc, a_next, b_next)
                    a_next, b_next = load_a(shared, here + my_a, 3), load_b(shared, here + my_b, 3)
                    if more:
                        ask(2, shared, empty, a, b, lda, ldb, mine_a, mine_b)
                    acc = mma(acc, a_now, b_now)
                a_now, b_now = load_a(shared, following + my_a, 0), load_b(shared, following + my_b, 0)
                if more:
                    ask(steps - 1, shared, empty, a, b, lda, ldb, mine_a, mine_b)
                cp_async_commit()
                acc = mma(acc, a_next, b_next)
                from_a += tile_k * along_a(lda)
                from_b += tile_k * along_b(ldb)
                empty, here = here, following
                left -= tile_k
            cuda.syncthreads()
            # Again: to keep it would take registers.
            row0, end, column0, _, start = place(turn, n_m, n_n, m, extra)
            turn += cuda.gridDim.x
            if turn < n_m * n_n:
                row, row_end, column, first_b, _ = place(turn, n_m, n_n, m, extra)
                mine_a, mine_b = begin(shared, a, b, lda, ldb, n, k, row, row_end, column, first_b)
            row, column = row0 + warp_row + (lane >> 2), column0 + warp_column + 2 * (lane & 3)
            first = row * ldo + column
            if width == 4:
                first += 6 * (lane & 1)
            to = (out, bias, start, first // width, ldo // width, row, column, end, n)
            if row0 + tile_m <= end and column0 + tile_n <= n:
                store(acc, to)
            else:
                store_edge(acc, to)

    return gemm


@functools.cache
def sm80_kernel(dtype, out_dtype, width, a_layout, b_layout, tile, order, bias_dtype=None, activation=None):
    """-> the kernel

    a_layout, b_layout   (major, width): "k" or "mn", and the bytes that are copied at once: 16, 4 or 2, of
                         which the array's address and its rows' distance are multiples
    width                1, or the elements of out in 8 bytes: n, and the distance of its rows, are multiples
    order                the tiles' order, a device function (turn, n_m, n_n) -> (m, n), as of ``grouping``
    """
    tile_m, tile_n, *_ = tile

    @inline
    def place(turn, n_m, n_n, m, extra):
        i, j = order(turn, n_m, n_n)
        return i * tile_m, m, j * tile_n, 0, 0

    gemm = gemm_body(dtype, out_dtype, width, a_layout, b_layout, tile, place, bias_dtype, activation)

    @cuda.jit(launch_bounds=(tile.threads, 1))
    def gemm_sm80(a, b, out, bias, m, n, k, lda, ldb, ldo):
        """a, b   uint16, 1-D: from the first element to the last, lda and ldb elements from line to line
        out    1-D: uint16, float32 or uint64 (`width` elements), ldo elements from row to row
        bias   uint16 or float32; not used without one
        """
        gemm(a, b, out, bias, m, n, k, lda, ldb, ldo, (m + tile_m - 1) // tile_m, ())

    return gemm_sm80


# ---- on the host


NARROW = 64 * 128  # elements of a tile whose operands come by 2 bytes, through registers: others need all


class _Choice(NamedTuple):
    tile: Tile  # with as many stages as there is room for
    blocks: int  # that share a multiprocessor: one computes while another one stores
    per_element: float  # time for one of out and one of K, over the first choice's
    end: int  # time for what is stored, in elements of K


_CHOICES = (
    _Choice(Tile(256, 128, 32, 6, 4, 2), 1, 1.0, 64),
    _Choice(Tile(128, 128, 32, 6, 2, 2), 2, 1.03, 0),
    _Choice(Tile(64, 128, 64, 4, 2, 2), 2, 1.2, 0),
    _Choice(Tile(64, 64, 64, 8, 2, 2), 1, 1.5, 64),
)


def choose_tile(m, n, k, gpu, largest=None):
    """-> the Tile for a product of that size: the one by which the busiest multiprocessor is done first.
    `largest`: elements of a tile at most."""

    def time(choice):
        tile = choice.tile
        tiles = -(-m // tile.m) * -(-n // tile.n)
        return -(-tiles // gpu.multiprocessors) * tile.m * tile.n * (choice.per_element * k + choice.end)

    tile, blocks, *_ = min(
        (c for c in _CHOICES if largest is None or c.tile.m * c.tile.n <= largest), key=time
    )
    room = (gpu.shared_bytes + RESERVED) // blocks - RESERVED
    for depth in (tile.k, 32):
        stages = min(tile.stages, room // (2 * depth * (tile.m + tile.n)))
        if stages >= 3:
            break
    return tile._replace(k=depth, stages=stages)


def resident(tile, gpu):
    """-> how many blocks a multiprocessor has room for: of memory, and of registers, 256 for each thread"""
    by_memory = (gpu.shared_bytes + RESERVED) // (tile.shared_bytes + RESERVED)
    return max(1, min(by_memory, REGISTERS // (256 * tile.threads)))


class _Layout(NamedTuple):
    major: str
    width: int
    ld: int  # elements from a line to the next one


def layout_of(array):
    """-> the _Layout of an operand whose rows are those of its tiles, and whose columns are K; None if
    neither is contiguous"""
    rows, columns = array.shape
    row_step, column_step = (stride // array.dtype.itemsize for stride in array.strides)
    if column_step == 1 or columns == 1:
        major, ld, count = "k", row_step, rows
    elif row_step == 1 or rows == 1:
        major, ld, count = "mn", column_step, columns
    else:
        return None
    if count == 1:
        ld = 0  # of which every width is a divisor
    if ld < 0:
        return None
    for width in (16, 4, 2):
        if not (address_of(array) | 2 * ld) % width and (major == "k" or not 2 * rows % width):
            return _Layout(major, width, ld)
    return None


def stored(out):
    """-> (out as the kernel takes it, 1-D, width, ldo)"""
    (m, n), itemsize = out.shape, out.dtype.itemsize
    ldo, width = out.strides[0] // itemsize if m > 1 else n, 8 // itemsize
    if (n | ldo) % width or address_of(out) % 8:
        width = 1
    return flat(out, "uint64" if width > 1 else element(out.dtype.name).stored), width, ldo


def out_that_cannot_be_stored(out):
    """-> why not, or None."""
    rows, columns = out.shape
    if rows > 1 and out.strides[0] < 0 or columns > 1 and out.strides[1] != out.dtype.itemsize:
        return f"out has strides {out.strides}; it must have contiguous rows"
    return None


class Sm80:
    """A product that is bound to the kernel: call it with a stream."""

    @staticmethod
    def unsupported(problem, gpu):
        """-> why it cannot compute `problem`, or None."""
        a, b, out, *_ = problem
        if gpu.compute_capability < (8, 0):
            return f"the GPU has compute capability {gpu.capability}; it must be 8.0 or newer"
        if reason := not_of_tensor_cores(problem):
            return reason
        if layout_of(a) is None or layout_of(b.T) is None:
            return f"x and w have strides {a.strides} and {b.strides}; rows or columns must be contiguous"
        return out_that_cannot_be_stored(out)

    def __init__(self, problem, gpu, tile=None, order=None):
        a, b, out, bias, activation, _ = problem
        m, n, k = problem.size
        a_layout: Any = layout_of(a)
        b_layout: Any = layout_of(b.T)
        narrow = 2 in (a_layout.width, b_layout.width)
        tile = tile or choose_tile(m, n, k, gpu, NARROW if narrow else None)
        tiles = -(-m // tile.m), -(-n // tile.n)
        check_order(order, *tiles)
        order = order or grouping(GROUP_ROWS // tile.m)
        out_dtype = out.dtype.name
        out, width, ldo = stored(out)
        bias_dtype = None if bias is None else bias.dtype.name
        operands = flat(a, "uint16"), flat(b, "uint16")
        bias = operands[0] if bias is None else bias.view(element(bias_dtype).stored)
        kernel = sm80_kernel(
            *(a.dtype.name, out_dtype, width),
            *(a_layout[:2], b_layout[:2], tile, order, bias_dtype, activation),
        )
        self._launch = bind(
            kernel,
            gpu.blocks(min(math.prod(tiles), gpu.multiprocessors * resident(tile, gpu))),
            tile.threads,
            (*operands, out, bias, m, n, k, a_layout.ld, b_layout.ld, ldo),
            shared=tile.shared_bytes,
        )

    def __call__(self, stream=None):
        self._launch(stream)


def table_entry(kernel, out_dtype, width, bias_dtype):
    """-> what GPU_KERNELS has of a kernel"""
    stored = element(out_dtype).stored, element(bias_dtype or "float16").stored
    return kernel, {"out": "uint64" if width > 1 else stored[0], "bias": stored[1]}


def _listed(tile, dtype, out_dtype, width, a_layout, b_layout, bias_dtype=None, activation=None):
    tile = Tile(*tile)
    given = a_layout, b_layout, tile, grouping(GROUP_ROWS // tile.m), bias_dtype, activation
    return table_entry(sm80_kernel(dtype, out_dtype, width, *given), out_dtype, width, bias_dtype)


_BY_K, _BY_ROW = ("k", 16), ("mn", 16)
_LARGE, _MIDDLE = (256, 128, 32, 6, 4, 2), (128, 128, 32, 6, 2, 2)
_WIDE, _SMALL = (64, 128, 64, 4, 2, 2), (64, 64, 64, 4, 2, 2)
GPU_KERNELS = {
    "256x128": _listed(_LARGE, "bfloat16", "bfloat16", 4, _BY_K, _BY_K),
    "256x128 rows": _listed(_LARGE, "float16", "float16", 4, _BY_K, _BY_ROW, "float32", "gelu"),
    "256x128 columns": _listed(_LARGE, "bfloat16", "float32", 2, _BY_ROW, _BY_ROW),
    "256x128 odd": _listed(_LARGE, "bfloat16", "bfloat16", 1, ("k", 4), ("mn", 4), "bfloat16", "silu"),
    "128x128": _listed(_MIDDLE, "bfloat16", "bfloat16", 4, _BY_K, _BY_K),
    "128x128 rows": _listed(_MIDDLE, "bfloat16", "bfloat16", 4, _BY_K, _BY_ROW),
    "64x128": _listed(_WIDE, "bfloat16", "bfloat16", 4, _BY_K, _BY_K),
    "64x128 odd": _listed(_WIDE, "bfloat16", "bfloat16", 1, ("k", 2), ("mn", 2), "bfloat16", "silu"),
    "64x64": _listed(_SMALL, "float16", "float32", 2, _BY_ROW, ("k", 4), "float16", "relu"),
}
