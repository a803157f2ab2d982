"""All-reduce as a reduce-scatter and an all-gather. For large messages, this takes as long on the links as
one kernel would.

  "push"         both by stores into the peers' memory (``schedules/push_exchange.py``)
  "copy_engine"  both by copy engines: ``schedules/copied.py``, and copies of the results to all outputs

Both methods work in place on the rank's own segment of `out`. ``stages.py`` sends what is no whole segment.

With "push", both stages have one scratch with two buffers, its full signals and its epochs: a stage is an
epoch. In each, every rank sends its part b to all others, in a launch of its own. So the double-buffer lemma
(docs/protocols.md) holds as within one stage. (Into a symmetric out the second stage needs no scratch, and is
no epoch.) It starts on the stream after the first: the own segment of out is complete. Another rank may still
be in its first stage: it reads only its own x and what was sent to it, never the out of another rank.

With "copy_engine", the second stage starts earlier, to keep the links busy. The rank combines the first half
of its result while the last copies of x run, and copies it to the peers as soon as they have ended. Then
follow the results for the other peers, and the second half. The side stream makes the copies. All ranks take
part in these barriers:

  1. beside the copies of x: the call before has ended everywhere. The copies need no barrier: all slots have
     been empty since barrier 3 of the call before
  2. after the first half of the result is combined, and its inputs have been copied from the own x
  3. after the second half, likewise
  4. at the end, if out is symmetric: all results are there

If out is symmetric, the rank combines its result in it, and copies the result to the peers' outs after
barriers 2 and 3. The outs may be written since barrier 1. If x is out, barriers 2 and 3 also say that the old
content has been sent.

Otherwise rank k combines its result in slots[k], which no rank sends to, and stores it from there to its own
out. The peers copy it to their outs after barriers 2 and 3. If x is out, a rank copies the results of the
peers only after its copies of x. After barrier 1 of the next call, these copies have ended: slots[k] may be
written again.
"""

from shmemkit.device import PIECE_BYTES

from ..copy_engines import enqueue
from ..reduce_scatter import ReduceScatter
from ..schedules.exchange import Exchange
from ..schedules.push_exchange import PushExchange
from ..stages import Staged, in_turn


class _Composed(Staged):
    rest = Exchange, {"whole": True}

    def segment_of(self, out):
        size = out.size // self.world.n_ranks
        return out[self.world.rank * size :][:size]


class Push(_Composed):
    """The method "push" of ``AllReduce``."""

    name = "all_reduce push"

    def make_stages(self, room, op):
        scatter = ReduceScatter._maker("push")(self.world, room, op, sms=self.sms, **self.of_stages)
        self.stages.append(scatter)
        self.stages.append(
            PushExchange(self.world, room, name=self.name, shared=scatter, sms=self.sms, **self.of_stages)
        )

    def bind_stages(self, x, out, in_place, dtype):
        mine, (scatter, gather, _) = self.segment_of(out), self.stages
        return in_turn(scatter.bind(x, mine, in_place, dtype), gather.bind(mine, out, True))


class CopyEngine(_Composed):
    """The method "copy_engine" of ``AllReduce``.

    line  packets, 128 bytes: portions begin at multiples of them, so that two never share a cache line
    """

    name, line = "all_reduce copy_engine", 8

    def make_stages(self, room, op):
        self.stages.append(
            ReduceScatter._maker("copy_engine")(self.world, room, op, sms=self.sms, **self.of_stages)
        )

    def bind_stages(self, x, out, in_place, dtype):
        world, order, n = self.world, self.world.backend.order, self.world.n_ranks
        mine, scatter = self.segment_of(out), self.stages[0]
        if n == 1:
            return scatter.bind(x, mine, in_place, dtype)
        others, barrier = scatter.others, scatter.barrier
        pushed, size = world.is_symmetric(out), mine.size
        result = mine if pushed else self._result_of(world.rank, mine)
        packets = mine.nbytes // PIECE_BYTES
        middle = min(packets, packets // 2 + self.line - 1 & -self.line)
        cut, segments = middle * PIECE_BYTES // out.itemsize, scatter.segments_of(x)
        early = scatter.copies(segments, others[:-1])
        late = [scatter.copies(segments, others[-1:], *part) for part in ((0, middle), (middle, packets))]
        combine = scatter.combining(x, result[:cut], dtype), scatter.combining(x, result[cut:], dtype, middle)
        first = self._copies(out, result, [(others[0], 0, cut)])
        rest = self._copies(out, result, [*((k, 0, size) for k in others[1:]), (others[0], cut, size)])
        own = [] if pushed else [scatter.bind_store(mine, result)]

        def run(stream):
            main, side = scatter.fork(stream)
            enqueue(early, side)
            if early:
                order(main, side)
            enqueue(late[0], side)
            barrier(stream)  # 1
            combine[0](stream)
            order(main, side)
            enqueue(late[1], side)
            barrier(stream)  # 2
            order(side, main)
            combine[1](stream)
            order(main, side)
            barrier(stream)  # 3
            enqueue(first, side)
            order(side, main)
            enqueue(own, stream)
            enqueue(rest, side)
            order(main, side)
            if pushed:
                barrier(stream)  # 4

        return run

    def _copies(self, out, result, portions):
        """-> copies of `portions`, (k, first, end), elements of a result: of `result` to rank k if `out` is
        symmetric, else of rank k's to its segment of `out`"""
        world, copies = self.world, []
        for k, first, end in portions:
            if first == end:
                continue
            if world.is_symmetric(out):
                dst, src = world.peer_view(result[first:end], k), result[first:end]
            else:
                dst = out[k * result.size :][first:end]
                src = world.peer_view(self._result_of(k, result)[first:end], k)
            copies.append(world.backend.copy(dst, src))
        return copies

    def _result_of(self, k, segment):
        """-> slots[k], on rank k its own, as an array like `segment`"""
        return self.stages[0].slots_of(k).view("uint8")[: segment.nbytes].view(segment.dtype)
