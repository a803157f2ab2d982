"""Collective calls of the host programs, compared: the n-th call of a rank is to be the n-th of the others,
of as many elements of one dtype, in the same symmetric memory. Otherwise kernels combine what does not belong
together, or wait for ever.

Each rank writes its calls down, in memory that all share, and looks at what others have written for the same
number. Nobody waits: it is the later one that finds out. A slot is used again SLOTS calls later; of what has
been overwritten nothing is known.
"""

from collections import defaultdict

import numpy as np

from shmemkit.support.agreement import ranks_text

SLOTS, TEXT, SITE = 32, 120, 80  # bytes of texts, at most
SLOT = np.dtype([("number", "int64"), ("text", f"S{TEXT}"), ("site", f"S{SITE}")])


class Calls:
    """Those of rank `me`. `table`: SLOT (ranks, SLOTS), zeros at first, of all; `ranks`: the World's of each,
    where they are a group."""

    def __init__(self, table, me, ranks=None):
        self._table, self._me, self._number = table, me, 0
        self._ranks = range(len(table)) if ranks is None else ranks
        self._of = "" if ranks is None else f" of the group of {ranks_text(sorted(ranks))}"
        self.last = ""  # the last call, without the place in memory

    def enter(self, text, site=""):
        """Enter the rank's next call, `text` at `site`, "file:line". ValueError if another rank's differs."""
        self._number, self.last = self._number + 1, text.partition(" in ")[0]
        slot = self._number % SLOTS
        mine = self._table[self._me : self._me + 1, slot]
        mine["number"] = 0  # nobody reads half a text
        mine["text"], mine["site"] = text.encode()[:TEXT], site.encode()[-SITE:]
        mine["number"] = self._number
        for rank, there in zip(self._ranks, self._table[:, slot : slot + 1], strict=True):
            before, other, after = int(there["number"][0]), there.copy(), int(there["number"][0])
            if before == after == self._number and other["text"][0] != mine["text"][0]:
                calls = sorted([(rank, *_said(other)), (self._ranks[self._me], *_said(mine))])
                alike = calls[0][1] == calls[1][1]  # but for the memory
                said = (f"rank {k} calls {what}{where * alike}{at}" for k, what, where, at in calls)
                raise ValueError(
                    f"ranks disagree: {', '.join(said)}. All ranks{self._of} must make the same collective "
                    "calls in the same order, with as many elements of one dtype, and with the same part of "
                    "symmetric memory where peers use it"
                )

    def missing(self):
        """-> lines on the last call of each rank, where some have made fewer calls than others; else []"""
        last = self._table[np.arange(len(self._table)), self._table["number"].argmax(axis=1)]
        if (last["number"] == last["number"][0]).all():
            return []
        ranks_of = defaultdict(list)
        for rank, slot in zip(self._ranks, last, strict=True):
            what, _, where = _said(slot[None])
            number = int(slot["number"])
            ranks_of[f"number {number}, {what}{where}" if number else "none"].append(rank)
        said = (f"    of {ranks_text(sorted(ranks))}: {call}" for call, ranks in ranks_of.items())
        return [f"  Not all ranks{self._of} have made the same collective calls. The last call", *said]


def _said(slot):
    """-> what a rank calls, in which memory, and where"""
    text, site = (slot[field][0].decode(errors="replace") for field in ("text", "site"))
    what, of, where = text.partition(" in ")
    return what, of + where, f" ({site})" * bool(site)
