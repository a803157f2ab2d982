"""The CPU emulator: several ranks, their CUDA grids and their symmetric memory, without a GPU."""

from .errors import (
    DeadlockError,
    EmulatorError,
    OutOfBoundsError,
    RaceError,
    UninitializedReadError,
    UseAfterFreeError,
)
from .exploration import Exploration, explore
from .race_report import Access, Race
from .run import run

__all__ = [
    "Access",
    "DeadlockError",
    "EmulatorError",
    "Exploration",
    "OutOfBoundsError",
    "Race",
    "RaceError",
    "UninitializedReadError",
    "UseAfterFreeError",
    "explore",
    "run",
]


def __dir__():
    return __all__
