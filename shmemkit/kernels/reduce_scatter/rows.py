"""Rows of words, one of each rank, combined in the order of the ranks: what has come from the others, and my
own, which need not lie beside them."""

import functools

from numba import cuda

from shmemkit.device import load_word, reduction


@functools.cache
def combining(op, dtype):
    """-> two device functions, of one word of a thread and of four, whose loads are under way together:

        one(mine, rows, at, stride, me, n, i)         -> total of words i, as of ``reduction(op, dtype)``
        four(mine, rows, at, stride, me, n, i, step)  -> those of i, i + step, i + 2 * step, i + 3 * step

    mine    my row, number `me` of the `n`: uint64 or uint8, 1-D
    rows    the others, which begin with words at + k * stride: likewise. Row `me` of it is not used
    """
    first, add, _ = reduction(op, dtype)

    @cuda.jit(device=True)
    def one(mine, rows, at, stride, me, n, i):
        own = load_word(mine, i)
        total = first(own if me == 0 else load_word(rows, at + i))
        k = 1
        while k < n:
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
            at += stride
            a, b, c, d = load(mine, rows, at, me == k, i, step)
            p, q, r, s = add(p, a), add(q, b), add(r, c), add(s, d)
            k += 1
        return p, q, r, s

    return one, four
