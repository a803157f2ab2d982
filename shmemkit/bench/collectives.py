"""``bench all_gather``, ``all_reduce``, ``reduce_scatter``, ``all_to_all``, ``broadcast``, ``gather``,
``scatter`` and ``reduce``: every method of the host object, and NCCL and PyTorch, at every size."""

from shmemkit.collectives import tuning

from . import options
from .cases import CASES, named
from .command import Command, Entry
from .measure import Ours, budgets
from .nccl import Nccl
from .results import NCCL_WAYS
from .torch_peer import TorchNccl, TorchOneShot, TorchSymmetric, TorchTwoShot

DTYPES = ("bfloat16", "float16", "float32")
SIZES = "8K:256M"
# What is measured unless it is said.
USUAL = {"sizes": SIZES, "vs": list(NCCL_WAYS), "out": ["private"]}
TO_TUNE = {"sizes": f"{SIZES}:2", "vs": [], "out": list(tuning.OUTPUTS)}
USERS = object()  # what --tune is without a FILE
PEERS = {  # what --vs takes: its contender, and what it is
    "nccl": (Nccl, "NCCL with plain buffers"),
    "nccl_graph": (Nccl, "with those of ncclMemAlloc, that a graph registers"),
    "nccl_window": (Nccl, "with windows"),
    "nccl_ce": (Nccl, "by copy engines"),
    "torch_nccl": (TorchNccl, "NCCL through PyTorch"),
    "torch_symm": (TorchSymmetric, "PyTorch's symmetric memory: all_gather"),
    "torch_one_shot": (TorchOneShot, "all_reduce"),
    "torch_two_shot": (TorchTwoShot, "all_reduce"),
}


def plan(world, given):
    kinds = {name: PEERS[name][0] for name in given.vs}
    contenders = [kind(world, *((name, given.nccl) if kind is Nccl else ())) for name, kind in kinds.items()]
    contenders += [
        Ours(world, name, out == "symmetric", sms)
        for sms in budgets(given)
        for name in given.methods
        for out in given.out
    ]
    cases = [CASES[given.command](world, size, given.dtype) for size in given.sizes]
    cases = {case.bytes: {None: case} for case in cases}  # sizes may be the same when rounded
    return [Entry(contender) for contender in contenders], list(cases.values())


def _command(case):
    text = "where the result goes: private or symmetric memory, or both with a comma; default private"
    out = {"type": options.some_of(lambda: tuning.OUTPUTS), "metavar": "A,B", "help": text}
    text = (
        "write what was the fastest into the tuning table, from which method='auto' takes it: by default "
        f"into the user's, {tuning.user_file()}, whose folder is made. The default is then every method but "
        f"auto, --sizes {TO_TUNE['sizes']}, --vs '', --out private,symmetric"
    )
    tune = {"nargs": "?", "type": options.path, "const": USERS, "metavar": "FILE", "help": text}
    return Command(
        case.op,
        f"every method of {', '.join(filter(None, (named(case.op), case.about)))}, and NCCL, by size",
        plan,
        together=False,
        limited=True,
        sizes="of the full array, rounded down to a multiple of 16 per rank, or up to an element",
        dtypes=DTYPES,
        host=named(case.op),
        without="all of them, and auto",
        peers={name: what for name, (_, what) in PEERS.items()},
        vs=",".join(NCCL_WAYS),
        sms=True,
        iters="20 up to 4 MB, 5 above",
        options=[("--out", out), ("--tune", tune)],
        defaults={"vs": None},
    )


COMMANDS = [_command(case) for case in CASES.values()]
