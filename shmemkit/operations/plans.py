"""What the host objects of operations keep: calls that are bound to arrays."""

from itertools import islice

PLANS, EMULATED_PLANS = 1024, 64  # bound calls that are kept; the emulator's keep their arrays alive


class Plans(dict):
    """The newest `most` bound calls, by how their arrays are and lie.

    synchronize  () waits for the GPU's work: for calls with device memory of their own, such as tensor maps,
                 which a call that is dropped may still use. To wait seldom, half of the calls is dropped
                 then. Graphs use that memory, too: calls that they captured are never dropped
    """

    def __init__(self, most, synchronize=None):
        self.most, self.synchronize, self.of_graphs = most, synchronize, set()

    def keep(self, key, run, capturing=False):
        """Add one. `capturing`: the stream captures, so that the host cannot wait."""
        if capturing and self.synchronize:
            self.of_graphs.add(run)
        if key in self:
            return
        if len(self) >= self.most and not (capturing and self.synchronize):
            n = 1
            if self.synchronize:
                self.synchronize()
                n = -(-self.most // 2)
            for old in list(islice(self, n)):
                del self[old]
        self[key] = run

    def clear(self):
        super().clear()
        self.of_graphs.clear()


def plans_of(world):
    return Plans(EMULATED_PLANS if world.backend.name == "emulator" else PLANS)
