"""Which host each rank runs on, how hosts and ranks lie, and what connects hosts."""

import glob
import os
from typing import NamedTuple

from .agreement import ranks_text
from .installed import text_of
from .settings import listed

BOOT_ID = "/proc/sys/kernel/random/boot_id"
NICS = "/sys/class/infiniband"
SHOWN = 8  # hosts that a text names


class Host(NamedTuple):
    """What tells a host from others: its name, and which boot of a kernel it runs, since pods and containers
    of different machines may have one name."""

    name: str
    boot: str


def boot_id():
    """Different on each machine, and alike in all its containers; "" where it is not known."""
    return text_of(BOOT_ID)


def machine():
    """The Host where this process runs."""
    return Host(os.uname().nodename, boot_id())


def this_host():
    """The Host that this process counts to: SHMEMKIT_HOST_ID, else ``machine()``."""
    given = os.environ.get("SHMEMKIT_HOST_ID", "").strip()
    return Host(given, "") if given else machine()


class Hosts:
    """Where ranks run.

    hosts, machines  of each rank, its ``this_host()`` and its ``machine()``
    local_size       ranks per host; 1 if hosts have different numbers of ranks, or ranks alternate
    problem          why it is 1 although a host has several, or None
    """

    def __init__(self, found):
        self.hosts, self.machines = (list(each) for each in zip(*found, strict=True))
        self.problem, n = None, len(self.hosts)
        sizes = {self.hosts.count(host) for host in set(self.hosts)}
        self.local_size = size = sizes.pop() if len(sizes) == 1 else 1
        if sizes:
            self.problem = "hosts have different numbers of ranks", "Start equally many on each host"
        elif any(len(set(self.hosts[i : i + size])) > 1 for i in range(0, n, size)):
            self.local_size = 1
            rule = "mpirun --map-by slot (Open MPI) and srun --distribution=block do so"
            self.problem = "ranks alternate between hosts", f"Give each host consecutive ranks: {rule}"

    @classmethod
    def of(cls, comm):
        """Those of the ranks of `comm`. Collective."""
        return cls(comm.allgather((this_host(), machine())))

    def local_rank(self, rank):
        """The number of `rank` among those of its machine, whatever SHMEMKIT_HOST_ID says: GPUs are its."""
        return self.machines[:rank].count(self.machines[rank])

    def warning(self):
        """What to tell the user about `problem`, or None."""
        if self.problem is None:
            return None
        what, do = self.problem
        return (
            f"{what} ({self.text()}), so each rank counts as a node of its own, and even ranks of one host "
            f"reach each other by puts alone. {do}; or set local_size in init()"
        )

    def text(self, ranks=None):
        """ "a (ranks 0 and 1) and b (ranks 2 and 3)", of these `ranks` (default: all), by hosts"""
        found = {}
        for rank in range(len(self.hosts)) if ranks is None else ranks:
            found.setdefault(self.hosts[rank], []).append(rank)
        names = [host.name for host in found]
        parts = []
        for host, those in found.items():
            same = names.count(host.name) > 1  # another machine, or a host with that SHMEMKIT_HOST_ID
            boot = f" of boot {host.boot[:8] or 'unknown'}" if same else ""
            parts.append(f"{host.name}{boot} ({ranks_text(sorted(those))})")
        more = [f"{len(parts) - SHOWN} more"] if len(parts) > SHOWN else []
        return listed(parts[:SHOWN] + more, "and")


def transport():
    """How NVSHMEM reaches other hosts, by its variables: "ibrc", or "ibrc and IBGDA"."""
    name = os.environ.get("NVSHMEM_REMOTE_TRANSPORT", "").strip().lower() or "ibrc"
    on = os.environ.get("NVSHMEM_IB_ENABLE_IBGDA", "").strip().lower() in ("1", "y", "yes", "on", "true", "t")
    return f"{name} and IBGDA" if on else name


def nics():
    """-> a text for each RDMA port of this host, "mlx5_0 port 1: ACTIVE, 400 Gb/sec (4X NDR)" """
    found = []
    for port in sorted(glob.glob(f"{NICS}/*/ports/*")):
        name, _, number = port[len(NICS) + 1 :].split("/")
        facts = [text_of(f"{port}/{fact}").rpartition(":")[2].strip() for fact in ("state", "rate")]
        found.append(f"{name} port {number}: {', '.join(filter(None, facts)) or 'not readable'}")
    return found
