"""``python -m shmemkit.bench``: the command line."""

import argparse
import contextlib
import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

import shmemkit as sk
from shmemkit.collectives import tuning
from shmemkit.comm.choice import default as default_comm
from shmemkit.emu.run import current_host
from shmemkit.runtime.symmetric_memory import as_dtype
from shmemkit.runtime.world import choose_backend
from shmemkit.support import command_line
from shmemkit.support.progress import showing
from shmemkit.support.settings import listed

from . import (
    ag_gemm,
    attention_combine,
    barrier,
    collectives,
    compare,
    expert_layers,
    expert_parallel,
    flash_decode,
    gemm,
    gemm_reduce,
    grouped_gemm,
    launch,
    layers,
    p2p,
    report,
    rms_norm,
    tune,
    tune_all,
)
from .cases import CASES
from .results import NCCL, NCCL_WAYS, Results
from .shapes import parse_shapes
from .sizes import parse_sizes

DTYPES = ("bfloat16", "float16", "float32")
SIZES, EMULATED_SIZES = "8K:256M", "8K:64K"
PLOTS = ".svg", ".png", ".pdf"
# NVLink multicast is off for all that are compared, ours too, unless the environment says otherwise.
NO_MULTICAST = {
    "NVSHMEM_DISABLE_NVLS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}
# What the collectives' commands measure unless it is said.
USUAL = {"sizes": SIZES, "vs": list(NCCL_WAYS), "out": ["private"]}
TO_TUNE = {"sizes": f"{SIZES}:2", "vs": [], "out": list(tuning.OUTPUTS)}
LAYER = "MxNxKxExTOPK"  # of a mixture of experts
USERS = object()  # what --tune is without a FILE


# Defaults on the emulator, where a kernel takes some 100,000 times as long
EMULATED = {
    **dict.fromkeys(("gemm", "ag_gemm", "gemm_rs", "gemm_ar"), {"shapes": "32x32x32"}),
    "grouped_gemm": {"shapes": "2x8x32x32"},
    **dict.fromkeys(("ag_grouped_gemm", "grouped_gemm_rs"), {"shapes": "8x16x16x2x2"}),
    "all_reduce_rms_norm": {"shapes": "4x128"},
    "attention_combine": {"shapes": "2x8x64"},
    "flash_decode": {"shapes": "16x8x1"},
    "expert_parallel": {"tokens": 4, "hidden": 64, "experts": 8, "top_k": 2},
    "launch": {"batches": 3, "batch_size": 5},
}


class _Parser(argparse.ArgumentParser):
    """Of all ranks, the first one speaks."""

    def _print_message(self, message, file=None):
        if _is_first():
            super()._print_message(message, file)


def _is_first():
    """Whether this is rank 0, before there is a World."""
    host = current_host()
    if host is not None:
        return host.pe == 0
    comm = default_comm()
    return comm is None or comm.Get_rank() == 0


def _by(parse):
    """-> `parse`, whose ValueError says what is wrong with an option"""

    def parsed(text):
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def _positive(text):
    if not text.strip().isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"it is {text!r}; it must be 1 or more")
    return int(text)


def _integers(text):
    return list(dict.fromkeys(_positive(part) for part in text.split(",")))


def _some_of(allowed):
    """A list with commas of the words that ``allowed()`` gives."""

    def parse(text):
        words = list(dict.fromkeys(filter(None, (part.strip() for part in text.split(",")))))
        for word in words:
            if word not in allowed():
                raise argparse.ArgumentTypeError(f"{word!r} is given; it must be {listed(allowed())}")
        return words

    return parse


def _file(path):
    """A file that is written at the end: what cannot be one is refused before anything runs."""
    if _is_first() and os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"{path!r} is a folder; it must be a file")
    if _is_first() and not os.path.isdir(os.path.dirname(path) or "."):
        raise argparse.ArgumentTypeError(f"the folder of {path!r} does not exist. Make it first")
    return path


def _plot(path):
    if Path(path).suffix not in PLOTS:
        raise argparse.ArgumentTypeError(f"it is {path!r}; it must end with {listed(PLOTS)}")
    return _file(path)


def _path(text):
    return Path(_file(text))


def _library(path):
    if not os.path.isfile(path):
        raise argparse.ArgumentTypeError(f"the file {path!r} does not exist; it must be a libnccl.so.2")
    return os.path.abspath(path)


def _results(path):
    """Those of an earlier run."""
    try:
        found = Results.read(path)
        found.path, found.given = path, compare.arguments_of(found)
        compare.check_machine(found, found)
    except (OSError, LookupError, ValueError, TypeError, AttributeError) as error:
        error = f"{type(error).__name__}: {error}"
        raise argparse.ArgumentTypeError(
            f"{path!r} is no file that this version's --json wrote, without --tune ({error})"
        ) from None
    return found


def _parser():
    name = command_line.name_of("shmemkit.bench")
    text = (
        "Without a command, --compare FILE runs the command that wrote FILE, with the options that are given."
    )
    parser = _Parser(
        prog=name, description="How fast it is on this machine.", epilog=text, allow_abbrev=False
    )
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)

    def command(run, name, text):
        about = text[0].upper() + text[1:] + "."
        found = commands.add_parser(name, help=text, description=about, allow_abbrev=False)
        found.set_defaults(run=run, plot=None, iters=None, tune=None, usual_sizes=SIZES, sms=None)
        found.add_argument("--json", type=_file, metavar="FILE", help="write the results there, too")
        found.add_argument("--replays", type=_positive, metavar="N", help="of each CUDA graph (20)")
        text = f"measure all N times, and take the median (1; with --compare {compare.RUNS})"
        found.add_argument("--runs", type=_positive, metavar="N", help=text)
        text = "measure in groups of N consecutive ranks, all at once; the first one's results are shown"
        found.add_argument("--group", type=_positive, metavar="N", help=text)
        text = "symmetric memory of each group, as 8G; default 8G, on the emulator 128M"
        found.add_argument("--group-heap", metavar="SIZE", help=text)
        text = "print what has become slower than in a FILE of --json; the exit status is 1 then"
        found.add_argument("--compare", type=_results, metavar="FILE", help=text)
        return found

    def versus(found, names, text, default, of_all=None):
        text = f"compare with some of {text}; '' is none; default {of_all or '%(default)s'}"
        known = _some_of(lambda: tuple(names))
        found.add_argument("--vs", type=known, default=default, metavar="A,B", help=text)
        if NCCL in names:
            text = "the libnccl.so.2 to compare with; default: the installed one"
            found.add_argument("--nccl", type=_library, metavar="FILE", help=text)

    def budgeted(found):
        text = "measure the methods once more within each of these budgets of multiprocessors, as 8,16,32"
        found.add_argument("--sms", type=_integers, metavar="N,N", help=text)

    def sized(found, meaning):
        usual = f"default {SIZES}, on the emulator {EMULATED_SIZES}"
        text = f"bytes {meaning}: 8K:256M (by factors of 8), 8K:1M:2, 8K,1M; {usual}"
        found.add_argument("--sizes", type=_by(parse_sizes), metavar="SIZES", help=text)
        text = "calls in a CUDA graph (20 up to 4 MB, 5 above)"
        found.add_argument("--iters", type=_positive, metavar="N", help=text)
        text = f"plot time against size; the suffix is the format: {', '.join(PLOTS)}"
        found.add_argument("--plot", type=_plot, metavar="FILE", help=text)

    for op, text in (
        ("all_gather", "every method of AllGather, and NCCL, by size"),
        ("all_reduce", "every method of AllReduce, sums, and NCCL, by size"),
        ("reduce_scatter", "every method of ReduceScatter, sums, and NCCL, by size"),
        ("all_to_all", "every method of AllToAll, and NCCL, by size"),
        ("broadcast", "every method of Broadcast, from rank 0, and NCCL, by size"),
        ("gather", "every method of Gather, to rank 0, and NCCL, by size"),
        ("scatter", "every method of Scatter, from rank 0, and NCCL, by size"),
        ("reduce", "every method of Reduce, sums, to rank 0, and NCCL, by size"),
    ):
        found = command(collectives.run, op, text)
        sized(found, "of the full array, rounded down to a multiple of 16 per rank, or up to an element")
        text = (
            f"{', '.join(NCCL_WAYS)} (NCCL with plain buffers, with those of ncclMemAlloc that a graph "
            "registers, with windows, by copy engines), torch_nccl (NCCL through PyTorch) and PyTorch's "
            "symmetric memory: torch_symm (all_gather), torch_one_shot, torch_two_shot (all_reduce)"
        )
        versus(found, collectives.PEERS, text, None, "all of NCCL's")
        known = _some_of(functools.partial(collectives.methods, op))
        found.add_argument("--methods", type=known, metavar="A,B", help="default: all of them, and auto")
        found.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default %(default)s")
        text = "where the result goes: private or symmetric memory, or both with a comma; default private"
        found.add_argument("--out", type=_some_of(lambda: tuning.OUTPUTS), metavar="A,B", help=text)
        text = (
            "write what was the fastest into the tuning table, from which method='auto' takes it: by default "
            f"into the user's, {tuning.user_file()}, whose folder is made. The default is then every method "
            f"but auto, --sizes {TO_TUNE['sizes']}, --vs '', --out private,symmetric"
        )
        budgeted(found)
        found.add_argument("--tune", nargs="?", type=_path, const=USERS, metavar="FILE", help=text)

    text = "the tuning table of all collectives: the methods that may be the fastest, each at some sizes"
    whole = command(tune_all.run, "tune", text)
    text = f"some of {', '.join(CASES)}; default: all"
    known = _some_of(lambda: tuple(CASES))
    whole.set_defaults(usual_sizes=tune_all.SIZES)
    whole.add_argument("--ops", type=known, default=list(CASES), metavar="A,B", help=text)
    sized(whole, "of the full array; between two with different methods it measures one more")
    whole.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default %(default)s")
    text = "begin no case later than so many seconds from the start; default %(default)s"
    whole.add_argument("--seconds", type=_positive, default=tune_all.SECONDS, metavar="N", help=text)
    text = f"the table; default: the user's, {tuning.user_file()}. FILE.part keeps what is not complete yet"
    whole.add_argument("--table", type=_path, metavar="FILE", help=text)

    experts = command(
        expert_parallel.run, "expert_parallel", "dispatch and combine of ExpertParallel, and by NCCL"
    )
    for option, default, text in expert_parallel.OPTIONS:
        text += "; default %(default)s"
        experts.add_argument(option, type=_positive, default=default, metavar="N", help=text)
    text = "rows that a rank receives at most, in one buffer: for a prefill; default: a place for each row"
    experts.add_argument("--max-rows", type=_positive, metavar="N", help=text)
    experts.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default %(default)s")
    text = "nccl and nccl_once (a row for each rank)"
    versus(experts, expert_parallel.PEERS, text, ",".join(expert_parallel.PEERS), "both")

    def of_shapes(found, meaning, module, methods, peers, default=None):
        text = f"M, N and K of {meaning}; default %(default)s"
        found.add_argument(
            "--shapes", type=_by(parse_shapes), default=module.SHAPES, metavar="MxNxK,..", help=text
        )
        found.add_argument("--dtype", choices=module.DTYPES, default="bfloat16", help="default %(default)s")
        text = f"some of {', '.join(methods)}; default {default or 'auto, and all for so many nodes'}"
        known = _some_of(lambda: methods)
        found.add_argument("--methods", type=known, default=default, metavar="A,B", help=text)
        versus(found, peers, ", ".join(peers.values()), ",".join(peers))
        budgeted(found)
        text = "calls in a CUDA graph (by their size, 2 to 50)"
        found.add_argument("--iters", type=_positive, metavar="N", help=text)

    products = command(gemm.run, "gemm", "every method of Gemm, and cuBLAS, on each rank's GPU")
    of_shapes(products, "the products", gemm, gemm.METHODS, gemm.PEERS, default="auto,sm80")
    text = "sm90 by these tiles, too, as 64x256,128x256; default: none"
    products.add_argument("--tiles", type=grouped_gemm.parse_tiles, default="", metavar="MxN,..", help=text)
    text = "tn: both operands by rows of K, as in a linear layer; nn: both by rows; default %(default)s"
    products.add_argument("--layout", choices=gemm.LAYOUTS, default="tn", help=text)

    text = "GroupedGemm, torch._grouped_mm, a loop of cuBLAS, and one dense product, on each rank's GPU"
    experts = command(grouped_gemm.run, "grouped_gemm", text)
    text = "experts, rows of each, N, K; with zipf, rows of a mean expert; default %(default)s"
    experts.add_argument(
        "--shapes",
        type=_by(grouped_gemm.parse_shapes),
        default=grouped_gemm.SHAPES,
        metavar="ExROWSxNxK[zipf],..",
        help=text,
    )
    experts.add_argument(
        "--dtype", choices=grouped_gemm.DTYPES, default="bfloat16", help="default %(default)s"
    )
    text = f"some of {', '.join(grouped_gemm.METHODS)}; default auto"
    known = _some_of(lambda: grouped_gemm.METHODS)
    experts.add_argument("--methods", type=known, default="auto", metavar="A,B", help=text)
    text = "sm90 by these tiles, too, as 64x256,128x256; default: none"
    experts.add_argument(
        "--tiles", type=_by(grouped_gemm.parse_tiles), default="", metavar="MxN,..", help=text
    )
    versus(experts, grouped_gemm.PEERS, ", ".join(grouped_gemm.PEERS.values()), ",".join(grouped_gemm.PEERS))
    text = "calls in a CUDA graph (by their size, 2 to 50)"
    experts.add_argument("--iters", type=_positive, metavar="N", help=text)

    text = "every method of AllGatherGemm, and NCCL's all-gather and then cuBLAS"
    meaning = "the whole layer, of which each rank has a part of M and N"
    of_shapes(command(ag_gemm.run, "ag_gemm", text), meaning, layers, ag_gemm.METHODS, ag_gemm.PEERS)
    for op, (_, host) in gemm_reduce.OPS.items():
        text = f"every method of {host.__name__}, and cuBLAS and then NCCL"
        meaning = "the whole layer, of which each rank has a part of N"
        methods, peers = gemm_reduce.methods(op), gemm_reduce.PEERS[op]
        of_shapes(command(gemm_reduce.run, op, text), meaning, layers, methods, peers)

    text = "every method of AllReduceRMSNorm, AllReduce alone, and PyTorch's all-reduces and then rms_norm"
    norms = command(rms_norm.run, "all_reduce_rms_norm", text)
    known, text = _by(rms_norm.parse_shapes), "tokens and elements of a row; default %(default)s"
    norms.add_argument("--shapes", type=known, default=rms_norm.SHAPES, metavar="TxH,..", help=text)
    norms.add_argument("--dtype", choices=rms_norm.DTYPES, default="bfloat16", help="default %(default)s")
    known, text = _some_of(lambda: rms_norm.METHODS), f"some of {', '.join(rms_norm.METHODS)}; default all"
    norms.add_argument("--methods", type=known, metavar="A,B", help=text)
    versus(norms, rms_norm.PEERS, ", ".join(rms_norm.PEERS), ",".join(rms_norm.PEERS))
    norms.add_argument("--iters", type=_positive, metavar="N", help="calls in a CUDA graph (20)")

    text = "AttentionCombine, AllGather and AllToAll of as many bytes, and NCCL and PyTorch's operations"
    rows = command(attention_combine.run, "attention_combine", text)
    known = _by(functools.partial(parse_shapes, names="BATCHxHEADSxHEAD_DIM"))
    text = "batch, heads, elements of a row; default %(default)s"
    rows.add_argument("--shapes", type=known, default=attention_combine.SHAPES, metavar="BxHxD,..", help=text)
    text = "default %(default)s"
    rows.add_argument("--dtype", choices=attention_combine.DTYPES, default="bfloat16", help=text)
    known, text = _some_of(lambda: tuple(attention_combine.FORMS)), "all_gather, all_to_all; default both"
    rows.add_argument("--methods", type=known, metavar="A,B", help=text)
    peers = attention_combine.PEERS
    versus(rows, peers, ", ".join(peers), ",".join(peers))
    rows.add_argument("--iters", type=_positive, metavar="N", help="calls in a CUDA graph (20)")

    text = "FlashDecode, and attention of PyTorch's and FlashInfer's with NCCL"
    decode = command(flash_decode.run, "flash_decode", text)
    text = "tokens of a rank, heads of k and v, heads of q for each of them; default %(default)s"
    decode.add_argument(
        "--shapes", type=_by(parse_shapes), default=flash_decode.SHAPES, metavar="TxHxG,..", help=text
    )
    decode.add_argument("--batch", type=_positive, default=1, metavar="N", help="sequences; default 1")
    text = "default %(default)s"
    decode.add_argument("--head-dim", type=int, choices=flash_decode.HEAD_DIMS, default=128, help=text)
    decode.add_argument("--dtype", choices=flash_decode.DTYPES, default="bfloat16", help=text)
    text = (
        "sdpa_nccl (PyTorch's attention to a rank's part, NCCL's all-gather, PyTorch's combination), "
        "flashinfer (likewise), sdpa (PyTorch's attention alone) and copy (of half of k and v)"
    )
    versus(decode, flash_decode.PEERS, text, ",".join(flash_decode.PEERS), "all")
    text = "calls in a CUDA graph (by their size, 2 to 50)"
    decode.add_argument("--iters", type=_positive, metavar="N", help=text)

    layer_shapes = _by(functools.partial(parse_shapes, names=LAYER))
    for op, host in (
        ("ag_grouped_gemm", "AllGatherGroupedGemm"),
        ("grouped_gemm_rs", "GroupedGemmReduceScatter"),
    ):
        text = f"every method of {host}, and NCCL with torch._grouped_mm and with a loop of cuBLAS"
        layer, methods, peers = (
            command(expert_layers.run, op, text),
            expert_layers.METHODS[op],
            expert_layers.PEERS,
        )
        text = "of the whole layer, experts, and experts of a token; default %(default)s"
        layer.add_argument(
            "--shapes", type=layer_shapes, default=expert_layers.SHAPES, metavar=f"{LAYER},..", help=text
        )
        layer.add_argument(
            "--dtype", choices=expert_layers.DTYPES, default="bfloat16", help="default %(default)s"
        )
        text = f"some of {', '.join(methods)}; default auto, and all for so many nodes"
        known = _some_of(functools.partial(expert_layers.METHODS.get, op))
        layer.add_argument("--methods", type=known, metavar="A,B", help=text)
        versus(layer, peers, ", ".join(peers.values()), ",".join(peers))
        text = "calls in a CUDA graph (by their size, 2 to 50)"
        layer.add_argument("--iters", type=_positive, metavar="N", help=text)

    barriers = command(barrier.run, "barrier", "how long a barrier of the streams of all ranks takes")
    text = f"{', '.join(NCCL_WAYS)} (NCCL's all-reduce of one element) and nvshmem"
    versus(barriers, barrier.PEERS, text, ",".join(barrier.PEERS), "all of them")
    text = "calls in a CUDA graph (20)"
    barriers.add_argument("--iters", type=_positive, metavar="N", help=text)

    peer = command(p2p.run, "p2p", "what one rank can send to another: bandwidth, and latency of a signal")
    sized(peer, "that each rank sends, not rounded")
    text = "blocks of the kernels; default %(default)s"
    peer.add_argument("--blocks", type=_integers, default="4,8,16,32,64,132", metavar="N,N", help=text)

    host = command(launch.run, "launch", "what a launch costs the host, and a kernel in a CUDA graph")
    host.add_argument("--batches", type=_positive, default=21, metavar="N", help="default %(default)s")
    text = "launches per batch; default %(default)s"
    host.add_argument("--batch-size", type=_positive, default=200, metavar="N", help=text)
    text = "the first launch in a new process, too, by the state of shmemkit's cache; with one rank"
    host.add_argument("--first", action="store_true", help=text)
    if choose_backend()[0] == "emulator":
        for name, given in EMULATED.items():
            commands.choices[name].set_defaults(**given)
    return parser


def parse(arguments, tables=True):
    """-> the options. SystemExit(2) on all ranks, and a message from rank 0, for what is not allowed, or, for
    `tables`, not installed."""
    options: Any = None
    status = None
    try:
        options = _parse(arguments, tables)
    except SystemExit as leaving:
        status = leaving.code
    comm = default_comm() if current_host() is None else None
    if comm is not None:
        statuses = comm.allgather(status)
        status = next((s for s in statuses if s is not None), None)
        if status:
            time.sleep(0.2)  # let the launcher forward what rank 0 says before it ends us
    if status is not None:
        sys.exit(status)
    return options


def _parse(arguments, tables):
    parser = _parser()
    alone = _Parser(prog=parser.prog, add_help=False, allow_abbrev=False)
    alone.add_argument("command", nargs="?")
    alone.add_argument("--compare", type=_results, metavar="FILE")
    if arguments and arguments[0].startswith("-") and (old := alone.parse_known_args(arguments)[0].compare):
        arguments = [*old.given, *arguments]
    options = parser.parse_args(arguments)
    options.runs = options.runs or (compare.RUNS if options.compare else 1)
    if old := options.compare:
        if options.json and os.path.realpath(options.json) == os.path.realpath(old.path):
            parser.error(f"--json is {options.json}, the file to compare with; it must be another one")
        try:
            compare.check_settings(parser.parse_args(old.given), options)
        except ValueError as error:
            parser.error(f"--compare {old.path}: {error}")
    if tables and _is_first() and (found := report.missing(options.plot)):
        parser.error(found)
    if options.command in CASES:
        _complete(options)
        if _is_first():
            try:  # before anything is measured
                if "auto" in options.methods:
                    tuning.tables()
                if options.tune and options.tune.exists():
                    tuning.read(options.tune)
            except ValueError as error:
                parser.error(str(error))
    options.arguments = arguments
    return options


def _complete(options):
    """What a collective's command measures, where it was not said."""
    options.file_named = options.tune is not USERS
    if not options.file_named:
        options.tune = tuning.user_file()
    default = TO_TUNE if options.tune else USUAL
    options.dtype = as_dtype(options.dtype)
    known = collectives.methods(options.command)
    options.methods = options.methods or [m for m in known if not options.tune or m != "auto"]
    options.usual_sizes = default["sizes"]
    options.vs = default["vs"] if options.vs is None else options.vs
    options.out = options.out or default["out"]


def measure(world, options):
    """-> Results, the same on every rank. Collective."""
    if options.command == "p2p" and world.n_ranks == 1:
        raise SystemExit(
            "p2p: there is one rank; it needs two or more, as in shmemkit run -n 2 -m shmemkit bench p2p"
        )
    if options.command == "tune" and not options.table and world.backend.name == "emulator":
        raise SystemExit(
            "tune: this is the emulator, whose times mean nothing. To try the command out, give --table FILE"
        )
    if options.tune and not options.file_named and world.backend.name == "emulator":
        raise SystemExit(
            "--tune: this is the emulator, whose times mean nothing. To try the option out, name a FILE"
        )
    if "sizes" in options and not options.sizes:
        emulated = world.backend.name == "emulator"
        options.sizes = parse_sizes(EMULATED_SIZES if emulated else options.usual_sizes)
    results = Results(world, options.arguments)
    if options.compare:
        try:
            compare.check_machine(options.compare, results)
        except ValueError as error:
            raise SystemExit(f"--compare {options.compare.path}: {error}") from None
    _run(world, options, results)
    if options.compare and compare.Comparison(options.compare, results).slower:
        _run(world, options, results)  # again: most that is slow once is so by chance
    return results


def _run(world, options, results):
    for run in range(options.runs):
        name = options.command + (f", run {run + 1} of {options.runs}" if options.runs > 1 else "")
        options.run(world, results, options, functools.partial(_progress, name))
    results.compare()


@contextlib.contextmanager
def _progress(command, total):
    """-> step(text), which says that the next of `total` steps begins"""
    with showing(command, total) as task:

        def step(text):
            task.done, task.detail = task.done + bool(task.detail), text

        yield step


def main(arguments=None):
    """Run the command that `arguments` (default sys.argv[1:]) name. -> exit status: 1 if a result was wrong,
    or --compare found something slower, failed, or nothing to compare.

    Every rank calls it.
    """
    options = parse(sys.argv[1:] if arguments is None else arguments)
    for name, value in NO_MULTICAST.items() if getattr(options, "vs", None) else ():
        os.environ.setdefault(name, value)
    with sk.init() as world:
        results = measure(_group_of(world, options), options)
        comparison = compare.Comparison(options.compare, results) if options.compare else None
        if world.rank == 0:
            report.show(results)
            if comparison:
                report.show_comparison(comparison)
            sys.stdout.flush()
            if options.json:
                results.write(options.json)
            if options.plot:
                report.plot(results, options.plot)
            if options.tune:
                _tune(world, results, options)
    return int(results.failed or bool(comparison and not comparison.passed))


def _group_of(world, options):
    """-> the World, or with --group this rank's group"""
    if not options.group:
        return world
    if world.n_ranks % options.group:
        raise SystemExit(f"--group is {options.group}; it must divide the number of ranks, {world.n_ranks}")
    heap = options.group_heap or ("128M" if world.backend.name == "emulator" else "8G")
    return world.split(world.rank // options.group, heap=heap)


def _tune(world, results, options):
    op, path = options.command, options.tune
    try:
        entry = tune.entry_of(world, op, results.rows, collectives.host_of(op).methods)
    except ValueError as error:
        raise SystemExit(f"--tune: {error}. {path} is unchanged") from None
    tuning.update(path, op, entry)
    report.show_choices(entry, path)


if __name__ == "__main__":
    sys.exit(main())
