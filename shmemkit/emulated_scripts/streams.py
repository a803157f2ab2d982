"""Streams and events of scripts: one class is what numba.cuda, CuPy and cuda.core make, so that each accepts
those of the others."""

from shmemkit.emu.stand_in_modules import Served, not_served
from shmemkit.emu.stream import Event, Stream, find

from .current_process import current


class _Null:
    def __get__(self, _, owner):
        return _process().null


def _process():
    return current("a stream")


class _OfCudaCore(Served):
    """What cuda.core's streams and events have alike."""

    def sync(self):
        self.synchronize()

    def close(self):
        pass


class ScriptEvent(Event, _OfCudaCore):
    """An event as Numba's, CuPy's and cuda.core's."""

    def __init__(self, block=False, disable_timing=False, interprocess=False, timing=True):
        super().__init__()

    def record(self, stream=None):
        (_process().stream if stream is None else find(stream)).record(self)

    def wait(self, stream=None):
        (_process().stream if stream is None else find(stream)).wait_event(self)

    def query(self):
        return self.marker is None or _process().poll(lambda: self.marker.done, "an event, which it polls")

    done = is_done = property(query)

    def __sub__(self, start):
        return start.elapsed_time(self)


class ScriptStream(Stream, _OfCudaCore):
    """A new stream of the PE that calls, with the arguments of ``cupy.cuda.Stream``."""

    null = _Null()

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None, *, process=None):
        if null or ptds:
            raise not_served(f"Stream({null=}, {ptds=})", "Use Stream.null")
        self.process = process or _process()
        super().__init__(self.process.machine, self.process.pe, not non_blocking)

    @staticmethod
    def from_handle(handle):
        """The stream of that address, as ``cuda.core.Stream.from_handle``."""
        return find(handle)

    @property
    def device_id(self):
        return self.process.device

    @property
    def done(self):
        return self.process.poll(self._is_idle, "its stream, which it polls")

    def record(self, event=None, options=None):
        return super().record(ScriptEvent() if event is None else event)

    def wait(self, event_or_stream):
        if isinstance(event_or_stream, Stream):
            event_or_stream = event_or_stream.record()
        self.wait_event(event_or_stream)


def new_stream(*_, **__):
    """``numba.cuda.stream()``"""
    return ScriptStream()
