"""Kernels compiled a second time, with waits that give up or that record themselves for a timeline, besides
what Numba has compiled of them.

Numba keeps what it compiles with the dispatcher of each function, and what it finds for each primitive with
its typing context. So an armed kernel has a dispatcher of its own, its twin, and so has every device function
that it calls; and it is typed and lowered in a pair of contexts of their own, in which a device function
stands for its twin. Nothing that is compiled otherwise sees any of it.
"""

import contextlib
import functools
import inspect
import os
import weakref

from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.target import CUDATargetContext, CUDATypingContext

from shmemkit.support import timeouts

from .numba_internals import contexts_instead

_kernels = weakref.WeakKeyDictionary()  # kernel -> {(seconds, recorded): twin}
_functions = {recorded: weakref.WeakKeyDictionary() for recorded in (False, True)}  # device function -> twin
_forced = []  # not empty: what is being compiled is armed; and whether it is recorded


def compile_armed(kernel, argument_types, seconds, around=None):
    """`kernel`, a dispatcher, compiled and loaded for these Numba types, with waits of `seconds`. -> a Numba
    kernel. Kernels with different limits are different modules, since the limit is one of the module.

    around  (begin, end), if it is recorded for a timeline: primitives that each thread calls at its begin and
            end, with the kernel's name
    """
    recorded = around is not None
    with arming(recorded):
        twins = _kernels.setdefault(kernel, {})
        if (seconds, recorded) not in twins:
            function = surrounded(kernel, *around) if recorded else kernel.py_func
            twins[seconds, recorded] = CUDADispatcher(function, kernel.targetoptions)
        return twins[seconds, recorded].compile(argument_types)


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
    return bool(_forced) or timeouts.default() is not None or recording()


def recording():
    """Whether what is being compiled now records itself for a timeline."""
    return _forced[-1] if _forced else bool(os.environ.get("SHMEMKIT_TIMELINE", "").strip())


@contextlib.contextmanager
def arming(recorded=False):
    """What this thread compiles meanwhile is armed; no other thread compiles meanwhile."""
    with contexts_instead(_contexts(recorded)):
        _forced.append(recorded)
        try:
            yield
        finally:
            _forced.pop()


@functools.cache
def _contexts(recorded):
    typing_context = _ArmedTyping()
    typing_context.recorded = recorded
    return typing_context, CUDATargetContext(typing_context)


class _ArmedTyping(CUDATypingContext):
    recorded = False

    def resolve_value_type(self, value):
        if hasattr(value, "py_func") and hasattr(value, "targetoptions"):  # also one of numba.jit
            value = _twin(value, _functions[self.recorded])
        return super().resolve_value_type(value)


def _twin(function, twins):
    if function not in twins:
        options = function.targetoptions | {"device": True, "opt": function.targetoptions.get("opt", True)}
        twins[function] = CUDADispatcher(function.py_func, options)
    return twins[function]
