"""NVSHMEM's own device functions, as the GPU side of the primitives that carry their names."""

import importlib

from shmemkit.compiler.ptx import TypingError, unsigned_view

__all__ = ["nvshmem", "signal_array"]

signal_array = unsigned_view
"""A signal array as NVSHMEM types it: uint64."""


def nvshmem(name):
    """nvshmem4py's device function `name`; imported when a kernel that uses it is compiled, not before."""
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
