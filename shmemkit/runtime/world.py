"""The World of a program: its ranks, their nodes, their stream and their barriers, on GPUs (NVSHMEM) or the
emulator; and groups of ranks, with ranks, symmetric memory and collectives of their own.

The memory of groups: ``split`` takes one part of the symmetric heap, a *slab*, on all ranks at once. From
then on a group allocates from it by itself, alike on its ranks. When all ranks have left the groups of a
split, the next collective allocation of what was split gives the slab back. The order of calls:
``stream_order.py``.
"""

from __future__ import annotations

import functools
import importlib.util
import io
import itertools
import math
import os
import pickle
import warnings
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TextIO, TypeVar, overload

import numpy as np

import shmemkit
from shmemkit.comm import choice
from shmemkit.support import notebook, settings, timeouts, tracebacks
from shmemkit.support.agreement import as_message, check_equal, counted, of_group, raise_on_all, ranks_text
from shmemkit.support.arrays import as_array, stream_of
from shmemkit.support.call_site import users_call
from shmemkit.support.command_line import say
from shmemkit.support.gpus import n_gpus
from shmemkit.support.host_program import current_world, host_program
from shmemkit.support.hosts import nics
from shmemkit.support.settings import integer, n_bytes, one_of, shown
from shmemkit.support.trace_file import save, timeline_file
from shmemkit.typing import AnyArray, AnyStream, Backend, Comm, Communicator

from . import forked
from .host_barrier import BoundedBarrier
from .program_end import ExitHandler
from .symmetric_memory import SymmetricMemory
from .timeline import Timeline

T = TypeVar("T")
WorldT = TypeVar("WorldT", bound="World")


@overload
def current(required: Literal[True]) -> World: ...
@overload
def current(required: bool = False) -> World | None: ...
def current(required: bool = False) -> World | None:
    """The World that is alive here, or None. With `required`, RuntimeError instead of None."""
    return current_world(required)


def init(
    backend: Backend = "auto",
    comm: Comm | None = None,
    local_size: int | None = None,
) -> World:
    """Initialize this rank and return its World. Collective.

    backend     "nvshmem" (GPUs), "emulator" (CPU) or "auto". "auto" takes SHMEMKIT_BACKEND if it is set, else
                NVSHMEM if there are a GPU and nvshmem4py, else the emulator
    comm        the communicator of the ranks: mpi4py's, ``sk.comm.from_env()``,
                ``sk.comm.from_torch(group)``, or an object of yours with the three methods of
                ``shmemkit.typing.Comm``. Default: the ranks that the launcher started
                (docs/launchers.md, how the ranks find each other)
    local_size  splits the ranks into logical nodes of this many consecutive ranks, so that multi-node kernels
                run on one host. It must divide the number of ranks. Default: SHMEMKIT_LOCAL_SIZE, else the
                number of ranks on this host

    The World's stream becomes CuPy's current stream. Use the World as a context manager, or call its
    finalize(); otherwise that happens at exit. If a failure on the emulator has ended the World of all ranks,
    init() makes a new one.

    RuntimeError if this rank has a World already, if the backend cannot be used, or if mpirun started several
    ranks and MPI knows of one; TypeError or ValueError for wrong arguments; errors as of ``from_env``.
    """
    notebook.hide_our_frames()
    tracebacks.hide_our_frames()
    host, world = host_program(), current()
    if world is not None and world.backend.over:
        world.abandon()
    elif world is not None:
        raise RuntimeError(
            "init(): this rank has a World already. Call finalize() on it, or use the one that "
            "shmemkit.current() returns"
        )
    if host.n_ranks is not None:
        asked, who = _asked_for(backend)
        if asked == "nvshmem":
            raise RuntimeError(
                f"init(): {who} asks for the backend 'nvshmem', but shmemkit.emu runs this program on the "
                "emulator. Start it with mpirun to use GPUs"
            )
        if comm is not None and choice.check("init()", comm) != host.n_ranks:
            raise ValueError(
                f"init(): comm has {counted(comm.Get_size(), 'rank')}; it must have all {host.n_ranks} that "
                "the emulator runs"
            )
        host.world = world = World("emulator", None, local_size)
        return world
    name, reason = choose_backend(backend)
    if comm is not None:
        choice.check("init()", comm)
    if reason and name == "emulator" and "nvshmem4py" in reason:
        warnings.warn(f"shmemkit runs on the CPU emulator: {reason}", stacklevel=2)
    given = choice.default() if comm is None else comm
    whole: Any = None if given is None else choice.whole(given)
    try:
        _check_backends(whole, name, reason)
        host.world = world = World(name, whole, local_size)
    except BaseException:
        if whole is not given:
            whole.Free()
        raise
    if whole is not given:
        world._connections = whole
    return world


def _check_backends(comm, name, reason):
    """RuntimeError, on all ranks of `comm`, unless they have chosen the same backend."""
    found = [] if comm is None or comm.Get_size() == 1 else comm.allgather((name, reason))
    if len({backend for backend, _ in found}) > 1:
        given = [f"the backend {backend!r} ({why})" for backend, why in found]
        rule = "init(): all ranks need the same backend. Set SHMEMKIT_BACKEND to it on all of them"
        check_equal(given, rule, "take", RuntimeError)


def _asked_for(requested):
    """-> (backend, who asks for it), by ``init(requested)`` and SHMEMKIT_BACKEND"""
    one_of("init()", "backend", requested, settings.BACKENDS)
    variable = settings.backend()
    if requested != "auto":
        return requested, "the program"
    return variable, "SHMEMKIT_BACKEND"


def choose_backend(requested="auto"):
    """-> (backend, reason): what ``init(requested)`` uses, and why. Nothing is initialized."""
    asked, who = _asked_for(requested)
    if asked != "auto":
        return asked, f"{who} asks for it"
    count = n_gpus()
    if count == 0:
        return "emulator", "no CUDA GPU was found"
    if importlib.util.find_spec("nvshmem") is None or importlib.util.find_spec("cupy") is None:
        return "emulator", (
            f"{counted(count, 'GPU')} found, but nvshmem4py and CuPy are not installed: "
            "pip install 'shmemkit[cu13]' (or cu12)"
        )
    return "nvshmem", f"{counted(count, 'GPU')} found"


def check_world(who, world, name="world"):
    """TypeError unless `world`, the argument `name`, is a World; RuntimeError if it is finalized."""
    if not isinstance(world, World):
        raise TypeError(
            f"{who}: {name} is {shown(world)}; it must be the World that shmemkit.init() returns, or a group "
            "that World.split() returns"
        )
    if world.finalized:
        raise RuntimeError(f"{who}: its {world._kind} is finalized; {world._again}")


def _heap_bytes(who, heap):
    """`heap` as bytes: an integer, or a text such as "64M"."""
    if isinstance(heap, str):
        if (size := n_bytes(heap)) < 1:
            raise ValueError(
                f"{who}: heap is {heap!r}; it must be a number of bytes, such as 1048576 or '64M'"
            )
        return size
    return integer(who, "heap", heap, 1)


class OutOfReach(ValueError):
    """Kernels cannot load from or store to the memory of some rank."""


class World(SymmetricMemory):
    """The ranks of this program and what they share: what ``sk.init()`` returns.

    rank, n_ranks      this rank and how many there are
    node, n_nodes      this rank's node and how many there are (logical nodes with `local_size`)
    local_rank         this rank within its node; consecutive ranks share a node
    local_size         ranks per node
    node_ranks         those of this node, a range
    xp                 the array module: cupy, or on the emulator NumPy, whose asarray copies host arrays,
                       too
    stream             a non-blocking stream that Numba, CuPy and cuda.core accept; CuPy's current stream
    comm               the mpi4py communicator, or one with its allgather, bcast, gather and barrier
                       (``shmemkit.typing.Communicator``)
    backend            `.name` is "nvshmem" or "emulator"

    *Collective* methods are called by all ranks, in the same order. If host programs wait in different ones,
    every rank raises RuntimeError. RuntimeError after ``finalize``. The stream orders what the host program
    does with arrays and kernels of this rank; between one rank's access and another rank's kernel, call
    ``barrier``. Use it as a context manager, which finalizes it.
    """

    comm: Communicator
    _connections: Any = None  # that ``init`` made for a communicator without
    _kind, _again = "World", "call shmemkit.init() again"

    def __init__(self, backend: str, comm: Communicator | None, local_size: int | None):
        limit = timeouts.default()  # a bad one is refused before anything is initialized
        self._timeline, self._timeline_file = None, timeline_file("SHMEMKIT_TIMELINE")
        self.finalized = False
        self.ends_with_main = False  # emu.run's function has returned: its variables are gone, and no leaks
        self.kept = {}  # objects that live as long as the World, by who keeps them
        self._host = host_program()
        self._exit_handler = ExitHandler(comm)
        if backend == "emulator":
            from shmemkit.backends.emulator import EmulatorBackend

            self.backend = EmulatorBackend(comm)
        else:
            from shmemkit.backends.nvshmem import NvshmemBackend

            self.backend = NvshmemBackend(comm)
        self.comm = self.backend.comm
        self.rank, self.n_ranks = self.comm.Get_rank(), self.comm.Get_size()
        try:
            size = self._local_size(local_size)
            self.backend.set_local_size(size)  # the emulator may refuse it
        except (TypeError, ValueError):
            self.backend.abandon()
            raise
        self._bounded_barrier = None
        if backend != "emulator":
            from .stream_barrier import bind_barrier

            self.backend.bind_bounded_barrier(bind_barrier)
            if self.n_ranks > 1:
                self._bounded_barrier = BoundedBarrier(self.comm, limit)
        self.xp, self.stream = self.backend.xp, self.backend.stream
        self._begin(size)
        if self._host.n_ranks is None:
            self._exit_handler.watch(self)
            if self._timeline_file is not None:  # emu.run records by itself
                self._timeline = Timeline(self).__enter__()

    def _begin(self, local_size):
        """What a World and a group have by their ranks, nodes and backend."""
        self.local_size = local_size
        self.node, self.local_rank = divmod(self.rank, local_size)
        self.n_nodes = self.n_ranks // local_size
        self.node_ranks = range(self.rank - self.local_rank, self.rank - self.local_rank + local_size)
        self.backend.set_local_size(local_size)
        self._init_memory()
        self._groups, self._splits = [], 0  # groups that this rank is in; splits so far
        forked.watch(self, self.world._exit_handler)

    def _local_size(self, requested):
        given, size = f"init(): local_size is {requested}", requested
        if requested is None:
            variable = os.environ.get("SHMEMKIT_LOCAL_SIZE", "").strip()
            if not variable:
                if self.rank == 0 and (text := self.backend.hosts.warning()) is not None:
                    say(f"shmemkit: {text}")
                return self.backend.default_local_size
            given = f"SHMEMKIT_LOCAL_SIZE is {variable!r}"
            size = int(variable) if variable.isdecimal() else 0
        size = integer("init()", "local_size", size)
        if size < 1 or self.n_ranks % size:
            raise ValueError(f"{given}; it must divide the number of ranks, {self.n_ranks}")
        return size

    def __repr__(self):
        return f"<World rank {self.rank} of {self.n_ranks}, {self.n_nodes} node(s), {self.backend.name}>"

    if not TYPE_CHECKING:  # with it, every attribute would be there

        def __getattr__(self, name):
            """Of an attribute that there is not: what to use."""
            instead = f"sk.{name}" if name in shmemkit.__all__ else shmemkit._AS_IN_MPI.get(name)
            if instead is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            raise AttributeError(f"a World has no {name!r}; use {instead}", name=name)

    # -- groups
    @property
    def world(self) -> World:
        """The World: itself, or that of a group."""
        return self

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks of the World, by rank: of a group, those that are in it."""
        return range(self.n_ranks)

    def world_rank(self, rank: int) -> int:
        """Return the rank of the World that is `rank` here, 0 to n_ranks - 1. Not collective."""
        return self.ranks[integer("world_rank()", "rank", rank, 0, self.n_ranks - 1)]

    def split(self, color: int | None, key: int = 0, heap: int | str = "64M") -> Group | None:
        """Return the Group of the ranks that give the same `color`, or None to a rank that gives None.
        Collective: all ranks of the World (or of the group that is split) call it.

        color  an integer of 0 or more, or None: in no group
        key    an integer: a group's ranks are numbered in the order of their keys, equal ones in the order of
               their ranks here
        heap   bytes of symmetric memory for each rank of each group, as an integer or as "64M"; the same on
               all ranks. Each rank gives them, also those in no group

        Everything that takes a World takes a Group. See ``help(Group)``.

        TypeError or ValueError, on all ranks, for wrong arguments; MemoryError, on all ranks, when the heap
        has no room; RuntimeError, on all ranks, when NVSHMEM has no more teams (NVSHMEM_MAX_TEAMS).
        """
        self._check_alive("split")

        def check():
            size = _heap_bytes("split()", heap)
            if color is not None:
                integer("split()", "color", color, 0)
            integer("split()", "key", key)
            return size, f"for groups with {size} bytes"

        return self._split("split", check, color, key)

    def group(self, ranks: Iterable[int], heap: int | str = "64M") -> Group | None:
        """Return the Group of these `ranks`, in this order, or None to all others. Collective: all ranks of
        the World (or of the group that has these ranks) call it with the same `ranks`. Otherwise as
        ``split``.
        """
        self._check_alive("group")
        place = None

        def check():
            nonlocal place
            size = _heap_bytes("group()", heap)
            if not hasattr(ranks, "__iter__") or isinstance(ranks, str):
                raise TypeError(f"group(): ranks is {shown(ranks)}; it must be a list of ranks")
            members = [integer("group()", "a rank", rank, 0, self.n_ranks - 1) for rank in ranks]
            if not members or len(set(members)) < len(members):
                needed = "it must have one rank or more, each once"
                raise ValueError(f"group(): ranks is {members}; {needed}")
            place = members.index(self.rank) if self.rank in members else None
            return size, f"for a group of {members} with {size} bytes"

        return self._split("group", check, lambda: None if place is None else 0, lambda: place or 0)

    def _split(self, call, check, color, key):
        """``check()`` -> (bytes of heap, what this rank asks for), or raises."""
        size = request = error = None
        try:
            size, request = check()
        except (TypeError, ValueError) as e:
            error = e
        self._agree(call, f"All ranks must ask for the same in {call}()", request, error)
        color, key = (value() if callable(value) else value for value in (color, key))
        asked = self._gather_all(call, (color, key))
        colors = sorted({c for c, _ in asked if c is not None})
        members = sorted((k, rank) for rank, (c, k) in enumerate(asked) if c == color)
        self._splits += 1
        number, slab = self._splits, self.backend.new_slab(size)
        self._slabs[number] = slab
        position = [rank for _, rank in members].index(self.rank)
        comm = self.comm.Split(len(colors) if color is None else colors.index(color), position)
        group = None
        if color is None:
            comm.Free()
        else:
            ranks = [rank for _, rank in members]
            try:
                group = Group(self, number, ranks, comm, slab, (number, colors.index(color)))
            except RuntimeError as e:
                error = e
        refusals = self._gather_all(call, as_message(error))  # every rank of the group is ready
        if group is None or any(refusals):
            self._unused.add(number)
        if group is not None and any(refusals):
            group.backend.end_group()
            group._forget()
        raise_on_all(error, refusals)
        if group is not None:
            self._groups.append(group)
        return group

    def group_of_node(self, heap: int | str = "64M") -> Group:
        """Return the Group of this rank's node. Collective; otherwise as ``split``."""
        group = self.split(self.node, 0, heap)
        assert group is not None
        return group

    def leaders(self, heap: int | str = "64M") -> Group | None:
        """Return the Group of the first ranks of all nodes, or None to all others. Collective; otherwise as
        ``split``."""
        return self.split(0 if self.local_rank == 0 else None, 0, heap)

    # -- synchronisation
    def barrier(self, *, stream: AnyStream | None = None) -> None:
        """Enqueue a barrier of all ranks on `stream` (default: the World's). Collective.

        Work that any rank enqueues after it sees all that every rank enqueued before it, puts included. On
        GPUs it returns at once, and can be captured in a graph. ``stream.synchronize()`` waits for it, and
        after SHMEMKIT_TIMEOUT raises SignalTimeout, which names the missing ranks.
        """
        self._check_alive("barrier")
        self.backend.barrier(stream)

    def host_barrier(self) -> None:
        """Wait until the host programs of all ranks are here. Does not wait for GPU work. Collective.

        After SHMEMKIT_TIMEOUT it raises RankTimeout, which names the missing ranks; without that setting, a
        line on standard error names them after a minute. All collective functions of the World do so.
        """
        self._check_alive("host_barrier")
        self._gather_all("host_barrier")

    def host_allgather(self, value: T) -> list[T]:
        """Return the list of all ranks' `value`, by rank. A value is a Python object that can be pickled,
        else all ranks raise TypeError. Does not wait for GPU work; errors as of ``host_barrier``.
        Collective.
        """
        self._check_alive("host_allgather")
        error = None
        try:
            pickle.dumps(value)
        except Exception as e:
            error = TypeError(
                f"host_allgather(): value is {shown(value)}, which cannot be pickled: {e}. Give numbers, "
                "strings, arrays, or lists and dicts of them"
            )
        answers = self._gather_all("host_allgather", (as_message(error), value if error is None else None))
        errors, values = zip(*answers, strict=True)
        raise_on_all(error, errors)
        return list(values)

    def print(
        self,
        *values: object,
        ranks: int | Iterable[int] | None = None,
        sep: str | None = " ",
        end: str | None = "\n",
        file: TextIO | None = None,
        flush: bool = True,
    ) -> None:
        """Print the `values` of each rank, in the order of ranks. Collective.

        Rank 0 prints everything: the lines of different ranks cannot mix, whatever the MPI does with the
        output of the ranks. Each rank makes its text of `values` as the built-in ``print`` does. It does not
        wait for GPU work: call ``synchronize()`` before you print an array that a kernel writes.

        ranks      the ranks whose values are printed: None (all), an integer, or several integers, such as
                   a range or a list. All ranks give the same; the other ranks' values are ignored
        sep, end   as of the built-in ``print``, on each rank
        file       where rank 0 prints; default: its standard output
        flush      whether rank 0 flushes `file`

        A rank that is no integer is a TypeError, and a rank that does not exist a ValueError, as are ranks
        that give different `ranks`. If a value's ``__str__`` raises an exception, its rank raises that. In
        all these cases all ranks raise, and nothing is printed.
        """
        self._check_alive("print")
        chosen, error, text = None, None, io.StringIO()
        try:
            chosen = self._chosen(ranks)
            if self.rank in chosen:
                print(*values, sep=sep, end=end, file=text)
        except Exception as e:
            error = e
        answers = self._gather_all("print", (as_message(error), f"ranks={chosen}", text.getvalue()))
        errors, given, texts = zip(*answers, strict=True)
        raise_on_all(error, errors)
        check_equal(given, "All ranks must give print() the same ranks")
        if self.rank == 0:
            print(*texts, sep="", end="", file=file, flush=flush)

    def _chosen(self, ranks):
        """The `ranks` of ``print``, in order."""
        if ranks is None:
            return list(range(self.n_ranks))
        several = ranks if hasattr(ranks, "__iter__") and not isinstance(ranks, str) else [ranks]
        return sorted({integer("print()", "a rank", rank, 0, self.n_ranks - 1) for rank in several})

    def asnumpy(self, array: AnyArray, *, stream: AnyStream | None = None) -> np.ndarray:
        """Return a NumPy copy of `array`, an array or a PyTorch tensor, once the work enqueued on `stream`
        has finished (default: the World's, of a tensor on a GPU PyTorch's current one). Errors as of
        ``synchronize``; TypeError for what is no array.
        """
        self._check_alive("asnumpy")
        stream = stream_of(stream, array)
        if not isinstance(array, (self.xp.ndarray, np.ndarray)):
            array = as_array("asnumpy()", "array", array, self.xp)
        return self.backend.to_host(array, stream)

    def synchronize(self) -> None:
        """Wait for all GPU work of this rank, on all streams. SignalTimeout when waits of its kernels have
        expired (SHMEMKIT_TIMEOUT, ``bind(timeout=)``). Not collective.
        """
        self._check_alive("synchronize")
        self.backend.synchronize()

    # -- the end
    def finalize(self) -> None:
        """Wait for this rank's GPU work and for all ranks, free the symmetric arrays, and end the World.
        Collective; a second call does nothing. At the exit of the program it happens by itself.

        Symmetric arrays that the program dropped without ``free`` are reported on standard error.
        SignalTimeout and RankTimeout as of ``synchronize`` and ``host_barrier``.
        """
        if self.finalized:
            return
        if self.backend.over:
            self.abandon()
            return
        self._free_all()
        for slab in self._slabs.values():  # of groups that the program has not ended
            self.backend.free_slab(slab)
        self._slabs.clear()
        try:
            self.backend.finalize()
        finally:
            self._forget()

    def _free_all(self):
        """Wait for this rank's GPU work and for all ranks, and free the symmetric arrays."""
        self.backend.synchronize()
        self.end_timeline(None)
        self._gather_all("finalize")
        self._report_leaks()
        for allocation in self._allocations.values():
            self.backend.free(allocation.raw)
        self._allocations.clear()
        if self._bounded_barrier is not None:
            self._bounded_barrier.close()

    def _report_leaks(self):
        """Of this, and of the groups made of it."""
        ends_with_main = self.world.ends_with_main
        leaks = self._dropped if ends_with_main else self._leaks()
        if leaks:
            names = ", ".join(map(str, leaks[:8])) + (", ..." if len(leaks) > 8 else "")
            rank, of = self.world.rank, "" if self is self.world else of_group(self.ranks)
            say(f"shmemkit: rank {rank} dropped {len(leaks)} symmetric array(s) without free{of}: {names}")
        for group in self._groups:
            group._report_leaks()

    def abandon(self) -> None:
        """End the World after a failure, without waiting for other ranks."""
        if not self.finalized:
            self.end_timeline(True)
            self.backend.abandon()
            self._forget()

    def end_timeline(self, error: object) -> None:
        """Write the file of SHMEMKIT_TIMELINE, if it is asked for; after an `error` one for each rank."""
        if self._timeline is not None and self._timeline_file is not None:
            timeline, self._timeline = self._timeline, None
            timeline.__exit__(None, error, None)
            path = self._timeline_file
            if error is not None and self.n_ranks > 1:  # of this rank alone
                root, suffix = os.path.splitext(path)
                path = f"{root}.rank{self.rank}{suffix}"
            elif self.rank != 0:
                return
            save(timeline.data, path)
            say(f"shmemkit: the timeline: {path}")

    def _forget(self):
        for group in self._groups:
            group._forget()
        self._groups.clear()
        self.finalized = True
        self.kept.clear()
        if self is not self.world:
            return
        self._exit_handler.forget()
        if self._connections is not None:
            self._connections.Free()
        if self._host.world is self:
            self._host.world, self._host.ended, self._host.asked = None, True, None

    def __enter__(self: WorldT) -> WorldT:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if forked.in_child():  # it leaves the block in which it was forked
            return
        if isinstance(error, SystemExit):
            self._exit_handler.exit(error.code)
            # Otherwise it ends the other ranks, too.
            if self._host.n_ranks is None or error.code in (None, 0):
                error = None
        if error is None:
            self.finalize()
        elif self.n_ranks == 1 or self._host.n_ranks is not None:
            self.abandon()
        elif self.backend.name == "emulator":
            self.backend.fail(error)
        # otherwise others may wait for this rank: an exception that nobody catches ends them all

    def _gather_all(self, call, value=None):
        """Barrier of the host programs of all ranks, in `call`, a collective function. -> the `value` of
        every rank

        RuntimeError, on every rank, if they call different functions: they would wait for each other forever.
        RankTimeout if ranks are missing after SHMEMKIT_TIMEOUT.
        """
        users = users_call(call)
        self._host.asked = self.ranks
        if call == "host_allgather":  # it may be a part of the function that the user calls
            call = str(users)
        if self._bounded_barrier is not None:
            self._bounded_barrier.wait(users)
        answers = self.backend.allgather((call, users, value), users)
        if len({theirs for theirs, *_ in answers}) > 1:
            rule = "All ranks must make the same collective calls in the same order"
            check_equal([f"{theirs}" for _, theirs, _ in answers], rule, "call", RuntimeError)
        return [theirs for *_, theirs in answers]

    def near(self) -> list[bool]:
        """Return a list that says, for each rank, whether this rank's kernels reach it by loads and stores:
        it is on the same node, and its memory is mapped here. Not collective."""
        self._check_alive("near")
        mapped = self.backend.mapped()
        return [mapped[rank] and rank in self.node_ranks for rank in range(self.n_ranks)]

    def describe(self) -> str:
        """Return some lines about where the ranks run and how this one reaches the others: hosts and their
        ranks, nodes, near ranks, the transport to far ones and the network cards. Not collective."""
        self._check_alive("describe")
        hosts, ranks, near = self.backend.hosts, list(self.ranks), self.near()
        n_hosts, n_near = len({hosts.hosts[rank] for rank in ranks}), sum(near)
        close = ranks_text([rank for rank in range(self.n_ranks) if near[rank]])
        lines = [
            f"{counted(self.n_ranks, 'rank')} on {counted(n_hosts, 'host')}: {hosts.text(ranks)}",
            f"{counted(self.n_nodes, 'node')} of {self.local_size}; this is rank {self.rank}, "
            f"on node {self.node}",
            f"near (loads and stores): {close}",
        ]
        if n_near < self.n_ranks:
            lines.append(f"far: {self.n_ranks - n_near}, by {self.backend.transport()}")
        lines.append(f"network cards here: {'; '.join(nics()) or 'no RDMA card'}")
        if self is self.world and self.local_size == 1 and hosts.problem is not None:
            lines.append(f"note: {hosts.problem[0]}. {hosts.problem[1]}")
        return "\n".join(lines)

    def check_reach(self, what: str, nvlink: bool = False, ranks: Iterable[int] | None = None) -> None:
        """Raise ValueError, on every rank, unless the kernels of each rank reach its `ranks` (default: all)
        by loads and stores. Collective.

        what    begins the message: the name of what needs them
        nvlink  so that lines of 128 bytes arrive in order: within one GPU, or over NVLink between GPUs of the
                same compute capability, 7.0, 8.0, 9.0 or 10.0 (docs/machine_code.md, whole line)
        """
        self._check_alive("check_reach")
        if ranks is not None:
            try:
                ranks = list(ranks)
            except TypeError:
                text = f"check_reach(): ranks is {shown(ranks)}; it must be a list of ranks"
                raise TypeError(text) from None
            for rank in ranks:
                integer("check_reach()", "rank", rank, 0, self.n_ranks - 1)
        reasons = self._gather_all("check_reach", self.backend.unreached(nvlink, ranks))
        if reason := next(filter(None, reasons), None):
            raise OutOfReach(f"{what} cannot be used here: {reason}")

    def locate(self, address: int) -> tuple[str, tuple[int, ...], int] | tuple[None, None, None]:
        """Return (name, index, rank) of the symmetric array's element at `address`, as kernels of this rank
        see it, or (None, None, None). GPUs only."""
        if not hasattr(self.backend, "locate"):
            raise RuntimeError("locate() is for GPUs only; the emulator's errors name the arrays")
        rank, found = self.backend.locate(address, self._find)
        return (None, None, None) if found is None else (*found, rank)

    def _find(self, address):
        """(name, index) of the element at `address` of this rank's symmetric heap, or None."""
        for start, allocation in self._allocations.items():
            number, within = divmod(address - start, allocation.dtype.itemsize)
            if number >= 0 and within == 0 and number < math.prod(allocation.shape):
                return allocation.name, tuple(map(int, np.unravel_index(number, allocation.shape)))
        return next(filter(None, (group._find(address) for group in self._groups)), None)

    def _check_alive(self, what):
        if self.finalized:
            raise RuntimeError(f"{what}(): this {self._kind} is finalized. {self._again.capitalize()}")


class Group(World):
    """Some ranks of a World: what ``World.split`` and ``World.group`` return.

    It has what a World has, for its own ranks: `rank` and `n_ranks`, symmetric arrays, barriers, `comm`.
    Every host object and one-line function that takes a World takes a Group; ``sk.bind(..., group=group)``
    binds a kernel whose `rank()`, `num_ranks()`, `symm_at`, `notify`, `put`, barriers and teams are the
    group's. (``kernel[grid, block](...)`` always means the World: Numba would load it at the first call.)

    world             the World
    ranks             the World's rank of each of the group's
    node, n_nodes     the nodes of the group's ranks, if each has equally many of them, one after another;
                      otherwise each rank counts as a node of its own, which other ranks reach by puts alone
    stream, backend   the World's

    *Collective* methods are called by all ranks of the group. Groups may overlap. Collectives and products of
    a World and all its groups run one after another on each rank, in the order of the calls, on whatever
    streams. So the program makes them in an order that all ranks respect: for any two calls that share a
    rank, all ranks that make both make the same one first, and there is no circle of such calls.

    Symmetric arrays of the World may be used with a group's ranks, too. Use a group as a context manager, or
    call ``finalize``, or keep it: it ends with its World.
    """

    _kind, _again = "group", "make a new one with World.split()"

    def __init__(
        self,
        parent: World,
        number: int,
        ranks: Sequence[int],
        comm: Communicator,
        slab: Any,
        key: tuple[int, int],
    ):  # see World.split
        self._parent, self._world, self._number = parent, parent.world, number
        self._ranks = tuple(parent.ranks[rank] for rank in ranks)
        self.comm, self.rank, self.n_ranks = comm, comm.Get_rank(), comm.Get_size()
        self.xp, self.stream, self._host = parent.xp, parent.stream, parent._host
        self.finalized, self.kept = False, {}
        self._timeline = self._timeline_file = self._bounded_barrier = None
        self.backend = parent.backend.group(ranks, comm, slab, key)
        if self.backend.name != "emulator" and self.n_ranks > 1:
            self._bounded_barrier = BoundedBarrier(comm, timeouts.default(), self._ranks)
        self._begin(self._local_size_of([rank // self._world.local_size for rank in self._ranks]))
        if self.backend.name != "emulator":
            from .stream_barrier import bind_barrier

            self.backend.bind_bounded_barrier(functools.partial(bind_barrier, group=self))

    @staticmethod
    def _local_size_of(nodes):
        """Ranks per node, where ranks are on these `nodes`."""
        sizes = [len(list(run)) for _, run in itertools.groupby(nodes)]
        return sizes[0] if len(set(sizes)) == 1 and len(sizes) == len(set(nodes)) else 1

    def __repr__(self):
        of, name = ranks_text(sorted(self._ranks)), self.backend.name
        return f"<Group of {of}: rank {self.rank} of {self.n_ranks}, {self.n_nodes} node(s), {name}>"

    @property
    def world(self) -> World:
        return self._world

    @property
    def ranks(self) -> Sequence[int]:
        return self._ranks

    def split(self, color: int | None, key: int = 0, heap: int | str = "16M") -> Group | None:
        return super().split(color, key, heap)

    def group(self, ranks: Iterable[int], heap: int | str = "16M") -> Group | None:
        return super().group(ranks, heap)

    def group_of_node(self, heap: int | str = "16M") -> Group:
        return super().group_of_node(heap)

    def leaders(self, heap: int | str = "16M") -> Group | None:
        return super().leaders(heap)

    def finalize(self) -> None:
        """Wait for this rank's GPU work and for the group's ranks, free the group's arrays, and end it.
        Collective; a second call does nothing. Groups made of this one end first.

        Symmetric arrays that the program dropped without ``free`` are reported on standard error. Objects
        that were made on the group cannot be used any more.
        """
        if self.finalized or self._world.backend.over:
            self._forget()
            return
        for group in list(self._groups):
            group.finalize()
        self._free_all()
        self.backend.end_group()
        self.comm.Free()
        if self in self._parent._groups:
            self._parent._groups.remove(self)
        self._parent._unused.add(self._number)
        self._forget()

    def abandon(self) -> None:
        """End the group after a failure, without waiting for other ranks."""
        self._forget()

    def locate(self, address: int) -> tuple[str, tuple[int, ...], int] | tuple[None, None, None]:
        return self._world.locate(address)

    def end_timeline(self, error: object) -> None:
        """A timeline is the World's."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # With an error, other ranks may wait for this one, and the World ends.
        if error is None and not forked.in_child():
            self.finalize()

    def _allocation_of(self, array):
        """Also of what the group is made of: its arrays are symmetric here, too."""
        found = super()._allocation_of(array)
        return found if found[0] is not None else self._parent._allocation_of(array)
