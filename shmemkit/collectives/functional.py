"""Collectives in one line, on the current World or a group of it.

Each function caches its objects (``AllGather``, ``AllReduce`` and so on, with method "auto") until the World
(or the `group`) ends: one object per op or root, per `sms`, and per size class (powers of two from 64 KB). To
make one is collective, and allocates symmetric memory, several times that size. So the first call of each
must be made on all ranks, and before a capture (RuntimeError in it). To choose the method, or to get the
memory back, make the object yourself: ``sk.ReduceScatter(world, max_nbytes, method="ring")``.

x, `out` and `stream` are those of the object's call, and so are the result, its memory ordering and the
errors; in the first call of each object, all ranks raise what is wrong on one of them. `sms` is the object's.
`out`, `stream`, `sms` and `group` (a Group; default: the World) are given by name. Ranks, and so `root`, are
the group's. RuntimeError without a World.
"""

from __future__ import annotations

from typing import Any

from shmemkit.operations.method import agree
from shmemkit.runtime.budget import checked_sms
from shmemkit.runtime.symmetric_memory import as_dtype
from shmemkit.runtime.world import World, check_world, current
from shmemkit.support.agreement import as_message, raise_on_all
from shmemkit.support.arrays import as_array, stream_of, with_shape
from shmemkit.support.settings import shown
from shmemkit.typing import AnyArray, AnyStream, ArrayT, AttentionForm

from .attention_combine import AttentionCombine
from .collective import Collective, checked_root

LEAST = 1 << 16  # bytes


def attention_combine(
    partial: ArrayT,
    lse: AnyArray,
    form: AttentionForm = "all_gather",
    *,
    out: ArrayT | None = None,
    stream: AnyStream | None = None,
    group: World | None = None,
    sms: int | None = None,
) -> ArrayT:
    """Combine the partial attention of all ranks: see `AttentionCombine`. Its object is for the heads,
    head_dim, dtype and form, and for the batch, rounded up to a power of two. -> out, default a new one of
    partial's kind
    """
    given = partial, lse, out
    of = AttentionCombine, "attention_combine()", _size_of_heads, (form, sms), "batch entries"
    return _kept(*of, "partial", partial, given, stream, group)(*given, stream=stream)


def _on(who, group):
    """-> the group, if there is one, else the current World"""
    if group is None:
        return current(required=True)
    check_world(who, group, "group")
    return group


def in_one_line(kind: type[Collective], x, out, stream, group, sms, *options: Any) -> Any:
    """Call the object that is cached for x, or for `out` where x is None and others say the size."""
    name, array = ("out", out) if x is None and kind._out_is_alike else ("x", x)
    of = kind, f"{kind._table}()", _size_of_bytes, (kind, options, sms), "bytes"
    return _kept(*of, name, array, (x, out), stream, group)(x, out, stream=stream)


def _size_of_bytes(who, world, name, array, kind, options, sms):
    if array is None and kind._out_is_alike:
        raise ValueError(f"{who}: x and out are None; the root gives x, all other ranks give out")
    array = with_shape(who, name, array, world.xp)
    times = world.n_ranks if name == "out" or kind._gathers > kind._scatters else 1
    if kind._reduces and not kind._rooted and "float8" in str(array.dtype):
        times = 2  # by some methods its totals travel as float32
    argument = "root" if kind._rooted else "op"
    if options and hasattr(options[0], "__len__") and not isinstance(options[0], str):
        raise TypeError(f"{who}: {argument} is {shown(options[0])}; give `out` and `stream` by name")
    if argument == "root":  # True and 1.0 have the hash of 1
        options = checked_root(who, world, options[0]), *options[1:]
    return max(LEAST, 1 << max(0, times * array.nbytes - 1).bit_length()), (*options, sms)


def _size_of_heads(who, world, name, partial, form, sms):
    array = with_shape(who, name, partial, world.xp)
    if array.ndim != 3:
        raise ValueError(f"{who}: partial is {shown(partial)}; it must be (batch, heads, head_dim)")
    batch, heads, head_dim = array.shape
    of = heads, head_dim, as_dtype(array.dtype, who).name, form
    return 1 << max(0, batch - 1).bit_length(), (*of, checked_sms(who, sms))


def _kept(kind, who, size_of, of, unit, name, array, given, stream, group):
    """-> the object for a call of the arrays `given`; ``size_of(who, world, name, array, *of)`` -> its size
    and options.

    In its first call all ranks raise if one of them finds an error, before anything is enqueued. (Who finds
    no size does not know whether others have the object, and do not wait. But nobody has one before the first
    of its kind.)
    """
    world, error = _on(who, group), None
    key: Any = ()
    try:
        size, options = size_of(who, world, name, array, *of)
        key = kind, size, options
        if key in world.kept:
            return world.kept[key]
        as_array(who, name, array, world.xp)  # refuses what cannot be used, before anything is made
        if any(world.backend.capture_of(s) is not None for s in (None, stream_of(stream, array))):
            raise RuntimeError(
                f"{who}: the stream captures a graph, and the first call for up to {size} {unit} allocates "
                "memory. Make one call before the capture"
            )
    except (TypeError, ValueError, RuntimeError) as e:
        error = e
        if not key and any(known[0] is kind for known in world.kept if isinstance(known, tuple)):
            raise
    raise_on_all(error, world.host_allgather(as_message(error)))
    kind, size, (*options, sms) = key
    made = kind(world, size, *options, sms=sms)
    agree(world, lambda: made._check_call(*given), made.free)
    world.kept[key] = made
    return made
