"""Kernels compiled a second time, besides what Numba has compiled of them: with waits that give up (*armed*)
or that record themselves for a timeline, or with a group's ranks in what calls NVSHMEM (*grouped*).

Numba keeps what it compiles with the dispatcher of each function, and what it finds for each primitive with
its typing context. So such a form of a kernel has a dispatcher of its own, its twin, and so has every device
function that it calls; and it is typed and lowered in a pair of contexts of their own, in which a device
function stands for its twin. Nothing that is compiled otherwise sees any of it.
"""

import contextlib
import functools
import inspect
import os
import weakref
from collections import defaultdict
from typing import NamedTuple

from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.target import CUDATargetContext, CUDATypingContext

from shmemkit.support import timeouts

from .numba_internals import contexts_instead


class Form(NamedTuple):
    armed: bool = False
    recorded: bool = False
    grouped: bool = False


_kernels = weakref.WeakKeyDictionary()  # kernel -> {(seconds, form): twin}
_functions = defaultdict(weakref.WeakKeyDictionary)  # form -> device function -> twin
_forced = []  # the form of what is being compiled, if it is not as Numba compiles by itself


def compile_form(kernel, argument_types, seconds=None, around=None, grouped=False):
    """`kernel`, a dispatcher, compiled and loaded for these Numba types in another form. -> a Numba kernel

    seconds  its waits take at most so long. Kernels with different limits are different modules, since the
             limit is one of the module
    around   (begin, end), if it is recorded for a timeline: primitives that each thread calls at its begin
             and end, with the kernel's name
    grouped  what calls NVSHMEM takes the ranks of a group
    """
    recorded = around is not None
    form = Form(seconds is not None or recorded, recorded, grouped)
    with compiling(form):
        twins = _kernels.setdefault(kernel, {})
        if (seconds, form) not in twins:
            function = surrounded(kernel, *around) if recorded else kernel.py_func
            twins[seconds, form] = CUDADispatcher(function, kernel.targetoptions)
        return twins[seconds, form].compile(argument_types)


def surrounded(kernel, begin, end):
    """A function that calls `begin`, what `kernel` does, and `end`."""
    name, parameters = kernel.py_func.__name__, ", ".join(inspect.signature(kernel.py_func).parameters)
    body = CUDADispatcher(kernel.py_func, kernel.targetoptions | {"device": True, "forceinline": True})
    names = {"_sk_begin": begin, "_sk_body": body, "_sk_end": end}
    lines = f"_sk_begin({name!r})", f"_sk_body({parameters})", f"_sk_end({name!r})"
    exec("\n ".join([f"def _sk_kernel({parameters}):", *lines]), names)
    function = names["_sk_kernel"]
    function.__name__ = function.__qualname__ = name
    return function


def armed():
    """Whether what is being compiled now has a limit for its waits, perhaps only to record them."""
    return bool(_forced and _forced[-1].armed) or timeouts.default() is not None or recording()


def recording():
    """Whether what is being compiled now records itself for a timeline."""
    return _forced[-1].recorded if _forced else bool(os.environ.get("SHMEMKIT_TIMELINE", "").strip())


def grouped():
    """Whether what is being compiled now takes the ranks of a group where it calls NVSHMEM."""
    return bool(_forced) and _forced[-1].grouped


def arming(recorded=False):
    """What this thread compiles meanwhile is armed; no other thread compiles meanwhile."""
    return compiling(Form(True, recorded))


@contextlib.contextmanager
def compiling(form):
    """What this thread compiles meanwhile has this form; no other thread compiles meanwhile."""
    with contexts_instead(_contexts(form)):
        _forced.append(form)
        try:
            yield
        finally:
            _forced.pop()


@functools.cache
def _contexts(form):
    typing_context = _TypingOfForm()
    typing_context.form = form
    return typing_context, CUDATargetContext(typing_context)


class _TypingOfForm(CUDATypingContext):
    form = Form()

    def resolve_value_type(self, value):
        if hasattr(value, "py_func") and hasattr(value, "targetoptions"):  # also one of numba.jit
            value = _twin(value, _functions[self.form])
        return super().resolve_value_type(value)


def _twin(function, twins):
    if function not in twins:
        options = function.targetoptions | {"device": True, "opt": function.targetoptions.get("opt", True)}
        twins[function] = CUDADispatcher(function.py_func, options)
    return twins[function]
