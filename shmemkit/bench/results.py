"""What a run found: its rows, and on which machine, with which versions and how it was measured."""

import dataclasses
import datetime
import importlib.metadata
import json
import os
import platform
import re
import shlex
import sys

from .timing import METHOD, ON_EMULATOR

DRIVER = "cuLaunchKernel, arguments packed before"  # what launches are compared with
VARIABLES = ("NCCL_", "NVSHMEM_", "SHMEMKIT_", "TORCH_SYMM_MEM_")
PACKAGES = (
    "shmemkit numpy numba numba-cuda cuda-bindings cuda-core mpi4py torch nvshmem4py-cu12 nvshmem4py-cu13 "
    "nvidia-nvshmem-cu12 nvidia-nvshmem-cu13 cupy-cuda12x cupy-cuda13x nvidia-nccl-cu12 nvidia-nccl-cu13"
).split()


@dataclasses.dataclass
class Row:
    """One method at one size.

    op         "all_gather", "p2p", "latency", "launch" (host) or "graph" (GPU)
    method     its name; "nccl" is what vs_nccl compares with
    bytes      of the gathered buffer (all_gather), or sent to the peer (p2p); None where nothing is sent
    us         per call: the maximum over the ranks; None when it did not run
    bus_GBps   10**9 bytes per second over the busiest link: bytes * (n - 1) / n / time for all_gather
    vs_nccl    NCCL's time in the same run over this one
    of_p2p     bus_GBps over what one rank can send to another in the same run
    vs_driver  launch: this time over that of cuLaunchKernel with packed arguments in the same run
    note       "" when all is well; "refused: why" or "wrong: what"
    blocks     of the kernel, where that was varied
    """

    op: str
    method: str
    bytes: int | None = None
    us: float | None = None
    bus_GBps: float | None = None
    vs_nccl: float | None = None
    of_p2p: float | None = None
    vs_driver: float | None = None
    note: str = ""
    blocks: int | None = None

    @property
    def wrong(self):
        return self.note.startswith("wrong")


class Results:
    """The rows of a run, in the order they were measured, the same on every rank.

    arguments   of the command line, for the record
    p2p_GBps    the limit that of_p2p refers to, or None
    """

    def __init__(self, world, arguments):
        self.rows, self.p2p_GBps, self.arguments = [], None, arguments
        self.n_ranks, self.emulated = world.n_ranks, world.backend.name == "emulator"
        gpus = world.host_allgather(_gpu(world))
        self.machine = _machine(world, gpus)

    def add(self, *args, **kwargs):
        self.rows.append(Row(*args, **kwargs))
        return self.rows[-1]

    def compare(self):
        """Fill in what compares a row with others."""
        nccl = {(row.op, row.bytes): row.us for row in self.rows if row.method == "nccl" and row.us}
        driver = {row.op: row.us for row in self.rows if row.method == DRIVER}
        for row in self.rows:
            if row.us and (row.op, row.bytes) in nccl:
                row.vs_nccl = nccl[row.op, row.bytes] / row.us
            if row.op in driver:
                row.vs_driver = row.us / driver[row.op]
            if row.bus_GBps is not None and self.p2p_GBps:
                row.of_p2p = row.bus_GBps / self.p2p_GBps

    @property
    def failed(self):
        return any(row.wrong for row in self.rows)

    def heading(self):
        """One line: where."""
        if self.emulated:
            return f"{self.n_ranks} ranks, {ON_EMULATOR}"
        about = self.machine
        gpus = ", ".join(f"{n} x {name}" for name, n in about["gpus"].items())
        return f"{self.n_ranks} ranks on {gpus}; driver {about['driver']}, CUDA {about['cuda']}"

    def as_dict(self):
        rows = [
            {key: value for key, value in dataclasses.asdict(row).items() if value not in (None, "")}
            for row in self.rows
        ]
        return {
            "machine": self.machine,
            "versions": _versions(),
            "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith(VARIABLES)},
            "command": shlex.join(["python3", "-m", "shmemkit.bench", *self.arguments]),
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "method": ON_EMULATOR if self.emulated else METHOD,
            "n_ranks": self.n_ranks,
            "p2p_GBps": self.p2p_GBps,
            "rows": rows,
        }

    def write(self, path):
        with open(path, "w") as file:
            json.dump(self.as_dict(), file, indent=1)
            file.write("\n")


def _gpu(world):
    """The name of this rank's GPU, or None."""
    if world.backend.name == "emulator":
        return None
    runtime = world.xp.cuda.runtime
    return runtime.getDeviceProperties(world.xp.cuda.Device().id)["name"].decode()


def _machine(world, gpus):
    about = {"cpus": os.cpu_count(), "python": platform.python_version(), "n_nodes": world.n_nodes}
    if gpus[0] is None:
        return {"gpu": "emulator", "gpus": {}, "driver": None, "cuda": None, **about}
    cuda = world.xp.cuda.runtime.driverGetVersion()
    return {
        "gpu": gpus[0],
        "gpus": {name: gpus.count(name) for name in dict.fromkeys(gpus)},
        "driver": _driver(),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
        **about,
    }


def _driver():
    """The version of NVIDIA's kernel driver, or None where /proc does not say."""
    try:
        with open("/proc/driver/nvidia/version") as file:
            match = re.search(r"\b(\d{3,}(?:\.\d+)+)\b", file.read())
    except OSError:
        return None
    return match and match[1]


def _versions():
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    if nccl := sys.modules.get("cupy.cuda.nccl"):
        if getattr(nccl, "available", False):
            code = nccl.get_version()
            found["nccl"] = f"{code // 10000}.{code // 100 % 100}.{code % 100}"
    return found
