"""The host program that runs, and its World. A process has one; on the emulator, each PE in it has one
(``shmemkit.emu.run``)."""

from typing import Any

from greenlet import getcurrent


class HostProgram:
    """A process, or a PE that the emulator runs in it.

    world    its World, if that is alive
    ended    whether it had one
    n_ranks  how many the emulator runs; None of a process by itself
    process  what a script has as if it had a process of its own
    asked    the ranks of the World that it has last had answers of, in their order; None for all
    """

    world: Any = None
    ended = False
    n_ranks: int | None = None
    process: Any = None
    asked: Any = None


_of_process = HostProgram()


def host_program():
    """The HostProgram that calls."""
    caller = getcurrent()
    return caller if isinstance(caller, HostProgram) else _of_process


def current_world(required=False) -> Any:
    """The World that is alive here, or None. With `required`, RuntimeError instead of None."""
    host = host_program()
    if host.world is None and required:
        if host.ended:
            raise RuntimeError("the World is finalized. Call shmemkit.init() again")
        raise RuntimeError("there is no World yet. Call shmemkit.init() first")
    return host.world
