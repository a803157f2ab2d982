"""Primitives that one thread calls, all threads of a warp, or all of a block: one body for the three forms.

A declaration has the name, the signature and the docstring of the form of one thread, and no body. A family
makes the bodies: ``family(kind, name, group)`` -> (a function for the emulator, a typing function as of
`gpu`), both with these parameters. `kind` is the declared name, `name` that of the form.

    @called_by_a_thread(family)
    def put(dst: Array, src: Array, pe: int) -> None:
        "Copy .."

    put_warp = called_by("warp", put)
    "`put` by all threads of a warp."       (The form has this docstring; here, it is for editors.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from shmemkit.compiler.ptx import gpu

from ..emulator import current_thread, group_thread

F = TypeVar("F", bound=Callable)

_families = {}  # primitive of one thread -> its family, and who calls its other forms


def _alone(group, name, *arguments):
    return current_thread(name)


ENTER = {"thread": _alone, "warp": group_thread, "block": group_thread}
"""Who calls -> ``enter(group, name, *arguments)``, the emulated thread. The form itself must call it."""


def share_of(thread, group):
    """-> the number of an emulated thread in a `group`, and how many threads that has"""
    if group == "thread":
        return 0, 1
    return (thread.lane, thread.warp_size()) if group == "warp" else (thread.thread_id, thread.n_threads)


def called_by_a_thread(family, callers="all threads of a {}") -> Callable[[F], F]:
    """Decorator: make the declared primitive. `callers`: those of its other forms."""

    def make(declared):
        primitive = _form(declared, family, declared.__name__, "thread", declared.__doc__)
        _families[primitive] = family, callers
        return primitive

    return make


def called_by(group, primitive: F, more=".") -> F:
    """-> the form of a primitive that all threads of a `group`, "warp" or "block", call; `more`: the end of
    its docstring."""
    (family, callers), kind = _families[primitive], primitive.__name__
    doc = f"`{kind}` by {callers.format(group)}{more}"
    return _form(primitive, family, f"{kind}_{group}", group, doc)


def _form(declared, family, name, group, doc) -> Any:
    emulated, typing_function = family(declared.__name__, name, group)
    emulated.__code__ = emulated.__code__.replace(co_name=name)  # for timelines and tracebacks
    form = functools.wraps(declared)(emulated)
    form.__name__ = form.__qualname__ = name
    form.__doc__ = doc
    gpu(form)(typing_function)
    return form
