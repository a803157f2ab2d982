"""Symmetric memory of ``nvshmem.core``: arrays and buffers."""

import math

import numpy as np

from shmemkit.emu.device_arrays import address
from shmemkit.emu.run import current_host
from shmemkit.emu.stand_in_modules import Served, named
from shmemkit.support.settings import shown

from .cupy import ndarray
from .current_process import current


class NvshmemError(Exception):
    """As nvshmem4py's."""

    __module__ = "nvshmem.core"


class NvshmemInvalid(Exception):
    """As nvshmem4py's."""

    __module__ = "nvshmem.core"


def world(call):
    """The World of the PE that calls; NvshmemInvalid before init()."""
    host = current_host()
    found = None if host is None else host.world
    if found is None:
        raise NvshmemInvalid(
            f"nvshmem.core.{call}: NVSHMEM is not initialized. Call nvshmem.core.init() first"
        )
    return found


class Buffer(Served):
    """Bytes of symmetric memory; `array` has them."""

    def __init__(self, array):
        self.array = array

    handle = property(lambda self: address(self.array))
    size = property(lambda self: self.array.nbytes)
    is_device_accessible, is_host_accessible, device_id = True, False, 0

    def __dlpack__(self, **options):
        return self.array.view(np.ndarray).__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.view(np.ndarray).__dlpack_device__()

    def __repr__(self):
        return f"<Buffer of {self.size} bytes at {self.handle:#x}>"


def array(shape, dtype="float32", release=False, morder="C", except_on_del=True):
    """A symmetric array of undefined content, as a CuPy array. Collective."""
    if morder != "C":
        raise NotImplementedError(f"nvshmem.core.array: morder is {morder!r}; on the emulator it must be 'C'")
    result = world("array").empty(shape, dtype).view(ndarray)
    current("array").allocations[address(result)] = [result, 1]
    return result


def bytearray(shape, dtype="float32", release=False, device_id=None, morder="C", except_on_del=True):
    """As many bytes as an array of `shape` and `dtype` has."""
    shape = shape if isinstance(shape, (tuple, list)) else (shape,)
    return array((math.prod(shape) * np.dtype(dtype).itemsize,), "uint8", morder=morder)


def buffer(size, release=False, except_on_del=True):
    """`size` bytes of symmetric memory. Collective."""
    world("buffer")
    return Buffer(array((size,), "uint8"))


def get_peer_array(array, peer_pe=None):
    """The array on another PE of this node, for loads and stores."""
    mine = world("get_peer_array")
    base = tracked(array, "get_peer_array")
    if peer_pe == mine.rank:
        current("get_peer_array").allocations[address(base)][1] += 1
        return array
    local_size = mine.backend.machine.local_size
    if 0 <= peer_pe < mine.n_ranks and peer_pe // local_size != mine.rank // local_size:
        raise NvshmemError(
            f"nvshmem.core.get_peer_array: PE {peer_pe} is on another node than PE {mine.rank}. Loads and "
            "stores do not reach it; use put and get"
        )
    return mine.peer_view(array, peer_pe).view(ndarray)


def get_peer_buffer(buffer, pe):
    return Buffer(get_peer_array(buffer.array, pe))


def free_array(array):
    """Collective, unless it is what ``get_peer_array`` returned."""
    mine = world("free_array")
    allocations = current("free_array").allocations
    entry = allocations.get(address(array))
    if entry is None:
        if mine.backend.machine.located(address(array))[0] not in (None, mine.backend.pe):
            return
        raise NvshmemInvalid(
            "nvshmem.core.free_array: the array is not one of nvshmem.core.array(), or was freed before"
        )
    entry[1] -= 1
    if entry[1] == 0:
        del allocations[address(array)]
        mine.free(entry[0])


def free(buffer):
    free_array(buffer.array)


def array_get_buffer(array):
    """-> (buffer, bytes of `array`, name of its dtype)"""
    return Buffer(_bytes(tracked(array, "array_get_buffer"))), array.nbytes, str(array.dtype)


def _bytes(array):
    return array.reshape(-1).view(np.uint8)


def tracked(array, call):
    """The allocation that begins where `array` does: host operations are about all of it."""
    if isinstance(array, Buffer):
        array = array.array
    if not isinstance(array, np.ndarray):
        raise NvshmemInvalid(
            f"nvshmem.core.{call}: the array is {shown(array)}; it must be an array or a Buffer"
        )
    entry = current(call).allocations.get(address(array))
    if entry is None:
        raise NvshmemInvalid(
            f"nvshmem.core.{call}: the array is not symmetric, is a slice that does not begin where it "
            "does, or was freed. Pass what nvshmem.core.array() or buffer() returned"
        )
    return entry[0]


MEMBERS = named(NvshmemError, NvshmemInvalid, array, array_get_buffer, buffer, bytearray) | named(
    free, free_array, get_peer_array, get_peer_buffer
)
