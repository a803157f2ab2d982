"""What the hosts of a program have in common, and which ranks reach which (``shmemkit doctor --hosts``, under
a launcher).

Each rank collects facts about its host, without a World. Rank 0 prints them, and those that differ with what
to do. Then a World starts, each rank puts a value with a signal to every other one, and rank 0 prints who got
which.
"""

import ctypes.util
import os
import platform
import time

import numpy as np
from numba import cuda

from shmemkit.comm import choice
from shmemkit.device import put_signal
from shmemkit.device.enums import SignalOp
from shmemkit.runtime.launch import bind
from shmemkit.runtime.world import init
from shmemkit.support import timeouts
from shmemkit.support.agreement import by_text, ranks_text
from shmemkit.support.command_line import messages_only
from shmemkit.support.hosts import Hosts, nics, transport
from shmemkit.support.installed import text_of

from .doctor import EMULATOR_PACKAGES, GPU_PACKAGES, Machine

HOW = (
    "doctor --hosts: start it on all hosts by a launcher, as "
    "shmemkit run -n 8 -H node1:4,node2:4 -m shmemkit doctor --hosts"
)
PATIENCE = 10.0  # seconds in which a put arrives; less or more with SHMEMKIT_TIMEOUT
SET = int(SignalOp.SIGNAL_SET)
INSTALL = "Install the same version on all hosts, or one environment that all of them see"
VARIABLES = (
    "Set it to the same value on all hosts: launchers do not pass every variable on (shmemkit run does)"
)
TODO = {  # what to do if a fact differs; of all others, INSTALL
    "backend": "See 'shmemkit doctor' on the host that has the emulator: all ranks need NVSHMEM, or none",
    "GPU": "LL128, Lamport and tuned methods want GPUs of one model. Take hosts that are alike",
    "driver": "Install one driver on all hosts",
    "transport": VARIABLES,
    "NVSHMEM variables": VARIABLES,
    "GDRCopy": "Load the module gdrdrv on all hosts; without it NVSHMEM's atomics and small puts are slower",
    "peer memory": "sudo modprobe nvidia_peermem on the hosts without it; without it, NVSHMEM needs DMA-BUF",
    "MTU": "Give the interfaces between the hosts one MTU: sudo ip link set dev NAME mtu 9000. A smaller one "
    "on the way can lose large packets",
    "network cards": "All hosts need active ports: ibstat, and the links' cables or switch",
}


def main(here=None):
    """Prints the report on the hosts of all ranks. -> 1 if something differs, or somebody is not reached; 2
    if there is one rank alone; else 0. Collective."""
    with messages_only("shmemkit doctor --hosts"):
        comm = choice.default()
    if comm is None or comm.Get_size() == 1:
        print(HOW)
        return 2
    found = comm.allgather(facts(here or Machine()))
    hosts = Hosts.of(comm)
    first = comm.Get_rank() == 0
    advice = _compared(found, print if first else _nothing)
    if warning := hosts.warning():
        advice.append(f"{warning[0].upper()}{warning[1:]}")
    if first:
        print(f"\nHosts\n  {hosts.text()}", flush=True)
    if len({each["backend"] for each in found}) == 1:
        advice += _reach(comm, hosts, print if first else _nothing)
    if first and advice:
        print("\nWhat to do", *(f"  - {text}" for text in advice), sep="\n")
    if first:
        print("\nThe hosts " + ("do not fit." if advice else "fit."), flush=True)
    comm.barrier()  # a rank that exits with a status ends the others: rank 0 has printed
    return 1 if advice else 0


def _nothing(*_, **__):
    pass


def facts(here):
    """-> {name: text} of this process's host, which is `here`, a ``doctor.Machine``; nothing is
    initialized"""
    found = {"backend": here.chosen_backend()[0], "Python": platform.python_version()}
    for package in ["shmemkit", *EMULATOR_PACKAGES, *GPU_PACKAGES]:
        name, version = here.version(package)
        found[package] = "none" if version is None else version if name == package else f"{version} ({name})"
    try:
        found["MPI"] = str(here.mpi_library())
    except RuntimeError:
        found["MPI"] = "none"
    try:
        driver = here.driver()
        major, minor = driver.version()
        found["driver"] = f"CUDA {major}.{minor}{here.driver_release()}"
        found["GPU"] = driver.name(0) if driver.count() else "none"
    except OSError:
        found["driver"] = found["GPU"] = "none"
    if found["GPU"] != "none":
        found["transport"] = transport()
        given = sorted(name for name in os.environ if name.startswith("NVSHMEM_"))
        found["NVSHMEM variables"] = ", ".join(f"{name}={os.environ[name]}" for name in given) or "none"
        has_library = ctypes.util.find_library("gdrapi") is not None
        found["GDRCopy"] = "yes" if has_library and os.path.exists("/dev/gdrdrv") else "no"
        found["peer memory"] = "yes" if _has_module("nvidia_peermem", "nv_peer_mem") else "no"
        found["network cards"] = "; ".join(nics()) or "none"
    found["MTU"] = mtus() or "no network"
    return found


def _has_module(*names):
    return any(line.split()[0] in names for line in text_of("/proc/modules").splitlines())


def mtus(folder="/sys/class/net"):
    """ "eth0 1500, ib0 4092", of the interfaces that are up"""
    found = []
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        state, mtu = (text_of(f"{folder}/{name}/{fact}") for fact in ("operstate", "mtu"))
        if mtu and name != "lo" and state != "down":
            found.append(f"{name} {mtu}")
    return ", ".join(found)


def _compared(found, write):
    """Write the facts of all ranks. -> what to do about those that differ"""
    write("All ranks have")
    differ = []
    for name in dict.fromkeys(name for each in found for name in each):
        values = by_text([each.get(name, "none") for each in found])
        if len(values) == 1:
            write(f"  {name:<20} {values[0][1]}")
        else:
            said = "; ".join(f"{ranks_text(ranks)}: {text}" for ranks, text in values)
            differ.append((name, said))
    if differ:
        write("\nDiffer")
    for name, said in differ:
        write(f"  {name:<20} {said}")
    return [f"{name} differs ({said}). {TODO.get(name, INSTALL)}" for name, said in differ]


@cuda.jit
def _send(values, signals, mine, n_ranks, me):
    """Put this rank's value, with a signal, to all ranks."""
    for peer in range(n_ranks):
        put_signal(values[me:], mine, signals[me:], 1, SET, peer)


def _reach(comm, hosts, write):
    """Put something from each rank to each other; write who got it. -> what to do about pairs without"""
    world = init(comm=comm)
    n = world.n_ranks
    values, signals = world.zeros(n, "int64"), world.zeros(n, "uint64")
    mine = world.xp.full(1, world.rank + 1, "int64")
    send = bind(_send, 1, 1, (values, signals, mine, n, world.rank))
    world.host_barrier()
    send()
    arrived = _arrived(world, values, signals)
    got, near = zip(*world.host_allgather((arrived, world.near())), strict=True)
    missing = table(hosts.hosts, got, near, world.backend.transport(), write)
    if missing:
        world.abandon()  # finalize() would wait for what does not arrive
    else:
        world.finalize()
    return missing


def _arrived(world, values, signals):
    """-> for each rank, whether its put has come here in time"""
    stream = world.backend.new_stream()  # the World's may wait for a put
    give_up = time.monotonic() + (timeouts.default() or PATIENCE)
    while True:
        came = world.asnumpy(signals, stream=stream) == 1
        right = world.asnumpy(values, stream=stream) == np.arange(1, world.n_ranks + 1)
        if came.all() or time.monotonic() > give_up:
            return (came & right).tolist()
        time.sleep(0.01)


def table(hosts, got, near, far, write):
    """Write, for each pair of hosts, how ranks of one reach those of the other. -> what to do about pairs of
    ranks that do not

    hosts      of each rank, its Host
    got, near  for each rank, of which ranks it got a put; which it reaches by loads and stores
    far        how it reaches others
    """
    on = {host: [rank for rank, its in enumerate(hosts) if its == host] for host in dict.fromkeys(hosts)}
    write(f"\nPuts with a signal, from (rows) to (columns); memory: loads and stores; network: {far}")
    labels = [ranks_text(ranks) for ranks in on.values()]
    width = max(16, *map(len, labels)) + 2
    write("  " + "".join(f"{text:<{width}}" for text in ["", *labels]).rstrip())
    for label, senders in zip(labels, on.values(), strict=True):
        cells = [label]
        for receivers in on.values():
            pairs = [(a, b) for a in senders for b in receivers if a != b]
            ways = {"memory" if near[a][b] else "network" for a, b in pairs}
            came = sum(got[b][a] for a, b in pairs)
            cells.append(" and ".join(sorted(ways)) or "-")
            if came < len(pairs):
                cells[-1] = f"{came} of {len(pairs)} come"
        write("  " + "".join(f"{cell:<{width}}" for cell in cells).rstrip())
    advice = []
    for a in range(len(hosts)):
        lost = [b for b in range(len(hosts)) if not got[b][a]]
        if lost:
            advice.append(
                f"Puts of rank {a} (on {hosts[a].name}) do not reach {ranks_text(lost)}. Run it with "
                "NVSHMEM_DEBUG=INFO; check NVSHMEM_REMOTE_TRANSPORT, NVSHMEM_HCA_LIST and the links (ibstat)"
            )
    return advice
