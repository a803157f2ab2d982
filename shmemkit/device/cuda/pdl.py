"""Programmatic dependent launch (PDL): a kernel begins while the one before it on the stream still runs.

For launches bound with ``pdl=True``: their blocks come to the GPU, and do what needs nothing of the kernel
before, while that one ends. It hides much of what a launch costs in a stream or graph of short kernels.

CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization"; PTX ISA, griddepcontrol. GPUs
before Hopper have nothing of the kind: there a kernel begins when the one before has ended, and these do
nothing.
"""

from __future__ import annotations

from shmemkit.compiler.ptx import TypingError, any_bits, asm, gpu, types
from shmemkit.typing import Array

from ..argument_checks import described
from ..emulator import current_thread

__all__ = ["griddepcontrol_launch_dependents", "griddepcontrol_wait"]


def griddepcontrol_wait(*needed: Array | int) -> None:
    """Wait until the earlier kernels on the stream have ended, and see all that they wrote.

    needed  arrays and integers that the kernel uses right after it. They are computed, and the kernel
            arguments that they come from are loaded, before the wait. Otherwise a compiler puts that behind
            the wait: a quarter of a microsecond, in kernels of two microseconds. ``symm_at(array, 0)`` loads
            where the first peers are

    All threads call it before they access anything that earlier kernels access. That includes counters of the
    kernel itself, which its previous launch advances. Each kernel that is launched with ``pdl=True`` must
    wait. A kernel that does not may end before an earlier one, and is all that the next kernel waits for. In
    a launch without ``pdl=True`` it does nothing. The emulator starts no kernel early; with races checked, it
    reports what comes before the wait.

    In CUDA C++ it is cudaGridDependencySynchronize.
    """
    current_thread("griddepcontrol_wait").griddepcontrol_wait()


def griddepcontrol_launch_dependents() -> None:
    """Let the next kernel of the stream begin, once all blocks have called this or have ended.

    The next kernel must be launched with ``pdl=True``. One thread of each block is enough. It orders nothing:
    the next kernel waits by `griddepcontrol_wait` for the end of this one. Call it after this kernel's own
    `griddepcontrol_wait`, so that no more than two kernels of a stream hold blocks at a time.

    In CUDA C++ it is cudaTriggerProgrammaticLaunchCompletion.
    """
    current_thread("griddepcontrol_launch_dependents")


_wait = asm("griddepcontrol.wait;", since=(9, 0))
# The condition is always true, which ptxas does not see: so it computes what it depends on.
_wait_with = asm(
    "{ .reg .pred p; .reg .b64 half; shr.u64 half, $0, 1; setp.ne.u64 p, half, -1; @p griddepcontrol.wait; }",
    types.void,
    (types.uint64,),
    since=(9, 0),
)
_launch_dependents = asm("griddepcontrol.launch_dependents;", since=(9, 0))


@gpu(griddepcontrol_wait)
def _(*needed):
    for given in needed:
        if not isinstance(given, (types.Array, types.Integer)):
            raise TypingError(
                f"griddepcontrol_wait(): an argument is {described(given)}; it must be an array or an integer"
            )

    def plain(*needed):
        _wait()

    def with_needed(*needed):
        _wait_with(any_bits(needed))

    return with_needed if needed else plain


@gpu(griddepcontrol_launch_dependents)
def _():
    return lambda: _launch_dependents()
