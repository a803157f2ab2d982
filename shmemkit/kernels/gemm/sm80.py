"""Matrix product by mma.sync: any GPU from compute capability 8.0 on.

    out[M, N] = activation(A[M, K] @ B[N, K].T + bias[N])

of float16 or bfloat16 operands, each stored by rows ("k": K is contiguous) or by columns ("mn"), added up in
float32. A block computes a tile of out, a warp a part of it, in registers. It goes through K in slabs, which
come to shared memory by cp.async, into a ring of `stages` slabs, and through a slab 16 of K at a time, in
steps; the operands of a step are loaded into registers during the one before.

  before: the slabs 0 to stages - 2 are asked for, one group of copies each (an empty group beyond the end);
          wait for slab 0, syncthreads, load the operands of its first step
  slab i: 1. wait until all but the latest stages - 3 groups are there: slab i + 1 is, of this thread;
             syncthreads: of all threads
          2. spread over the steps: ask for slab i + stages - 1, into the place of slab i - 1
          3. in the last step: load the operands of the first step of slab i + 1

No race: the copies of 2. overwrite what was last read during slab i - 1, before the syncthreads of slab i.
What is read of slab i has been there since the syncthreads of slab i - 1, which comes before its last step.
No deadlock: no block waits for another.

The tensor cores go on during 1.: the operands of the first step are in registers already, and those of the
next have all of it to come. At a slab's end all warps would wait for each other and for their loads at once.

Shared memory: rows of 16-byte chunks, of an operand's row ("k") or of one k ("mn"). The chunks of a row are
permuted by exclusive or with the row's number, so that the 8 rows of a matrix that ldmatrix loads lie in 8
different places of the 32 banks.

Edges: what is beyond the operands' rows or K are zeros; what is beyond out's rows or columns is not stored.
"""

import functools
from typing import NamedTuple

from numba import cuda, types

from shmemkit.device.elements import element
from shmemkit.device.mma import cp_async, cp_async_commit, cp_async_wait, ldmatrix, ldmatrix_trans, warp_mma
from shmemkit.device.registers import for_each_part
from shmemkit.device.swizzle import grouped
from shmemkit.launch import bind

from .epilogue import finishing, inline
from .problem import address_of, flat, not_of_tensor_cores

CHUNK = 8  # elements of 16 bits in 16 bytes
GROUP_ROWS = 2048  # of out, whose tiles are computed together: their operands fit the L2 cache
RESERVED = 1024  # bytes of shared memory that each block takes besides


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
                            the index of the first chunk that I copy; how many rows there are from its row
                            on ("k"), or elements in it ("mn"); where it goes in the slab
    fill(shared, to, array, ld, first, left, part)        ask for a part of a slab, all of whose K is there
    fill_end(shared, to, array, ld, first, left, depth)   ask for a slab, of whose K `depth` are there
    along(ld)               elements from one K to the next
    place(lane, row)        where my rows begin, for the warp's first row
    load(shared, place, step)   my registers, for the `step`-th 16 of K
    """

    begin: object
    fill: object
    fill_end: object
    along: object
    place: object
    load: object


@functools.cache
def _operand(is_b, major, width, tile_rows, tile_k, warp_rows, threads, parts):
    by_k = major == "k"
    per_line = (tile_k if by_k else tile_rows) // CHUNK  # chunks of a line in shared memory
    lines = tile_rows if by_k else tile_k
    log_per_line = per_line.bit_length() - 1
    at_once = threads // per_line  # lines that the block copies at once
    rounds = lines // at_once
    # Lines shorter than the 128 bytes of all banks share them: two such lines count as one.
    shift, mask = (1, 3) if per_line == 4 else (0, 7)
    if per_line & (per_line - 1) or at_once % 8 or rounds * at_once != lines:
        raise ValueError(f"a slab of {tile_rows} by {tile_k} is not copied evenly by {threads} threads")
    round_bytes = 16 * per_line * at_once
    group_bytes = 16 * per_line * 16  # from a line to the 16th after it
    copy = _chunk_copy(width)

    @inline
    def key(line):
        return (line >> shift) & mask

    @inline
    def mine():
        return cuda.threadIdx.x & (per_line - 1), cuda.threadIdx.x >> log_per_line

    @inline
    def begin(ld, row, rows):
        chunk, line = mine()
        to = ((line << log_per_line) + (chunk ^ key(line))) << 4
        if by_k:
            row += line
            return row * ld + CHUNK * chunk, types.int32(min(rows - row, tile_rows)), to
        row += CHUNK * chunk
        return row + line * ld, types.int32(max(0, min(rows - row, CHUNK))), to

    @inline
    def fill(shared, to, array, ld, first, left, part):
        for i in range(part * rounds // parts, (part + 1) * rounds // parts):
            there = left
            if by_k:
                there = CHUNK if i * at_once < left else 0
            copy(shared, to + i * round_bytes, array, first + i * (at_once * ld), there)

    @inline
    def fill_end(shared, to, array, ld, first, left, depth):
        chunk, line = mine()
        for i in range(rounds):
            if by_k:
                there = depth - CHUNK * chunk if i * at_once < left else 0
            else:
                there = left if line + i * at_once < depth else 0
            copy(shared, to + i * round_bytes, array, first + i * (at_once * ld), there)

    @inline
    def along(ld):
        return 1 if by_k else ld

    @inline
    def place(lane, row):
        # Lanes 8 * i to 8 * i + 7 name the rows of matrix i: quarters by rows, then columns; of B the other
        # way round.
        inner, outer = (lane >> 3) & 1, lane >> 4
        half_of_rows, half_of_k = (outer, inner) if is_b else (inner, outer)
        if by_k:
            line, chunk = row + (lane & 7) + 8 * half_of_rows, half_of_k
        else:
            line, chunk = (lane & 7) + 8 * half_of_k, (row >> 3) + half_of_rows
        return ((line << log_per_line) + (chunk ^ key(line))) << 4

    # Of the chunk's number only its low bits are in a step of 16 along the line: exclusive or adds them.
    if by_k:

        @inline
        def sixteen(shared, place, step, i):
            return ldmatrix(shared, (place ^ step * 32) + i * group_bytes)
    else:

        @inline
        def sixteen(shared, place, step, i):
            return ldmatrix_trans(shared, (place ^ i * 32) + step * group_bytes)

    def loading(n):  # of n times 16 rows
        @inline
        def first(shared, place, step):
            return sixteen(shared, place, step, 0)

        before = loading(n - 1) if n > 1 else None

        @inline
        def load(shared, place, step):
            return before(shared, place, step) + sixteen(shared, place, step, n - 1)

        return load if n > 1 else first

    return _Operand(begin, fill, fill_end, along, place, loading(warp_rows // 16))


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
def _storing(columns, out_dtype, paired, bias_dtype, activation, whole):
    """``store(acc, (out, bias, at, step, row, column, m, n))``: a warp's part of out, of `columns` columns;
    row and column are those of my first element, which is out[at], and step is from row to row. `whole`: all
    of it is there."""
    finish, out_element = finishing(bias_dtype, activation), element(out_dtype)
    narrow, pack = out_element.narrow, out_element.pack
    per_row, width = columns // 8, 2 if paired else 1

    @inline
    def two(out, bias, at, row, column, m, n, x, y):
        if whole or (row < m and column < n):
            at = types.uint64(at)  # an index that may be negative takes more instructions
            x = finish(x, bias, column)
            if paired:
                out[at] = pack(x, finish(y, bias, column + 1))
            else:
                out[at] = narrow(x)
                if whole or column + 1 < n:
                    out[at + types.uint64(1)] = narrow(finish(y, bias, column + 1))

    @inline
    def store(part, i, arguments):
        out, bias, at, step, row, column, m, n = arguments
        down, right = 16 * (i // per_row), 8 * (i % per_row)
        row, column, at = row + down, column + right, at + down * step + right // width
        two(out, bias, at, row, column, m, n, part[0], part[1])
        two(out, bias, at + 8 * step, row + 8, column, m, n, part[2], part[3])

    return for_each_part(4, store)


@functools.cache
def grouping(group):
    """-> the order ``grouped`` of `group` tile rows"""

    @inline
    def order(place, n_m, n_n):
        return grouped(place, n_m, n_n, group)

    return order


@functools.cache
def sm80_kernel(dtype, out_dtype, paired, a_layout, b_layout, tile, order, bias_dtype=None, activation=None):
    """-> the kernel

    a_layout, b_layout   (major, width): "k" or "mn", and the bytes that are copied at once: 16, 4 or 2, of
                         which the array's address and its rows' distance are multiples
    paired               out is given by pairs: n, and the distance of its rows, are even
    order                the tiles' order, a device function (place, n_m, n_n) -> (m, n), as of ``grouping``
    """
    tile_m, tile_n, tile_k, stages, warps_m, warps_n = tile
    threads, steps = tile.threads, tile_k // 16
    rows, columns = tile_m // warps_m, tile_n // warps_n  # of a warp
    log_warps_m, log_tile_k = warps_m.bit_length() - 1, tile_k.bit_length() - 1
    if stages < 3:
        raise ValueError(f"{tile}: 3 stages or more are allowed")
    of_a = _operand(False, *a_layout, tile_m, tile_k, rows, threads, steps)
    of_b = _operand(True, *b_layout, tile_n, tile_k, columns, threads, steps)
    begin_a, fill_a, end_a, along_a, place_a, load_a = of_a
    begin_b, fill_b, end_b, along_b, place_b, load_b = of_b
    zero, mma = warp_mma(rows // 16, columns // 8, dtype)
    store, store_edge = (
        _storing(columns, out_dtype, paired, bias_dtype, activation, whole) for whole in (True, False)
    )
    width = 2 if paired else 1
    a_bytes, slab_bytes = 2 * tile_m * tile_k, 2 * tile_k * (tile_m + tile_n)
    ahead, but_first, but_second, ring = stages - 1, stages - 2, stages - 3, stages * slab_bytes

    @inline
    def ask(part, shared, slab, a, b, lda, ldb, mine_a, mine_b):
        first, left, to = mine_a
        fill_a(shared, slab + to, a, lda, first, left, part)
        first, left, to = mine_b
        fill_b(shared, slab + to, b, ldb, first, left, part)

    @cuda.jit(launch_bounds=(threads, 1))
    def gemm_sm80(a, b, out, bias, m, n, k, lda, ldb, ldo):
        """a, b   uint16, 1-D: from the first element to the last, lda and ldb elements from line to line
        out    1-D: uint16, uint32 (pairs), float32 or uint64 (pairs), ldo elements from row to row
        bias   uint16 or float32; not used without one
        """
        shared = cuda.shared.array(0, types.uint16, alignment=128)
        n_m, n_n = (m + tile_m - 1) // tile_m, (n + tile_n - 1) // tile_n
        i, j = order(cuda.blockIdx.x, n_m, n_n)
        row0, column0 = i * tile_m, j * tile_n
        warp, lane = cuda.threadIdx.x >> 5, cuda.threadIdx.x & 31
        row, column = (warp & (warps_m - 1)) * rows, (warp >> log_warps_m) * columns
        my_a, my_b = place_a(lane, row), place_b(lane, column) + a_bytes

        from_a, left_a, to_a = begin_a(lda, row0, m)
        from_b, left_b, to_b = begin_b(ldb, column0, n)
        to_b += a_bytes

        # The slab with the end of K goes first, so that the others are whole.
        whole = (k - 1 >> log_tile_k) << log_tile_k
        end_a(shared, to_a, a, lda, from_a + whole * along_a(lda), left_a, k - whole)
        end_b(shared, to_b, b, ldb, from_b + whole * along_b(ldb), left_b, k - whole)
        cp_async_commit()
        asked = 0
        for slab in range(1, ahead):
            mine_a, mine_b = (from_a, left_a, to_a), (from_b, left_b, to_b)
            if asked < whole:
                for part in range(steps):
                    ask(part, shared, slab * slab_bytes, a, b, lda, ldb, mine_a, mine_b)
            cp_async_commit()
            from_a += tile_k * along_a(lda)
            from_b += tile_k * along_b(ldb)
            asked += tile_k
        cp_async_wait(but_first)
        cuda.syncthreads()
        acc = zero()
        a_now, b_now = load_a(shared, my_a, 0), load_b(shared, my_b, 0)
        here, free = 0, ahead * slab_bytes
        left = whole + tile_k
        while left > 0:
            following = here + slab_bytes
            if following == ring:
                following = 0
            more = asked < whole
            mine_a, mine_b = (from_a, left_a, to_a), (from_b, left_b, to_b)
            # Each step is written out: in a loop over them, the registers of two would be moved around.
            cp_async_wait(but_second)
            cuda.syncthreads()
            a_next, b_next = load_a(shared, here + my_a, 1), load_b(shared, here + my_b, 1)
            if more:
                ask(0, shared, free, a, b, lda, ldb, mine_a, mine_b)
            acc = mma(acc, a_now, b_now)
            if steps == 4:
                a_now, b_now = load_a(shared, here + my_a, 2), load_b(shared, here + my_b, 2)
                if more:
                    ask(1, shared, free, a, b, lda, ldb, mine_a, mine_b)
                acc = mma(acc, a_next, b_next)
                a_next, b_next = load_a(shared, here + my_a, 3), load_b(shared, here + my_b, 3)
                if more:
                    ask(2, shared, free, a, b, lda, ldb, mine_a, mine_b)
                acc = mma(acc, a_now, b_now)
            a_now, b_now = load_a(shared, following + my_a, 0), load_b(shared, following + my_b, 0)
            if more:
                ask(steps - 1, shared, free, a, b, lda, ldb, mine_a, mine_b)
            cp_async_commit()
            acc = mma(acc, a_next, b_next)
            from_a += tile_k * along_a(lda)
            from_b += tile_k * along_b(ldb)
            free, here = here, following
            asked += tile_k
            left -= tile_k
        row += row0 + (lane >> 2)
        column += column0 + 2 * (lane & 3)
        to = (out, bias, (row * ldo + column) // width, ldo // width, row, column, m, n)
        if row0 + tile_m <= m and column0 + tile_n <= n:
            store(acc, to)
        else:
            store_edge(acc, to)

    return gemm_sm80


# ---- on the host

# The Tile at most, blocks that share a multiprocessor, time per element of out over the first's
_TILES = (
    (Tile(128, 128, 32, 6, 2, 2), 2, 1.0),
    (Tile(128, 256, 64, 4, 2, 4), 1, 1.01),
    (Tile(128, 224, 64, 4, 4, 2), 1, 1.05),
    (Tile(64, 128, 64, 4, 2, 2), 2, 1.2),
    (Tile(64, 64, 64, 8, 2, 2), 1, 1.5),
)


def choose_tile(m, n, gpu, b_major="k"):
    """-> the Tile for an (m, n) result: the one by which the busiest multiprocessor is done first."""
    possible = [entry for entry in _TILES if b_major == "k" or not entry[0].n & (entry[0].n - 1)]

    def time(entry):
        tile, _, per_element = entry
        tiles = -(-m // tile.m) * -(-n // tile.n)
        return -(-tiles // gpu.multiprocessors) * tile.m * tile.n * per_element

    tile, resident, _ = min(possible, key=time)
    room = (gpu.shared_bytes + RESERVED) // resident - RESERVED
    for k in (tile.k, 32):
        stages = min(tile.stages, room // (2 * k * (tile.m + tile.n)))
        if stages >= 3:
            break
    return tile._replace(k=k, stages=stages)


class _Layout(NamedTuple):
    major: str
    width: int
    ld: int  # elements from a line to the next one


def _layout(array):
    """-> the _Layout of an operand whose rows are those of its tiles, and whose columns are K; None if
    neither is contiguous"""
    rows, columns = array.shape
    row_step, column_step = (stride // array.dtype.itemsize for stride in array.strides)
    if column_step == 1 or columns == 1:
        major, ld, lines = "k", row_step, rows
    elif row_step == 1 or rows == 1:
        major, ld, lines = "mn", column_step, columns
    else:
        return None
    if lines == 1:
        ld = 0  # of which every width is a divisor
    if ld < 0:
        return None
    for width in (16, 4, 2):
        if not (address_of(array) | 2 * ld) % width and (major == "k" or not 2 * rows % width):
            return _Layout(major, width, ld)
    return None


class Sm80:
    """A product that is bound to the kernel: call it with a stream."""

    @staticmethod
    def unsupported(problem, gpu):
        """-> why it cannot compute `problem`, or None."""
        a, b, out, _, _ = problem
        if gpu.compute_capability < (8, 0):
            return f"compute capability {gpu.compute_capability}: 8.0 and later are allowed"
        if reason := not_of_tensor_cores(problem):
            return reason
        if _layout(a) is None or _layout(b.T) is None:
            return f"strides {a.strides} and {b.strides}: contiguous rows or columns are allowed"
        if out.shape[1] > 1 and (out.strides[1] != out.dtype.itemsize or out.strides[0] < 0):
            return f"strides {out.strides} of out: contiguous rows are allowed"
        return None

    def __init__(self, problem, gpu, tile=None, order=None):
        a, b, out, bias, activation = problem
        m, n, k = problem.size
        a_layout, b_layout = _layout(a), _layout(b.T)
        tile = tile or choose_tile(m, n, gpu, b_layout.major)
        order = order or grouping(GROUP_ROWS // tile.m)
        out_dtype = out.dtype.name
        to = element(out_dtype)
        ldo = out.strides[0] // out.dtype.itemsize if m > 1 else n
        paired = not (n | ldo) % 2 and not address_of(out) % (2 * out.dtype.itemsize)
        out = flat(out, to.pair if paired else to.stored)
        bias_dtype = None if bias is None else bias.dtype.name
        operands = flat(a, "uint16"), flat(b, "uint16")
        bias = operands[0] if bias is None else bias.view(element(bias_dtype).stored)
        kernel = sm80_kernel(
            *(a.dtype.name, out_dtype, paired),
            *(a_layout[:2], b_layout[:2], tile, order, bias_dtype, activation),
        )
        self._launch = bind(
            kernel,
            -(-m // tile.m) * -(-n // tile.n),
            tile.threads,
            (*operands, out, bias, m, n, k, a_layout.ld, b_layout.ld, ldo),
            shared=tile.shared_bytes,
        )
        self._launch.forget_arrays()

    def __call__(self, stream=None):
        self._launch(stream)


def _listed(tile, dtype, out_dtype, paired, a_layout, b_layout, bias_dtype=None, activation=None):
    tile = Tile(*tile)
    kernel = sm80_kernel(
        dtype,
        out_dtype,
        paired,
        a_layout,
        b_layout,
        tile,
        grouping(GROUP_ROWS // tile.m),
        bias_dtype,
        activation,
    )
    to = element(out_dtype)
    out = getattr(types, to.pair if paired else to.stored)
    bias = getattr(types, element(bias_dtype).stored if bias_dtype else "uint16")
    return kernel, (*(types.uint16[::1],) * 2, out[::1], bias[::1], *(types.int64,) * 6)


_BY_K, _BY_ROW = ("k", 16), ("mn", 16)
_LARGE, _SMALL = (128, 256, 64, 4, 2, 4), (64, 64, 64, 4, 2, 2)
GPU_KERNELS = {
    "128x256": _listed(_LARGE, "bfloat16", "bfloat16", True, _BY_K, _BY_K),
    "128x256 rows": _listed(_LARGE, "float16", "float16", True, _BY_K, _BY_ROW, "float32", "gelu"),
    "128x256x32": _listed((128, 256, 32, 4, 2, 4), "bfloat16", "bfloat16", True, _BY_K, _BY_ROW),
    "128x224": _listed((128, 224, 64, 4, 4, 2), "bfloat16", "bfloat16", True, _BY_K, _BY_K),
    "128x256 odd": _listed(_LARGE, "bfloat16", "bfloat16", False, ("k", 2), ("mn", 4), "bfloat16", "silu"),
    "128x128": _listed((128, 128, 64, 3, 2, 2), "bfloat16", "bfloat16", True, _BY_K, _BY_ROW),
    "64x64": _listed(_SMALL, "float16", "float32", False, _BY_ROW, ("k", 4), "float16", "relu"),
}
