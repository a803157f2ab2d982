"""Streams, events and graphs of the emulator: what host code orders work with.

A launch returns when the kernel has finished, as with CUDA_LAUNCH_BLOCKING=1, so that ordinary NumPy reads of its results are
right; unless the kernel waits for something that the host has yet to start: then it stays on its stream and goes on later.
"""

from collections import deque


class Stream:
    """A queue of operations of one PE; with ``with stream:`` and ``use()`` as CuPy's."""

    ptr = 0

    def __init__(self, machine, pe):
        self.machine, self.pe = machine, pe
        self.queue = deque()
        self.capturing = None
        machine.streams[pe].append(self)

    def enqueue(self, operation):
        """`operation` has start(), done and a name. Blocks as the module says."""
        if self.capturing is not None:
            self.capturing.append(operation)
            return
        self.queue.append(operation)
        self.advance()
        self._wait(can_go_on=True)

    def synchronize(self):
        """Wait until everything enqueued has finished."""
        if self.capturing is not None:
            raise RuntimeError("synchronize: the stream is capturing a graph; end the capture first")
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
        self.machine.scheduler.wake(id(self))

    # -- as CuPy's streams
    def use(self):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def record(self, event=None):
        event = event or Event()
        event.stream = self
        return event

    def wait_event(self, event):
        """Work enqueued here later runs after what `event` has recorded."""
        event.synchronize()

    def begin_capture(self, mode=None):
        if self.capturing is not None:
            raise RuntimeError("begin_capture: the stream is already capturing")
        self.capturing = []

    def end_capture(self):
        if self.capturing is None:
            raise RuntimeError("end_capture: begin_capture was not called")
        operations, self.capturing = self.capturing, None
        return Graph(operations)

    def is_capturing(self):
        return self.capturing is not None


class Event:
    """A point in a stream. Times are not emulated."""

    def __init__(self, *_, **__):
        self.stream = None

    def record(self, stream=None):
        if stream is not None:
            stream.record(self)

    def synchronize(self):
        if self.stream is not None:
            self.stream.synchronize()

    def wait(self, stream=None):
        self.synchronize()

    def query(self):
        return self.stream is None or self.stream.done

    done = property(query)

    def elapsed_time(self, end):
        raise NotImplementedError("times between events are not emulated")


class Graph:
    """A captured sequence of launches."""

    def __init__(self, operations):
        self.operations = operations

    def launch(self, stream=None):
        for operation in self.operations:
            (stream or operation.stream).enqueue(operation.again())

    def upload(self, stream=None):
        pass
