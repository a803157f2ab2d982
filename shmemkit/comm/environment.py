"""What the variables of torchrun, Ray, Kubernetes, Slurm, or a program of yours say of the ranks."""

import hashlib
import ipaddress
import os
from dataclasses import dataclass
from typing import Any

MPI_SIZES = "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "MPI_LOCALNRANKS"  # of mpirun
MPI_RANKS = "PMIX_RANK", "PMI_RANK", "PMI_FD"
_JOB = "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID"
NEEDED = (
    "Each rank needs RANK (its number, from 0), WORLD_SIZE (how many there are), and MASTER_ADDR and "
    "MASTER_PORT (where rank 0 is: 127.0.0.1 on one host)"
)


@dataclass
class Told:
    """What this process is told: `rank` of `size` ranks, as the variable `by` says."""

    rank: int | None
    size: int
    by: str


def under_torchrun():
    return "TORCHELASTIC_RUN_ID" in os.environ


def under_srun():
    """Whether srun started this process as a rank; what a shell of `srun --pty` starts is none."""
    step = "SLURM_STEP_ID" in os.environ and "SLURM_PROCID" in os.environ
    return step and "SLURM_PTY_PORT" not in os.environ


def on_one_node():
    """Whether srun started this process and all other ranks on one host."""
    return under_srun() and os.environ.get("SLURM_STEP_NUM_NODES") == "1"


def has_pmi():
    return any(variable in os.environ for variable in (*MPI_SIZES, *MPI_RANKS))


def read() -> Told | None:
    """-> what the variables say, or None: nothing. ValueError if they are no numbers."""
    size, by = _integer("WORLD_SIZE", 1), "WORLD_SIZE"
    # An mpirun may start its own processes by srun: the ranks have the variables of that, too.
    by_srun = under_srun() and "OMPI_COMM_WORLD_SIZE" not in os.environ
    slurm = _integer("SLURM_STEP_NUM_TASKS", 1) if by_srun else None
    if size is None:
        size, by = slurm, "SLURM_STEP_NUM_TASKS"
    if size is None:
        return None
    rank = _integer("RANK", 0)
    if rank is None and size > 1:
        rank = _integer("JOB_COMPLETION_INDEX", 0)  # of Kubernetes
    if rank is None and slurm == size:
        rank = _integer("SLURM_PROCID", 0)
    if rank is not None and rank >= size:
        raise ValueError(f"this is rank {rank}, but {by} is {size}: ranks are 0 to {size - 1}")
    return Told(rank, size, by)


def _integer(variable, least, most=None) -> Any:
    text = os.environ.get(variable, "").strip()
    if text and (not text.isdecimal() or int(text) < least or int(text) > (most or int(text))):
        wanted = f"{least} or more" if most is None else f"{least} to {most}"
        raise ValueError(f"{variable} is {text!r}; it must be an integer, {wanted}")
    return int(text) if text else None


def check_alone():
    """ValueError if a variable says that this is one of several ranks, and none says how many there are."""
    if read() is not None:
        return
    rank = _integer("RANK", 0)
    if rank or (rank == 0 and os.environ.get("MASTER_ADDR")):
        raise ValueError(f"RANK is {rank}, and WORLD_SIZE is not set. {NEEDED}; for one rank, unset RANK")
    # Of a Job's pods, number 0 raises, too: it would compute alone while the others fail.
    if (index := _integer("JOB_COMPLETION_INDEX", 0)) is not None and not has_pmi():
        raise ValueError(
            f"JOB_COMPLETION_INDEX is {index}, as in an indexed Job of Kubernetes, and WORLD_SIZE is not "
            "set. Set WORLD_SIZE to the Job's completions, MASTER_ADDR and MASTER_PORT to where pod 0 is, "
            "and SHMEMKIT_SECRET, on all pods; or WORLD_SIZE=1 if each pod computes for itself"
        )


def local_rank(n_ranks):
    """-> LOCAL_RANK, if its launcher started `n_ranks`; else None"""
    told = read()
    return _integer("LOCAL_RANK", 0) if told is not None and told.size == n_ranks > 1 else None


def rendezvous(who, told):
    """-> (address, secret) by which the ranks find each other: see `sockets.listen`. ValueError if the
    environment does not say it."""
    host = os.environ.get("MASTER_ADDR", "").strip().strip("[]")  # of an IPv6 address
    port = _integer("MASTER_PORT", 1, 65535)
    secret, ours = os.environ.get("SHMEMKIT_SECRET", ""), _integer("SHMEMKIT_PORT", 1, 65535)
    said = f"{who}: there are {told.size} ranks ({told.by})"
    srun = ". Or let MPI bring them together: srun --mpi=pmix or --mpi=pmi2" if under_srun() else ""
    if told.rank is None:
        raise ValueError(f"{said}, but no variable says which of them this is. {NEEDED}{srun}")
    alone = on_one_node() and not under_torchrun() and not secret
    if not alone and (not host or (port is None and ours is None)):
        unset = f"{'MASTER_PORT' if host else 'MASTER_ADDR'} is not set"
        raise ValueError(f"{said}, but {unset}: no variable says where rank 0 is. {NEEDED}{srun}")
    try:
        host.encode("idna")
    except UnicodeError as error:
        raise ValueError(f"{who}: MASTER_ADDR is {host!r}, which cannot be a host's name: {error}") from None
    _integer("LOCAL_RANK", 0)  # wrong on the emulator, too
    if secret:
        if len(secret) < 16:
            raise ValueError(f"{who}: SHMEMKIT_SECRET has {len(secret)} characters; it must have 16 or more")
        if ours is None and port == 65535:
            raise ValueError(
                f"{who}: MASTER_PORT is 65535, and rank 0 listens on the port after it, which there is not. "
                "Choose a smaller MASTER_PORT, or set SHMEMKIT_PORT, the same on all ranks"
            )
        return (host, ours or int(port or 0) + 1), os.fsencode(secret)
    if not (alone or is_loopback(host) or _integer("LOCAL_WORLD_SIZE", 1) == told.size):
        raise ValueError(
            f"{who}: MASTER_ADDR is {host!r}, so ranks may be on several hosts, where others can reach them, "
            "too. Set SHMEMKIT_SECRET on all ranks to the same text, which nobody else knows, such as "
            "`openssl rand -hex 16` prints; or, if all ranks are on one host, MASTER_ADDR=127.0.0.1"
        )
    job = "|".join([str(port), *(os.environ.get(name, "") for name in _JOB)])
    return f"\0shmemkit-{os.getuid()}-{hashlib.sha256(job.encode()).hexdigest()[:16]}".encode(), b""


def is_loopback(host):
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
