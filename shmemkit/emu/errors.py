"""What the emulator raises."""


class EmulatorError(RuntimeError):
    """A kernel or a PE failed on the emulator; the message says where."""


class DeadlockError(EmulatorError):
    """No PE can go on. The message lists each stuck PE, block and thread, its source line and what it waits
    for."""


class OutOfBoundsError(EmulatorError, IndexError):
    """A kernel accessed an array outside of its bounds; the message names the array, index, rank and line."""


class RaceError(EmulatorError):
    """Accesses of kernels that nothing orders. `races` lists them (``shmemkit.emu.Race``); the message is the
    report."""

    def __init__(self, races):
        self.races = races
        n = len(races)
        head = "1 data race" if n == 1 else f"{n} data races"
        super().__init__("\n".join([head, *map(str, races)]))
