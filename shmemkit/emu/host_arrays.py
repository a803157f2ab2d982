"""Symmetric arrays as host programs see them where races are looked for: what the host does with one is an
operation of the current stream (CuPy's; at first the World's), as with CuPy.

So it comes after the work that is on that stream, and before what is enqueued there later; other streams and
ranks need an event, a synchronize or a barrier. A value that comes to the host has been waited for, besides.
What reaches the memory by other ways (``np.asarray``, buffers, DLPack) is not seen; CuPy refuses most of it.
"""

import sys

import numpy as np

from shmemkit.support.host_program import current_world

from .report import user_frame
from .thread import Thread
from .vector_clock import Moment
from .workers import running


class HostAccess:
    """The operation of a stream that calls ``function()``. `reads` and `writes` are (array, index), `site` is
    (code, instruction) of the host program. Of threads it has what reports need."""

    name = "the host program"
    started = done = pdl = False
    stream = result = None
    threads = missed = noted = blocks = ()
    thread_id, gr_frame = 0, None
    block = launch = property(lambda self: self)
    pe = property(lambda self: self.stream.pe)

    def __init__(self, function, reads, writes, site):
        self._call = function, reads, writes, site
        self.arrays = {}

    def again(self, _):
        return HostAccess(*self._call)

    def start(self):
        function, reads, writes, site = self._call
        races = self.stream.machine.races
        races.kernel_started(self)
        key, number = self.stream_key, self.number
        access = Moment(0, 0, key, number, key, number, self, races.events), *site
        self.result = function()
        for what, parts in (("read", reads), ("write", writes)):
            for array, index in parts:
                for part in _parts(array, index):
                    races.tracked(_plain(array)).touch(what, self.clock, access, part)
        races.kernel_ended(self)
        self.done = True


def _parts(array, index):
    """`index` as such of slices and integers."""
    items = index if isinstance(index, tuple) else (index,)
    if not any(isinstance(i, (bool, np.bool_, list, np.ndarray)) for i in items):
        return [items]
    chosen = np.unique(np.arange(array.size).reshape(array.shape)[_plain(index)])
    return list(zip(*np.unravel_index(chosen, array.shape), strict=True))


def _is_view(array, index):
    """Whether ``array[index]`` names memory, and loads nothing."""
    items = index if isinstance(index, tuple) else (index,)
    integers = sum(isinstance(i, (int, np.integer)) and not isinstance(i, (bool, np.bool_)) for i in items)
    others = sum(i is None or i is ... or isinstance(i, slice) for i in items)
    return integers + others == len(items) and (others > 0 or integers < array.ndim)


def perform(function, reads=(), writes=(), stream=None):
    """-> ``function()``, which reads and writes those (array, index), on `stream` (None: the current one).
    Where it only writes and the stream is held up, it is done later."""
    world = None if isinstance(running(), Thread) else current_world()
    machine = getattr(world and world.backend, "machine", None)
    if machine is None or machine.races is None:
        return _wrapped(function())
    stream = stream or machine.current[world.backend.pe]
    reads, writes = (
        [(a, i) for a, i in parts if isinstance(a, HostArray) and a.size] for parts in (reads, writes)
    )
    if not reads and not writes:
        result = function()
    else:
        for array, _ in (*reads, *writes):
            machine.refuse_freed(stream.pe, array, "the host program accesses")
        operation = HostAccess(function, reads, writes, _site())
        stream.enqueue(operation)
        if writes and not operation.done:
            return None  # on its way, or captured
        if not operation.done:
            if stream.captured is not None:
                raise RuntimeError(
                    "the host reads an array while the stream captures a graph. End the capture first"
                )
            stream.settle()
        result = operation.result
    if result is not None and not isinstance(result, (np.ndarray, tuple)) and stream.captured is None:
        stream.synchronize()  # a value, for the host
    return _wrapped(result)


def _site():
    frame = user_frame(sys._getframe(2))
    return (None, 0) if frame is None else (frame.f_code, frame.f_lasti)


def _plain(value):
    if isinstance(value, HostArray):
        return value.view(np.ndarray)
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


def _wrapped(value):
    if isinstance(value, np.ndarray):
        return value if isinstance(value, HostArray) else value.view(HostArray)
    return type(value)(map(_wrapped, value)) if type(value) in (list, tuple) else value


def _all_of(value):
    """(array, index) of the arrays in `value`, which may be a sequence or a dictionary of them."""
    if isinstance(value, HostArray):
        return [(value, ...)]
    values = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [part for v in values for part in _all_of(v)]


class HostArray(np.ndarray):
    """A symmetric array, or what has been computed from one."""

    def __getitem__(self, index):
        if _is_view(self, index):
            return np.ndarray.__getitem__(self, index)
        return perform(lambda: _plain(self)[_plain(index)], [(self, index), *_all_of(index)])

    def __setitem__(self, index, value):
        reads = _all_of(value)
        if isinstance(value, np.ndarray) and not reads:
            value = np.array(value)  # as it is now

        def store():
            _plain(self)[_plain(index)] = _plain(value)

        perform(store, reads, [(self, index)])

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        out = kwargs.get("out") or ()
        writes = _all_of(out) + (_all_of(inputs[0]) if method == "at" else [])
        rest = {k: v for k, v in kwargs.items() if k != "out"}
        reads = _all_of(inputs[method == "at" :]) + _all_of(rest)
        function = getattr(ufunc, method)
        plain = {k: _plain(v) for k, v in kwargs.items()}
        result = perform(lambda: function(*map(_plain, inputs), **plain), reads, writes)
        return out[0] if len(out) == 1 else result

    def __array_function__(self, function, types, args, kwargs):
        plain = {k: _plain(v) for k, v in kwargs.items()}
        writes = _all_of(kwargs.get("out")) + (_all_of(args[0]) if function in _STORES else [])
        reads = _all_of(args[function in _STORES :])
        reads += _all_of({k: v for k, v in kwargs.items() if k != "out"})
        if function in _NOTHING:
            reads = writes = ()
        result = perform(lambda: function(*map(_plain, args), **plain), reads, writes)
        return kwargs["out"] if kwargs.get("out") is not None else result


_STORES = {np.copyto, np.put, np.place, np.putmask, np.put_along_axis, np.fill_diagonal}
_NOTHING = {np.shape, np.ndim, np.size, np.empty_like, np.zeros_like, np.ones_like, np.full_like}
_NOTHING |= {np.shares_memory, np.may_share_memory, np.result_type, np.can_cast}
_READING = (
    "__bool__ __complex__ __contains__ __copy__ __deepcopy__ __float__ __format__ __index__ __int__ "
    "__reduce__ __reduce_ex__ __repr__ __str__ argmax argmin argpartition argsort astype choose "
    "compress copy cumprod cumsum diagonal dot flatten item nonzero ptp repeat round searchsorted take "
    "tobytes tofile tolist trace"
).split()
_STORING = "byteswap fill partition put sort".split()


def _method(name):
    function = getattr(np.ndarray, name)

    def method(self, *args, **kwargs):
        reads, writes = _all_of(args), _all_of(kwargs.get("out"))
        (writes if name in _STORING else reads).append((self, ...))
        plain = {k: _plain(v) for k, v in kwargs.items()}
        return perform(lambda: function(_plain(self), *map(_plain, args), **plain), reads, writes)

    method.__name__ = name
    return method


for _name in _READING + _STORING:
    if hasattr(np.ndarray, _name):
        setattr(HostArray, _name, _method(_name))
