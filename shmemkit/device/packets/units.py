"""What kernels do with the units of all ranks, by a packet transport (``transports.py``)."""

import functools

from numba import cuda, types

from ..cuda.subarrays import span
from ..cuda.unroll import folded, for_each, tuple_of
from ..cuda.word_reductions import reduction
from ..shmem.barriers import num_ranks
from .transports import rank_after

device = cuda.jit(device=True)
u32 = types.uint32


@functools.cache
def repeating(n):
    """-> ``copies(words)``: the same words, `n` times."""

    @device
    def same(k, words):
        return words

    return tuple_of(n, same)


@functools.cache
def sending(t, n, personalized):
    """-> ``send(channel, row, i, x, size, epoch, me)``: send each of `n` ranks, this one too, unit `i` of x,
    or of its segment of x, of `size` elements."""
    load_unit, send_all, rotates = t.load, t.send_all(n), t.rotates

    @device
    def load(k, arguments):
        x, size, i, me = arguments
        return load_unit(span(x, (rank_after(me, k + 1) if rotates else k) * size, size), i)

    load_all, copies = tuple_of(n, load), repeating(n)

    @device
    def send(channel, row, i, x, size, epoch, me):
        words = load_all((x, size, i, me)) if personalized else copies(load_unit(x, i))
        send_all(channel, row, i, words, epoch, me)

    return send


@functools.cache
def storing(t, n):
    """-> ``store(units, (out, size, i))``: store the k-th of `n` units as unit `i` of segment k of out, of
    `size` elements, for all k."""
    store_unit = t.store

    @device
    def store(k, words, arguments):
        out, size, i = arguments
        store_unit(span(out, k * size, size), i, words)

    return for_each(n, store)


@functools.cache
def combining(op, dtype, n):
    """-> ``combine(units)``: the words of the combination of `n` units of two words, in their order."""
    first, add, result = reduction(op, dtype)

    @device
    def first_pair(words, _):
        return first(words[0]), first(words[1])

    @device
    def add_pair(totals, words, _):
        return add(totals[0], words[0]), add(totals[1], words[1])

    fold = folded(n, first_pair, add_pair)

    @device
    def combine(units):
        low, high = fold(units, ())
        return result(low, n), result(high, n)

    return combine


@functools.cache
def combining_one_by_one(t, op, dtype):
    """-> ``combine(channel, slot, own, epoch, me)``: the combination of a unit of all ranks, in their order;
    `slot` is that of rank 0."""
    receive, (first, add, result) = t.receive, reduction(op, dtype)

    @device
    def of_rank(channel, slot, own, epoch, me, k):
        return own if k == me else receive(channel, u32(slot + k * channel[1]), epoch)

    @device
    def combine_words(channel, slot, own, epoch, me):
        n, k = num_ranks(), 1
        total = first(of_rank(channel, slot, own, epoch, me, 0)[0])
        while k < n:
            total = add(total, of_rank(channel, slot, own, epoch, me, k)[0])
            k += 1
        return (result(total, n),)

    @device
    def combine_pairs(channel, slot, own, epoch, me):
        n, k = num_ranks(), 1
        words = of_rank(channel, slot, own, epoch, me, 0)
        low, high = first(words[0]), first(words[1])
        while k < n:
            words = of_rank(channel, slot, own, epoch, me, k)
            low, high = add(low, words[0]), add(high, words[1])
            k += 1
        return result(low, n), result(high, n)

    return combine_words if t.unit_bytes == 8 else combine_pairs


REDUCTIONS = (
    ("sum", "bfloat16"),
    ("max", "float32"),
    ("sum", "float16"),
    ("prod", "int8"),
    ("avg", "float8_e5m2"),
)
