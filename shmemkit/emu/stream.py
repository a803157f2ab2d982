"""Streams, events and graphs of the emulator: what host code orders work with.

A launch returns when the kernel has finished, as with CUDA_LAUNCH_BLOCKING=1, so that ordinary NumPy reads of
its results are right; unless the kernel waits for something that the host has yet to start: then it stays on
its stream and goes on later. So do memory operations that wait. Copies, and memory operations that only
write, return at once: kernels on other streams run concurrently.

A PE's default stream is the legacy one of CUDA: it waits for what is on streams that are not non-blocking,
and they for it. A World's stream is non-blocking, and so are those of ``backend.new_stream``.
"""

import contextlib
import itertools
import time
from collections import deque
from typing import Any

import numpy as np
from numba import cuda

from shmemkit.support.host_program import current_world, host_program
from shmemkit.support.settings import shown

from .grid import Launch
from .thread import current_thread


class Handle(int):
    """The address of a stream: an integer, as cuda.core has it, with Numba's ``.value``."""

    @property
    def value(self):
        return int(self)


class Stream:
    """A queue of operations of one PE; with ``with stream:`` and ``use()`` as CuPy's.

    An operation has start(), done, name, and again(renewed), which makes another like it (for a graph).
    """

    per_thread = None  # of a default stream: the per-thread one, once somebody has asked for it
    ended = False  # with its World

    def __init__(self, machine, pe, blocking=True):
        self.machine, self.pe, self.blocking = machine, pe, blocking
        self.queue = deque()
        self.captured = None  # the operations of the graph that is being captured, with their streams
        self.enqueued, self.followed = 0, {}  # operations so far; of other streams, that this one waits for
        self.before = []  # CuPy's current streams outside of `with`
        # Unlike any address, and the same in every run; 0 is the default stream, which is made first.
        number = len(machine.streams[pe])
        self.ptr = Handle((pe + 1 << 24) + (number << 4) if number else 0)
        if machine.races is not None:
            machine.races.new_stream(self)
        machine.streams[pe].append(self)

    def enqueue(self, operation):
        """Run `operation` after what is on the stream already. Blocks as the module says."""
        self.machine.check_thread()
        if self.ended:
            raise RuntimeError(
                f"{operation.name}: the World of its stream is finalized. Call shmemkit.init() again, and "
                "use the stream and the arrays of the new World"
            )
        if self.captured is not None:
            self.captured.append((self, operation))
            return
        self._follow_blocking()
        self.enqueued += 1
        if self.machine.timeline is not None:
            self.machine.timeline.enqueued(self.pe, operation)
        self._append(operation)
        if not isinstance(operation, Background):
            self._wait(can_go_on=True)

    def _append(self, operation):
        operation.stream = self
        if self.machine.races is not None:
            operation.told = self.machine.races.hosts[self.pe]  # what the host program knows
        self.queue.append(operation)
        self.advance()

    def _follow_blocking(self):
        """Come after what is on the default stream. That one comes after all that are not non-blocking."""
        default = self.machine.defaults.get(self.pe)
        if self is not default:
            if self.blocking and default is not None:
                self._follow(default)
            return
        for other in self.machine.streams[self.pe]:
            if other is not self and other.blocking:
                if other.captured is not None:
                    raise RuntimeError(
                        "the default stream waits for a stream that captures a graph. End the capture "
                        "first, or use a non-blocking stream, such as the World's"
                    )
                self._follow(other)

    def _follow(self, other):
        """What is enqueued from now on runs after what is on `other` now. The host program does not wait."""
        if self.followed.get(other, 0) < other.enqueued:
            self.followed[other] = other.enqueued
            marker = Marker()
            other._append(marker)
            self._append(WaitFor(marker))

    def synchronize(self):
        """Wait until everything enqueued has finished."""
        if self.captured is not None:
            raise RuntimeError("synchronize(): the stream captures a graph. End the capture first")
        self.settle()
        if self.machine.timeline is not None:
            self.machine.timeline.synchronized(self)
        if self.machine.races is not None:
            self.machine.races.synchronized(self.pe, self.clock)

    def settle(self):
        """Wait for the work, of which the host program learns nothing."""
        if self.captured is None:
            self._follow_blocking()
        self._wait(can_go_on=False)

    def _wait(self, can_go_on):
        self.machine.wait_on_host(self.pe, self._is_idle, id(self), self._why, can_go_on)

    def _why(self):
        return f"its stream, which runs {self.queue[0].name}" if self.queue else "its stream"

    def _is_idle(self):
        return not self.queue

    done = property(_is_idle)

    def advance(self):
        """Start what comes next, once what ran has finished."""
        queue = self.queue
        while queue:
            head = queue[0]
            if not head.started:
                head.started = True
                head.start()
            if not head.done:
                return
            queue.popleft()
            if self.machine.timeline is not None:
                self.machine.timeline.operation_ended(self, head)
            if isinstance(head, WaitFor) and self.machine.races is not None:
                self.machine.races.waited(self, head.marker.clock)
            self.machine.scheduler.wake(id(self))

    # -- as CuPy's streams
    handle = property(lambda self: self.ptr)

    def __cuda_stream__(self):
        return 0, int(self.ptr)

    def use(self):
        self.machine.current[self.pe] = self
        return self

    def __enter__(self):
        self.before.append(self.machine.current.get(self.pe))
        return self.use()

    def __exit__(self, *_):
        self.machine.current[self.pe] = self.before.pop()

    @contextlib.contextmanager
    def auto_synchronize(self):
        """As Numba's: synchronize at the end of the block."""
        yield self
        self.synchronize()

    def record(self, event=None):
        event = event or Event()
        event.marker = Marker()
        event.captured = self.captured
        self.enqueue(event.marker)
        return event

    def wait_event(self, event):
        """Work enqueued here later runs after what `event` has recorded. A capture extends to this stream."""
        if event.marker is None:
            return
        if event.captured is not None and self.captured is None:
            if not any(s.captured is event.captured for s in self.machine.streams[self.pe]):
                raise RuntimeError(
                    "wait_event(): the event was recorded in a capture that has ended. Record it again"
                )
            self.captured = event.captured
        self.enqueue(WaitFor(event.marker))

    def begin_capture(self, mode=None):
        if self.captured is not None:
            raise RuntimeError("begin_capture(): the stream captures a graph already. End that capture first")
        if self is self.machine.defaults.get(self.pe):
            raise RuntimeError(
                "begin_capture(): the default stream cannot capture a graph. Use another stream"
            )
        self.captured = Capture()

    def end_capture(self):
        if self.captured is None:
            raise RuntimeError(
                "end_capture(): the stream does not capture a graph. Call begin_capture() first"
            )
        captured = self.captured
        for stream in self.machine.streams[self.pe]:
            if stream.captured is captured:
                stream.captured = None
        if (apart := _unjoined(self, captured)) is not None:
            raise RuntimeError(
                f"end_capture(): {apart.name}, on another stream of the capture, is not joined. Let the "
                "stream that began the capture wait for an event behind it (wait_event)"
            )
        return Graph(self, captured)

    def is_capturing(self):
        return self.captured is not None


class Capture(list):
    """The operations of a graph that is being captured, with their streams. `number`: no other's."""

    _numbers = itertools.count(1)

    def __init__(self):
        super().__init__()
        self.number = next(self._numbers)


class Marker:
    """The operation that an event records: it is done when the stream comes to it."""

    name = "an event"
    started = done = False
    stream: Any = None
    time: Any = None
    clock: Any = None  # what has happened before, where races are looked for

    def start(self):
        self.done, self.time = True, time.perf_counter()
        if self.stream.machine.races is not None:
            self.clock = self.stream.clock
        for other in self.stream.machine.streams[self.stream.pe]:
            if other.queue and isinstance(other.queue[0], WaitFor):
                other.advance()

    def again(self, renewed):
        return renewed.setdefault(self, Marker())


class WaitFor:
    """The operation of a stream that waits for a Marker of another one."""

    name = "a wait for an event of another stream"
    started = False
    stream = None

    def __init__(self, marker):
        self.marker = marker

    done = property(lambda self: self.marker.done)

    def start(self):
        pass

    def again(self, renewed):
        return WaitFor(renewed.get(self.marker, self.marker))


def _unjoined(origin, captured):
    """-> what was captured last, on some other stream, that `origin` does not come after, or None"""
    joined, awaited = {origin}, set()  # going backwards: streams, and markers, that it comes after
    for stream, operation in reversed(captured):
        if operation in awaited:
            joined.add(stream)
        elif isinstance(operation, WaitFor):
            if stream in joined:
                awaited.add(operation.marker)
        elif stream not in joined and not isinstance(operation, Marker):
            return operation
    return None


class Background(Launch):
    """An operation of one emulated thread, for which the host program does not wait."""

    def again(self, _):
        return Background(*self._call)


def copy(stream, dst, src):
    """The operation that copies `src` to `dst`: contiguous, of as many bytes, and of any PE."""
    return copy_rows(stream, *(array.reshape(1, -1).view(np.uint8) for array in (dst, src)))


def copy_by(function, stream, *arguments):
    """The operation that copies by ``function(arguments)``, of one emulated thread."""
    return _operation(Background, stream, "a copy", function, *arguments)


def copy_rows(stream, dst, src):
    """The operation that copies `src` to `dst`: 2-D, of the same shape, with rows of consecutive bytes."""
    return _operation(Background, stream, "a copy", _copy_rows, dst, src)


def memory_operations(stream, operations):
    """The operation that stores values, by releases of scope "sys", and waits for some, by acquires.

    operations  ("write" or "wait", array of one uint64, value): "wait" until it is at least that
    """
    kinds, words, values = zip(*operations, strict=True)
    waits = tuple(kind == "wait" for kind in kinds)
    kind = Launch if any(waits) else Background
    return _operation(kind, stream, "memory operations", _operate, waits, words, values)


def _operation(kind, stream, name, function, *arguments):
    # Arrays go in a tuple: they have no names, and reports take those of their allocations.
    return kind(stream, name, function, ["arguments"], [arguments])


def _copy_rows(arguments):
    dst, src = arguments
    for i in range(src.shape[0]):
        current_thread("copy").copy(dst[i], src[i], 0, src.shape[1])


def _operate(arguments):
    thread = current_thread("memory_operations")
    for waits, word, value in zip(*arguments, strict=True):
        if waits:
            thread.wait(word, 0, "ge", value, "sys", "acquire")
        else:
            thread.store(word, 0, value, "sys", "release")


class Event:
    """A point in a stream, as CuPy's and Numba's."""

    def __init__(self, *_, **__):
        self.marker = self.captured = None

    def record(self, stream=None):
        find(stream).record(self)

    def wait(self, stream=None):
        find(stream).wait_event(self)

    def synchronize(self):
        """Wait until the stream has come to this point."""
        marker = self.marker
        if marker is None:
            return
        stream = marker.stream
        if stream is None:
            raise RuntimeError(
                "synchronize(): the event was captured into a graph; the host cannot wait for it. "
                "Synchronize the stream"
            )
        stream.machine.wait_on_host(
            stream.pe, lambda: marker.done, id(stream), lambda: "an event of its stream", can_go_on=False
        )
        if stream.machine.timeline is not None:
            stream.machine.timeline.waited_for_event(stream.pe, marker)
        if marker.clock is not None:
            stream.machine.races.synchronized(stream.pe, marker.clock)

    def query(self):
        return self.marker is None or self.marker.done

    done = property(query)

    def elapsed_time(self, end):
        """Milliseconds between two events: of the emulator, which says nothing about a GPU."""
        return (end.marker.time - self.marker.time) * 1e3


def default_stream():
    """The default stream of the PE that calls; it has a World, or runs a script."""
    process = host_program().process
    if process is not None:
        return process.null
    backend = current_world(required=True).backend
    return backend.machine.defaults[backend.pe]


def find(stream):
    """The emulated stream that `stream` is: one of Numba, CuPy or cuda.core, or its address, or None."""
    if isinstance(stream, Stream):
        return stream
    default = default_stream()
    if stream is None:
        return default
    if hasattr(type(stream), "__cuda_stream__"):
        stream = stream.__cuda_stream__()[1]
    if not hasattr(stream, "__index__") or isinstance(stream, np.ndarray):
        raise TypeError(
            f"stream is {shown(stream)}; it must be a stream of numba.cuda, CuPy or cuda.core, or its address"
        )
    if int(stream) in (0, 1):
        return default
    if int(stream) == 2:
        default.per_thread = default.per_thread or cuda.stream()
        return default.per_thread
    for known in default.machine.streams[default.pe]:
        if known.ptr == int(stream):
            return known
    raise ValueError(
        f"stream is {int(stream):#x}; it must be the address of a stream of this rank ({default.pe})"
    )


class Graph:
    """A captured sequence of operations. `origin` is the stream that the capture began on."""

    def __init__(self, origin, captured):
        self.origin, self.captured = origin, captured

    def launch(self, stream=None):
        """Run it on `stream` (default: where it was captured); what other streams took part in, on those."""
        renewed = {}
        # All of them first: an error leaves none started.
        operations = [operation.again(renewed) for _, operation in self.captured]
        for (captured_on, _), operation in zip(self.captured, operations, strict=True):
            target = stream if stream is not None and captured_on is self.origin else captured_on
            target.enqueue(operation)

    def upload(self, stream=None):
        pass
