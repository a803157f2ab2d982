"""All-gather by copy engines beside a consumer, into memory that nobody else uses.

As "copy_push" beside a consumer (``copy_engine.py``), but for three things. Nobody but these transfers and
their consumers uses the `buffer`: so a rank knows at the end of a call that the next one may write its own,
and says so then; the next one need not begin with asking. A segment comes in parts, with a signal each, so
that a consumer waits for less: of its rows, one after the other; or of its columns, for a consumer that goes
through the columns of all rows at once. And parts of columns go to all ranks at once, on several streams.

Signals   ready[k], on every rank: 0 or 1, at first 1; arrived[PARTS * k + i]: part i of segment k is here.
          Those of my own are 1 for ever

  beside:     1. wait for ready[k] here, and set it back                      acquire, sys
              2. copy parts of x to segment me on rank k; after each, set its arrived there    release, sys
  consumer:      waits for arrived, and leaves it
  finish:     3. wait for all arrived here, and set them back                 acquire, sys
              4. set ready[me] on the others                                  release, sys

No signal is lost. Rank k sets ready[k] here again at the end of a call in which it has waited for the arrived
that I set after I had set ready[k] back. It sets arrived here in a later call, after it has waited for the
ready[me] that I set after I had set arrived back. And nothing is overwritten too early: what rank k writes
here in a call comes after that ready[me], and so after my consumer of the call before.

No deadlock: each step waits for steps of others that come earlier, of this call or of the one before.
"""

import functools

from .copy_engine import CopyEngine, Transfer

PARTS = 4  # signals of a segment
OF_ROWS = 2  # parts of rows: each costs some microseconds
LEAST = 1 << 22  # bytes of one
LANES = 4  # streams, at most
UNIT = 128  # bytes: parts of columns begin at multiples of them


class PushAhead(CopyEngine):
    """Transfers of up to `max_nbytes` gathered bytes into `buffer`, symmetric uint8 (max_nbytes,), which is
    this object's. Collective."""

    parts = PARTS

    def prepare(self, max_nbytes):
        self._prepare_signals(max_nbytes)
        self.buffer = self.empty(max_nbytes, "uint8", "all_gather.ahead.buffer")
        with self.world.stream:
            self.ready[:] = 1
        self.world.stream.synchronize()

    def bind(self, x, out, in_place):
        raise NotImplementedError("PushAhead: overlap is allowed")

    def overlap(self, x, out, own="first", by_columns=False):
        """-> the Transfer, as of ``CopyEngine``; start, wait and finish are allowed, not run.

        out         a part of `buffer`, from its beginning on
        by_columns  x is 2-D and comes in parts of columns, all of its rows: see ``columns_of``. Otherwise in
                    ``parts_of`` parts of rows
        """
        in_place, address = self._check_arrays(x, out), self.world.backend.address
        if address(out) != address(self.buffer):
            raise ValueError("overlap: out begins where the buffer of PushAhead does")
        return Ahead(self, x, out, in_place, own, by_columns)

    def parts_of(self, nbytes):
        """In how many parts of equal size a segment of so many bytes comes that is cut by rows: each sets
        ``parts / parts_of`` signals."""
        return OF_ROWS if nbytes % OF_ROWS == 0 and nbytes >= OF_ROWS * LEAST else 1

    def columns_of(self, row_bytes):
        """How many bytes of each row a part of columns has: a multiple of UNIT; part i begins with byte
        ``i * columns_of``, the last ones may have none."""
        return -(-row_bytes // (UNIT * self.parts)) * UNIT


class Ahead(Transfer):
    """A Transfer of PushAhead."""

    def __init__(self, engine, x, out, in_place, own, by_columns):
        flat, out = (array.reshape(-1).view("uint8") for array in (x, out))
        super().__init__(engine, flat, out, in_place, own)
        self._by_columns, self._x = by_columns, x
        self._segment = out[self.world.rank * x.nbytes :][: x.nbytes]

    @functools.cached_property
    def halves(self):
        if not self.peers:
            return [[*self.last]], []
        me, peers, engine = self.world.rank, self.peers[::-1], self.engine
        operations = self.backend.memory_operations
        lanes = []
        for lane in range(min(LANES, len(peers)) if self._by_columns else 1):
            its = peers[lane::LANES] if self._by_columns else peers
            copies = self._columns(its) if self._by_columns else self._rows(its)
            lanes.append([operations(self._await(engine.ready, its)), *copies])
        lanes[0] += self.last
        last = self._await(engine.arrived) + [self._tell(engine.ready, me, p) for p in peers]
        return lanes, [operations(last)]

    def _rows(self, peers):
        x, me = self._x.reshape(-1).view("uint8"), self.world.rank
        parts = self.engine.parts_of(x.size)
        step, signals = x.size // parts, self.engine.parts // parts
        for p in peers:
            for i in range(parts):
                part = slice(i * step, (i + 1) * step)
                yield self._copy(self._segment[part], p, x[part], me)
                yield self._arrived(range(i * signals, (i + 1) * signals), p)

    def _columns(self, peers):
        x = self._x.view("uint8")
        step = self.engine.columns_of(x.shape[1])
        for i in range(self.engine.parts):
            part = slice(i * step, (i + 1) * step)
            for p in peers:
                there = self.world.peer_view(self._segment, p).reshape(x.shape)
                if x[:, part].size:
                    yield self.backend.copy_rows(there[:, part], x[:, part])
                yield self._arrived([i], p)

    def _arrived(self, parts, p):
        first = self.world.rank * self.engine.parts
        return self.backend.memory_operations([self._tell(self.engine.arrived, first + i, p) for i in parts])

    def run(self, stream=None):
        raise RuntimeError("a Transfer of PushAhead: start and finish are allowed, not run")
