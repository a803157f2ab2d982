"""Multicast memory (NVLink SHARP): one array that stands for the same offset in the heap of every PE of a
node.

On a GPU it is an address of its own, which only the multimem instructions may use. Here it is an object
without elements: whatever else touches it fails, and says so. What the instructions do is done to each PE's
array, one after another, with races looked for as for any access to a peer's memory.
"""

import operator

import numpy as np
from numba.cuda import types

from shmemkit.compiler.numba_internals import from_dtype

from . import multicast_aliases
from .device_arrays import device_view
from .multicast_aliases import SameAddress, aliased
from .shadow_arrays import Tracked, kernel_site, untracked

_TEAM_NODE = 2


class Multicast:
    """The symmetric array `local` on all PEs of its node: what a host program passes to a kernel, and what
    the kernel sees. Slices, rows, `reshape` and `view` are the same parts of all of them."""

    __slots__ = ("local",)

    def __init__(self, local):
        self.local = device_view(local)

    @property
    def _numba_type_(self):
        layout = "C" if self.local.flags.c_contiguous else "A"
        return types.Array(from_dtype(self.dtype), self.ndim, layout)

    def __len__(self):
        return len(self.local)

    def __getitem__(self, index):
        part = self.local[index]
        if not isinstance(part, np.ndarray):
            raise TypeError(f"element {index} is read from {_REFUSED}")
        return Multicast(part)

    def __setitem__(self, index, value):
        raise TypeError(f"element {index} is written to {_REFUSED}")

    def __array__(self, *_, **__):
        raise TypeError(f"the elements are read from {_REFUSED}")

    def __getattr__(self, name):
        raise AttributeError(f"{name!r} is asked of {_REFUSED}")

    def reshape(self, *shape):
        return Multicast(self.local.reshape(*shape))

    def view(self, dtype):
        return Multicast(self.local.view(dtype))

    def __repr__(self):
        return f"<multicast {self.dtype} {self.shape}>"


for _name in "dtype shape strides ndim size itemsize nbytes".split():
    setattr(Multicast, _name, property(operator.attrgetter(f"local.{_name}")))

_REFUSED = (
    "a multicast view: it is for the multimem_ functions of kernels only; for ordinary accesses use the "
    "array itself, or symm_at"
)


def view(thread, team, array):
    """The multicast view of a symmetric array for `team`, whose PEs must be those of the node."""
    pes, node = thread.team(team), thread.team(_TEAM_NODE)
    if pes != node:
        raise ValueError(
            f"get_multicast_array(): team {team} has ranks {pes}; it must have those of a node, {node}"
        )
    thread.peer(array, thread.rank)  # it is symmetric
    return Multicast(untracked(array))


def replicas(thread, array, name):
    """`array`, a Multicast, as `thread` accesses it on each PE of its node."""
    if not isinstance(array, Multicast):
        raise TypeError(
            f"{name}(): the array is of type {type(array).__name__}; it must be a multicast view, as "
            "World.multicast_view returns"
        )
    peer, block = thread.block.machine.peer, thread.block
    return [peer(block, array.local, pe) for pe in thread.team(_TEAM_NODE)]


def store(thread, arrays, index, values, semantic):
    """Store `values`, neighbouring elements, to each of `arrays`, from `index` on."""
    if semantic == "weak":
        write(thread, arrays, values.itemsize * index, values.view(np.uint8))
        return
    for i, value in enumerate(values.tolist(), index):
        for array in arrays:
            thread.store(array, i, value, "sys", semantic)


def write(thread, arrays, first, data):
    """Store bytes `data` to each of `arrays`, from byte `first` on, by ordinary stores."""
    thread.block.effects += 1
    checked = [array for array in arrays if isinstance(array, Tracked)]
    if checked:
        now, site, clock = thread.moment or thread.now(), kernel_site(), SameAddress(thread)
        later = aliased(thread, now, thread.team(_TEAM_NODE))
        for array in checked:
            region, offset = array.region, array.first + first
            region.write(offset, data.size, clock, (now, *site))
            lo, hi = region.cells(offset, data.size)
            region.writes[lo:hi] = [(later, *site)] * (hi - lo)
    for array in arrays:
        _bytes(array)[first : first + data.size] = data


def load(thread, arrays, index, count):
    """-> `count` elements of each of `arrays`, from `index` on: an array with a row for each"""
    dtype, size = arrays[0].dtype, arrays[0].itemsize * count
    first = arrays[0].itemsize * index
    checked = [array for array in arrays if isinstance(array, Tracked)]
    if checked:
        access, clock = (thread.moment or thread.now(), *kernel_site()), SameAddress(thread)
        for array in checked:
            array.region.read(array.first + first, size, clock, access)
    return np.stack([_bytes(array)[first : first + size] for array in arrays]).view(dtype)


def fence(thread):
    """Accesses through multicast views and ordinary ones are ordered."""
    if thread.block.machine.races is not None:
        multicast_aliases.fence(thread)


def _bytes(array):
    return np.asarray(array).reshape(-1).view(np.uint8)
