"""The CPU emulator: several PEs, their CUDA grids and their symmetric memory, without a GPU."""

from .errors import DeadlockError, EmulatorError, OutOfBoundsError
from .run import run

__all__ = ["DeadlockError", "EmulatorError", "OutOfBoundsError", "run"]
