"""The GPUs of the machine, as all libraries number them: as many as PEs, all alike. Every PE may use any."""

from shmemkit.emu.stand_in_modules import Served

from .current_process import current


class EmulatedDevice(Served):
    """GPU `number` (default: the current one), in a subclass for each library. `error` is raised for a number
    of none."""

    call, error = "Device()", ValueError

    def __init__(self, number=None):
        process = current(self.call)
        number, n = process.device if number is None else number, process.machine.n_ranks
        if not 0 <= number < n:
            raise self.error(
                f"{self.call}: the number is {number}; it must be 0 to {n - 1}: the emulator has a device "
                "for each rank"
            )
        self._number, self._gpu = int(number), process.machine.gpu

    def __int__(self):
        return self._number

    def __eq__(self, other):
        return type(other) is type(self) and int(other) == self._number

    def __hash__(self):
        return self._number

    def make_current(self):
        current(self.call).device = self._number
        return self


class ContextDevice(EmulatedDevice):
    """One that is current in a ``with`` block."""

    def __enter__(self):
        self._before = current(self.call).device
        return self.make_current()

    def __exit__(self, *_):
        current(self.call).device = self._before
