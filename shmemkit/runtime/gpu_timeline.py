"""The timeline of kernels on GPUs: their buffer, their clocks, and what was recorded.

GPUs have clocks of their own. Before anything is recorded, each rank and rank 0 send a signal back and forth
ROUNDS times. In the fastest round, rank 0's clock at its answer belongs to the middle between the rank's send
and its receipt; it is wrong by at most half of that time, which is the stated uncertainty.
"""

import functools
from time import time_ns

import numpy as np
from numba import cuda

from shmemkit.device import ComparisonType, SignalOp, notify, rank, signal_op, signal_wait_until
from shmemkit.device.cuda import timeline_records
from shmemkit.device.cuda.timeline_records import BEGIN, MARK, WAIT, host_call, modules
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


class GpuRecorder:
    """Records from when it is made until ``stop``. Collective."""

    def __init__(self, world, records):
        self.world = world
        self.capacity = records or RECORDS
        self.sms = world.backend.multiprocessors
        self.buffer = world.xp.zeros(timeline_records.bytes_of_buffer(self.sms, self.capacity) // 8, "uint64")
        self.offset, self.uncertainty = self._offset()
        self._ahead, self._event, self._seen = self._host_clock()
        self.calls = []  # of the host program: (name, begin, end), by its clock
        self.copies = []  # (address, bytes, event before it, event behind it)
        self.lost = 0  # calls and copies beyond MOST
        world.synchronize()
        before = modules.record_to(self.buffer, self.buffer.data.ptr, self.capacity, self.sms)
        self._before, modules.recorder = (*before, modules.recorder), self

    def _offset(self):
        """-> (my clock less rank 0's, by how much that may be wrong); every rank has a turn with rank 0."""
        world = self.world
        signals = world.signals(world.n_ranks, name="timeline.ping_pong")
        times = world.xp.zeros(2 * ROUNDS, "uint64")
        unreached = world.host_allgather(world.backend.unreached(nvlink=False))
        call = bind(ping_pong_kernel(any(unreached)), 1, 1, (signals, times, 0, ROUNDS))
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
            sent = time_ns()
            call()
            event = world.backend.timed_event(world.backend.handle(None))
            world.synchronize()
            took = time_ns() - sent
            rounds.append((took, sent + took // 2, int(world.asnumpy(time)[0]), event))
        _, middle, seen, event = min(rounds, key=lambda r: r[0])
        return middle - seen, event, seen

    def called(self, name, begin, end):
        """The host program has, between these times of its clock."""
        if self.has_room(self.calls):
            self.calls.append((name, begin, end))

    def has_room(self, those):
        full = len(those) >= MOST
        self.lost += full
        return not full

    def launching(self, name, on):
        """`on`, stream -> launch(), of the kernel `name`; its calls are recorded."""

        def recorded(launch):
            with host_call(f"launch {name}"):
                return launch()

        return lambda stream: functools.partial(recorded, on(stream))

    def copying(self, address, n_bytes, enqueue):
        """``enqueue(handle)``, of a copy to `address`, which is recorded between two events: copy engines may
        work where no multiprocessor is free. Of a graph's copies the last run is known."""
        event = self.world.backend.timed_event

        def recorded(handle):
            if modules.recorder is not self or not self.has_room(self.copies):
                enqueue(handle)
                return
            begin = event(handle)
            enqueue(handle)
            self.copies.append((address, n_bytes, begin, event(handle)))

        return recorded

    def end(self):
        """Kernels record to what they did before. The buffer lives until the GPU is at rest."""
        *before, modules.recorder = self._before
        self.world.synchronize()
        modules.record_to(*before)

    def stop(self):
        """-> the file's dictionary of this rank. Its times begin with the first record of any rank."""
        self.end()
        records, lost = timeline_records.decoded(self.world.asnumpy(self.buffer), self.sms, self.capacity)
        spans, marks = self._of_kernels(records)
        spans += [*self._of_copies(), *self._of_host()]
        times = [span.begin for span in spans] + [mark.time for mark in marks]
        firsts = self.world.host_allgather(min(times) - self.offset if times else None)
        base = min((t for t in firsts if t is not None), default=0) + self.offset
        for span in spans:
            span.begin, span.end = span.begin - base, span.end - base
        marks = [mark._replace(time=mark.time - base) for mark in marks]
        uncertainty = max(self.world.host_allgather(self.uncertainty))
        lost += self.lost
        dropped = {str(self.world.rank): lost} if lost else {}
        return trace(spans, marks, unit="ns", dropped=dropped, uncertainty_ns=uncertainty)

    def _of_kernels(self, records):
        spans, marks, kernels, opened = [], [], {}, {}
        last = max((r.time + r.length for r in records), default=0)
        for r in sorted(records, key=lambda r: r.time):
            track, block = Track(self.world.rank, r.block, r.warp, r.sm), (r.module, r.block)
            phases = opened.setdefault((track, r.module), [])
            if r.category == "kernel" and r.kind == BEGIN:
                kernels[block] = Span(track, "kernel", r.name, r.time, last)
                spans.append(kernels[block])
                continue
            if block in kernels:  # its first thread may end before the others
                kernels[block].end = max(r.time + r.length, kernels[block].begin)
            if r.kind == WAIT:
                args = self._what(r.address)
                spans.append(Span(track, "wait", r.name, r.time, r.time + r.length, args))
            elif r.kind == MARK:
                marks.append(Mark(track, "mark", r.name, r.time, {}))
            elif r.category == "phase" and r.kind == BEGIN:
                phases.append(Span(track, "phase", r.name, r.time, last, {"not ended": True}))
                spans.append(phases[-1])
            elif found := next((p for p in reversed(phases) if p.name == r.name), None):
                phases.remove(found)
                found.end, found.args = r.time, {}
        return spans, marks

    def _of_copies(self):
        for address, n_bytes, begin, end in self.copies:
            times = [self.world.backend.elapsed_ns(self._event, event) for event in (begin, end)]
            if None not in times:  # else it is of a graph that has not run
                owner = self.world.locate(address)[2]
                name = "copy" if owner in (None, self.world.rank) else f"copy to rank {owner}"
                first, last = (self._seen + t for t in times)
                yield Span(Track(self.world.rank, COPIES), "copy", name, first, last, {"bytes": n_bytes})

    def _of_host(self):
        for name, begin, end in self.calls:
            yield Span(Track(self.world.rank), "host", name, begin - self._ahead, end - self._ahead)

    def _what(self, address):
        name, index, owner = self.world.locate(address)
        if name is None:
            return {"for": f"{address:#x}"}
        return {"for": f"{name}[{', '.join(map(str, index))}] on rank {owner}"}
