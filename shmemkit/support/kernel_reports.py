"""What kernels report to the host program, which raises it where it looks for waits that have expired: when
it synchronizes, and before a bound launch."""

import ctypes
from typing import Any

CHECKS = []
"""Functions that raise what a kernel of this process has reported, if one has."""

AFTER_WAITS = []
"""Such functions, of what kernels of all ranks report alike. They are called only when the program has waited
for the GPU. So all ranks raise at the same place: one that raised before a launch would leave the others
waiting for it."""


def words_for(count, explained, checks=CHECKS):
    """-> the address of a flag and `count` more words of host memory, which kernels on GPUs write; when the
    flag is set, ValueError of ``explained(*words)`` is raised, by one of `checks`"""
    import cupy

    runtime: Any = cupy.cuda.runtime
    address = runtime.hostAlloc(8 * (1 + count), runtime.hostAllocPortable | runtime.hostAllocMapped)
    words = (ctypes.c_int64 * (1 + count)).from_address(address)
    words[:] = [0] * (1 + count)

    def raise_reported():
        if words[0]:
            words[0] = 0
            raise ValueError(explained(*words[1:]))

    checks.append(raise_reported)
    return address


def check():
    """Raise what kernels have reported, one at a time."""
    for raise_reported in CHECKS:
        raise_reported()


def check_after_wait():
    """The same of what all ranks report: the program has just waited for the GPU."""
    for raise_reported in AFTER_WAITS:
        raise_reported()
