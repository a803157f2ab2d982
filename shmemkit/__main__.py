"""``shmemkit`` and ``python -m shmemkit``: the command line."""

import argparse
import importlib
import sys

from . import __version__
from .tools import mpirun


def main(arguments=None):
    """Runs the command that `arguments` (default sys.argv[1:]) name. -> exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    # These read their own: the options after a script are the script's.
    if arguments[:1] == ["run"]:
        try:
            return mpirun.main(arguments[1:])
        except KeyboardInterrupt:  # while an MPI was asked
            return 130
    if arguments[:1] == ["check"]:
        return importlib.import_module(".tools.check.command", __package__).main(arguments[1:])
    if arguments[:1] == ["timeline"]:
        return importlib.import_module(".timeline", __package__).main(arguments[1:])
    if arguments[:2] == ["bench", "everything"]:
        return importlib.import_module(".tools.everything.command", __package__).main(arguments[2:])
    if arguments[:1] in (["emu"], ["bench"]):
        return importlib.import_module(f".{arguments[0]}.__main__", __package__).main(arguments[1:])
    parser = argparse.ArgumentParser(prog="shmemkit", description="SHMEM kernels in Python.")
    parser.add_argument("--version", action="version", version=f"shmemkit {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    commands.add_parser("run", help=mpirun.HELP)
    commands.add_parser("emu", help="run a script on the CPU emulator, and find its races: shmemkit-emu")
    commands.add_parser("bench", help="how fast it is on this machine")
    commands.add_parser("timeline", help="the summary and the picture of a recorded timeline")
    commands.add_parser("check", help="check that every operation is right on this machine, with this Python")
    asked = commands.add_parser(
        "doctor",
        help="say what is installed, which backend init() picks, and what to do about what is missing",
        description="Say what is installed, how the GPUs are linked, which backend init() picks, and what to "
        "do about what is missing. Initializes nothing. Exit status 1 if that backend lacks anything.",
    )
    asked.add_argument(
        "--hosts",
        action="store_true",
        help="under a launcher, as shmemkit run -n 8 -H node1:4,node2:4 -m shmemkit doctor --hosts: compare "
        "versions, drivers and network settings of all ranks, and try which reach which. Exit status 1 if "
        "something differs, or a rank is not reached",
    )
    options = parser.parse_args(arguments)
    name = "doctor_hosts" if options.hosts else "doctor"
    return importlib.import_module(f".tools.{name}", __package__).main()


if __name__ == "__main__":
    sys.exit(main())
