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
    """Wait until the kernels before on the stream have ended, and see all that they wrote.

    needed  arrays and integers that are used right behind: where the arrays are, and the integers, is
            computed before it waits, and what it comes from, as the kernel's arguments, is fetched then.
            Otherwise a compiler puts that behind: a quarter of a microsecond, in kernels of two.
            ``symm_at(array, 0)`` fetches where the first peers are

    All threads call it, before they read or write anything that those do: the counters of the kernel itself,
    too, that its launch before advances. A kernel that is launched with ``pdl=True`` and never waits may end
    before the one before it, and is all that the next kernel waits for: so each waits. In a launch without
    ``pdl=True`` it does nothing, for that begins so late anyway. The emulator starts no kernel early; with
    races checked, it reports what comes before the wait.

    cudaGridDependencySynchronize in CUDA C++.
    """
    current_thread("griddepcontrol_wait").griddepcontrol_wait()


def griddepcontrol_launch_dependents() -> None:
    """Let the next kernel of the stream begin, if it is launched with ``pdl=True``, when all blocks have
    called this or have ended.

    One thread of each block is enough. It orders nothing: the next kernel waits by `griddepcontrol_wait` for
    the end of this one. It comes after this kernel's own `griddepcontrol_wait`, so that no more than two
    kernels of a stream hold blocks at a time.

    cudaTriggerProgrammaticLaunchCompletion in CUDA C++.
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
    def impl():
        _launch_dependents()

    return impl
