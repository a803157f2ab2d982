"""``nvshmem``, ``nvshmem.core`` and ``nvshmem.bindings``: the host interface of nvshmem4py, with its argument
lists and its errors."""

import itertools

import numpy as np

from shmemkit.backends import nvshmem_device_names
from shmemkit.device.enums import ComparisonType, SignalOp, SmemAmount, Teams
from shmemkit.emu.members import TEAM_SAME_MYPE_NODE
from shmemkit.emu.stand_in_modules import StandIn, named
from shmemkit.runtime import world as worlds
from shmemkit.support.settings import listed

from . import nvshmem_memory, nvshmem_rma
from .current_process import current
from .nvshmem_memory import NvshmemError, NvshmemInvalid

_numbers = itertools.count(1)  # of unique ids


class UniqueID(np.ndarray):
    """What ``get_unique_id`` returns, and one PE hands to the others; bytes."""

    def __new__(cls, number=0):
        result = np.zeros(128, np.uint8).view(cls)
        result[:8].view(np.ndarray).view(np.uint64)[0] = number
        return result

    _data = property(lambda self: self.view(np.ndarray))
    ptr = property(lambda self: self.ctypes.data)


class InitStatus(int):
    STATUS_NOT_INITIALIZED, STATUS_IS_BOOTSTRAPPED, STATUS_IS_INITIALIZED = range(3)


class Version:
    """What ``get_version`` returns."""

    def __init__(self, openshmem_spec_version="", nvshmem4py_version="", libnvshmem_version=""):
        self.openshmem_spec_version = openshmem_spec_version
        self.nvshmem4py_version, self.libnvshmem_version = nvshmem4py_version, libnvshmem_version

    def __repr__(self):
        return (
            f"{self.nvshmem4py_version} on {self.libnvshmem_version}, OpenSHMEM {self.openshmem_spec_version}"
        )


def get_name():
    return "shmemkit emulator"


def get_version():
    from shmemkit import __version__

    return Version("1.5", f"emulated by shmemkit {__version__}", "shmemkit emulator")


def get_unique_id(empty=False):
    """A new id; `empty`: room for one that comes by a broadcast."""
    return UniqueID(0 if empty else next(_numbers))


def init(device=None, uid=None, rank=None, nranks=None, mpi_comm=None, initializer_method=""):
    """All PEs, in each of the forms "mpi", "uid" and "emulated_mpi". Collective."""
    process = current("nvshmem.core.init")
    if initializer_method not in ("mpi", "uid", "emulated_mpi"):
        raise NvshmemInvalid(
            f"nvshmem.core.init: initializer_method is {initializer_method!r}; it must be 'mpi', 'uid' or "
            "'emulated_mpi'"
        )
    if initializer_method == "uid":
        if uid is None or rank is None or nranks is None or mpi_comm:
            raise NvshmemInvalid(
                "nvshmem.core.init: initializer_method is 'uid'; it needs uid, rank and nranks, "
                "and no mpi_comm"
            )
        if not np.any(np.asarray(uid)):
            raise NvshmemError(
                "nvshmem.core.init: the uid is empty. PE 0 must call get_unique_id() and broadcast "
                "what it returns"
            )
    elif mpi_comm is not None:
        rank, nranks = mpi_comm.Get_rank(), mpi_comm.Get_size()
    if rank is not None and (rank, nranks) != (process.pe, process.machine.n_ranks):
        raise NotImplementedError(
            f"nvshmem.core.init: this is rank {rank} of {nranks}; on the emulator it must be as in "
            f"COMM_WORLD, rank {process.pe} of {process.machine.n_ranks}"
        )
    process.inits += 1
    if process.inits > 1:
        return  # as with NVSHMEM: the last finalize() counts
    world = worlds.init()
    world.stream.__exit__()
    process.streams.remove(world.stream)  # NVSHMEM has none: the script's own are all there are
    world.stream = world.backend.stream = process.null
    if initializer_method == "uid":
        ids = world.host_allgather(bytes(np.asarray(uid).view(np.uint8)))
        if len(set(ids)) > 1:
            world.abandon()
            raise NvshmemError(
                "nvshmem.core.init: the PEs have different uids. One PE must call get_unique_id() and "
                "broadcast what it returns"
            )


def finalize():
    """Collective. What was not freed is freed, and reported on standard error by its PE. After several calls
    of init(), the last of as many calls does it."""
    world, process = nvshmem_memory.world("finalize"), current("finalize")
    process.inits -= 1
    if process.inits == 0:
        process.allocations.clear()
        world.finalize()


def init_status():
    initialized = current("nvshmem.core.init_status").host.world is not None
    return InitStatus(InitStatus.STATUS_IS_INITIALIZED if initialized else InitStatus.STATUS_NOT_INITIALIZED)


def my_pe():
    return nvshmem_memory.world("my_pe").rank


def n_pes():
    return nvshmem_memory.world("n_pes").n_ranks


def _members(team, call):
    world = nvshmem_memory.world(call)
    if not 0 <= int(team) <= TEAM_SAME_MYPE_NODE:
        raise NotImplementedError(
            f"nvshmem.core.{call}: team is {team!r}; on the emulator it must be "
            f"{listed(t.name for t in Teams)}"
        )
    return world.backend.members.team(int(team))


def team_my_pe(team):
    return _members(team, "team_my_pe").index(my_pe())


def team_n_pes(team):
    return len(_members(team, "team_n_pes"))


def team_translate_pe(src_team, src_pe, dest_team):
    """Member `src_pe` of one team as a member of another; -1 if it is none."""
    pe, there = _members(src_team, "team_translate_pe")[src_pe], _members(dest_team, "team_translate_pe")
    return there.index(pe) if pe in there else -1


def modules():
    """-> the stand-ins, by name"""
    shared = named(my_pe, n_pes, team_my_pe, team_n_pes, init_status, team_translate_pe)
    core = {
        **nvshmem_memory.MEMBERS,
        **nvshmem_rma.MEMBERS,
        **named(ComparisonType, InitStatus, SignalOp, SmemAmount, Teams, UniqueID, Version),
        **named(finalize, get_name, get_unique_id, get_version, init),
    }
    bindings = {
        "Cmp_type": ComparisonType,
        "Signal_op": SignalOp,
        "Smem_amount": SmemAmount,
        "Team_id": Teams,
    }
    return {
        "nvshmem": StandIn("nvshmem", {"__version__": get_version().nvshmem4py_version}),
        "nvshmem.core": StandIn("nvshmem.core", shared | core),
        "nvshmem.core.device": StandIn("nvshmem.core.device", {}),
        "nvshmem.bindings": StandIn("nvshmem.bindings", shared | bindings),
        "nvshmem.bindings.device": StandIn("nvshmem.bindings.device", {}),
        **nvshmem_device_names.modules(),
    }
