"""Collective calls of the host programs, compared: the n-th call of a rank is to be the n-th of the others,
of as many elements of one dtype, in the same symmetric memory. Otherwise kernels combine what does not belong
together, or wait for ever.

Each rank writes its calls down, in memory that all share, and looks at what others have written for the same
number. Nobody waits: it is the later one that finds out. A slot is used again SLOTS calls later; of what has
been overwritten nothing is known.
"""

import numpy as np

SLOTS, TEXT = 32, 120  # bytes of a text, at most
SLOT = np.dtype([("number", "int64"), ("text", f"S{TEXT}")])


class Calls:
    """Those of rank `pe`. `table`: SLOT (ranks, SLOTS), zeros at first, of all."""

    def __init__(self, table, pe):
        self._table, self._pe, self._number = table, pe, 0
        self.last = ""  # my last call, without the place in memory

    def enter(self, text):
        """My next call is `text`. ValueError if that of another rank is not."""
        self._number, self.last = self._number + 1, text.partition(" in ")[0]
        slot, text = self._number % SLOTS, text[:TEXT]
        mine = self._table[self._pe : self._pe + 1, slot]
        mine["number"] = 0  # nobody reads half a text
        mine["text"] = text.encode()
        mine["number"] = self._number
        for pe, there in enumerate(self._table[:, slot : slot + 1]):
            before, other, after = int(there["number"][0]), bytes(there["text"][0]), int(there["number"][0])
            if before == after == self._number and other.decode() != text:
                raise ValueError(
                    f"collective call {self._number} of rank {self._pe} is {text}, of rank {pe} it is "
                    f"{other.decode()}: all ranks make the same calls in the same order, with as many "
                    "elements of one dtype, and what peers use in symmetric memory is the same part of it"
                )
