"""The rank, and where the peers' heaps are, in constant memory: no NVSHMEM call, no kernel argument.

Every module whose kernels need it has a table of its own:

  word 0        rank
  word 1        number of ranks
  word 8 + pe   the offset from an address in this rank's symmetric heap to the same one in rank pe's: 0 for
  this
                rank, UNREACHABLE if rank pe's heap is not mapped here (any use faults)

A second table has what kernels of a group need of the World:

  word t        NVSHMEM's team for the group's team number t (Teams.TEAM_WORLD, ...)
  word 8 + k    the World's rank of rank k

The host publishes the values once; tables of modules loaded before and after that are filled alike. A module
that is loaded once more for a group (`filled_with`) gets the group's. A kernel that runs before there is a
World sees rank 0 of 0.
"""

import contextlib
import struct
import threading
from typing import Any

from shmemkit.compiler.ptx import constant_words, gpu_function, types

MAX_RANKS = 1024
UNREACHABLE = 1 << 63

_NAME, _GROUP = "shmemkit_world", "shmemkit_group"
_HEADER = 8
TEAMS = 4  # numbers of teams that kernels of a group may use: Teams.TEAM_WORLD to TEAM_SAME_MYPE_NODE
NO_TEAM = -1


def publish(rank, n_ranks, offsets):
    """Publish the rank and the peers' heaps to all kernels of this process, loaded or not yet.

    rank, n_ranks   of this process
    offsets         n_ranks integers: bytes from this rank's heap to rank pe's as mapped here; UNREACHABLE
                    where it is not
    Call it with the device current; no kernel that reads the table may be running. Later calls replace the
    values.
    """
    _tables.publish(packed(rank, n_ranks, offsets))
    _group_tables.publish(packed_group(range(TEAMS), range(n_ranks)))


def packed_group(teams, ranks):
    """The words of the second table as bytes: NVSHMEM's `teams`, and the World's rank of each rank."""
    words = [*teams] + [NO_TEAM] * (_HEADER - len(teams)) + [*ranks]
    return struct.pack(f"<{len(words)}q", *words)


@contextlib.contextmanager
def filled_with(values, of_group):
    """Modules that this thread loads meanwhile get these tables, as `packed` and `packed_group` return
    them."""
    with _tables.lock, _group_tables.lock:
        _tables.instead, _group_tables.instead = values, of_group
        try:
            yield
        finally:
            _tables.instead = _group_tables.instead = None


def packed(rank, n_ranks, offsets):
    """The words of the table as bytes; arguments and errors as in `publish`."""
    if len(offsets) != n_ranks or not 0 <= rank < n_ranks <= MAX_RANKS:
        raise ValueError(
            f"publish(): rank is {rank}, n_ranks {n_ranks}, and there are {len(offsets)} offsets; there must "
            f"be one offset for each rank, and 0 <= rank < n_ranks <= {MAX_RANKS}"
        )
    words = [rank, n_ranks] + [0] * (_HEADER - 2) + [offset % (1 << 64) for offset in offsets]
    return struct.pack(f"<{len(words)}Q", *words)


class Tables:
    """The published values, and the modules that hold a copy of them.

    fill   fill(library, values): writes the bytes to the table of a module, a CUlibrary's address
    """

    def __init__(self, fill):
        self.fill = fill
        self.lock = threading.RLock()  # the garbage collector may unload a module in the middle of a fill
        self.values: Any = None
        self.instead: Any = None  # of `values`, for what is loaded now
        self.libraries = set()  # CUlibrary handles of the loaded modules

    def publish(self, values):
        with self.lock:
            self.values = values
            for library in self.libraries.copy():
                if library in self.libraries:
                    self.fill(library, self.values)

    def loaded(self, module):
        library = int(module.handle)
        with self.lock:
            if self.instead is not None:
                self.fill(library, self.instead)
                return
            if library not in self.libraries and self.values is not None:
                self.fill(library, self.values)
            self.libraries.add(library)

    def unloaded(self, module):
        with self.lock:
            self.libraries.discard(int(module.handle))


class _Writer:
    """Writes to the GPU that is current at its first call."""

    stream: Any = None

    def __init__(self, name):
        self.name = name.encode()

    def __call__(self, library, values):
        from cuda.bindings import driver

        address, _ = _checked(driver.cuLibraryGetGlobal(driver.CUlibrary(library), self.name))
        if self.stream is None:
            # Non-blocking, so that the copy waits for no kernel: one that spins may be waiting for this very
            # rank.
            (self.stream,) = _checked(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
        _checked(driver.cuMemcpyHtoDAsync(address, values, len(values), self.stream))
        _checked(driver.cuStreamSynchronize(self.stream))


def _checked(result):
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"the table of peers could not be written to the GPU: {error!r}")
    return values


_tables, _group_tables = Tables(_Writer(_NAME)), Tables(_Writer(_GROUP))
_word = constant_words(_NAME, _HEADER + MAX_RANKS, _tables.loaded, _tables.unloaded)
_group_word = constant_words(_GROUP, _HEADER + MAX_RANKS, _group_tables.loaded, _group_tables.unloaded)


@gpu_function
def my_rank():
    return types.int32(_word(0))


@gpu_function
def n_ranks():
    return types.int32(_word(1))


@gpu_function
def offset_of(rank):
    """Bytes from this rank's heap to `rank`'s, modulo 2**64."""
    return _word(_HEADER + rank)


@gpu_function
def rank_in_world(rank):
    """The World's rank of `rank`."""
    return types.int32(_group_word(_HEADER + rank))


@gpu_function
def team_of(team):
    """NVSHMEM's team for the number of one."""
    return types.int32(_group_word(team))
