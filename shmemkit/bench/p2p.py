"""``bench p2p``: what one rank can send to another: the physical limit on this machine.

Every rank sends to the next at once (a pull reads from the next), so that each link carries as much in both
directions; for the latency ranks 0 and 1, 2 and 3, ... send to and fro in pairs.
"""

from typing import Any

import numpy as np

from shmemkit.runtime.launch import bind
from shmemkit.runtime.timer import Timer

from . import kernels, options
from .command import Command
from .refusal import Refused, agreed, allocated
from .sizes import size_text

THREADS, THREADS_EMULATED = 1024, 32
LIMIT_BYTES, LIMIT_BYTES_EMULATED = 256 << 20, 2 << 10
LIMIT_BLOCKS = 64
ROUNDS, ROUNDS_EMULATED = 100, 3
COPY_ENGINE = "copy engine"
BY_BLOCKS = ("push", "pull", "put_signal")  # kernels, of which the blocks are varied


class Ring:
    """Symmetric buffers of `n_bytes`, random data in them, and the neighbours: `next` and the one before.
    Refused where there is no memory for that. Collective."""

    def __init__(self, world, n_bytes, max_blocks):
        self.world, n = world, world.n_ranks
        self.next, self.before = (world.rank + 1) % n, (world.rank - 1) % n
        self._data = agreed(world, lambda: self._random(n_bytes))
        self.src, self.dst, self.signals = allocated(
            world,
            lambda: world.array(self._data[world.rank], name="bench.src"),
            lambda: world.zeros(n_bytes, "uint8", name="bench.dst"),
            lambda: world.signals(max_blocks, "bench.signals"),
        )

    def _random(self, n_bytes):
        return {
            rank: self.world.xp.asarray(np.frombuffer(np.random.default_rng(rank).bytes(n_bytes), "uint8"))
            for rank in {self.world.rank, self.next, self.before}
        }

    def free(self):
        for array in (self.src, self.dst, self.signals):
            self.world.free(array)

    def transfer(self, method, n_bytes, blocks: Any = None):
        """-> (call, blocks): enqueues that transfer of the first `n_bytes`, by so many blocks or fewer.

        ValueError where the next rank's memory is not mapped here.
        """
        src, dst = self.src[:n_bytes], self.dst[:n_bytes]
        if method == COPY_ENGINE:
            return self._copy(self.world.peer_view(dst, self.next), src), None
        if method != "put_signal":
            self.world.peer_view(dst, self.next)  # refuses what cannot be reached
        chunk = -(-n_bytes // (16 * blocks)) * 16
        blocks = -(-n_bytes // chunk)
        threads = THREADS_EMULATED if self.world.backend.name == "emulator" else THREADS
        kernel = getattr(kernels, f"{method}_kernel")
        signals = (self.signals,) if method == "put_signal" else ()
        return bind(kernel, blocks, threads, (dst, src, *signals, self.next, chunk), group=self.world), blocks

    def _copy(self, there, src):
        if self.world.backend.name == "emulator":
            return lambda: np.copyto(there, src)
        runtime, stream = self.world.xp.cuda.runtime, self.world.stream.ptr
        to, of, count = there.data.ptr, src.data.ptr, src.nbytes
        return lambda: runtime.memcpyAsync(to, of, count, runtime.memcpyDefault, stream)

    def measure(self, timer, method, n_bytes, blocks=None):
        """-> (microseconds or None, blocks, note). Collective."""
        world = self.world
        try:
            call, blocks = agreed(world, lambda: self.transfer(method, n_bytes, blocks))
        except Refused as reason:
            return None, blocks, f"refused: {reason}"
        expected = self._data[self.next if method == "pull" else self.before][:n_bytes]
        world.xp.invert(expected, out=self.dst[:n_bytes])
        world.synchronize()
        world.host_barrier()
        call()
        iters = timer.iters_for(n_bytes)
        us = timer.time(timer.capture(call, iters), iters)
        try:
            differ = agreed(world, lambda: int((self.dst[:n_bytes] != expected).sum()))
        except Refused as reason:
            return None, blocks, f"refused: {reason}"
        found = f"wrong: {differ} of {n_bytes} bytes differ on rank {world.rank}" if differ else ""
        return us, blocks, next(filter(None, world.host_allgather(found)), "")


def limit(world, timer):
    """-> 10**9 bytes per second that each rank can send to the next at once, or None if it cannot reach it,
    or there is no memory. The better of a copy engine and a kernel. Collective."""
    n_bytes = LIMIT_BYTES_EMULATED if timer.emulated else LIMIT_BYTES
    try:
        ring = Ring(world, n_bytes, 1)
    except Refused:
        return None
    ways = ((COPY_ENGINE, n_bytes), ("push", n_bytes, LIMIT_BLOCKS))
    times = [us for us, _, note in (ring.measure(timer, *way) for way in ways) if us and not note]
    ring.free()
    return n_bytes / min(times) / 1e3 if times else None


def latency(world, timer, method):
    """-> (microseconds from one rank to its partner, or None, note). Collective."""
    rounds = ROUNDS_EMULATED if timer.emulated else ROUNDS
    partner, first = world.rank ^ 1, world.rank % 2 == 0
    paired = partner < world.n_ranks
    data = [np.random.default_rng(rank).integers(1, 256, 8, "uint8") for rank in (world.rank, partner)]
    try:
        src, dst, signal = allocated(
            world,
            lambda: world.array(data[0], name="bench.word"),
            lambda: world.zeros(8, "uint8", name="bench.word_there"),
            lambda: world.signals(1, "bench.signal"),
        )
    except Refused as reason:
        return None, f"refused: {reason}"
    state = world.xp.zeros(1, "uint64")

    def load():
        args = (signal, state, partner, int(first), rounds)
        if not paired:
            return None
        if method == "put_signal":
            return bind(kernels.put_signal_latency_kernel, 1, 1, (dst, src, *args), group=world)
        world.peer_view(signal, partner)  # refuses what cannot be reached
        return bind(kernels.notify_kernel, 1, 1, args, group=world)

    us, note = None, ""
    try:
        call = agreed(world, load)  # on all ranks before any launch: loading waits for running kernels
    except Refused as reason:
        note = f"refused: {reason}"
    else:
        if paired:
            call()
        iters = timer.iters_for(8)
        us = timer.time(timer.capture(call, iters) if paired else None, iters) / (2 * rounds)
    if paired and not note:
        counted, arrived = int(state[0]), int(signal[0])
        if counted != arrived or counted == 0 or counted % rounds:
            note = f"wrong: rank {world.rank} counted {counted} signals, the last was {arrived}"
        elif method == "put_signal" and world.asnumpy(dst).tolist() != data[1].tolist():
            note = f"wrong: rank {world.rank} has not got what rank {partner} sent"
    note = next(filter(None, world.host_allgather(note)), "")
    for array in (src, dst, signal):
        world.free(array)
    return us, note


def run(world, results, given, progress):
    """Fill in the rows. Collective."""
    if world.n_ranks == 1:
        raise SystemExit(
            "p2p: there is one rank; it needs two or more, as in shmemkit run -n 2 -m shmemkit bench p2p"
        )
    timer = Timer(world, given.iters, given.replays)
    ways = [(method, blocks) for method in BY_BLOCKS for blocks in given.blocks] + [(COPY_ENGINE, None)]
    with progress(2 + len(given.sizes) * len(ways)) as step:
        for method in ("notify", "put_signal"):
            step(f"latency, {method}")
            us, note = latency(world, timer, method)
            results.add("latency", method, 8, us, note=note)
        for size in given.sizes:
            measured = set()
            try:
                ring = Ring(world, size, max(given.blocks))
            except Refused as reason:
                for method in (*BY_BLOCKS, COPY_ENGINE):
                    results.add("p2p", method, size, note=f"refused: {reason}")
                continue
            for method, wanted in ways:
                step(f"{size_text(size)}, {method}" + (f", {wanted} blocks" if wanted else ""))
                us, blocks, note = ring.measure(timer, method, size, wanted)
                if (method, blocks) not in measured:  # a small size has no work for more blocks
                    measured.add((method, blocks))
                    bus = size / us / 1e3 if us else None
                    results.add("p2p", method, size, us, bus, note=note, blocks=blocks)
            ring.free()
    right = [row for row in results.rows if row.bus_GBps and not row.note]
    largest = max((row.bytes for row in right), default=0)
    results.p2p_GBps = max((row.bus_GBps for row in right if row.bytes == largest), default=None)


_text = f"blocks of the kernels; {options.DEFAULT}"
_blocks = {"type": options.integers, "default": "4,8,16,32,64,132", "metavar": "N,N", "help": _text}
COMMANDS = [
    Command(
        "p2p",
        "what one rank can send to another: bandwidth, and latency of a signal",
        run=run,
        sizes="that each rank sends, not rounded",
        iters="20 up to 4 MB, 5 above",
        options=[("--blocks", _blocks)],
    )
]
