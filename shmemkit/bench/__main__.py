"""``python -m shmemkit.bench``: the command line."""

import argparse
import os
import sys
import time

import shmemkit as sk
from shmemkit.emu.run import current_host
from shmemkit.memory import as_dtype
from shmemkit.world import launched_by_mpi

from . import all_gather, launch, p2p, report
from .results import Results
from .sizes import parse_sizes

DTYPES = ("bfloat16", "float16", "float32")


class _Parser(argparse.ArgumentParser):
    """Of all ranks, the first one speaks."""

    def _print_message(self, message, file=None):
        if _is_first():
            super()._print_message(message, file)

    def exit(self, status=0, message=None):
        if status and launched_by_mpi() and not _is_first():
            time.sleep(1.0)  # let rank 0 speak before the end of this one ends it, too
        super().exit(status, message)


def _is_first():
    """Whether this is rank 0, before there is a World."""
    host = current_host()
    if host is not None:
        return host.pe == 0
    if launched_by_mpi():
        from mpi4py import MPI

        return MPI.COMM_WORLD.Get_rank() == 0
    return True


def _sizes(text):
    try:
        return parse_sizes(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _positive(text):
    if not text.strip().isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r}: an integer of 1 or more is allowed")
    return int(text)


def _integers(text):
    return list(dict.fromkeys(_positive(part) for part in text.split(",")))


def _some_of(allowed):
    """A list with commas of the words that ``allowed()`` gives."""

    def parse(text):
        words = list(dict.fromkeys(filter(None, (part.strip() for part in text.split(",")))))
        for word in words:
            if word not in allowed():
                raise argparse.ArgumentTypeError(f"{word!r}: {', '.join(allowed())} are allowed")
        return words

    return parse


def _file(path):
    if _is_first() and not os.path.isdir(os.path.dirname(path) or "."):
        raise argparse.ArgumentTypeError(f"{path!r}: its folder does not exist")
    return path


def _parser():
    parser = _Parser(prog="python -m shmemkit.bench", description="How fast it is on this machine.")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)

    def command(run, name, text):
        found = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        found.set_defaults(run=run, plot=None, iters=None)
        found.add_argument("--json", type=_file, metavar="FILE", help="write the results there, too")
        found.add_argument("--replays", type=_positive, metavar="N", help="of each CUDA graph (20)")
        return found

    def sized(found, default):
        text = "bytes: 8K:256M (by factors of 8), 8K:1M:2, 8K,1M; default %(default)s"
        found.add_argument("--sizes", type=_sizes, default=default, metavar="SIZES", help=text)
        text = "calls in a CUDA graph (20 up to 4 MB, 5 above)"
        found.add_argument("--iters", type=_positive, metavar="N", help=text)
        text = "plot time against size; the suffix is the format"
        found.add_argument("--plot", type=_file, metavar="FILE", help=text)

    gather = command(all_gather.run, "all_gather", "every method of AllGather, and NCCL, by size")
    sized(gather, "8K:256M")
    text = "compare with nccl, torch (PyTorch's symmetric memory), or both (a comma); default %(default)s"
    gather.add_argument("--vs", type=_some_of(lambda: tuple(all_gather.PEERS)), default="nccl", help=text)
    known = _some_of(all_gather.methods)
    gather.add_argument("--methods", type=known, metavar="A,B", help="default: all of them, and auto")
    gather.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="default %(default)s")
    text = "where the result goes: private or symmetric memory, or both with a comma; default %(default)s"
    gather.add_argument("--out", type=_some_of(lambda: all_gather.OUTPUTS), default="private", help=text)

    peer = command(p2p.run, "p2p", "what one rank can send to another: bandwidth, and latency of a signal")
    sized(peer, "8K:256M")
    text = "blocks of the kernels; default %(default)s"
    peer.add_argument("--blocks", type=_integers, default="4,8,16,32,64,132", metavar="N,N", help=text)

    host = command(launch.run, "launch", "what a launch costs the host, and a kernel in a CUDA graph")
    host.add_argument("--batches", type=_positive, default=21, metavar="N", help="default %(default)s")
    text = "launches per batch; default %(default)s"
    host.add_argument("--batch-size", type=_positive, default=200, metavar="N", help=text)
    return parser


def parse(arguments):
    """-> the options. SystemExit(2), and a message from rank 0, for what is not allowed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if _is_first() and (found := report.missing(options.plot)):
        parser.error(found)
    if options.command == "all_gather":
        options.methods = options.methods or all_gather.methods()
        options.dtype = as_dtype(options.dtype)
    options.arguments = arguments
    return options


def measure(world, options):
    """-> Results, the same on every rank. Collective."""
    if options.command == "p2p" and world.n_ranks == 1:
        raise SystemExit("p2p needs two ranks or more: ./mpi_launch.sh -n 2 -m shmemkit.bench p2p")
    results = Results(world, options.arguments)
    options.run(world, results, options, report.progress_of(world))
    results.compare()
    return results


def main(arguments=None):
    """Run the command that `arguments` (default sys.argv[1:]) name. -> exit status: 1 if a result was wrong.

    Every rank calls it.
    """
    options = parse(sys.argv[1:] if arguments is None else arguments)
    with sk.init() as world:
        results = measure(world, options)
        if world.rank == 0:
            report.show(results)
            sys.stdout.flush()
            if options.json:
                results.write(options.json)
            if options.plot:
                report.plot(results, options.plot)
    return int(results.failed)


if __name__ == "__main__":
    sys.exit(main())
