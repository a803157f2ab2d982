"""The arrays of products: CuPy's, PyTorch's and others', as they are given; new ones; and where they lie."""

import sys

import numpy as np

from shmemkit.launch import address_of_stream
from shmemkit.memory import as_dtype

from .problem import address_of


def keyed(arrays, module):
    """-> (key, arrays): what tells `arrays`, {name: array or None}, apart as far as a bound launch is
    concerned; and they, which have been converted if they do not say it themselves.

    module  CuPy or NumPy
    """
    key = tuple(map(_key, arrays.values()))
    if None in key:
        arrays = converted(arrays, module)
        key = tuple(map(_key, arrays.values()))
    return key, arrays


def _key(array):
    if array is None:
        return ()
    if hasattr(array, "data_ptr"):  # PyTorch
        return array.data_ptr(), array.shape, array.stride(), array.dtype
    if isinstance(array, np.ndarray) or hasattr(getattr(array, "data", None), "ptr"):  # NumPy, CuPy
        return address_of(array), array.shape, array.strides, array.dtype
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        return None
    return interface["data"][0], interface["shape"], interface.get("strides"), interface["typestr"]


def converted(arrays, module):
    """-> `arrays`, {name: array or None}, as those of CuPy or NumPy; the same memory. TypeError for what has
    none there."""
    return {name: None if x is None else _converted(name, x, module) for name, x in arrays.items()}


def with_shape(name, x, module):
    """`x`, converted if it does not say its dtype and its dimensions itself, as no other DLPack need."""
    return x if x is None or (hasattr(x, "dtype") and hasattr(x, "shape")) else _converted(name, x, module)


def _converted(name, x, module):
    if isinstance(x, module.ndarray):
        return x
    on_host = module.ndarray is np.ndarray
    if not (hasattr(x, "__dlpack__") or hasattr(x, "__cuda_array_interface__")) or (
        not on_host and (isinstance(x, np.ndarray) or not getattr(x, "is_cuda", True))
    ):
        where = "NumPy arrays" if on_host else "CuPy arrays, or any with the CUDA Array Interface or DLPack,"
        raise TypeError(f"{name} is a {type(x).__module__}.{type(x).__qualname__}: {where} are allowed")
    x = x.detach() if hasattr(x, "detach") else x
    if str(getattr(x, "dtype", "")) == "torch.bfloat16":  # which not all know
        torch = sys.modules["torch"]
        return module.from_dlpack(x.view(torch.int16)).view(as_dtype("bfloat16"))
    if hasattr(x, "__cuda_array_interface__") and not on_host:
        return module.asarray(x)
    return module.from_dlpack(x)


def unowned(array):
    """A CuPy array as one that does not keep its memory alive: so its owner may give that back, and get it
    again. NumPy's as it is."""
    if isinstance(array, np.ndarray):
        return array
    import cupy

    memory = cupy.cuda.UnownedMemory(array.data.ptr, array.nbytes, None, array.data.device_id)
    return cupy.ndarray(array.shape, array.dtype, cupy.cuda.MemoryPointer(memory, 0), array.strides)


def new_output(like, shape, dtype, module, world, stream):
    """-> a new array, PyTorch's (and of its dtype) if `like` is, else of `module`. What is enqueued on
    `stream` (None: the World's, or CuPy's current one) from now on runs after what may have used its memory
    before: that is on the stream that such arrays are made on."""
    if hasattr(like, "new_empty"):
        out, before = like.new_empty(shape), None
        if getattr(like, "is_cuda", False):
            before = sys.modules["torch"].cuda.current_stream(like.device)
    else:
        out, before = module.empty(shape, dtype), None
    if stream is not None or before is not None:
        if world is not None:
            world.backend.follow(stream, before)
        else:
            _follow(module, stream, before)
    return out


def _follow(cupy, later, earlier):
    """As a World's ``follow``; a stream of None is CuPy's current one."""
    current = cupy.cuda.get_current_stream()
    later, earlier = (address_of_stream(current if stream is None else stream) for stream in (later, earlier))
    captures = cupy.cuda.runtime.streamIsCapturing
    if later != earlier and not captures(later) and not captures(earlier):
        event = cupy.cuda.Event(disable_timing=True)
        cupy.cuda.runtime.eventRecord(event.ptr, earlier)
        cupy.cuda.runtime.streamWaitEvent(later, event.ptr)


def overlap(x, y):
    """Whether there are bytes between the first and the last ones of both arrays."""
    if not (x.size and y.size):
        return False
    (first, last), (begin, end) = _extent(x), _extent(y)
    return first < end and begin < last


def _extent(array):
    """-> addresses of an array's first byte, and of the one after its last"""
    steps = [stride * (size - 1) for stride, size in zip(array.strides, array.shape, strict=True)]
    first = address_of(array) + sum(step for step in steps if step < 0)
    return first, first + sum(map(abs, steps)) + array.dtype.itemsize
