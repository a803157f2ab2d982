"""All commands of ``shmemkit bench``, in the order of its help, and their options."""

import functools
import importlib

from . import compare, loop, options
from .results import NCCL
from .shapes import parse_shapes
from .sizes import parse_sizes

EMULATED_SIZES = "8K:64K"
MODULES = (
    "collectives tune_all expert_parallel gemm grouped_gemm ag_gemm gemm_reduce rms_norm attention_combine "
    "flash_decode expert_layers barrier p2p launch"
).split()
COMMANDS = {
    command.name: command
    for module in MODULES
    for command in importlib.import_module(f".{module}", __package__).COMMANDS
}


def add_parser(commands, command, emulated):
    """Add the parser of a Command, with its defaults, on the emulator or not."""
    text = command.text
    found = commands.add_parser(
        command.name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
    )
    unset = dict.fromkeys(("plot", "iters", "tune", "sms"))
    found.set_defaults(
        run=command.run or functools.partial(loop.run, command), usual_sizes=command.usual, **unset
    )
    add = found.add_argument
    add("--json", type=options.file, metavar="FILE", help="write the results there, too")
    add("--replays", type=options.positive, metavar="N", help="of each CUDA graph (20)")
    text = f"measure all N times, and take the median (1; with --compare {compare.RUNS})"
    add("--runs", type=options.positive, metavar="N", help=text)
    text = "measure in groups of N consecutive ranks, all at once; the first one's results are shown"
    add("--group", type=options.positive, metavar="N", help=text)
    text = "symmetric memory of each group, as 8G; default 8G, on the emulator 128M"
    add("--group-heap", metavar="SIZE", help=text)
    text = "print what has become slower than in a FILE of --json; the exit status is 1 then"
    add("--compare", type=options.results_file, metavar="FILE", help=text)
    if command.shapes:
        default, small, text, unit, parse = command.shapes
        more = {"type": options.by(parse or functools.partial(parse_shapes, names=unit))}
        more |= {"default": small if emulated else default, "metavar": f"{unit},.."}
        add("--shapes", help=f"{text}; {options.DEFAULT}", **more)
    if command.sizes:
        text = "8K:256M (by factors of 8), 8K:1M:2, 8K,1M; default 8K:256M, on the emulator"
        text = f"bytes {command.sizes}: {text} {EMULATED_SIZES}"
        add("--sizes", type=options.by(parse_sizes), metavar="SIZES", help=text)
        text = f"plot time against size; the suffix is the format: {', '.join(options.PLOTS)}"
        add("--plot", type=options.plot, metavar="FILE", help=text)
    if command.dtypes:
        add("--dtype", choices=command.dtypes, default="bfloat16", help=options.DEFAULT)
    if command.known:
        text = f"some of {', '.join(command.known)}; default {command.default or command.without}"
        known = options.some_of(lambda: command.known)
        add("--methods", type=known, default=command.default, metavar="A,B", help=text)
    if command.peers:
        words = [f"{word} ({what})" if what else word for word, what in command.peers.items()]
        default = ",".join(command.peers) if command.vs is None else command.vs
        text = f"compare with some of {', '.join(words)}; '' is none; default {default}"
        known = options.some_of(lambda: tuple(command.peers))
        add("--vs", type=known, default=default, metavar="A,B", help=text)
    if NCCL in command.peers:
        text = "the libnccl.so.2 to compare with; default: the installed one"
        add("--nccl", type=options.library, metavar="FILE", help=text)
    if command.sms:
        text = "measure the methods once more within each of these budgets of multiprocessors, as 8,16,32"
        add("--sms", type=options.integers, metavar="N,N", help=text)
    if command.iters:
        add("--iters", type=options.positive, metavar="N", help=f"calls in a CUDA graph ({command.iters})")
    for name, settings in command.options:
        add(name, **settings)
    found.set_defaults(**command.defaults, **(command.emulated if emulated else {}))
