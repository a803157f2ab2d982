"""Kernels compiled a second time, with waits that give up, besides what Numba has compiled of them.

Numba keeps what it compiles with the dispatcher of each function, and what it finds for each primitive with
its typing context. So an armed kernel has a dispatcher of its own, its twin, and so has every device function
that it calls; and it is typed and lowered in a pair of contexts of their own, in which a device function
stands for its twin. Nothing that is compiled otherwise sees any of it.
"""

import contextlib
import functools
import weakref

from numba.cuda.core.compiler_lock import global_compiler_lock
from numba.cuda.descriptor import cuda_target
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.target import CUDATargetContext, CUDATypingContext

from shmemkit.support import timeouts

_kernels = weakref.WeakKeyDictionary()  # kernel -> {seconds: twin}
_functions = weakref.WeakKeyDictionary()  # device function -> twin
_forced = []  # not empty: what is being compiled is armed


def compile_armed(kernel, argument_types, seconds):
    """`kernel`, a dispatcher, compiled and loaded for these Numba types, with waits of `seconds`. -> a Numba
    kernel. Kernels with different limits are different modules, since the limit is one of the module."""
    with arming():
        twins = _kernels.setdefault(kernel, {})
        if seconds not in twins:
            twins[seconds] = CUDADispatcher(kernel.py_func, kernel.targetoptions)
        return twins[seconds].compile(argument_types)


def armed():
    """Whether what is being compiled now has a limit for its waits."""
    return bool(_forced) or timeouts.default() is not None


@contextlib.contextmanager
def arming():
    """What this thread compiles meanwhile is armed; no other thread compiles meanwhile."""
    with global_compiler_lock:
        contexts = cuda_target.typing_context, cuda_target.target_context
        cuda_target._typingctx, cuda_target._targetctx = _contexts()
        _forced.append(True)
        try:
            yield
        finally:
            _forced.pop()
            cuda_target._typingctx, cuda_target._targetctx = contexts


@functools.cache
def _contexts():
    typing_context = _ArmedTyping()
    return typing_context, CUDATargetContext(typing_context)


class _ArmedTyping(CUDATypingContext):
    def resolve_value_type(self, value):
        if hasattr(value, "py_func") and hasattr(value, "targetoptions"):  # also one of numba.jit
            value = _twin(value)
        return super().resolve_value_type(value)


def _twin(function):
    if function not in _functions:
        options = function.targetoptions | {"device": True, "opt": function.targetoptions.get("opt", True)}
        _functions[function] = CUDADispatcher(function.py_func, options)
    return _functions[function]
