"""Operations of ``nvshmem.core`` on a stream: put, get, signals, barriers, collectives. They are kernels of
one thread, so that races and delivery see them."""

import sys

import numpy as np

from shmemkit import device
from shmemkit.device.enums import comparison_name
from shmemkit.emu import report
from shmemkit.emu.device_arrays import address
from shmemkit.emu.grid import Launch
from shmemkit.emu.stand_in_modules import named
from shmemkit.support.settings import listed, shown

from .current_process import current
from .nvshmem_memory import Buffer, NvshmemInvalid, tracked, world
from .streams import find

_OPS = ("sum", "max", "min")


def on_stream(name, stream, primitive, **arguments):
    """Enqueue ``primitive(*arguments)``, a function of ``shmemkit.device``, on the emulated `stream`. Reports
    show it as kernel `name`, at the line of the script that calls."""
    function = _called_from(sys._getframe(1), name, primitive)
    stream.enqueue(Launch(stream, name, function, list(arguments), list(arguments.values())))


def _called_from(frame, name, primitive):
    """`primitive`, called from the innermost line of the script at or above `frame`."""
    frame = report.kernel_frame(frame)

    def call(*arguments):
        primitive(*arguments)

    if frame is not None:
        first = frame.f_lineno - 1  # what `call` does is one line below its head
        call.__code__ = call.__code__.replace(
            co_filename=frame.f_code.co_filename, co_firstlineno=first, co_name=name
        )
    return call


def _stream(call, stream):
    world(call)
    if stream is None:
        raise NotImplementedError(
            f"nvshmem.core.{call}: stream is None; it must be a stream, as with nvshmem4py"
        )
    return find(stream)


def _transfer(name, dst, src, pe, stream, signal=None):
    """`name`: the primitive. What moves is the whole of the smaller allocation, as with nvshmem4py."""
    stream = _stream(name, stream)
    dst, src = tracked(dst, name), tracked(src, name)
    if dst.dtype != src.dtype:
        n = min(dst.nbytes, src.nbytes)
        dst, src = (a.reshape(-1).view(np.uint8)[:n] for a in (dst, src))
    arguments = {"dst": dst, "src": src}
    if signal is not None:
        variable, value, operation = signal
        arguments |= {"signal_var": _signal(name, variable), "signal_val": value, "signal_op": int(operation)}
    on_stream(name, stream, getattr(device, name), **arguments, pe=pe)


def _signal(call, variable):
    if not isinstance(variable, Buffer) or variable.size < 8:
        raise NvshmemInvalid(
            f"nvshmem.core.{call}: the signal is {shown(variable)}; it must be a Buffer of 8 bytes or more, "
            "which buffer() or array_get_buffer() returned"
        )
    return variable.array.reshape(-1).view(np.uint8)[:8].view(np.uint64)


def put(dst, src, remote_pe=-1, stream=None):
    _transfer("put", dst, src, remote_pe, stream)


def put_nbi(dst, src, remote_pe=-1, stream=None):
    _transfer("put_nbi", dst, src, remote_pe, stream)


def get(dst, src, remote_pe=-1, stream=None):
    _transfer("get", dst, src, remote_pe, stream)


def get_nbi(dst, src, remote_pe=-1, stream=None):
    _transfer("get_nbi", dst, src, remote_pe, stream)


def put_signal(dst, src, signal_var, signal_val, signal_op, remote_pe=-1, stream=None):
    _transfer("put_signal", dst, src, remote_pe, stream, (signal_var, signal_val, signal_op))


def put_signal_nbi(dst, src, signal_var, signal_val, signal_op, remote_pe=-1, stream=None):
    _transfer("put_signal_nbi", dst, src, remote_pe, stream, (signal_var, signal_val, signal_op))


def signal_op(signal_var, signal_val, signal_op, remote_pe=-1, stream=None):
    stream, signal = _stream("signal_op", stream), _signal("signal_op", signal_var)
    arguments = {"signal_var": signal, "signal_val": signal_val, "signal_op": int(signal_op), "pe": remote_pe}
    on_stream("signal_op", stream, device.signal_op, **arguments)


def signal_wait(signal_var, signal_val, signal_op, stream=None):
    """`signal_op`: a ComparisonType."""
    stream, signal = _stream("signal_wait", stream), _signal("signal_wait", signal_var)
    comparison_name(signal_op)  # a known one
    arguments = {"signal_var": signal, "signal_op": int(signal_op), "signal_val": signal_val}
    on_stream("signal_wait", stream, device.signal_wait, **arguments)


def signal_fetch(signal_var):
    world("signal_fetch")
    current("signal_fetch").null.synchronize()
    return int(_signal("signal_fetch", signal_var)[0])


def quiet(stream=None):
    on_stream("quiet", _stream("quiet", stream), device.quiet)


def _barrier(name, team, stream):
    if stream is None:
        world(name)
        raise NvshmemInvalid(f"nvshmem.core.{name}: stream is None; it must be a stream")
    arguments = {} if team is None else {"team": int(team)}
    on_stream(name, _stream(name, stream), getattr(device, name), **arguments)


def barrier(team, stream=None):
    _barrier("barrier", team, stream)


def sync(team, stream=None):
    _barrier("sync", team, stream)


def barrier_all(stream=None):
    _barrier("barrier_all", None, stream)


def sync_all(stream=None):
    _barrier("sync_all", None, stream)


def _collective(name, team, dst, src, stream, **options):
    stream = _stream(name, stream)
    dst, src = _collective_array(name, dst), _collective_array(name, src)
    if "op" in options and options["op"] not in _OPS:
        raise NvshmemInvalid(f"nvshmem.core.{name}: op is {options['op']!r}; it must be {listed(_OPS)}")
    arguments = {"team": int(team), "dst": dst, "src": src}
    primitive = getattr(device, name)
    on_stream(name, stream, lambda *a: primitive(*a, **options), **arguments)


def _collective_array(name, array):
    if isinstance(array, Buffer):
        raise NvshmemInvalid(f"nvshmem.core.{name}: an argument is a Buffer; it must be an array")
    base = tracked(array, name)
    return base if address(base) == address(array) and base.dtype == array.dtype else array


def reduce(team, dst_array, src_array, op, stream=None):
    _collective("reduce", team, dst_array, src_array, stream, op=op)


def reducescatter(team, dst_array, src_array, op, stream=None):
    _collective("reducescatter", team, dst_array, src_array, stream, op=op)


def alltoall(team, dst_array, src_array, stream=None):
    _collective("alltoall", team, dst_array, src_array, stream)


def fcollect(team, dst_array, src_array, stream=None):
    _collective("fcollect", team, dst_array, src_array, stream)


def broadcast(team, dst_array, src_array, root=0, stream=None):
    _collective("broadcast", team, dst_array, src_array, stream, root=root)


MEMBERS = (
    named(put, put_nbi, get, get_nbi, put_signal, put_signal_nbi, signal_op, signal_wait, signal_fetch)
    | named(barrier, barrier_all, quiet, sync, sync_all)
    | named(alltoall, broadcast, fcollect, reduce, reducescatter)
)
