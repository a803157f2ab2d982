"""Rows of words, one of each rank, combined in the order of the ranks. The rank's own row may lie apart from
the rows that the others have sent.
"""

import functools

from numba import cuda

from shmemkit.device import load_word, reduction

AT_ONCE = 8  # rows of four words, in registers


@functools.cache
def combining(op, dtype, n_rows=None, own_row=True):
    """-> two device functions, of one word of a thread and of four, whose loads are under way together, also
    those of all rows if these are `n_rows`, AT_ONCE or fewer:

        one(mine, rows, at, stride, me, n, i)         -> total of words i, as of ``reduction(op, dtype)``
        four(mine, rows, at, stride, me, n, i, step)  -> those of i, i + step, i + 2 * step, i + 3 * step

    mine    the rank's own row, number `me` of the `n`: uint64 or uint8, 1-D
    rows    the others, likewise: row k begins with word at + k * stride, and row `me` is not used. Without
            `own_row` there is no such row; those of the ranks after `me` begin one stride earlier
    """
    first, add, _ = reduction(op, dtype)

    @cuda.jit(device=True)
    def one(mine, rows, at, stride, me, n, i):
        own = load_word(mine, i)
        total = first(own if me == 0 else load_word(rows, at + i))
        k = 1
        while k < n:
            if own_row or k - 1 != me:
                at += stride
            total = add(total, own if me == k else load_word(rows, at + i))
            k += 1
        return total

    @cuda.jit(device=True)
    def load(mine, rows, at, its, i, step):
        if its:
            return (
                load_word(mine, i),
                load_word(mine, i + step),
                load_word(mine, i + 2 * step),
                load_word(mine, i + 3 * step),
            )
        at += i
        return (
            load_word(rows, at),
            load_word(rows, at + step),
            load_word(rows, at + 2 * step),
            load_word(rows, at + 3 * step),
        )

    @cuda.jit(device=True)
    def four(mine, rows, at, stride, me, n, i, step):
        p, q, r, s = load(mine, rows, at, me == 0, i, step)
        p, q, r, s = first(p), first(q), first(r), first(s)
        k = 1
        while k < n:
            if own_row or k - 1 != me:
                at += stride
            a, b, c, d = load(mine, rows, at, me == k, i, step)
            p, q, r, s = add(p, a), add(q, b), add(r, c), add(s, d)
            k += 1
        return p, q, r, s

    if n_rows is not None and n_rows <= AT_ONCE:
        four = _four_of(op, dtype, n_rows, own_row)
    return one, four


def _four_of(op, dtype, n_rows, own_row):
    load, combine = _loading(n_rows, own_row), _adding(op, dtype, n_rows)

    @cuda.jit(device=True)
    def four(mine, rows, at, stride, me, n, i, step):
        return combine(_load_four(mine, i, step), load(rows, at + i, stride, me, step), me)

    return four


@cuda.jit(device=True)
def _load_four(row, i, step):
    return (
        load_word(row, i),
        load_word(row, i + step),
        load_word(row, i + 2 * step),
        load_word(row, i + 3 * step),
    )


@functools.cache
def _loading(n, own_row, is_last=True):
    """-> ``load(rows, i, stride, me, step)``: four words of each of `n` rows. Instead of row `me`, it loads
    the row before, so that no load waits for a branch."""
    k, neighbour = n - 1, max(n - 2, 0)
    moved = is_last and not own_row  # whatever `me` is
    before = _loading(n - 1, own_row, False) if n > 1 else None

    @cuda.jit(device=True)
    def load_first(rows, i, stride, me, step):
        return (_load_four(rows, i, step),)

    @cuda.jit(device=True)
    def load(rows, i, stride, me, step):
        others = before(rows, i, stride, me, step)
        row = neighbour if moved or me == k or not own_row and me < k else k
        return others + (_load_four(rows, i + row * stride, step),)

    return load if n > 1 else load_first


@functools.cache
def _adding(op, dtype, n):
    """-> ``combine(own, words, me)``: the four totals of `n` rows, row `me` being `own`."""
    first, add, _ = reduction(op, dtype)
    k = n - 1
    before = _adding(op, dtype, n - 1) if n > 1 else None

    @cuda.jit(device=True)
    def only(own, words, me):
        a, b, c, d = own if me == 0 else words[0]
        return first(a), first(b), first(c), first(d)

    @cuda.jit(device=True)
    def combine(own, words, me):
        p, q, r, s = before(own, words, me)
        a, b, c, d = own if me == k else words[k]
        return add(p, a), add(q, b), add(r, c), add(s, d)

    return combine if n > 1 else only
