"""Rows of words, one of each rank, combined in the order of the ranks. The rank's own row may lie apart from
the rows that the others have sent.
"""

import functools

from numba import cuda

from .array_words import load_word
from .unroll import folded, tuple_of
from .word_reductions import reduction

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
        return _load_four(mine, i, step) if its else _load_four(rows, at + i, step)

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


@functools.cache
def _four_of(op, dtype, n_rows, own_row):
    """-> ``four`` of `n_rows` rows. Instead of row `me`, it loads the row before, so that no load waits for a
    branch."""
    first, add, _ = reduction(op, dtype)

    @cuda.jit(device=True)
    def load(k, arguments):
        rows, i, stride, me, step = arguments
        row = k
        if k > 0 and (me == k or not own_row and (me < k or k == n_rows - 1)):
            row = k - 1
        return _load_four(rows, i + row * stride, step)

    @cuda.jit(device=True)
    def chosen(k, arguments):
        own, others, me = arguments
        return own if me == k else others[k]

    @cuda.jit(device=True)
    def first_four(words, _):
        return first(words[0]), first(words[1]), first(words[2]), first(words[3])

    @cuda.jit(device=True)
    def add_four(totals, words, _):
        p, q, r, s = totals
        a, b, c, d = words
        return add(p, a), add(q, b), add(r, c), add(s, d)

    loads, choose, fold = (
        tuple_of(n_rows, load),
        tuple_of(n_rows, chosen),
        folded(n_rows, first_four, add_four),
    )

    @cuda.jit(device=True)
    def four(mine, rows, at, stride, me, n, i, step):
        others = loads((rows, at + i, stride, me, step))
        return fold(choose((_load_four(mine, i, step), others, me)), me)

    return four


@cuda.jit(device=True)
def _load_four(row, i, step):
    return (
        load_word(row, i),
        load_word(row, i + step),
        load_word(row, i + 2 * step),
        load_word(row, i + 3 * step),
    )
