"""NVSHMEM on GPUs, as a World sees it; ``backends.emulator`` has the same interface for the emulator."""

import copy
import ctypes
import importlib
import os
import re
import threading
from typing import Any

from cuda.bindings import driver

from shmemkit.comm import environment
from shmemkit.comm.communicator import SingleComm
from shmemkit.compiler import kernel_cache
from shmemkit.compiler.numba_internals import Module, no_warnings_of_small_grids
from shmemkit.device.cuda.timeline_records import host_call, modules
from shmemkit.device.shmem import bounded_waits, peers
from shmemkit.support import timeouts
from shmemkit.support.agreement import by_text, check_equal, counted, of_group, ranks_text
from shmemkit.support.hosts import Hosts, transport
from shmemkit.support.settings import listed, switch
from shmemkit.typing import Communicator

from . import multicast
from .slabs import Slab
from .streams import address_of_stream

ALIGNMENT = 256  # bytes; NVSHMEM itself aligns allocations to 512
TEAM_WORLD, TEAM_SHARED, TEAM_NODE = range(3)  # NVSHMEM's numbers
TEAM_CONFIG_VERSION, TEAM_CONFIG_UNIQUEID = 2 << 16, 2  # NVSHMEM's, of nvshmem_team_config_t
MEMORY_OPERATIONS = 255  # of a stream, that the driver takes at once
IN_ORDER = ((7, 0), (8, 0), (9, 0), (10, 0))
"""Compute capabilities: between such GPUs, NVLink keeps 128-byte stores in order (docs/machine_code.md)."""
HINT = (
    "On a machine without a GPU use shmemkit.init(backend='emulator') or SHMEMKIT_BACKEND=emulator; "
    "'python -m shmemkit doctor' says what is missing."
)


class NvshmemBackend:
    """One rank's GPU, its stream, and NVSHMEM over the ranks of `comm`.

    `comm` is a Communicator, or None for one rank. `device` is the GPU's number among those that this
    process sees. The new stream becomes CuPy's current one. Collective.

    RuntimeError, on every rank, when one of them has no GPU, or when ranks share a GPU although
    SHMEMKIT_OVERSUBSCRIBE=1 is not set.
    """

    name = "nvshmem"
    slab: Any = None  # of a group: where it allocates
    teams: Any = None  # of a group: Teams.TEAM_WORLD, ... -> NVSHMEM's team
    _modules: Any = None  # of a group: compiled kernel -> its Module
    over = False  # a rank that fails ends all
    calls = None  # of all ranks are not compared: see ``shmemkit.emu.collective_calls``

    def __init__(self, comm: Communicator | None):
        self.comm: Communicator = SingleComm() if comm is None else comm
        self.rank, self.n_ranks = self.comm.Get_rank(), self.comm.Get_size()
        if self.n_ranks > peers.MAX_RANKS:
            raise RuntimeError(
                f"init(): there are {self.n_ranks} ranks; shmemkit takes {peers.MAX_RANKS} at most"
            )
        self.hosts = Hosts.of(self.comm)
        self.default_local_size = self.hosts.local_size
        self.device = self._choose_device(self.hosts.local_rank(self.rank))

        import cupy
        import nvshmem.bindings
        import nvshmem.core
        from cuda.core import Device

        from shmemkit.compiler.cupy_arrays import register_arrays

        from .cupy_streams import Stream

        self.xp, self._core, self._bindings = cupy, nvshmem.core, nvshmem.bindings
        no_warnings_of_small_grids()
        kernel_cache.install()
        register_arrays()
        device = Device(self.device)
        device.set_current()
        self.compute_capability = tuple(device.compute_capability)
        self.multiprocessors = device.properties.multiprocessor_count
        cupy.cuda.Device(self.device).use()
        # What kernels need to call NVSHMEM takes long to import: do it during NVSHMEM's own initialization.
        device_side = threading.Thread(target=importlib.import_module, args=["nvshmem.core.device.numba"])
        device_side.start()
        self._init_nvshmem(device)
        device_side.join()
        self._buffers = {}  # address -> nvshmem4py's Buffer
        self._in_use = self._peak = 0  # bytes
        self._probe = self.allocate(ALIGNMENT)
        self.offsets = [self._offset(pe) for pe in range(self.n_ranks)]
        peers.publish(self.rank, self.n_ranks, self.offsets)
        self.stream = Stream()
        self.stream.__enter__()  # current until finalize(); use() would be forgotten after any "with"
        self._event = None  # of order
        self._bounded_barrier = self._arrivals = None
        self.ranks = range(self.n_ranks)  # of the World
        self.groups = []  # the backends of groups that this rank is in, of the World and of its groups
        limits, offsets = zip(*self.allgather((timeouts.default(), self.offsets)), strict=True)
        variable = timeouts.VARIABLE
        given = [f"no {variable}" if limit is None else f"{variable}={limit:g}" for limit in limits]
        check_equal(given, "Set it to the same value on all ranks, or on none", "set")
        reached = not any(peers.UNREACHABLE in of_rank for of_rank in offsets)
        self._bounds_barrier = limits[0] is not None and reached  # of a group: `reached`, by its ranks

    # -- groups: see ``shmemkit.backends.emulator``
    def new_slab(self, n_bytes):
        raw = self.allocate(n_bytes + 8 * self.n_ranks + ALIGNMENT)  # with a group's `_arrivals`
        return Slab(raw, raw.data.ptr)

    def free_slab(self, slab):
        self.free(slab.raw)

    def group(self, ranks, comm, slab, key):
        """A copy, with ranks, memory, modules and NVSHMEM's teams of its own."""
        group = copy.copy(self)
        group.comm, group.slab = comm, slab
        group.rank, group.n_ranks = comm.Get_rank(), comm.Get_size()
        group.ranks, group.offsets = ([those[rank] for rank in ranks] for those in (self.ranks, self.offsets))
        group._event = group._bounded_barrier = group._arrivals = None
        reached = not any(comm.allgather(peers.UNREACHABLE in group.offsets))
        if group.shares_gpus and not reached:
            raise RuntimeError(
                f"split(): {ranks_text(sorted(group.ranks))} do not reach each other's memory, and ranks "
                "share a GPU (SHMEMKIT_OVERSUBSCRIBE=1), for which NVSHMEM has no teams. Start one rank per "
                "GPU"
            )
        group._bounds_barrier = reached
        group._modules, group.teams = {}, {TEAM_WORLD: group._new_team(range(group.n_ranks))}
        self.groups.append(group)
        return group

    def end_group(self):
        self.groups.remove(self)
        self.unload()
        for team in set(self.teams.values()) - {peers.NO_TEAM}:
            self._bindings.team_destroy(team)

    def unload(self):
        """A group's modules, now that nothing runs: the garbage collector would do so at any time."""
        for module in self._modules.values():
            module.unload()
        self._modules.clear()

    def _new_team(self, ranks):
        """-> NVSHMEM's team of these `ranks`, which are consecutive and call it alike; NO_TEAM where
        ranks share a GPU: there NVSHMEM has no teams, and ends the program that asks for one

        Not by nvshmem4py's own function: its list of teams outlives NVSHMEM, and a later World gets the
        numbers of this one's teams again.
        """
        if self.shares_gpus:
            return peers.NO_TEAM
        me = self.rank - ranks.start
        value = self._core.get_team_unique_id().value if me == 0 else None
        values = self.comm.allgather(value)
        config, team = self._bindings.TeamConfig(), ctypes.c_int(peers.NO_TEAM)
        config.version = TEAM_CONFIG_VERSION + self._bindings.team_config_dtype.itemsize
        config.num_contexts, config.uniqueid = -1, values[ranks.start]
        given = ctypes.addressof(team), config.ptr, TEAM_CONFIG_UNIQUEID, len(ranks), me
        try:
            self._bindings.team_init(*given)
        except Exception as error:  # nvshmem4py's NVSHMEMError
            raise RuntimeError(
                f"split(): NVSHMEM makes no team of {counted(len(ranks), 'rank')}: {error}. End groups "
                "that are not used, or raise NVSHMEM_MAX_TEAMS "
                f"({os.environ.get('NVSHMEM_MAX_TEAMS', 'not set, 32')})"
            ) from error
        return team.value

    def load(self, compiled):
        """-> the function of a compiled kernel (a Numba kernel), in a module with the group's tables"""
        if compiled not in self._modules:
            if self.shares_gpus and calls_teams(compiled):
                name = bounded_waits.kernel_name(compiled.entry_name)
                raise RuntimeError(
                    f"bind(): kernel {name} calls NVSHMEM's barriers or teams for a group, which needs a GPU "
                    "for each rank; ranks share one here (SHMEMKIT_OVERSUBSCRIBE=1)"
                )
            tables = peers.packed(self.rank, self.n_ranks, self.offsets)
            teams = [self.teams.get(number, peers.NO_TEAM) for number in range(peers.TEAMS)]
            with peers.filled_with(tables, peers.packed_group(teams, self.ranks)):
                self._modules[compiled] = Module(compiled)
        return self._modules[compiled].function

    # -- who runs where
    def _choose_device(self, local_rank):
        """The number of this rank's GPU among those visible: all of the host's, or this rank's own."""
        error, device, uuid, count = None, None, None, 0
        try:
            count, told = _count_devices(), environment.local_rank(self.n_ranks)
            device = (local_rank if told is None else told) % count
            uuid = _uuid(device)
        except (RuntimeError, ValueError) as e:
            error = str(e)
        found = self.comm.allgather((error, uuid, count))
        failed = [f"{ranks_text(ranks)}: {e}" for ranks, e in by_text([e for e, *_ in found]) if e]
        if failed:
            raise RuntimeError(f"init(): the backend 'nvshmem' cannot start. {'; '.join(failed)}. {HINT}")
        sharing = {}
        for rank, (_, gpu, _) in enumerate(found):
            sharing.setdefault(gpu, []).append(rank)
        shared = [ranks for ranks in sharing.values() if len(ranks) > 1]
        self._uuids, self.shares_gpus = [gpu for _, gpu, _ in found], bool(shared)
        if shared and not switch("SHMEMKIT_OVERSUBSCRIBE", False):
            raise RuntimeError(
                f"init(): there are {self.n_ranks} ranks for {counted(len(sharing), 'GPU')} (rank "
                f"{self.rank} sees {count}), and {ranks_text(shared[0])} would share one. Start one rank "
                "per GPU, or set SHMEMKIT_OVERSUBSCRIBE=1 to share them: results are the same, but "
                "kernels that wait for each other take turns, which takes longer"
            )
        if len({len(ranks) for ranks in sharing.values()}) > 1:
            raise RuntimeError(
                f"init(): there are {self.n_ranks} ranks for {len(sharing)} GPUs, so some GPUs have more "
                "ranks than others. NVSHMEM 3.8 does not start so. Start as many ranks on each GPU"
            )
        return device

    def _init_nvshmem(self, device):
        uid = self._core.get_unique_id(empty=self.rank != 0)
        size = self._bindings.uniqueid_dtype.itemsize
        data = self.comm.bcast(ctypes.string_at(uid.ptr, size) if self.rank == 0 else None, root=0)
        ctypes.memmove(uid.ptr, data, size)
        try:
            self._core.init(
                device=device, uid=uid, rank=self.rank, nranks=self.n_ranks, initializer_method="uid"
            )
        except Exception as error:
            raise RuntimeError(
                f"init(): NVSHMEM does not start on rank {self.rank} (GPU {self.device}): {error}. Set "
                "NVSHMEM_DEBUG=INFO to see why; 'python -m shmemkit doctor' checks the installation"
            ) from error

    def bind_bounded_barrier(self, bind):
        """If all ranks reach each other, and for the World with SHMEMKIT_TIMEOUT alone, let ``barrier`` do
        what ``bind(arrivals, epoch, n_ranks, stream)`` returns: NVSHMEM's own barrier waits without limit
        and does not say for whom, and where ranks share a GPU it has none for groups. Collective.

        arrivals, epoch  uint64 zeros: n_ranks symmetric ones, and a local one
        """
        if not self._bounds_barrier:
            return
        self._arrivals = self.allocate(8 * self.n_ranks)
        self._arrivals.fill(0)
        epoch = self.xp.zeros(1, "uint64")
        self.stream.synchronize()
        self.comm.allgather(None)  # every rank's arrivals are zero
        self._bounded_barrier = bind(self._arrivals.view("uint64"), epoch, self.n_ranks, self.stream)

    def locate(self, address, find):
        """-> (rank, what is there) of an `address` in this rank's or a peer's symmetric memory; or two None.

        ``find(the same address in this rank's memory)`` says what is there, or None.
        """
        for pe, offset in enumerate(self.offsets):
            here = address - offset
            if self._arrivals is not None and 0 <= here - self._arrivals.data.ptr < 8 * self.n_ranks:
                return pe, (timeouts.BARRIER, ((here - self._arrivals.data.ptr) // 8,))
            if found := find(here):
                return pe, found
            for group in self.groups:
                if group._arrivals is not None and pe in group.ranks:
                    number = (here - group._arrivals.data.ptr) // 8
                    if 0 <= number < group.n_ranks:
                        barrier = timeouts.BARRIER + of_group(group.ranks)
                        return pe, (barrier, (group.ranks[number],))
        return None, None

    def _offset(self, pe):
        if pe == self.rank:
            return 0
        address = self._bindings.ptr(self._probe.data.ptr, pe)
        return address - self._probe.data.ptr if address else peers.UNREACHABLE

    # -- what World asks of a backend
    @property
    def gpu_name(self):
        """The model of this rank's GPU."""
        return self.xp.cuda.runtime.getDeviceProperties(self.device)["name"].decode()

    @property
    def gpu_id(self):
        """What this rank's GPU alone has; ranks that share it have it alike."""
        me = self.ranks[self.rank]
        return self.hosts.machines[me], self._uuids[me]

    def transport(self):
        """How kernels reach ranks whose memory is not mapped here."""
        return f"NVSHMEM's {transport()}"

    def mapped(self):
        """-> for each rank, whether its memory is mapped here."""
        return [offset != peers.UNREACHABLE for offset in self.offsets]

    def unreached(self, nvlink, ranks=None):
        """-> why kernels here do not reach `ranks` (default: all) by loads and stores (with `nvlink`: by
        lines of 128 bytes that arrive in order, over NVLink or within one GPU), or None."""
        mapped = self.mapped()
        ranks = range(len(mapped)) if ranks is None else ranks
        me = self.ranks[self.rank]
        for pe in ranks:
            if not mapped[pe]:
                return (
                    f"rank {me} cannot access the memory of rank {self.ranks[pe]}: their GPUs have no NVLink "
                    "or PCIe peer access"
                )
        if nvlink:
            here = {_uuid(device): device for device in range(_count_devices())}
            atomics = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
            for pe in ranks:
                pe = self.ranks[pe]
                uuid = self._uuids[pe]
                if uuid == self._uuids[me]:
                    continue
                if uuid not in here:
                    return (
                        f"rank {me} does not see the GPU of rank {pe}, and so cannot tell whether "
                        "NVLink connects them. CUDA_VISIBLE_DEVICES must name all GPUs of the host"
                    )
                devices = [_checked(driver.cuDeviceGet(number))[0] for number in (self.device, here[uuid])]
                if not _checked(driver.cuDeviceGetP2PAttribute(atomics, *devices))[0]:  # PCIe has none
                    return f"no NVLink connects the GPUs of ranks {me} and {pe}"
                mine, theirs = (_capability(device) for device in devices)
                if mine != theirs or mine not in IN_ORDER:
                    return (
                        f"the GPUs of ranks {me} and {pe} are of compute capability {_dotted(mine)} and "
                        f"{_dotted(theirs)}; stores of 128 bytes are known to arrive in order between two of "
                        f"the same, {listed(map(_dotted, IN_ORDER))}. Take a method that does not need NVLink"
                    )
        return None

    def set_local_size(self, local_size):
        """Logical nodes do not change where NVSHMEM can reach. A group gets the teams of its nodes."""
        if self.slab is None:
            return
        everybody, node = self.teams[TEAM_WORLD], self.rank // local_size * local_size
        alone = local_size == self.n_ranks
        mine = everybody if alone else self._new_team(range(node, node + local_size))
        self.teams.update({TEAM_SHARED: mine, TEAM_NODE: mine})

    def allgather(self, value, call=None):
        """`value` of every rank. (`call` is for the emulator's reports.)"""
        return self.comm.allgather(value)

    def allocate(self, n_bytes):
        """`n_bytes` of the symmetric heap, as a 1-D uint8 CuPy array, aligned to ALIGNMENT. Collective.

        MemoryError on every rank when it does not fit on one of them.
        """
        size = -(-max(n_bytes, 1) // ALIGNMENT) * ALIGNMENT
        if self.slab is not None:
            address = self.slab.address + self.slab.take(size)
            return self._view(address, size, self.slab.raw, (n_bytes,), "uint8")
        # Where a GPU cannot back its heap, NVSHMEM ends the program or leaves the other ranks waiting.
        rooms = self.allgather(self._room())
        buffer = None
        if size <= min(rooms):
            try:
                buffer = self._core.buffer(size, except_on_del=False)
            except Exception:  # nvshmem4py's NvshmemError: the heap is full
                buffer = None
            rooms = self.allgather(None if buffer is None else size)
        if size > min(room or 0 for room in rooms):
            raise MemoryError(self._explain(n_bytes))
        self._in_use += size
        self._peak = max(self._peak, self._in_use)
        address = int(buffer.handle)
        self._buffers[address] = buffer
        return self._view(address, size, buffer, (n_bytes,), "uint8")

    def _room(self):
        """At most what this rank can still allocate: free memory, and what the heap kept from earlier."""
        free, _ = self.xp.cuda.runtime.memGetInfo()
        return free + self._peak - self._in_use

    def _explain(self, n_bytes):
        free, total = self.xp.cuda.runtime.memGetInfo()
        symmetric = os.environ.get("NVSHMEM_SYMMETRIC_SIZE", "not set, 1 GiB")
        maximum = os.environ.get("NVSHMEM_MAX_MEMORY_PER_GPU", "not set, 128 GiB")
        return (
            f"the symmetric heap has no room for {n_bytes} bytes ({n_bytes / 2**30:.3g} GiB) on every rank. "
            f"Rank {self.rank} uses {self._in_use} bytes of it, and its GPU has {free / 2**30:.3g} of "
            f"{total / 2**30:.3g} GiB free. Free symmetric arrays, ask for less, or raise the heap's limit: "
            f"NVSHMEM_MAX_MEMORY_PER_GPU ({maximum}) for a heap that grows (the default), "
            f"NVSHMEM_SYMMETRIC_SIZE ({symmetric}) for one of fixed size (NVSHMEM_DISABLE_CUDA_VMM=1)"
        )

    def _view(self, address, size, owner, shape, dtype, strides=None, offset=0):
        memory = self.xp.cuda.UnownedMemory(address, size, owner, self.device)
        return self.xp.ndarray(shape, dtype, self.xp.cuda.MemoryPointer(memory, offset), strides)

    def as_array(self, raw, shape, dtype, owner):
        """Bytes `raw` as an array; `owner` lives as long as it or a view of it."""
        return self._view(raw.data.ptr, raw.nbytes, (raw, owner), shape, dtype)

    def describe(self, raw, name, dtype):
        """Names are for the emulator's reports."""

    def address(self, array):
        return array.data.ptr

    def free(self, raw):
        """Give back what ``allocate`` returned. Collective."""
        if self.slab is not None:
            self.barrier()  # as NVSHMEM's own: all messages are delivered
            self.stream.synchronize()
            self.slab.give_back(raw.data.ptr - self.slab.address)
            return
        buffer = self._buffers.pop(raw.data.ptr)
        self._in_use -= buffer.size
        self._core.free(buffer)

    def peer_view(self, array, pe):
        """`array`, symmetric or a view of a symmetric array, as it is on PE `pe`: a CuPy array over NVLink.

        ValueError when `pe`'s memory is not mapped here (no peer access).
        """
        memory = array.data.mem
        address = self._bindings.ptr(memory.ptr, self.ranks[pe])
        if not address:
            raise ValueError(f"peer_view(): {self.unreached(nvlink=False, ranks=[pe])}. Use put and get")
        offset = array.data.ptr - memory.ptr
        return self._view(address, memory.size, array, array.shape, array.dtype, array.strides, offset)

    def multicast_view(self, array, ranks):
        """`array`, symmetric or a view of a symmetric array, at its multicast address for `ranks`, those of
        this node. ValueError where there is none."""
        memory = array.data.mem
        members, team = ranks, None
        if self.slab is not None:
            members, team = [self.ranks[rank] for rank in ranks], self.teams[TEAM_NODE]
            if team == peers.NO_TEAM:
                raise ValueError("ranks share a GPU, for which NVSHMEM has no teams")
        address = multicast.address(self._bindings, self.device, members, memory.ptr, team)
        offset = array.data.ptr - memory.ptr
        return self._view(address, memory.size, array, array.shape, array.dtype, array.strides, offset)

    def barrier(self, stream=None):
        """A barrier of all ranks on `stream` (default: the World's); returns at once."""
        if self._bounded_barrier is not None:
            self._bounded_barrier(stream)
            return
        bounded_waits.check()
        if stream is None:
            stream = self.stream
        if self.slab is not None:
            self._bindings.barrier_on_stream(self.teams[TEAM_WORLD], address_of_stream(stream))
            return
        if stream is not self.stream:
            from cuda.core import Stream

            stream = Stream.from_handle(address_of_stream(stream))
        self._core.barrier_all(stream)

    def follow(self, later, earlier):
        """What is enqueued on stream `later` from now on runs after what is on `earlier` now (None: the
        World's).

        Nothing is done where only one of them captures a graph, or each another one: a graph's launches are
        ordered by who launches it.
        """
        if self.capture_of(later) == self.capture_of(earlier):
            self.order(self.handle(later), self.handle(earlier))

    def capture_of(self, stream):
        """What identifies the capture of a graph that `stream` (None: the World's) takes part in, or None."""
        status, number = _checked(driver.cuStreamGetCaptureInfo(self.handle(stream)))[:2]
        return int(number) if int(status) else None

    # -- copies and memory operations of streams, which are given by their handles
    def handle(self, stream):
        """What the functions below, and what they return, take for `stream` (None: the World's)."""
        return driver.CUstream(address_of_stream(self.stream if stream is None else stream))

    def timed_event(self, handle):
        """-> an event, recorded now; in the capture of a graph, whenever that runs"""
        capturing = int(_checked(driver.cuStreamGetCaptureInfo(handle))[0])
        external = int(driver.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL)
        (event,) = _checked(driver.cuEventCreate(0))
        _checked(driver.cuEventRecordWithFlags(event, handle, external if capturing else 0))
        return event

    def elapsed_ns(self, first, last):
        """-> nanoseconds between two events of work that has ended, or None if one was never recorded"""
        error, milliseconds = driver.cuEventElapsedTime(first, last)
        never = driver.CUresult.CUDA_ERROR_INVALID_HANDLE
        return None if error == never else round(_checked((error, milliseconds))[0] * 1e6)

    def new_stream(self):
        """-> a stream of this rank's GPU, which no other waits for by itself."""
        return self.xp.cuda.Stream(non_blocking=True)

    def order(self, later, earlier):
        """What is enqueued on `later` from now on runs after what is on `earlier` now. A graph that `earlier`
        captures extends to `later`."""
        if self._event is None:
            flags = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
            (self._event,) = _checked(driver.cuEventCreate(flags))
        _checked(driver.cuEventRecord(self._event, earlier))
        _checked(driver.cuStreamWaitEvent(later, self._event, 0))

    def no_copies(self, ranks=None):
        """-> why streams of this rank cannot copy to `ranks` (default: all) and signal them, or None: they
        can."""
        unreached = self.unreached(nvlink=False, ranks=ranks)
        if unreached is None:
            attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS
            (device,) = _checked(driver.cuDeviceGet(self.device))
            if not _checked(driver.cuDeviceGetAttribute(attribute, device))[0]:
                me = self.ranks[self.rank]
                return f"the GPU or the driver of rank {me} has no 64-bit stream memory operations"
        return unreached

    def copy(self, dst, src):
        """-> ``enqueue(handle)``: copy `src` to `dst`, contiguous arrays of as many bytes, this rank's or a
        peer's (``peer_view``). The caller keeps them alive.

        A stream's operations that follow find the copy done, and its writes (``memory_operations``) publish
        it.
        """
        to, at = (driver.CUdeviceptr(self.address(array)) for array in (dst, src))
        size = src.nbytes
        return self._recorded(
            dst, src, lambda handle: _checked(driver.cuMemcpyDtoDAsync(to, at, size, handle))
        )

    def copy_pieces(self, places, src, empty):
        """As ``copy``, to `places` that are empty (``shmemkit.device.packets.lamport``), of whole pieces at a
        multiple of 16 bytes: each comes at once, in no order; kernels may wait for it there.

        empty  the pattern, (low, high), which the emulator looks for
        """
        return self.copy(places, src)

    def copy_rows(self, dst, src):
        """As ``copy``, of 2-D uint8 arrays of the same shape, whose rows are consecutive bytes."""
        parameters = driver.CUDA_MEMCPY2D()
        parameters.srcMemoryType = parameters.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        parameters.srcDevice, parameters.srcPitch = self.address(src), src.strides[0]
        parameters.dstDevice, parameters.dstPitch = self.address(dst), dst.strides[0]
        parameters.Height, parameters.WidthInBytes = src.shape
        return self._recorded(dst, src, lambda handle: _checked(driver.cuMemcpy2DAsync(parameters, handle)))

    def _recorded(self, dst, src, enqueue):
        """`enqueue`, of a copy of `src` to `dst`; in a timeline, it is recorded."""
        addresses, n_bytes = tuple(map(self.address, (dst, src))), dst.nbytes

        def run(handle):
            if modules.recorder is None:
                enqueue(handle)
            else:
                modules.recorder.copied(addresses, n_bytes, enqueue, handle)

        return run

    def memory_operations(self, operations):
        """-> ``enqueue(handle)``: the stream itself does `operations`, one after the other.

        operations  ("write", word, value): store `value`; releases, to all ranks, what came before on the
                    stream. ("wait", word, value): go on once it is at least `value`; acquires.
                    A word is an array of one uint64, this rank's or a peer's. The caller keeps them
                    alive

        They wait without limit: SHMEMKIT_TIMEOUT is for kernels.
        """
        kinds, entries = driver.CUstreamBatchMemOpType, []
        for kind, word, value in operations:
            entry = driver.CUstreamBatchMemOpParams()
            part = entry.waitValue if kind == "wait" else entry.writeValue
            part.operation = getattr(kinds, f"CU_STREAM_MEM_OP_{kind.upper()}_VALUE_64")
            part.address, part.value64 = self.address(word), value
            part.flags = 0  # wait: greater or equal; write: after a fence of the whole system
            entries.append(entry)
        batches = [entries[i : i + MEMORY_OPERATIONS] for i in range(0, len(entries), MEMORY_OPERATIONS)]

        def enqueue(handle):
            bounded_waits.check()
            for batch in batches:
                _checked(driver.cuStreamBatchMemOp(handle, len(batch), batch, 0))

        return enqueue

    def synchronize(self):
        with host_call("synchronize"), bounded_waits.checked():
            self.xp.cuda.runtime.deviceSynchronize()

    def to_host(self, array, stream=None):
        stream = self.stream if stream is None else stream
        if not hasattr(stream, "ptr"):  # CuPy takes its own alone
            stream = self.xp.cuda.ExternalStream(address_of_stream(stream))
        with bounded_waits.checked():
            if "float8" in array.dtype.name:  # of which CuPy copies no arrays with gaps
                return self.xp.asnumpy(array.view("uint8"), stream=stream).view(array.dtype)
            return self.xp.asnumpy(array, stream=stream)

    def finalize(self):
        """Leave NVSHMEM. Collective; no work may be running."""
        for group in self.groups:
            group.unload()
        for buffer in self._buffers.values():  # those of groups, too: nvshmem4py calls what is left an error
            self._core.free(buffer)
        self._buffers.clear()
        self._probe = self._arrivals = self._bounded_barrier = None
        self.stream.__exit__()
        self._core.finalize()

    def abandon(self):
        """Leave after a failure: put CuPy's stream back, but wait for nobody: NVSHMEM is left as it is."""
        self.stream.__exit__()


def calls_teams(compiled):
    """Whether a compiled kernel calls NVSHMEM's barriers, or other functions that take a team."""
    return any(OF_TEAMS.search(str(module)) for module in compiled._codelibrary.modules)


OF_TEAMS = re.compile("nvshmemx?_\\w*(barrier|sync|team|alltoall|broadcast|fcollect|reduce|mc_ptr)")


def _checked(result):
    """The values that a function of the driver returned; RuntimeError if it failed."""
    error, *values = result
    if int(error) != 0:
        raise RuntimeError(f"the CUDA driver returned an error: {error!r}")
    return values


def _count_devices():
    try:
        import cupy
        import nvshmem.core  # noqa: F401
    except ImportError as error:
        raise RuntimeError(
            f"{error}; install the GPU packages: pip install 'shmemkit[cu13]' (or [cu12])"
        ) from error
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise RuntimeError(f"there is no usable NVIDIA GPU or driver ({error})") from error
    if count == 0:
        raise RuntimeError("the driver sees no GPU. Look at CUDA_VISIBLE_DEVICES")
    return count


def _capability(device):
    kinds = driver.CUdevice_attribute
    return tuple(
        _checked(driver.cuDeviceGetAttribute(kind, device))[0]
        for kind in (
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            kinds.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )


def _dotted(capability):
    return ".".join(map(str, capability))


def _uuid(device):
    import cupy

    return bytes(cupy.cuda.runtime.getDeviceProperties(device)["uuid"])
