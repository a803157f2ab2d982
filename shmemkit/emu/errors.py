"""What the emulator raises."""

from __future__ import annotations

from collections.abc import Sequence

from shmemkit.support.notebook import html_text


class EmulatorError(RuntimeError):
    """A kernel or a rank failed on the emulator; the message says where.

    `races` lists the data races that were found before (``shmemkit.emu.Race``)."""

    races: Sequence = ()
    delivery: str | None = None
    seed: int | None = None
    tells_its_cause = True  # the message does, and where

    def _repr_html_(self):
        head, _, text = f"{type(self).__name__}: {self}".partition("\n")
        return html_text(head, text)


class DeadlockError(EmulatorError):
    """No rank can go on. The message lists each rank, block and thread that waits, its line, and for what."""


class OutOfBoundsError(EmulatorError, IndexError):
    """A kernel accessed an array outside of its bounds; the message names the array, index, rank and line."""


class UseAfterFreeError(EmulatorError):
    """Symmetric memory is used after ``free``. The message names the array, the line that freed it and the
    line that uses it."""


class UninitializedReadError(EmulatorError):
    """Kernels read memory of ``empty`` that nobody has written; the message names the element, the line that
    reads it and the line that made it."""


class RaceError(EmulatorError):
    """Accesses of kernels that nothing orders. `races` lists them (``shmemkit.emu.Race``); the message is the
    report."""

    def __init__(self, races: Sequence):
        self.races = races
        super().__init__(races_text(races))

    def _repr_html_(self):
        text = races_text(self.races)
        more = "".join(race._repr_html_() for race in self.races)
        return html_text(f"RaceError: {text}".partition("\n")[0], str(self).removeprefix(text).strip(), more)


def races_text(races):
    head = "1 data race" if len(races) == 1 else f"{len(races)} data races"
    return "\n".join([head, *map(str, races)])


def add_text(error, text):
    """Say `text`, too, where `error` is shown: at the end of our own messages, as a note of others."""
    if isinstance(error, EmulatorError):
        error.args = (f"{error}\n{text}",)
    elif hasattr(error, "add_note"):
        error.add_note(text)
    else:  # Python 3.10: ``told`` and pytest show it
        error.__notes__ = [*getattr(error, "__notes__", ()), text]
