"""Kernels typed by Numba and not compiled: what Numba refuses is found where nothing is compiled, on the
emulator.

Everything up to the types of all variables is Numba's own: bytecode, types of arguments, overloads of
primitives. Then it stops, in device functions and overloads, too: these are typed instead of compiled. All
of it happens in a pair of contexts of its own, so that nothing that is compiled otherwise sees any of it. It
needs neither a GPU nor a library of CUDA.
"""

import contextlib
import functools
import linecache
import logging
import os
import re
import traceback
from types import SimpleNamespace
from typing import Any

import numba
import numpy as np
from numba.core import errors as core_errors
from numba.cuda import errors as cuda_errors
from numba.cuda import types, typing, utils
from numba.cuda.compiler import CreateLibrary, CUDACompiler, IRProcessing, compile_extra
from numba.cuda.core import errors
from numba.cuda.core.compiler_machinery import AnalysisPass, FunctionPass, PassManager, register_pass
from numba.cuda.core.ir import Assign, FreeVar, Global, Loc
from numba.cuda.core.sigutils import normalize_signature
from numba.cuda.descriptor import cuda_target
from numba.cuda.dispatcher import CUDADispatcher
from numba.cuda.flags import CUDAFlags
from numba.cuda.target import CUDATargetContext, CUDATypingContext
from numba.cuda.typing.templates import AbstractTemplate

from shmemkit.support.arrays import as_array
from shmemkit.support.call_site import shown_place
from shmemkit.support.garbage_collection import uncollected
from shmemkit.support.settings import switch

from .numba_internals import contexts_instead, from_dtype

_LIBRARY = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_NOT_THE_PROGRAM = (_LIBRARY, *(os.path.dirname(m.__file__) + os.sep for m in (numba, cuda_errors)))
# numba-cuda raises Numba's own errors, too, and has two classes of one name that are none of Numba's.
_REFUSALS = (core_errors.NumbaError, errors.UnsupportedBytecodeError, cuda_errors.UnsupportedBytecodeError)
_OTHERS = tuple(  # not about the kernel
    getattr(module, name) for module in (core_errors, errors) for name in ("InternalError", "ForceLiteralArg")
)
_ELSEWHERE = "ExternFunction"  # of cuda.declare_device: Numba declares it in its own contexts alone
_PLACE = re.compile(r'^File "(.+)", line (\d+):|^.*Raised from (.+) \((\d+)\)', re.M)
_REASON = re.compile(r"raised a specific error:\s+\w+: (?!Failed in |No implementation)(.+)")  # a primitive's

_READ_ONLY = (
    "an array of the host that a kernel captures is a constant, and so is one in a tuple: give it as an "
    "argument, or capture an array of the device"
)

_log = logging.getLogger(__name__)
_accepted = set()  # keys of functions, with the types of their arguments
_on_device: list = []  # who tells arrays of the device from others
_checks = []  # the check that is under way, if any: {(device function, types): its signature, or its refusal}


def check(kernel, arguments):
    """TypingError, or another error of Numba, if Numba refuses `kernel`, a dispatcher, for these arguments.

    Kernels of shmemkit itself are not looked at: its tests compile them. Other errors than refusals, as when
    a library is missing, accept the kernel; logging shows them at level DEBUG. SHMEMKIT_TYPING=0 accepts all.
    """
    function, signature = kernel.py_func, None
    if function.__code__.co_filename.startswith(_LIBRARY) or not switch("SHMEMKIT_TYPING", True):
        return
    try:
        signatures = declared_for(kernel) or [tuple(_kind(kernel, value) for value in arguments)]
        accepted = kernel.__dict__.setdefault("__accepted__", set())
        if accepted.issuperset(signatures):
            return
        key = _key(function)
        if _accepted.issuperset((key, signature) for signature in signatures):
            return
        with contexts_instead(_contexts()), _typed_instead_of_compiled(), uncollected():
            for signature in signatures:
                _type(kernel, signature, types.void)
        accepted.update(signatures)
        _accepted.update((key, signature) for signature in signatures)
    except Exception as error:
        known = isinstance(error, _REFUSALS) and not isinstance(error, _OTHERS)
        if signature is None or not known or _ELSEWHERE in str(error):
            _log.debug("kernel %s is not typed", function.__qualname__, exc_info=True)
            return
        error.args = (_explained(error, function, signature),)
        raise error.with_traceback(None) from None


def captured_as_memory(tells):
    """An array that a kernel captures is for Numba as one of a GPU, which the kernel may write, where
    ``tells(array)``. All others are constants."""
    _on_device.append(tells)


def prepare():
    """Import what Numba imports late, for a program that soon sees other modules in place of these."""
    with contextlib.suppress(Exception):  # then check() accepts, and logs why
        _contexts()[0].refresh()


def _kind(kernel, value):
    """The Numba type of an argument. An array may be written: that of a GPU always may."""
    if hasattr(value, "__dlpack__"):
        value = as_array("", "", value, np)
        layout = "C" if value.flags.c_contiguous else "F" if value.flags.f_contiguous else "A"
        return types.Array(from_dtype(value.dtype), value.ndim, layout)
    return kernel.typeof_pyval(value)


def _key(function, outer=()):
    """What tells functions apart: the same for two of the same code, device functions and values, as programs
    make them again and again. `outer`: the functions that call it"""
    code, key = function.__code__, [function.__code__]
    if code not in outer:
        called = [function.__globals__.get(name) for name in code.co_names]
        values = [value for value in called if isinstance(value, CUDADispatcher)]
        for value in values + [cell.cell_contents for cell in function.__closure__ or ()]:
            if isinstance(value, CUDADispatcher):
                key.append(_key(value.py_func, (code, *outer)))
            elif value is None or isinstance(value, (bool, int, float, str, types.Type)):
                key.append((type(value), value))
            else:
                key.append(id(value))
    return tuple(key)


# ---- what is declared and not compiled


def declare(dispatcher, signature, returns=None):
    """`dispatcher` is declared for these types, by @cuda.jit(signature) or dispatcher.compile(signature)."""
    declared = dispatcher.__dict__.setdefault("__declared__", {})
    arguments, given = normalize_signature(signature)
    declared[arguments] = returns or given


def close(dispatcher, closed=True):
    """From now on `dispatcher` takes no other types than it is declared for, as @cuda.jit(signature) says."""
    dispatcher.__dict__["__closed__"] = closed


def declared_for(dispatcher):
    """{types of arguments: what is returned, or None} if `dispatcher` takes no others; else {}"""
    return dispatcher.__dict__.get("__declared__", {}) if dispatcher.__dict__.get("__closed__") else {}


def checking():
    """Whether a kernel is being typed now, and not compiled."""
    return bool(_checks)


@functools.cache
def declared(name, result) -> Any:
    """A function `name` for kernels that are only typed; ``result(*types of arguments)`` is the type of what
    it returns."""

    class Declared(AbstractTemplate):
        key = name

        def generic(self, args, kws):
            return typing.signature(result(*args), *args)

    return SimpleNamespace(_numba_type_=types.Function(Declared))


# ---- typing instead of compiling


class _Typing(CUDACompiler):
    """Numba's steps up to the types of all variables; its result is the function's signature."""

    def define_pipelines(self):
        (whole,) = super().define_pipelines()
        steps = [step for step, _ in whole.passes]
        part = PassManager("cuda")
        at, end = steps.index(IRProcessing), steps.index(CreateLibrary)
        part.passes = [*whole.passes[:at], (_Captured, "captured arrays"), *whole.passes[at:end]]
        part.passes.append((_Signature, "signature"))
        part.finalize()
        return [part]


class _ArrayOfTheGPU:
    """Stands for an array that a kernel captures, as Numba sees one of a GPU."""

    __cuda_array_interface__ = None

    def __init__(self, array):
        self._numba_type_ = _kind(None, array)


@register_pass(mutates_CFG=False, analysis_only=False)
class _Captured(FunctionPass):
    _name = "shmemkit_captured"

    def __init__(self):
        FunctionPass.__init__(self)

    def run_pass(self, state):
        found = False
        for block in state.func_ir.blocks.values():
            for assigned in block.find_insts(Assign):
                value = assigned.value
                if isinstance(value, (Global, FreeVar)) and isinstance(value.value, np.ndarray):
                    if any(tells(value.value) for tells in _on_device):
                        value.value, found = _ArrayOfTheGPU(value.value), True
        return found


@register_pass(mutates_CFG=False, analysis_only=True)
class _Signature(AnalysisPass):
    _name = "shmemkit_signature"

    def __init__(self):
        AnalysisPass.__init__(self)

    def run_pass(self, state):
        state.cr = typing.signature(state.return_type, *state.args)
        return False


class _TypingContext(CUDATypingContext):
    """Numba refreshes contexts in whatever might need it, also in a refresh: a third of the time."""

    _refreshing = False

    def refresh(self):
        if not self._refreshing:
            self._refreshing = True
            try:
                super().refresh()
            finally:
                self._refreshing = False


class _TargetContext(CUDATargetContext):
    """No implementation is asked for; the modules that have them are imported for the overloads there."""

    def refresh(self):
        (self.typing_context if self._registries else super()).refresh()


@functools.cache
def _contexts():
    typing_context = _TypingContext()
    return typing_context, _TargetContext(typing_context)


@contextlib.contextmanager
def _typed_instead_of_compiled():
    instead = {
        "get_call_template": _call_template,
        "get_overload": lambda dispatcher, signature: object(),  # nobody calls it
    }
    before = {name: getattr(CUDADispatcher, name) for name in instead}
    _checks.append({})
    try:
        for name, method in instead.items():
            setattr(CUDADispatcher, name, method)
        yield
    finally:
        for name, method in before.items():
            setattr(CUDADispatcher, name, method)
        _checks.pop()


def _call_template(dispatcher, args, kws):
    """Numba's CUDADispatcher.get_call_template"""
    parameters, args = dispatcher._compiler.fold_argument_types(args, kws)
    wanted = declared_for(dispatcher) or {tuple(args): None}
    signatures = [_type_once(dispatcher, *each) for each in wanted.items()]
    name = dispatcher.py_func.__name__
    return typing.make_concrete_template(f"CallTemplate({name})", name, signatures), parameters, args, {}


def _type_once(dispatcher, arguments, returns):
    known, key = _checks[-1], (dispatcher, arguments)
    if key not in known:
        try:
            known[key] = _type(dispatcher, arguments, returns)
        except _REFUSALS as error:
            known[key] = error
    if isinstance(known[key], Exception):
        raise known[key]
    return known[key]


def _type(dispatcher, arguments, returns):
    """-> the signature of `dispatcher` for these arguments; `returns`: what it must return, or None"""
    if "@pytest_ar" in dispatcher.py_func.__code__.co_names:
        raise NotImplementedError("pytest has rewritten its assertions, into what Numba does not compile")
    flags = CUDAFlags()
    flags.no_compile = flags.no_cpython_wrapper = flags.no_cfunc_wrapper = True
    if dispatcher.targetoptions.get("device"):
        flags.inline = dispatcher.targetoptions.get("inline", "never")
    flags.error_model = "numpy"
    flags.compute_capability = (9, 0)
    with utils.numba_target_override(), dispatcher._compiling_counter:
        return compile_extra(
            *(cuda_target.typing_context, cuda_target.target_context),
            *(dispatcher.py_func, arguments, returns, flags, {}),
            pipeline_class=_Typing,
        )


# ---- what is said


def _explained(error, function, signature):
    """The text of `error`, below the line of the program that it is about, which Numba's own often lacks."""
    names = function.__code__.co_varnames
    given = ", ".join(f"{name}: {kind}" for name, kind in zip(names, signature, strict=False))
    file, line = _place(error, function)
    text = str(error).strip()
    reasons = [f"  {reason}\n" for reason in _REASON.findall(text)]
    if "Cannot modify readonly array" in text:
        reasons.append(f"  {_READ_ONLY}\n")
    return (
        f"kernel {function.__name__}: Numba refuses to compile it, so it runs on no GPU. SHMEMKIT_TYPING=0 "
        f"runs it here all the same.\n  {shown_place(file, line)}: {linecache.getline(file, line).strip()}\n"
        f"{''.join(reasons[-1:])}  arguments: {given or 'none'}\n{text}"
    )


def _place(error, function):
    """-> (file, line) of what `error` is about: the innermost line of the program that was being typed"""
    locs = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        locs += [getattr(frame.f_locals.get(name), "loc", None) for name in ("self", "stmt", "inst", "gvar")]
    locs.append(getattr(error, "loc", None))
    places = [(loc.filename, loc.line) for loc in locs if isinstance(loc, Loc)]
    if found := _PLACE.search(str(error)):
        places.append((os.path.abspath(found[1] or found[3]), int(found[2] or found[4])))
    code = function.__code__
    known = [place for place in places if not place[0].startswith(_NOT_THE_PROGRAM)]
    return known[-1] if known else (code.co_filename, code.co_firstlineno)
