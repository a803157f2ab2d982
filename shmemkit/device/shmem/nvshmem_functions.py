"""NVSHMEM's own device functions, as the GPU side of the primitives that carry their names."""

import importlib
import re

from shmemkit.compiler import type_check
from shmemkit.compiler.bounded_compile import grouped
from shmemkit.compiler.ptx import TypingError, gpu_function, types, unsigned_view

from .peers import rank_in_world, team_of

__all__ = ["nvshmem", "on_all", "signal_array", "to_pe", "to_team"]

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


def to_pe():
    """-> what makes NVSHMEM's PE of a kernel's rank: a look-up in what is compiled for groups."""
    return rank_in_world if grouped() else types.int32


def to_team():
    """-> what makes NVSHMEM's team of a kernel's team, likewise"""
    return team_of if grouped() else types.int32


def on_all(name):
    """-> nvshmem4py's device function `name`, as "barrier_all_warp", to be called without arguments: for
    groups, the same for the group's team"""
    if not grouped():
        return nvshmem(name)
    call = nvshmem(name.replace("_all", "", 1))

    def of_group():
        call(team_of(0))

    return gpu_function(of_group)
