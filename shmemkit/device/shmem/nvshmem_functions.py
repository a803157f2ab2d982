"""NVSHMEM's own device functions, as the GPU side of the primitives that carry their names."""

import importlib
import re

from shmemkit.compiler import type_check
from shmemkit.compiler.ptx import TypingError, types, unsigned_view

__all__ = ["nvshmem", "signal_array"]

signal_array = unsigned_view
"""A signal array as NVSHMEM types it: uint64."""


def nvshmem(name):
    """nvshmem4py's device function `name`; imported when a kernel that uses it is compiled, not before.
    A kernel that is only typed gets its signature: the import takes longer than all the rest."""
    if type_check.checking():
        return type_check.declared(name, _result_of(name))
    for module in ("nvshmem.core.device.numba", "nvshmem.bindings.device.numba"):
        try:
            return getattr(importlib.import_module(module), name)
        except ImportError as error:
            raise TypingError(
                f"{name}(): nvshmem4py's Numba bindings, which it needs on a GPU, cannot be imported: "
                f"{error}. Install them: pip install 'shmemkit[cu13]' (or [cu12])"
            ) from error
        except AttributeError:
            continue
    raise TypingError(f"{name}(): the installed nvshmem4py has no such device function. Update nvshmem4py")


def _result_of(name):
    """-> types of arguments -> the type of what nvshmem4py's device function `name` returns"""
    if name == "g" or re.search("atomic_(fetch|swap|compare_swap)", name):
        return _element
    return _RESULTS.get(name, _nothing)


def _element(array, *_):
    return array.dtype


def _nothing(*_):
    return types.none


_RESULTS = {
    "ask_smem": lambda flag: types.int32,
    "mc_ptr": lambda team, pointer: pointer,
    "signal_wait": lambda *_: types.uint64,
    "team_my_pe": lambda team: types.int32,
    "team_n_pes": lambda team: types.int32,
}
