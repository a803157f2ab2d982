"""The timeline of kernels on GPUs: their buffer, their clocks, and what was recorded.

GPUs have clocks of their own. Before anything is recorded, each rank and rank 0 send a signal back and forth
ROUNDS times. In the fastest round, rank 0's clock at its answer belongs to the middle between the rank's send
and its receipt; it is wrong by at most half of that time, which is the stated uncertainty.
"""

import functools
from collections import defaultdict
from time import perf_counter_ns

import numpy as np
from numba import cuda, types

from shmemkit.device import ComparisonType, SignalOp, notify, rank, signal_op, signal_wait_until
from shmemkit.device.cuda import timeline_records
from shmemkit.device.cuda.timeline_records import BEGIN, MARK, WAIT, modules
from shmemkit.device.shmem.bounded_waits import clock
from shmemkit.support.trace_file import COPIES, Mark, Span, Track, trace

from .launch import bind

ROUNDS = 100
RECORDS = 1_000  # of a multiprocessor, by default
MOST = 20_000  # calls of the host program, and copies


@functools.cache
def ping_pong_kernel(network):
    """-> the kernel; `network`: some ranks are not reached by stores"""

    @cuda.jit(device=True)
    def send(signals, peer, value, to):
        if network:
            signal_op(signals[peer:], value, SignalOp.SIGNAL_SET, to)
        else:
            notify(signals[peer:], to, value)

    @cuda.jit
    def ping_pong(signals, times, peer, rounds):
        """Rank `peer` and rank 0, one thread of each. times: when rank 0 answers; on `peer` when it sends
        (even places), and when the answer is there."""
        for i in range(rounds):
            if rank() == 0:
                signal_wait_until(signals[peer:], ComparisonType.CMP_GE, i + 1)
                times[i] = clock()
                send(signals, peer, i + 1, peer)
            else:
                times[2 * i] = clock()
                send(signals, peer, i + 1, 0)
                signal_wait_until(signals[peer:], ComparisonType.CMP_GE, i + 1)
                times[2 * i + 1] = clock()

    return ping_pong


def offsets(answered, sent, received):
    """-> (what to subtract from a rank's clock to get rank 0's, by how much that may be wrong), of arrays of
    times in nanoseconds"""
    best = int(np.argmin(received - sent))
    there, back = int(sent[best]), int(received[best])
    steps = np.diff(np.unique(np.concatenate([sent, received])))
    tick = int(steps.min()) if steps.size else 0  # of the clock, which may be coarse
    return (there + back) // 2 - int(answered[best]), (back - there + 1) // 2 + tick


@cuda.jit
def read_clock(time):
    time[0] = clock()


_words = types.Array(types.uint64, 1, "C")
_ping_pong = (_words, types.Array(types.int64, 1, "C"), types.int64, types.int64)
GPU_KERNELS = {
    "ping_pong": (ping_pong_kernel(False), _ping_pong),
    "ping_pong[network]": (ping_pong_kernel(True), _ping_pong),
    "read_clock": (read_clock, _ping_pong[1:2]),
}


def spans_of(records, rank, what):
    """-> (spans, marks) of these records of a rank, by its GPU's clock; ``what(address)``: what a wait for it
    says.

    Of launches in a row, the next one may begin before the last one has ended: an end is that of the span
    that began first. A block's first thread may end before its others.
    """
    spans, marks, kernels, newest, opened = [], [], defaultdict(list), {}, defaultdict(list)
    last = max((r.time + r.length for r in records), default=0)
    for r in sorted(records, key=lambda r: r.time):
        track = Track(rank, r.block, r.warp, r.sm)
        block, phases = (r.module, r.block, r.sm), opened[track, r.module]
        if r.category == "kernel" and r.kind == BEGIN:
            newest[block] = Span(track, "kernel", r.name, r.time, r.time)
            kernels[block].append(newest[block])
            spans.append(newest[block])
            continue
        ended = r.category == "kernel" and kernels[block]
        of = kernels[block].pop(0) if ended else newest.get(block)
        if of is not None:
            of.end = max(of.end, r.time + r.length)
        if r.kind == WAIT:
            spans.append(Span(track, "wait", r.name, r.time, r.time + r.length, what(r.address)))
        elif r.kind == MARK:
            marks.append(Mark(track, "mark", r.name, r.time, {}))
        elif r.category == "phase" and r.kind == BEGIN:
            phases.append(Span(track, "phase", r.name, r.time, last, {"not ended": True}))
            spans.append(phases[-1])
        elif r.category == "phase":
            found = next((p for p in reversed(phases) if p.name == r.name), None)
            if found is not None:
                phases.remove(found)
                found.end, found.args = r.time, {}
    return spans, marks


class GpuRecorder:
    """Records from when it is made until ``stop``. Collective."""

    def __init__(self, world, records):
        self.world, self.me = world, world.world_rank(world.rank)
        self.capacity = records or RECORDS
        self.sms = world.backend.multiprocessors
        self.buffer = world.xp.zeros(timeline_records.bytes_of_buffer(self.sms, self.capacity) // 8, "uint64")
        self.offset, self.uncertainty = self._offset()
        self._ahead, self._event, self._seen = self._host_clock()
        self.calls = []  # of the host program: (name, begin, end), by its clock
        self.copies = []  # (addresses to and from, bytes, event before it, event behind it)
        self.lost = 0  # calls and copies beyond MOST
        world.synchronize()
        before = modules.record_to(self.buffer, self.buffer.data.ptr, self.capacity, self.sms)
        self._before, modules.recorder = (*before, modules.recorder), self

    def _offset(self):
        """-> (this rank's clock less rank 0's, by how much that may be wrong). Collective."""
        world = self.world
        signals = world.signals(world.n_ranks, name="timeline.ping_pong")
        times = world.xp.zeros(2 * ROUNDS, "uint64")
        unreached = world.host_allgather(world.backend.unreached(nvlink=False))
        kernel, arguments = ping_pong_kernel(any(unreached)), (signals, times, 0, ROUNDS)
        call = bind(kernel, 1, 1, arguments, group=world)
        mine = (0, 0)
        for peer in range(1, world.n_ranks):
            call.set("peer", peer)
            if world.rank in (0, peer):
                call()
            seen = world.asnumpy(times)
            answered = world.host_allgather(seen[:ROUNDS])[0]
            if world.rank == peer:
                mine = offsets(answered, seen[::2], seen[1::2])
        world.free(signals)
        return mine

    def _host_clock(self):
        """-> (the host's clock less the GPU's; an event, and when it was recorded by the GPU's clock)"""
        world, rounds = self.world, []
        time = world.xp.zeros(1, "uint64")
        call = bind(read_clock, 1, 1, (time,))
        for _ in range(20):
            sent = perf_counter_ns()
            call()
            event = world.backend.timed_event(world.backend.handle(None))
            world.synchronize()
            took = perf_counter_ns() - sent
            rounds.append((took, sent + took // 2, int(world.asnumpy(time)[0]), event))
        _, middle, seen, event = min(rounds, key=lambda r: r[0])
        return middle - seen, event, seen

    def called(self, name, begin, end):
        """The host program has, between these times of its clock."""
        if self.has_room(self.calls):
            self.calls.append((name, begin, end))

    def copied(self, addresses, n_bytes, enqueue, handle):
        """Enqueue a copy, to and from these `addresses`, between two events: copy engines may work where no
        multiprocessor is free. Of a graph's copies the last run is known."""
        if not self.has_room(self.copies):
            enqueue(handle)
            return
        begin = self.world.backend.timed_event(handle)
        enqueue(handle)
        self.copies.append((addresses, n_bytes, begin, self.world.backend.timed_event(handle)))

    def has_room(self, those):
        full = len(those) >= MOST
        self.lost += full
        return not full

    def stop(self):
        """-> the file's dictionary of this rank. Its times begin with the first record of any rank. Kernels
        record to what they did before. Collective."""
        self._leave()
        self.world.synchronize()
        modules.record_to(*self._before[:-1])
        spans, marks, lost, first = self._recorded(self.world.asnumpy(self.buffer))
        firsts = self.world.host_allgather(None if first is None else first - self.offset)
        base = min((t for t in firsts if t is not None), default=0) + self.offset
        uncertainty = max(self.world.host_allgather(self.uncertainty))
        return self._trace(spans, marks, lost, base, uncertainty_ns=uncertainty)

    def abandon(self):
        """-> likewise, of what there is, by the rank's own clock, without waiting for other ranks or kernels.
        These go on recording, where nobody will read it."""
        self._leave()
        spans, marks, lost, first = self._recorded(modules.read())
        return self._trace(spans, marks, lost, first or 0)

    def _leave(self):
        if modules.recorder is self:  # else an outer one has ended before
            modules.recorder = self._before[-1]

    def _recorded(self, words):
        """-> (spans, marks, how many were lost, when the first one begins or None)"""
        records, lost = timeline_records.decoded(words, self.sms, self.capacity)
        spans, marks = spans_of(records, self.me, self._what)
        spans += [*self._of_copies(), *self._of_host()]
        times = [*(span.begin for span in spans), *(mark.time for mark in marks)]
        return spans, marks, lost + self.lost, min(times, default=None)

    def _trace(self, spans, marks, lost, base, **about):
        for span in spans:
            span.begin, span.end = span.begin - base, span.end - base
        marks = [mark._replace(time=mark.time - base) for mark in marks]
        dropped = {str(self.me): lost} if lost else {}
        return trace(spans, marks, unit="ns", dropped=dropped, **about)

    def _of_copies(self):
        for addresses, n_bytes, begin, end in self.copies:
            since, took = (self.world.backend.elapsed_ns(*p) for p in ((self._event, begin), (begin, end)))
            if since is not None and took is not None:  # else it has not run, as those of a graph
                begin, name, args = self._seen + since, self._name(*addresses), {"bytes": n_bytes}
                yield Span(Track(self.me, COPIES), "copy", name, begin, begin + took, args)

    def _name(self, *addresses):
        """Of a copy to and from these addresses."""
        to, of = (self.world.locate(address)[2] for address in addresses)
        here = None, self.me
        return f"copy to rank {to}" if to not in here else "copy" if of in here else f"copy from rank {of}"

    def _of_host(self):
        for name, begin, end in self.calls:
            yield Span(Track(self.me), "host", name, begin - self._ahead, end - self._ahead)

    def _what(self, address):
        name, index, owner = self.world.locate(address)
        if name is None:
            return {"for": f"{address:#x}"}
        return {"for": f"{name}[{', '.join(map(str, index))}] on rank {owner}"}
