"""``shmemkit`` and ``python -m shmemkit``: the command line."""

import argparse
import sys

from . import __version__, mpirun


def main(arguments=None):
    """Runs the command that `arguments` (default sys.argv[1:]) name. -> exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["run"]:  # reads its own: the options behind the script are the program's
        return mpirun.main(arguments[1:])
    parser = argparse.ArgumentParser(prog="shmemkit", description="SHMEM kernels in Python.")
    parser.add_argument("--version", action="version", version=f"shmemkit {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    commands.add_parser("run", help=mpirun.HELP)
    commands.add_parser(
        "doctor",
        help="say what is installed, which backend init() picks, and what to do about what is missing",
        description="Say what is installed, how the GPUs are linked, which backend init() picks, and what to "
        "do about what is missing. Initializes nothing. Exit status 1 if that backend lacks anything.",
    )
    parser.parse_args(arguments)
    from . import doctor

    return doctor.main()


if __name__ == "__main__":
    sys.exit(main())
