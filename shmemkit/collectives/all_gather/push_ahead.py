"""All-gather by copy engines beside a consumer, into memory that only this object uses.

As "copy_push" beside a consumer (``copy_engine.py``), with its signals, but x may come by columns. This is
for a consumer that works on columns of all rows at once, and would otherwise wait for whole segments. Part
i of x, some columns of all its rows, goes to one rank after the other; then part i + 1.

Signals   by_columns[PARTS * k + i], on every rank: 1 when part i of segment k is here, else 0; the own ones
          are always 1. The barrier resets them, as it does `arrived` there

  side stream:  2. for each part, for each rank: copy it there, and then write 1 to its signal

All else is as there, and so is the proof. A consumer need not wait for empty parts, of narrow arrays. But
all signals must have been written when a call ends. So empty parts come first: who has seen another signal
of a rank has them behind it.

There is one stream, and one rank at a time: on four H200, large copies to several ranks at once were half
as fast. For each rank a part costs some 8 us besides its bytes, its write included: so rows come in one
part.
"""

import functools

from .copy_engine import CopyEngine, Transfer

PARTS = 4  # of the columns
UNIT = 128  # bytes: parts of columns begin at multiples of them


class PushAhead(CopyEngine):
    """Transfers of up to `max_nbytes` gathered bytes into `buffer`, symmetric uint8 (max_nbytes,), which is
    this object's. Collective.

    by_columns  symmetric uint64 (len(ranks) * PARTS,): what is here, for consumers of columns
    """

    def prepare(self, max_nbytes, ranks=None):
        super().prepare(max_nbytes, ranks)
        self.kernels_of_columns = self.kernels_of(self.by_columns)

    def allocate(self):
        self.by_columns = self.signals(PARTS, "all_gather.ahead.by_columns")
        self.buffer = self.empty(self.max_nbytes, "uint8", "all_gather.ahead.buffer")

    def bind(self, x, out, in_place):
        raise NotImplementedError("PushAhead: only overlap() can be used")

    def overlap(self, x, out, own="first", by_columns=False):
        """-> the Transfer, as of ``CopyEngine``; with start, wait and finish, without run.

        out         a part of `buffer`, from its beginning on
        by_columns  x is 2-D and comes in parts of columns, all of its rows: see ``columns_of``
        """
        in_place, address = self._check_arrays(x, out), self.world.backend.address
        if address(out) != address(self.buffer):
            raise ValueError("overlap(): out must begin where the buffer of PushAhead does")
        return (AheadByColumns if by_columns else Ahead)(self, x, out, in_place, own)

    def columns_of(self, row_bytes):
        """How many bytes of each row a part of columns has: a multiple of UNIT; part i begins with byte
        ``i * columns_of``, the last ones may have none."""
        return -(-row_bytes // (UNIT * PARTS)) * UNIT


class Ahead(Transfer):
    """A Transfer of PushAhead."""

    def __init__(self, engine, x, out, in_place, own):
        flat, out = (array.reshape(-1).view("uint8") for array in (x, out))
        super().__init__(engine, flat, out, in_place, own)

    def run(self, stream=None):
        raise RuntimeError("run(): a Transfer of PushAhead has only start(), wait() and finish()")


class AheadByColumns(Ahead):
    """One whose x comes by columns."""

    def __init__(self, engine, x, out, in_place, own):
        super().__init__(engine, x, out, in_place, own)
        self.barrier, self.awaiting = engine.kernels_of_columns
        self._rows = x.view("uint8")
        self._segment = out.view("uint8").reshape(engine.n_ranks, *self._rows.shape)[engine.me]

    @functools.cached_property
    def side_operations(self):
        engine, x, operations = self.engine, self._rows, []
        width = engine.columns_of(x.shape[1])
        parts = [slice(i * width, (i + 1) * width) for i in range(PARTS)]
        for i in sorted(range(PARTS), key=lambda i: x[:, parts[i]].size > 0):
            for p in self.peers:
                if x[:, parts[i]].size:
                    there = engine.view(self._segment, p)
                    operations.append(self.backend.copy_rows(there[:, parts[i]], x[:, parts[i]]))
                operations.append(self._set(engine.by_columns, engine.me * PARTS + i, p))
        return operations + self.last
