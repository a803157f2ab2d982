"""Streams and events of scripts: one class is what numba.cuda, CuPy and cuda.core make, so that each accepts
those of the others.

The default stream (the "legacy" one) waits for the streams that are not made non-blocking, and they for it.
"""

from ..run import current_host
from ..stream import Event, Marker, Stream, WaitFor
from .modules import Served


class Handle(int):
    """The address of a stream: an integer, as cuda.core has it, with Numba's ``.value``."""

    @property
    def value(self):
        return int(self)


class _Null:
    def __get__(self, _, owner):
        return _process().null


def _process():
    from .process import current

    return current("a stream")


class ScriptEvent(Event, Served):
    """An event as Numba's, CuPy's and cuda.core's."""

    def __init__(self, block=False, disable_timing=False, interprocess=False, timing=True):
        super().__init__()

    def record(self, stream=None):
        (_process().stream if stream is None else find(stream)).record(self)

    def wait(self, stream=None):
        (_process().stream if stream is None else find(stream)).wait_event(self)

    def sync(self):
        self.synchronize()

    def close(self):
        pass

    def query(self):
        return self.marker is None or _process().poll(lambda: self.marker.done, "an event, which it polls")

    done = is_done = property(query)

    def __sub__(self, start):
        return start.elapsed_time(self)


class ScriptStream(Stream, Served):
    """A new stream of the PE that calls, with the arguments of ``cupy.cuda.Stream``."""

    null = _Null()
    legacy = True  # ordered with the default stream

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None, *, process=None):
        if null or ptds:
            raise NotImplementedError("Stream(null=True), Stream(ptds=True): use Stream.null")
        process = process or _process()
        super().__init__(process.machine, process.pe)
        self.process, self.legacy = process, not non_blocking
        self.before = []  # CuPy's current streams outside of `with`
        # Unlike any address, and the same in every run.
        self.ptr = Handle((process.pe + 1 << 24) + (len(process.streams) << 4))

    @classmethod
    def null_of(cls, process):
        stream = cls(process=process)
        stream.ptr = Handle(0)
        return stream

    @staticmethod
    def from_handle(handle):
        """The stream of that address, as ``cuda.core.Stream.from_handle``."""
        return find(handle)

    @property
    def handle(self):
        return self.ptr

    @property
    def device_id(self):
        return self.process.device

    def __cuda_stream__(self):
        return 0, int(self.ptr)

    @property
    def done(self):
        return self.process.poll(self._is_idle, "its stream, which it polls")

    # -- work
    def enqueue(self, operation):
        if self.captured is None and self.legacy:
            null = self.process.null
            if self is null:
                for other in self.process.streams:
                    if other is not self and other.captured is None and getattr(other, "legacy", False):
                        _order(other, self)
            else:
                _order(null, self)
        super().enqueue(operation)

    def settle(self):
        """Wait for the work, which the host program does not learn from."""
        self._wait(can_go_on=False)

    def sync(self):
        self.synchronize()

    def close(self):
        pass

    def record(self, event=None, options=None):
        return super().record(ScriptEvent() if event is None else event)

    def wait(self, event_or_stream):
        if isinstance(event_or_stream, Stream):
            event_or_stream = event_or_stream.record()
        self.wait_event(event_or_stream)

    # -- CuPy's current stream
    def use(self):
        self.process.stream = self
        return self

    def __enter__(self):
        self.before.append(self.process.stream)
        self.process.stream = self
        return self

    def __exit__(self, *_):
        self.process.stream = self.before.pop()


def _order(first, then):
    """What is enqueued on `then` comes after what is on `first` now. The host program does not wait."""
    marker = Marker()
    for stream, operation in ((first, marker), (then, WaitFor(marker))):
        operation.stream = stream
        stream.queue.append(operation)
        stream.advance()


def new_stream(*_, **__):
    """``numba.cuda.stream()``"""
    return ScriptStream()


def find(stream):
    """The emulated stream that `stream` is: one of Numba, CuPy or cuda.core, or its address."""
    process = _process()
    if isinstance(stream, Stream):
        return stream
    if stream is None:
        return process.null
    if hasattr(type(stream), "__cuda_stream__"):
        stream = stream.__cuda_stream__()[1]
    if not hasattr(stream, "__index__"):
        raise TypeError(
            f"{stream!r} is no stream: one of numba.cuda, CuPy or cuda.core, or its address, is allowed"
        )
    if int(stream) in (0, 1, 2):
        return process.null
    for known in process.streams:
        if known.ptr == int(stream):
            return known
    raise ValueError(f"{int(stream):#x} is not the address of a stream of this PE ({current_host().pe})")
