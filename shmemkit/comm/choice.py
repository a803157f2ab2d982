"""Which communicator: MPI's, PyTorch's, one over sockets, or that of one rank."""

import errno
import importlib.util
import os
import secrets
import socket
import sys
from typing import Any

from shmemkit.support.hosts import machine
from shmemkit.support.settings import listed, shown
from shmemkit.support.timeouts import as_seconds
from shmemkit.typing import Comm, Communicator

from . import environment
from .communicator import SingleComm
from .sockets import Link, SocketComm, gather, listen, place, reach, warn_rank_0

NEEDED = ("Get_rank", "Get_size", "allgather")  # of a user's own
START = 300.0  # seconds that ranks have to start
_of_env: Any = None  # the communicator of the environment's variables: a process has one


def is_mpi(comm) -> bool:
    """Whether `comm` is one of mpi4py's."""
    kind = getattr(sys.modules.get("mpi4py.MPI"), "Comm", None)
    return kind is not None and isinstance(comm, kind)


def _mpi_is_imported():
    return "mpi4py.MPI" in sys.modules


def launched() -> bool:
    """Whether a launcher started this process, as one of several ranks or not."""
    return (
        _mpi_is_imported()
        or environment.has_pmi()
        or environment.under_srun()
        or environment.read() is not None
    )


def default() -> Any:
    """-> the communicator of the ranks that the launcher started; None if it started none.

    RuntimeError or ValueError if it started several, and they cannot find each other.
    """
    told, world = environment.read(), None
    of_mpi = _is_of_mpi(told) and importlib.util.find_spec("mpi4py") is not None
    if of_mpi or (_mpi_is_imported() and not environment.under_torchrun()):
        from mpi4py import MPI

        world = MPI.COMM_WORLD
        if world.Get_size() > 1:
            return world
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        if distributed.get_world_size() > 1:
            return from_torch()
    if told is not None and told.size > 1:
        return from_env()
    _check_alone(world)
    environment.check_alone()
    return world


def _is_of_mpi(told):
    """Whether mpirun started this process, or srun with what MPI needs. A torchrun inside of them has the
    variables of its own launcher."""
    if environment.under_torchrun():
        return False
    if environment.has_pmi():
        return True
    # Some MPIs need no variable of their own under srun.
    unsaid = told is None or told.size == 1 or "MASTER_ADDR" not in os.environ
    return environment.under_srun() and not environment.on_one_node() and unsaid


def _check_alone(world):
    """RuntimeError if mpirun started several ranks, and each of them takes itself for the only one."""
    sizes = {v: int(os.environ[v]) for v in environment.MPI_SIZES if os.environ.get(v, "").isdecimal()}
    variable = max(sizes, key=sizes.__getitem__, default=None)
    if variable is None or sizes[variable] < 2 or environment.under_torchrun():
        return
    started = f"init(): the launcher started {sizes[variable]} ranks ({variable}), but"
    if world is None:
        raise RuntimeError(
            f"{started} mpi4py is not installed: {sys.executable} -m pip install mpi4py. Without MPI, start "
            f"them with torchrun, or by yourself: {environment.NEEDED}"
        )
    from mpi4py import MPI

    name, version = MPI.get_vendor()
    raise RuntimeError(
        f"{started} MPI's COMM_WORLD has one: "
        f"the launcher is not of the MPI that mpi4py loads, {name} {'.'.join(map(str, version))}. Start the "
        "ranks with 'shmemkit run -n N script.py', which finds the right launcher; 'shmemkit doctor' shows "
        "what is installed. With srun, try --mpi=pmix or --mpi=pmi2. If one rank is what you want, call "
        "init(comm=MPI.COMM_SELF)"
    )


def from_env(timeout: float = START) -> Communicator:
    """Return the communicator of the ranks that the environment's variables name, without MPI. Collective.

    RANK, WORLD_SIZE         this rank's number, from 0, and how many there are. torchrun, Ray Train and
                             Kubeflow set them. Instead of RANK also JOB_COMPLETION_INDEX (Kubernetes); under
                             srun, SLURM_PROCID and SLURM_STEP_NUM_TASKS do
    MASTER_ADDR,             where rank 0 is. With 127.0.0.1, and where LOCAL_WORLD_SIZE is WORLD_SIZE, all
    MASTER_PORT              ranks are on one host. Without SHMEMKIT_SECRET they then meet at a Unix socket,
                             which processes of other users cannot use, and open no TCP port. MASTER_PORT is
                             only part of the socket's name: give two jobs different numbers. srun on one node
                             needs neither variable
    SHMEMKIT_SECRET          a text that only the ranks know, the same on all: needed on several hosts. With
                             it, rank 0 listens on MASTER_ADDR's port MASTER_PORT + 1, since PyTorch uses
                             MASTER_PORT; or on SHMEMKIT_PORT. Other ranks prove that they know the secret

    timeout  how many seconds to wait for all ranks. Then the ranks that are there raise RankTimeout, which
             names the missing ones

    When a rank dies, all others end. Without these variables, or with WORLD_SIZE=1, it is one rank. A second
    call returns the same communicator.

    ValueError for variables that are missing or wrong; RuntimeError, on all ranks, if two have the same RANK;
    PermissionError if a rank has a different secret; OSError if the port is in use.
    """
    global _of_env
    if _of_env is not None and (_of_env.link.closed is None or _of_env.link.forked_from is not None):
        return _of_env
    limit = as_seconds(timeout, "from_env(): timeout")
    told = environment.read()
    if told is None or told.size == 1:
        return SingleComm()
    who = "from_env()"
    address, secret = environment.rendezvous(who, told)
    try:
        listener = listen(address) if told.rank == 0 else None
    except OSError as error:
        raise _cannot_listen(who, address, secret, told.size, error) from None
    _of_env = _linked(listener, [address], secret, told.rank, told.size, limit, who)
    return _of_env


def _cannot_listen(who, address, secret, size, error):
    text = f"{who}: rank 0 cannot listen at {place(address)}"
    if error.errno != errno.EADDRINUSE:
        return OSError(error.errno, f"{text}: {error}")
    instead = "MASTER_PORT" if isinstance(address, bytes) else "SHMEMKIT_PORT"
    user = "Another program uses it"
    if warn_rank_0(address, secret, size):
        user = "Another rank 0 waited there, as of an earlier run, and has been told to end, too"
    return OSError(
        errno.EADDRINUSE,
        f"{text}. {user}. Choose another {instead}, the same on all ranks; or another process of this job "
        "has RANK=0, too: give each its own RANK",
    )


def _linked(listener, addresses, secret, rank, size, limit, who):
    if rank == 0:
        peers = gather(listener, secret, size, limit, who)
    else:
        peers = {0: reach(addresses, secret, rank, size, limit, who)}
    return SocketComm(Link(rank, size, peers), range(size))


def from_torch(group: Any = None) -> Comm:
    """Return a communicator of the ranks of `group`, a process group of torch.distributed (default: of all
    ranks), for ``sk.init(comm=)``. Collective over the group.

    PyTorch only brings the ranks together. From then on they have connections of their own, so that the
    death of one ends the others, and groups of shmemkit need none of PyTorch's. With NCCL alone, it makes a
    temporary gloo group, since NCCL would use GPU memory.

    RuntimeError if torch.distributed is not initialized; ValueError if this rank is not in `group`.
    """
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        raise RuntimeError(
            "from_torch(): torch.distributed is not initialized. Call torch.distributed.init_process_group() "
            "first, or use shmemkit.comm.from_env(), which needs no PyTorch"
        )
    if dist.get_rank(group) < 0:
        raise ValueError(
            "from_torch(): this rank is not in the group. Only the ranks of a group may make its World"
        )
    return _TorchComm(dist, group)


class _TorchComm:
    def __init__(self, dist, group):
        self._dist, self._group = dist, group

    def Get_rank(self) -> int:
        return self._dist.get_rank(self._group)

    def Get_size(self) -> int:
        return self._dist.get_world_size(self._group)

    def allgather(self, value: Any, /) -> list[Any]:
        dist, group = self._dist, self._group
        values: list[Any] = [None] * self.Get_size()
        if "gloo" in str(dist.get_backend_config(group)):
            dist.all_gather_object(values, value, group=group)
            return values
        # NCCL would take memory of the GPU that happens to be current, perhaps the same one on two ranks.
        ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        host = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        dist.all_gather_object(values, value, group=host)
        dist.destroy_process_group(host)
        return values


def check(who: str, comm: Any) -> int:
    """-> how many ranks `comm` has. TypeError if it is no communicator."""
    if any(not callable(getattr(comm, name, None)) for name in NEEDED):
        raise TypeError(
            f"{who}: comm is {shown(comm)}; it must be an mpi4py communicator, or an object with "
            f"its methods {listed(NEEDED, 'and')}"
        )
    return comm.Get_size()


def whole(comm: Any) -> Any:
    """-> what a World needs: `comm` itself, if it is MPI's or shmemkit's; for any other, connections of our
    own, for which its ``allgather`` brings the ranks together. Collective."""
    if is_mpi(comm) or isinstance(comm, (SingleComm, SocketComm)):
        return comm
    rank, size = comm.Get_rank(), comm.Get_size()
    if size == 1:
        return SingleComm()
    found = comm.allgather((rank, _host()))
    if (numbers := [r for r, _ in found]) != list(range(size)):
        raise ValueError(
            f"init(): comm.allgather() of each rank's number returned {numbers}; it must return the value of "
            f"each of the {size} ranks, in their order"
        )
    listener = offer = None
    if rank == 0:
        secret = secrets.token_hex(16)
        if len({host for _, host in found}) == 1:
            addresses: list[Any] = [f"\0shmemkit-{os.getuid()}-{secret[:16]}".encode()]
            listener = listen(addresses[0])
        else:
            listener = listen(("", 0))
            addresses = [(name, listener.getsockname()[1]) for name in _names()]
        offer = addresses, secret.encode()
    addresses, secret = comm.allgather(offer)[0]
    return _linked(listener, addresses, secret, rank, size, START, "init()")


def _host():
    """What tells where a Unix socket of this process can be found."""
    try:
        return *machine(), os.stat("/proc/self/ns/net").st_ino
    except OSError:
        return *machine(), 0


def _names():
    """Where others may find this host: the address by which it reaches them, its name's addresses, its
    name."""
    names = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # which sends nothing
        try:
            probe.connect((os.environ.get("MASTER_ADDR") or "10.255.255.255", 9))
            names.append(probe.getsockname()[0])
        except (OSError, UnicodeError):
            pass
    try:
        names += [where[0] for *_, where in socket.getaddrinfo(socket.gethostname(), None)]
    except (OSError, UnicodeError):
        pass
    names = [name for name in names if not environment.is_loopback(name)]
    return list(dict.fromkeys([*map(str, names), socket.gethostname()]))
