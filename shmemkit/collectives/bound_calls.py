"""What the host objects of operations keep: calls that are bound to arrays."""

from itertools import islice


class Plans(dict):
    """The newest `most` bound calls, by how their arrays are and lie.

    synchronize  () waits for the GPU's work: for calls with device memory of their own, such as tensor maps,
                 which a call that is dropped may still use. To wait seldom, half of the calls is dropped then
    """

    def __init__(self, most, synchronize=None):
        self.most, self.synchronize = most, synchronize

    def keep(self, key, run, capturing=False):
        """Add one. `capturing`: the stream captures, so that the host cannot wait."""
        if len(self) >= self.most and not (capturing and self.synchronize):
            n = 1
            if self.synchronize:
                self.synchronize()
                n = -(-self.most // 2)
            for old in list(islice(self, n)):
                del self[old]
        self[key] = run
