"""What a run found: its rows, and on which machine, with which versions and how it was measured."""

import contextlib
import dataclasses
import datetime
import json
import os
import platform
import re
import shlex
import statistics
import sys
from collections import Counter
from typing import Any

from shmemkit.collectives.tuning import EMULATOR
from shmemkit.support.installed import driver_release, versions

from . import libraries

# How it was measured (``shmemkit.Timer``).
METHOD = (
    "iters calls in one CUDA graph, replayed between CUDA events; median over replays of elapsed / iters, "
    "then the maximum over ranks; random data; results checked bit for bit in the same run"
)
METHOD_OF_ROUNDS = (
    "iters calls of each method in a CUDA graph; in each round all graphs of a shape replayed, in random "
    "order, each after a barrier of the ranks and between two CUDA events; median over rounds of elapsed / "
    "iters, then the maximum over ranks; random data; results checked in the same run, by the relative error "
    "of the norm"
)
ON_EMULATOR = "emulator: times mean nothing"

# What others are compared with.
NCCL_WAYS = NCCL, NCCL_GRAPH, NCCL_WINDOW, NCCL_CE = "nccl", "nccl_graph", "nccl_window", "nccl_ce"
TORCH_NCCL = "nccl through torch"
CUBLAS = "cuBLAS"
CUBLAS_LOOP = "cuBLAS, a loop"
NCCL_CUBLAS = "NCCL and cuBLAS"  # one after the other
TORCH_GROUPED = "torch._grouped_mm"
TORCH_EXPERTS = "torch, NCCL and _grouped_mm"
TORCH_EXPERTS_LOOP = "torch, NCCL and a loop of cuBLAS"
TORCH_AG_GEMM = "torch fused_all_gather_matmul, no graph"
TORCH_GEMM_RS = "torch fused_matmul_reduce_scatter, no graph"
TORCH_NORM = TORCH_NCCL_NORM, TORCH_ONE_SHOT_NORM = (
    "torch nccl, rms_norm",
    "torch symm_mem one_shot, rms_norm",
)
TORCH_COMBINE, SDPA_COMBINE = "torch nccl, combine", "sdpa, nccl, combine"
FLASHINFER = "flashinfer, nccl, merge_states"
TORCH_SYMMETRIC = "torch symm_mem", "torch symm_mem one_shot", "torch symm_mem two_shot"


def nccl_cublas(way):
    """The name of one of NCCL_WAYS and cuBLAS, one after the other."""
    return NCCL_CUBLAS if way == NCCL else f"{NCCL_CUBLAS} ({way})"


NCCL_CUBLAS_WAYS = tuple(map(nccl_cublas, NCCL_WAYS))
RATIOS = {  # a field of a row: the methods whose shortest time is compared with the row's
    "vs_nccl": (*NCCL_WAYS, *NCCL_CUBLAS_WAYS),
    "vs_plain": (NCCL, NCCL_CUBLAS),
    "vs_torch_nccl": (TORCH_NCCL,),
    "vs_torch": (
        *(*TORCH_SYMMETRIC, TORCH_AG_GEMM, TORCH_GEMM_RS, TORCH_GROUPED, TORCH_EXPERTS),
        *(*TORCH_NORM, TORCH_COMBINE, SDPA_COMBINE),
    ),
    "vs_cublas": (CUBLAS,),
    "vs_loop": (CUBLAS_LOOP, TORCH_EXPERTS_LOOP),
}
DRIVER = "cuLaunchKernel, arguments packed before"
NVSHMEM, NCCL_ONCE = "nvshmem", "nccl, once per rank"
SDPA, COPY = "sdpa", "copy"
COMPETITORS = {*(m for methods in RATIOS.values() for m in methods), DRIVER, NVSHMEM, NCCL_ONCE, SDPA, COPY}
COMPETITORS |= {FLASHINFER}
VARIABLES = ("NCCL_", "NVSHMEM_", "SHMEMKIT_", "TORCH_SYMM_MEM_")
PACKAGES = (
    "shmemkit numpy numba numba-cuda cuda-bindings cuda-core mpi4py torch nvshmem4py-cu12 nvshmem4py-cu13 "
    "cupy-cuda12x cupy-cuda13x"
).split()


@dataclasses.dataclass
class Row:
    """One method at one size.

    op             "all_gather", "p2p", "latency", "launch" (host), "graph" (GPU), "first_launch", "gemm",
                   "grouped_gemm", "ag_gemm", "gemm_rs", "gemm_ar", "flash_decode" and others
    method         its name
    bytes          of the gathered buffer (all_gather), or sent to the peer (p2p), or of all operands (gemm),
                   or of a rank's k and v (flash_decode), or its rows and their lse (attention_combine);
                   None where there are none
    us             per call: the maximum over the ranks; None when it did not run
    bus_GBps       10**9 bytes per second over the busiest link: bytes * (n - 1) / n / time for all_gather;
                   flash_decode: from memory
    vs_nccl        the time of NCCL (of a layer: of NCCL and then cuBLAS) in the same run over this one; NCCL
                   in the fastest of NCCL_WAYS. None if no way but plain buffers ran
    vs_plain       the same of NCCL with plain buffers
    vs_torch_nccl  the same of NCCL through PyTorch
    of_p2p         bus_GBps over what one rank can send to another in the same run
    vs_driver      launch: this time over that of cuLaunchKernel with packed arguments in the same run
    note           "" when all is well; "refused: why" or "wrong: what"
    blocks         of the kernel, where that was varied
    out            "symmetric" where the result went to symmetric memory
    took           the method that "auto" took
    shape          gemm: "MxNxK"; grouped_gemm: "ExROWSxNxK"; flash_decode: "TOKENSxKV_HEADSxGROUP"
    tflops         gemm: 10**12 operations per second, 2 M N K in all
    weights_GBps   grouped_gemm: 10**9 bytes of the weights of experts with rows, per second
    vs_cublas      gemm: cuBLAS's time in the same run over this one; grouped_gemm: of one dense product
    vs_loop        grouped_gemm: the same of a product for each expert
    alone          ag_gemm, gemm_rs, gemm_ar: "product", "gathering" or "reduction", for a part of the whole;
                   flash_decode: "attention", "exchange" or "memory"; attention_combine: "exchange"
    vs_torch       the shortest time of PyTorch's symmetric memory, fused operation, or several in a graph, in
                   the same run over this one
    overlap        ag_gemm, gemm_rs, gemm_ar: the longer one of the two parts alone, each by what was the
                   fastest at it in the same run, over this time: 1 if the other part costs nothing
    ran            of NCCL: the kernels and copies of a call
    version        of NCCL
    of_memory      flash_decode: bus_GBps over what the GPU's memory has by its clock and width
    runs           the time of each run, of which `us` is the median; None of one run
    rooms          the modules whose kernels it launched, where that was noted (shmemkit/tools/ledger.py)

    Not in a file (docs/earlier.py): `earlier`, as "of earlier kernels, 2026-11-22", and `dagger`, which marks
    its figures among others.
    """

    earlier = dagger = ""

    op: str
    method: str
    bytes: int | None = None
    us: float | None = None
    bus_GBps: float | None = None
    vs_nccl: float | None = None
    vs_torch_nccl: float | None = None
    of_p2p: float | None = None
    vs_driver: float | None = None
    note: str = ""
    blocks: int | None = None
    out: str | None = None
    took: str | None = None
    shape: str | None = None
    tflops: float | None = None
    vs_cublas: float | None = None
    alone: str | None = None
    vs_torch: float | None = None
    overlap: float | None = None
    vs_plain: float | None = None
    ran: str | None = None
    version: str | None = None
    runs: list[float] | None = None
    vs_loop: float | None = None
    of_memory: float | None = None
    weights_GBps: float | None = None
    rooms: list[str] | None = None

    @property
    def wrong(self):
        return self.note.startswith("wrong")

    @property
    def key(self):
        """What tells a row from the others."""
        return self.op, self.method, self.bytes, self.shape, self.alone, self.out, self.blocks

    @property
    def case(self):
        """What is the same in rows that are compared."""
        return self.op, self.bytes, self.shape, self.alone

    @property
    def label(self):
        """The method, with all that was varied."""
        parts = self.method, self.blocks and f"{self.blocks} blocks", self.out and f"{self.out} out"
        return ", ".join(str(part) for part in parts if part)


class Results:
    """The rows of a run, in the order they were measured, the same on every rank.

    arguments   of the command line, for the record
    p2p_GBps    the limit that of_p2p refers to, or None
    method      how it was timed
    """

    def __init__(self, world, arguments):
        self.rows, self.p2p_GBps = [], None
        # Files without their folders.
        named = [re.sub(r"^(--[a-z]+=)?.*/", r"\1", argument) for argument in arguments]
        self.command = shlex.join(["python3", "-m", "shmemkit.bench", *named])
        self.date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
        self.n_ranks, self.emulated = world.n_ranks, world.backend.name == "emulator"
        self.method = ON_EMULATOR if self.emulated else METHOD
        shown = {k for k in os.environ if k.startswith(VARIABLES)} - {"SHMEMKIT_SECRET"}
        self.environment = {k: os.environ[k] for k in sorted(shown)}
        self.machine = _machine(world)

    @classmethod
    def read(cls, path) -> Any:
        """Those that ``write`` put into a file, with the `versions` and `environment` then, and what
        ``bench everything`` adds: `measured` and `digests` (shmemkit/tools/everything/files.py), or {}. None
        for another JSON file."""
        with open(path) as file:
            data = json.load(file)
        if "rows" not in data:
            return None
        self = cls.__new__(cls)
        self.emulated = not data["machine"]["gpus"]
        fields = {field.name for field in dataclasses.fields(Row)}  # other versions have others
        self.rows = [Row(**{k: v for k, v in row.items() if k in fields}) for row in data["rows"]]
        for key in ("machine", "versions", "environment", "command", "date", "method", "n_ranks", "p2p_GBps"):
            setattr(self, key, data[key])
        for key in ("measured", "digests"):
            setattr(self, key, data.get(key, {}))
        self.compare()  # with today's meaning of the ratios
        return self

    def add(self, *args, **kwargs):
        """Take in a row. One that is there already, of an earlier run, gets the median time of all runs."""
        new = Row(*args, **kwargs)
        row = next((row for row in self.rows if row.key == new.key), None)
        if row is None:
            self.rows.append(new)
            return
        row.note = row.note or new.note
        if row.us is None or new.us is None:
            row.us = row.bus_GBps = row.tflops = row.weights_GBps = row.of_memory = row.runs = None
            return
        row.runs = [*(row.runs or [row.us]), new.us]
        median = statistics.median(row.runs)
        for rate in ("bus_GBps", "tflops", "weights_GBps", "of_memory"):
            if getattr(row, rate) is not None:
                setattr(row, rate, getattr(row, rate) * row.us / median)
        row.us = median

    def compare(self):
        """Fill in what compares a row with others."""
        times = {}  # case -> {method: time}
        for row in self.rows:
            if row.us and not row.note:
                times.setdefault(row.case, {})[row.method] = row.us
        driver = {row.op: row.us for row in self.rows if row.method == DRIVER}
        parts = {}  # (op, shape) -> part: the fastest one's time
        for row in self.rows:
            if row.alone and row.us and not row.note:
                of_shape = parts.setdefault((row.op, row.shape), {})
                of_shape[row.alone] = min(row.us, of_shape.get(row.alone, row.us))
        for row in self.rows:
            if not row.us:
                continue
            for ratio, methods in RATIOS.items():
                of_peers = {m: us for m, us in times.get(row.case, {}).items() if m in methods}
                plain_alone = ratio == "vs_nccl" and set(of_peers) <= {NCCL, NCCL_CUBLAS}
                best = None if plain_alone else min(of_peers.values(), default=None)
                setattr(row, ratio, best and best / row.us)
            alone = {} if row.alone else parts.get((row.op, row.shape), {})
            if len(alone) > 1 and row.op != "flash_decode":
                row.overlap = max(alone.values()) / row.us
            if row.op in driver:
                row.vs_driver = row.us / driver[row.op]
            if row.bus_GBps is not None and self.p2p_GBps:
                row.of_p2p = row.bus_GBps / self.p2p_GBps

    @property
    def failed(self):
        return any(row.wrong for row in self.rows)

    @property
    def dtype(self):
        """Its name, as the command says."""
        match = re.search(r"--dtype[= ](\w+)", self.command)
        return match[1] if match else "bfloat16"

    def heading(self):
        """One line: where."""
        if self.emulated:
            return f"{ranks_of(self.n_ranks)}, {ON_EMULATOR}"
        about = self.machine
        gpus = ", ".join(f"{n} x {name}" for name, n in about["gpus"].items())
        return f"{ranks_of(self.n_ranks)} on {gpus}; driver {about['driver']}, CUDA {about['cuda']}"

    def as_dict(self):
        rows = [
            {key: value for key, value in dataclasses.asdict(row).items() if value not in (None, "")}
            for row in self.rows
        ]
        return {
            "machine": self.machine,
            "versions": _versions(),
            "environment": self.environment,
            "command": self.command,
            "date": self.date,
            "method": self.method,
            "n_ranks": self.n_ranks,
            "p2p_GBps": self.p2p_GBps,
            "rows": rows,
        }

    def write(self, path):
        with open(path, "w") as file:
            json.dump(self.as_dict(), file, indent=1)
            file.write("\n")


def case_of(row):
    """What a file calls the case of a row, a Row or a dict: its shape, or else its bytes."""
    row = row if isinstance(row, dict) else vars(row)
    return row.get("shape") or str(row.get("bytes") or "")


def ranks_of(n):
    """ "1 rank", or "2 ranks"."""
    return f"{n} rank{'s' * (n > 1)}"


def gpus_of(world):
    """-> {model: how many GPUs of it the ranks have}; ranks may share one. {} on the emulator. Collective."""
    found = dict.fromkeys(world.host_allgather((world.backend.gpu_name, world.backend.gpu_id)))
    return dict(Counter(name for name, _ in found if name != EMULATOR))


def _machine(world):
    gpus = gpus_of(world)
    about = {"cpus": os.cpu_count(), "python": platform.python_version(), "n_nodes": world.n_nodes}
    if world.backend.name == "emulator":
        return {"gpu": world.backend.gpu_name, "gpus": gpus, "driver": None, "cuda": None, **about}
    cuda = world.xp.cuda.runtime.driverGetVersion()
    return {
        "gpu": next(iter(gpus)),
        "gpus": gpus,
        "driver": driver_release(),
        "cuda": f"{cuda // 1000}.{cuda % 1000 // 10}",
        **about,
    }


def _versions():
    found = versions(PACKAGES) | libraries.loaded()
    if torch := sys.modules.get("torch"):
        with contextlib.suppress(AttributeError):  # a PyTorch without CUDA
            found["NCCL that PyTorch was built with"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found
