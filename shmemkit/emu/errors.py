"""What the emulator raises."""


class EmulatorError(RuntimeError):
    """A kernel or a PE failed on the emulator; the message says where."""


class DeadlockError(EmulatorError):
    """No PE can go on. The message lists each stuck PE, block and thread, its source line and what it waits
    for."""


class OutOfBoundsError(EmulatorError, IndexError):
    """A kernel accessed an array outside of its bounds; the message names the array, index, rank and line."""
