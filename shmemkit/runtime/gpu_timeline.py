"""The timeline of kernels on GPUs: their buffer, their clocks, and what was recorded.

GPUs have clocks of their own. Before anything is recorded, each rank and rank 0 send a signal back and forth
ROUNDS times. In the fastest round, rank 0's clock at its answer belongs to the middle between the rank's send
and its receipt; it is wrong by at most half of that time, which is the stated uncertainty.
"""

import functools

import numpy as np
from numba import cuda

from shmemkit.device import ComparisonType, SignalOp, notify, rank, signal_op, signal_wait_until
from shmemkit.device.cuda import timeline_records
from shmemkit.device.cuda.timeline_records import BEGIN, END, MARK, modules
from shmemkit.device.shmem.bounded_waits import clock
from shmemkit.support.trace_file import Mark, Span, Track, trace

from .launch import bind

ROUNDS = 100
RECORDS = 1_000  # of a multiprocessor, by default


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


class GpuRecorder:
    """Records from when it is made until ``stop``. Collective."""

    def __init__(self, world, records):
        self.world = world
        self.capacity = records or RECORDS
        self.sms = world.backend.multiprocessors
        self.buffer = world.xp.zeros(timeline_records.bytes_of_buffer(self.sms, self.capacity) // 8, "uint64")
        self.offset, self.uncertainty = self._offset()
        world.synchronize()
        before = modules.record_to(self.buffer, self.buffer.data.ptr, self.capacity, self.sms)
        self._before, modules.active = (*before, modules.active), True

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

    def end(self):
        """Kernels record to what they did before. The buffer lives until the GPU is at rest."""
        *before, modules.active = self._before
        self.world.synchronize()
        modules.record_to(*before)

    def stop(self):
        """-> the file's dictionary of this rank. Its times begin with the first record of any rank."""
        self.end()
        records, lost = timeline_records.decoded(self.world.asnumpy(self.buffer), self.sms, self.capacity)
        times = [r.time - self.offset for r in records]
        base = min(
            (t for t in self.world.host_allgather(min(times, default=None)) if t is not None), default=0
        )
        spans, marks = self._spans(records, base + self.offset)
        uncertainty = max(self.world.host_allgather(self.uncertainty))
        dropped = {str(self.world.rank): lost} if lost else {}
        return trace(spans, marks, unit="ns", dropped=dropped, uncertainty_ns=uncertainty)

    def _spans(self, records, base):
        spans, marks, open_phases = [], [], {}
        last = max((r.time + r.length for r in records), default=base) - base
        for r in sorted(records, key=lambda r: r.time):
            track, time = Track(self.world.rank, r.block, r.warp, r.sm), r.time - base
            phases = open_phases.setdefault((track, r.module), [])
            if r.kind == BEGIN:
                phases.append(Span(track, "phase", r.name, time, last, {"not ended": True}))
                spans.append(phases[-1])
            elif r.kind == END:
                found = next((p for p in reversed(phases) if p.name == r.name), None)
                if found is not None:
                    phases.remove(found)
                    found.end, found.args = time, {}
            elif r.kind == MARK:
                marks.append(Mark(track, "mark", r.name, time, {}))
            else:
                spans.append(Span(track, "wait", r.name, time, time + r.length, self._what(r.address)))
        return spans, marks

    def _what(self, address):
        name, index, owner = self.world.locate(address)
        if name is None:
            return {"for": f"{address:#x}"}
        return {"for": f"{name}[{', '.join(map(str, index))}] on rank {owner}"}
