"""``python -m shmemkit.bench``: the command line."""

import contextlib
import functools
import os
import sys
import time
from typing import Any

import shmemkit as sk
from shmemkit.collectives import tuning
from shmemkit.comm.choice import default as default_comm
from shmemkit.emu.run import current_host
from shmemkit.runtime.symmetric_memory import as_dtype
from shmemkit.runtime.world import choose_backend
from shmemkit.support import command_line
from shmemkit.support.progress import showing

from . import compare, report, tune
from .cases import CASES, host_of, methods
from .collectives import TO_TUNE, USERS, USUAL
from .commands import COMMANDS, EMULATED_SIZES, add_parser
from .options import Parser, is_first, results_file
from .results import Results
from .sizes import parse_sizes

# NVLink multicast is off for all that are compared, ours too, unless the environment says otherwise.
NO_MULTICAST = {
    "NVSHMEM_DISABLE_NVLS": "1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}


def _parser():
    text = (
        "Without a command, --compare FILE runs the command that wrote FILE, with the options that are given."
    )
    parser = Parser(
        prog=command_line.name_of("shmemkit.bench"),
        description="How fast it is on this machine.",
        epilog=text,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    emulated = choose_backend()[0] == "emulator"
    for command in COMMANDS.values():
        add_parser(commands, command, emulated)
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
    alone = Parser(prog=parser.prog, add_help=False, allow_abbrev=False)
    alone.add_argument("command", nargs="?")
    alone.add_argument("--compare", type=results_file, metavar="FILE")
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
    if tables and is_first() and (found := report.missing(options.plot)):
        parser.error(found)
    if options.command in CASES:
        _complete(options)
        if is_first():
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
    known = methods(options.command)
    options.methods = options.methods or [m for m in known if not options.tune or m != "auto"]
    options.usual_sizes = default["sizes"]
    options.vs = default["vs"] if options.vs is None else options.vs
    options.out = options.out or default["out"]


def take_usual_sizes(world, options):
    """Fill in the sizes, which depend on the backend, where none were given."""
    if "sizes" in options and not options.sizes:
        emulated = world.backend.name == "emulator"
        options.sizes = parse_sizes(EMULATED_SIZES if emulated else options.usual_sizes)


def measure(world, options):
    """-> Results, the same on every rank. Collective."""
    if options.tune and not options.file_named and world.backend.name == "emulator":
        raise SystemExit(
            "--tune: this is the emulator, whose times mean nothing. To try the option out, name a FILE"
        )
    take_usual_sizes(world, options)
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
    with command_line.messages_only(command_line.name_of("shmemkit.bench")):
        if current_host() is None:
            default_comm()  # the ranks find each other
        choose_backend()
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
        entry = tune.entry_of(world, op, results.rows, host_of(op).methods)
    except ValueError as error:
        raise SystemExit(f"--tune: {error}. {path} is unchanged") from None
    tuning.update(path, op, entry)
    report.show_choices(entry, path)


if __name__ == "__main__":
    sys.exit(main())
