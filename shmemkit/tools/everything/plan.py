"""What ``bench everything`` measures: batches, each a command of ``shmemkit bench`` for one file.

A batch has cases, which are sizes or shapes; one without them is a single case. All that a case compares is
measured in one run. Batches of as many ranks follow each other: a process compiles a kernel once.
"""

from __future__ import annotations

from typing import NamedTuple

from shmemkit.bench.cases import CASES
from shmemkit.bench.commands import COMMANDS
from shmemkit.bench.results import NCCL, NCCL_WAYS, ranks_of
from shmemkit.bench.sizes import parse_size, size_text

SIZES = "8K,64K,512K,1M,4M,16M,32M,64M,128M,256M".split(",")
QUICK_SIZES, QUICK_SECONDS, PART_SECONDS = "8K,512K,16M,256M".split(","), 180, 240
AUTO, ALL = "auto", "all methods"
PEERS = {"all_gather": ("torch_symm",), "all_reduce": ("torch_one_shot", "torch_two_shot")}
PREFILL = "--tokens 4096 --experts 256 --max-rows 40960".split()
SMALL_M = ",64x28672x8192,16x28672x8192"  # of gemm_ar, for decoding
WITH_NCCL = {name for name, command in COMMANDS.items() if NCCL in command.peers}  # commands with --nccl
START = 20  # seconds until the ranks of a process begin


class Batch(NamedTuple):
    """A command for one file.

    file       its name, without the GPU's and the ranks
    ranks      how many
    what       AUTO or ALL: which of our methods
    arguments  of ``shmemkit bench``, without the cases
    option     that names the cases: "--sizes", "--shapes" or "", with one case, ""
    cases      texts
    seconds    about, for each case
    start      about, once: compiling
    """

    file: str
    ranks: int
    what: str
    arguments: list[str]
    option: str = ""
    cases: tuple[str, ...] = ("",)
    seconds: tuple[float, ...] = (5,)
    start: float = 6

    @property
    def total(self):
        return self.start + sum(self.seconds)

    @property
    def text(self):
        cases = f": {', '.join(self.cases)}" if self.option else ""
        return f"{self.file}, {ranks_of(self.ranks)}, {self.what}{cases}"

    def key(self, case):
        """What a file calls the case (``results.case_of``)."""
        if self.option != "--sizes":
            return case.strip().replace("zipf", " zipf")
        size, unit = parse_size(case), 16 * self.ranks
        return str(size // unit * unit or size)

    def shown(self, key):
        """What progress calls it, before a comma."""
        return size_text(int(key)) if self.option == "--sizes" else key

    def command(self, cases):
        """-> the arguments for some of its cases"""
        return [*self.arguments, *([self.option, ",".join(cases)] if self.option else [])]


def lanes(gpus, ranks):
    """The GPUs can run this many groups of `ranks` ranks beside each other."""
    return max(1, gpus // ranks)


def batches(gpus, quick=False, only=(), emulated=False):
    """-> [Batch, ...] for so many GPUs, the most valuable first; ValueError for what `only` names and is not
    there."""
    made = _emulated(gpus) if emulated else _quick(gpus) if quick else _full(gpus)
    names = dict.fromkeys(batch.file for batch in made)
    if unknown := [name for name in only if name not in names]:
        raise ValueError(f"--only has {unknown[0]!r}; it must be some of {', '.join(names)}")
    return [batch for batch in made if not only or batch.file in only]


def ranks_on(gpus):
    """The numbers of ranks of which there are results: all GPUs, and fewer powers of two."""
    return sorted({gpus, *(n for n in (1, 2, 4, 8) if n <= gpus)}, reverse=True)


def parts(made, gpus, n):
    """-> n lists, of `made` in its order, that take about as long as each other."""
    found, total, at = [[] for _ in range(n)], sum(wall(batch, gpus) for batch in made), 0.0
    for batch in made:
        seconds = wall(batch, gpus)
        found[min(n - 1, int((at + seconds / 2) * n / total))].append(batch)
        at += seconds
    return found


def parts_of_limit(made, gpus, seconds=PART_SECONDS):
    """How many parts there must be, so that none takes longer, about; up to one for each batch."""
    for n in range(1, len(made)):
        if all(expected(part, gpus) <= seconds for part in parts(made, gpus, n)):
            return n
    return len(made)


def wall(batch, gpus):
    return batch.total / lanes(gpus, batch.ranks)


def expected(made, gpus):
    """-> seconds that `made` take, about, with the starts of their processes."""
    starts = START * len({batch.ranks for batch in made})
    return starts + sum(wall(batch, gpus) for batch in made)


def _full(gpus):
    several = [n for n in ranks_on(gpus) if n > 1]
    found = []
    for n in several:
        first = [_collective("all_reduce", n, AUTO, SIZES), _layer("ag_gemm", n)]
        rest = [_collective(op, n, AUTO, SIZES) for op in CASES if op != "all_reduce"]
        found += first + rest + _layers(n)
    found += _alone()
    for n in several:
        found += [_collective(op, n, ALL, SIZES) for op in CASES]
    return found


def _quick(gpus):
    """All GPUs together only."""
    if gpus == 1:
        return [batch._replace(cases=batch.cases[:2], seconds=batch.seconds[:2]) for batch in _alone()[:-1]]
    found = []
    for batch in [_layer("ag_gemm", gpus), *_layers(gpus)]:
        arguments = batch.arguments
        if batch.file in METHODS:
            arguments = [*arguments, "--methods", METHODS[batch.file]]
        if PREFILL[0] not in arguments and batch.file != "p2p":
            case, seconds = batch.cases[-1:], batch.seconds[-1:]
            if batch.file in ("ag_gemm", "gemm_rs", "gemm_ar"):
                case = ("8192x8192x8192",)
            seconds = (min(seconds[0], 5),)
            found.append(batch._replace(what=AUTO, arguments=arguments, cases=case, seconds=seconds, start=3))
    moved = [_collective(op, gpus, AUTO, QUICK_SIZES)._replace(start=4) for op in CASES]
    return [*moved[:4], *found, *moved[4:]]


METHODS = dict.fromkeys("ag_gemm gemm_rs gemm_ar all_reduce_rms_norm".split(), "auto")
METHODS |= dict.fromkeys(("ag_grouped_gemm", "grouped_gemm_rs"), "auto")


def _collective(op, n, what, sizes):
    ours = ["--methods", "auto"] if what == AUTO else []
    vs = ",".join((*NCCL_WAYS, *PEERS.get(op, ())))
    arguments = [op, *ours, "--out", "private,symmetric", "--vs", vs, "--replays", "7"]
    seconds = [1.2 if parse_size(s) <= 4 << 20 else 2 if parse_size(s) <= 64 << 20 else 3.5 for s in sizes]
    factor = 1 if what == AUTO else 2
    each = tuple(factor * second for second in seconds)
    return Batch(op, n, what, arguments, "--sizes", tuple(sizes), each, 6 if what == AUTO else 16)


def _shaped(file, n, arguments, seconds, start, shapes=None):
    """By default of the command's own shapes."""
    cases = tuple((shapes or COMMANDS[arguments[0]].shapes.default).split(","))
    return Batch(file, n, ALL, arguments, "--shapes", cases, (seconds,) * len(cases), start)


def _layer(op, n, seconds=5.0, start=14):
    return _shaped(op, n, [op, "--replays", "8"], seconds, start)


def _layers(n):
    small = COMMANDS["gemm_ar"].shapes.default + SMALL_M
    found = [
        _layer("gemm_rs", n),
        _shaped("gemm_ar", n, ["gemm_ar", "--replays", "8"], 5, 14, small),
        _layer("ag_grouped_gemm", n, 10),
        _layer("grouped_gemm_rs", n, 10),
        _layer("flash_decode", n, 1.5, 12),
        _layer("attention_combine", n, 2, 8),
        _shaped("all_reduce_rms_norm", n, ["all_reduce_rms_norm"], 1.5, 12),
        Batch("expert_parallel", n, ALL, ["expert_parallel", "--replays", "9"], seconds=(12,)),
        Batch("expert_parallel_prefill", n, ALL, ["expert_parallel", "--replays", "9", *PREFILL]),
        Batch("barrier", n, ALL, ["barrier"], seconds=(4,), start=2),
        Batch("p2p", n, ALL, ["p2p", "--replays", "7"], seconds=(25,), start=8),
    ]
    return found


def _alone():
    """Of one GPU."""
    float8 = ["--dtype", "float8_e4m3fn", "--methods", "auto", "--replays", "12"]
    return [
        _shaped("gemm", 1, ["gemm", "--methods", "auto,sm80", "--replays", "12"], 5, 8),
        _shaped("gemm_float8", 1, ["gemm", *float8], 10, 8, "8192x8192x8192,4096x4096x4096"),
        _layer("grouped_gemm", 1, 5, 8),
        Batch("launch", 1, ALL, ["launch", "--first"], seconds=(60,), start=2),
    ]


def _emulated(ranks):
    """Small ones: times mean nothing there."""
    few = ("1K", "2K")
    found = [
        Batch(op, ranks, AUTO, [op, "--methods", "auto", "--vs", ""], "--sizes", few, (2, 2)) for op in CASES
    ]
    return found + [
        _shaped("all_reduce_rms_norm", ranks, ["all_reduce_rms_norm", "--vs", ""], 1, 2, "1x64,2x64"),
        Batch("barrier", ranks, ALL, ["barrier", "--vs", ""], seconds=(1,), start=1),
    ]
