"""Arrays as users give them: CuPy's (on the emulator NumPy's), PyTorch's tensors, and others that share their
memory by ``__cuda_array_interface__`` or DLPack (on the emulator DLPack or ``__array_interface__``).

In what follows `module` is CuPy, or NumPy on the emulator, and `who` what errors begin with, as "AllGather".
"""

import functools
import sys
from types import SimpleNamespace
from typing import Any, TypeGuard, TypeVar

import numpy as np

from .settings import array_text, shown

# Tensors without memory of their own -> those that they stand for
HOLLOW = {"DTensor": "to_local()", "AsyncCollectiveTensor": "wait()", "FakeTensor": None}
T = TypeVar("T")
HOST, GPU = (1, 3), (2, 13)  # DLPack's types of devices: of the host, also pinned; CUDA's, also managed


def keyed(who, arrays, module, optional=()) -> tuple[tuple, dict[str, Any]]:
    """Return (key, arrays) of `arrays`, {name: array}. The key holds what a bound launch depends on: address,
    shape, strides, dtype. The arrays are converted, unless each says that itself. Tensors on a GPU do: they
    stay tensors, which takes less time.

    optional  names of arrays that may be None begin with one of these
    """
    ndarray = module.ndarray
    key = tuple([_key_of(x, ndarray) for x in arrays.values()])  # a list is quicker than a generator
    if None in key:
        arrays = converted(who, arrays, module, optional)
        key = tuple([_key_of(x, ndarray) for x in arrays.values()])
    return key, arrays


def _key_of(x, ndarray):
    if isinstance(x, ndarray):
        return address_of(x), x.shape, x.strides, x.dtype
    if ndarray is not np.ndarray and _is_dense(x) and x.is_cuda:
        return x.data_ptr(), x.shape, x.stride(), x.dtype, x.is_conj(), x.is_neg()
    return () if x is None else None


def converted(who, arrays, module, optional=()) -> dict[str, Any]:
    """-> `arrays`, {name: array}, each ``as_array``."""
    return {
        name: None if x is None and name.startswith(optional) else as_array(who, name, x, module)
        for name, x in arrays.items()
    }


def with_shape(who, name, x, module) -> Any:
    """`x`, converted if it does not say its dtype and its dimensions itself, as no other DLPack need."""
    return x if isinstance(x, module.ndarray) or _is_dense(x) else as_array(who, name, x, module)


def as_array(who, name, x, module) -> Any:
    """`x` as an array of `module`, of the same memory. TypeError for what has none where it is needed."""
    if isinstance(x, module.ndarray):
        if isinstance(x, (np.matrix, np.ma.MaskedArray)):  # their elements are not those of an array
            raise TypeError(
                f"{who}: {name} is {shown(x)}; it must be another array. Give numpy.array({name})"
            )
        return x
    on_host = module.ndarray is np.ndarray
    try:
        if is_tensor(x):
            return _of_tensor(who, name, x, module)
        if not on_host and hasattr(x, "__cuda_array_interface__"):
            return module.asarray(x)
        if hasattr(x, "__dlpack__") and x.__dlpack_device__()[0] in (HOST if on_host else GPU):
            return (np if on_host else module).from_dlpack(x)
        if on_host and hasattr(x, "__array_interface__") and not isinstance(x, np.generic):
            return np.asarray(x)
    except (BufferError, RuntimeError) as error:
        raise TypeError(f"{who}: {name} is {_described(x)}, which cannot be used: {error}") from None
    raise TypeError(f"{who}: {name} is {_described(x)}; {_needed(name, x, on_host)}")


def _needed(name, x, on_host):
    if is_tensor(x) and x.device.type == "meta":
        return f"it has no data; it must be on the {'CPU' if on_host else 'GPU'}"
    if on_host:
        if is_tensor(x):
            return f"on the emulator it must be in host memory: {name}.cpu()"
        return (
            "it must be a NumPy array, a PyTorch CPU tensor, or another array in host memory with DLPack or "
            "__array_interface__"
        )
    if is_tensor(x):
        return f"it must be on the GPU: {name}.cuda()"
    if isinstance(x, np.ndarray):
        return f"it must be on the GPU: cupy.asarray({name})"
    return (
        "it must be a CuPy array, a PyTorch CUDA tensor, or another array with __cuda_array_interface__ or "
        "DLPack"
    )


def _described(x):
    return f"a {x.device.type.upper()} torch.Tensor" if is_tensor(x) else shown(x)


# ---- PyTorch


def is_tensor(x) -> TypeGuard[Any]:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(x, torch.Tensor)


def _is_dense(x):
    return is_tensor(x) and x.layout is sys.modules["torch"].strided and not _is_hollow(x)


def _is_hollow(x):
    """Whether a tensor has elements without memory of its own, as those that wrap others."""
    return type(x).__name__ in HOLLOW or (x.data_ptr() == 0 and x.numel() > 0)


@functools.cache
def _dtype_of(dtype):
    """-> (PyTorch's `dtype` as NumPy's or ml_dtypes', whether it is NumPy's own), or (None, False)"""
    import ml_dtypes

    name = str(dtype).removeprefix("torch.")
    found = getattr(ml_dtypes, name, None)
    if found is not None:
        return np.dtype(found), False
    try:
        return np.dtype(name), True
    except TypeError:
        return None, False


def _of_tensor(who, name, x, module):
    """Without its gradient, and without a wait of any stream."""
    torch, on_host = sys.modules["torch"], module.ndarray is np.ndarray
    dtype, known = _dtype_of(x.dtype)
    if x.device.type != ("cpu" if on_host else "cuda"):
        raise TypeError(f"{who}: {name} is {_described(x)}; {_needed(name, x, on_host)}")
    if x.layout is not torch.strided:
        raise TypeError(
            f"{who}: {name} is a tensor of {x.layout} and {x.dtype}; it must be dense (torch.strided): give "
            f"{name}.to_dense()"
        )
    if _is_hollow(x):
        of = HOLLOW.get(type(x).__name__)
        instead = f"give {name}.{of}" if of else "it must be a torch.Tensor with data"
        raise TypeError(f"{who}: {name} is {shown(x)}, which has no memory of its own; {instead}")
    if dtype is None:
        raise TypeError(f"{who}: {name} has {x.dtype}; it must be a dtype that NumPy or ml_dtypes has")
    if x.is_conj() or x.is_neg():
        raise ValueError(
            f"{who}: {name} is conjugated or negated, which PyTorch has not computed yet; give "
            f"{name}.resolve_conj().resolve_neg()"
        )
    if not on_host and x.device.index != (here := module.cuda.Device().id):
        raise ValueError(
            f"{who}: {name} is on {x.device}, and this rank's GPU is cuda:{here}; give {name}.cuda({here})"
        )
    x = x.detach()
    if not on_host:
        memory = module.cuda.UnownedMemory(x.data_ptr(), x.untyped_storage().nbytes(), x, here)
        strides = tuple(dtype.itemsize * step for step in x.stride())
        return module.ndarray(tuple(x.shape), dtype, module.cuda.MemoryPointer(memory, 0), strides)
    if known:
        return x.numpy()
    return x.view(torch.int16 if dtype.itemsize == 2 else torch.uint8).numpy().view(dtype)


def tensor_of(array, device):
    """A CuPy or NumPy array as a PyTorch tensor of the same memory, without a wait of any stream."""
    torch, known = sys.modules["torch"], array.dtype.type.__module__ == "numpy"
    tensor = torch.as_tensor(array if known else array.view(f"int{8 * array.itemsize}"), device=device)
    return tensor if known else tensor.view(getattr(torch, array.dtype.name))


def stream_of(stream, *arrays):
    """The stream of a call with `arrays` that names `stream`: where that is None and one of them is a tensor
    on a GPU, PyTorch's current one there (its address)."""
    if stream is None and "torch" in sys.modules:
        for x in arrays:
            if is_tensor(x) and x.is_cuda:
                return sys.modules["torch"].cuda.current_stream(x.device).cuda_stream
    return stream


def call_on(world, stream, *arrays):
    """-> (stream, waits), of a call with `arrays`, or None for some, that names `stream`. The stream is None
    for the World's. If it waits, the call ends with ``world.stream.synchronize()``: on the emulator, for
    arrays other than NumPy's, unless the call names a stream or is captured. Their results are there when the
    call returns, as those of PyTorch's own functions of CPU tensors: ``x.item()`` waits for no stream."""
    stream = stream_of(stream, *arrays)
    if stream is not None:
        return (None if stream is world.stream else stream), False
    emulated = world.xp.ndarray is np.ndarray and world.backend.capture_of(None) is None
    return None, emulated and not all(x is None or isinstance(x, np.ndarray) for x in arrays)


# ---- new ones, and where they lie


def new_array(module, shape, dtype) -> Any:
    """-> a new array of `module`. CuPy allocates no float8, but has arrays of it: views of bytes."""
    dtype = np.dtype(dtype)
    if dtype.type.__module__ == "numpy":
        return module.empty(shape, dtype)
    return module.empty(shape, f"uint{8 * dtype.itemsize}").view(dtype)


def new_output(like: T, shape, dtype, module, stream, follow) -> T:
    """-> a new array of `dtype`, PyTorch's if `like` is, else of `module`. What is enqueued on
    `stream` (None: the World's, or CuPy's current one) from now on runs after what may have used its memory
    before: that is on the stream that such arrays are made on.

    follow  (later stream, earlier stream): orders them
    """
    if is_tensor(like):
        name = str(dtype).removeprefix("torch.")
        out, made_on = like.new_empty(shape, dtype=getattr(sys.modules["torch"], name)), stream_of(None, like)
    else:
        out, made_on = new_array(module, shape, dtype), None
    made_there = stream is None if made_on is None else stream == made_on
    if not made_there:
        follow(stream, made_on)
    return out


def unowned(array):
    """A CuPy array as one that does not keep its memory alive: so its owner may give that back, and get it
    again. NumPy's as it is."""
    if isinstance(array, np.ndarray):
        return array
    import cupy

    memory = cupy.cuda.UnownedMemory(array.data.ptr, array.nbytes, None, array.data.device_id)
    return cupy.ndarray(array.shape, array.dtype, cupy.cuda.MemoryPointer(memory, 0), array.strides)


def unlocked(array):
    """`array`; of a read-only NumPy array, a view that can be written. Kernels know arrays by their types,
    and those of read-only arrays are others."""
    if getattr(array.flags, "writeable", True):
        return array
    interface = dict(array.__array_interface__)
    interface["data"] = interface["data"][0], False
    return np.asarray(SimpleNamespace(__array_interface__=interface, owner=array)).view(array.dtype)


def check_contiguous(who, name, array):
    """ValueError unless `array` is C-contiguous."""
    if not array.flags.c_contiguous:
        instead = "a C-contiguous `out`" if name.startswith("out") else "a copy"
        if name in ("x", "y") and "torch" in sys.modules:
            instead += f": of a tensor, {name}.contiguous()"
        raise ValueError(f"{who}: {name} is {array_text(array)}; it must be C-contiguous. Give {instead}")


def check_writable(who, name, array):
    """ValueError if `array` is a read-only one of NumPy."""
    if not getattr(array.flags, "writeable", True):
        raise ValueError(f"{who}: {name} is a read-only array; give one that can be written")


def address_of(array):
    """Of the first element of a CuPy or NumPy array."""
    return array.__array_interface__["data"][0] if isinstance(array, np.ndarray) else array.data.ptr


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
