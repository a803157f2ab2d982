"""``python -m shmemkit.emu -n 4 script.py``, or ``-m module``: on several ranks of one process. See
docs/scripts.md."""

import argparse
import json
import os
import platform
import sys
from importlib import metadata

from shmemkit import __version__
from shmemkit.support import command_line

from .exploration import explore
from .network import DELIVERIES, checked_delivery
from .run import schedule_of


class Parser(argparse.ArgumentParser):
    def error(self, message):
        """As argparse's, but for the exit status: 2 is a race."""
        self.print_usage(sys.stderr)
        self.exit(1, f"{self.prog}: error: {message}\n")


def parser():
    result = Parser(
        prog=command_line.name_of("shmemkit.emu"),
        usage="%(prog)s [options] (script.py | -m module) [arguments]",
        description="Run a script, or a module, that uses shmemkit, or nvshmem4py, numba-cuda, CuPy and "
        "mpi4py, on several ranks without a GPU.",
        epilog="Exit status: 0 clean, 1 the script failed or the options are wrong, 2 race, 3 deadlock; or "
        "the script's own, of 4 and more.",
        allow_abbrev=False,
    )
    result.add_argument("-n", "-np", type=_positive, default=2, metavar="N", help="ranks (default 2)")
    result.add_argument("--local-size", type=_positive, metavar="L", help="ranks per node (default: all)")
    result.add_argument(
        "--races", action="store_true", default=None, help="report accesses that nothing orders"
    )
    result.add_argument("--gpu", help='to emulate, as "H200" (default) or "A100,sms=8"')
    text = f"when messages arrive: {', '.join(DELIVERIES)}, or as 'node 1 late'"
    result.add_argument("--delivery", type=_delivery, metavar="WHEN", help=text)
    schedule = result.add_mutually_exclusive_group()
    schedule.add_argument("--seed", type=int, help="a random schedule, the same each time")
    schedule.add_argument(
        "--explore",
        type=_positive,
        metavar="K",
        help="run with the seeds 0 to K - 1 and each delivery, until one fails",
    )
    result.add_argument("--timeline", metavar="FILE", help="write a timeline, for ui.perfetto.dev")
    result.add_argument("--json", type=_file, metavar="FILE", help="write the outcome there, too")
    result.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        metavar="module",
        help="a module in the place of the script, as python -m runs it, and its arguments",
    )
    result.add_argument("script", nargs="?")
    result.add_argument("arguments", nargs=argparse.REMAINDER)
    return result


def _positive(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"it is {text!r}; it must be 1 or more")
    return int(text)


def _delivery(text):
    try:
        return checked_delivery("it", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _file(path):
    """A file that can be written; an older outcome is gone."""
    try:
        open(path, "w").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


def main(argv=None):
    """-> the exit status"""
    options_of = parser()
    options = options_of.parse_args(argv)
    if options.module:
        options.script, *options.arguments = options.module
    if options.script is None:
        options_of.error("a script, or a module after -m, is required")
    if not options.module and not os.path.isfile(options.script):
        options_of.error(f"{options.script}: no such script")
    try:
        from shmemkit.emulated_scripts.runner import Module, Script, status_of, text_of
    except ImportError as error:
        sys.exit(f"{options_of.prog}: {error}; pip install 'shmemkit[cu13]' or numba-cuda")
    for line in command_line.late_options(options_of, options, options.arguments):
        command_line.say(f"{options_of.prog}: {line}")
    error = found = None
    try:
        script = (Module if options.module else Script)(options.script, options.arguments)
        if options.explore is None:
            _run(script, options)
        else:
            found = _explore(script, options)
            error = found.failure
    except (Exception, KeyboardInterrupt) as e:
        error = e
    sys.stdout.flush()
    status = status_of(error)
    text = "" if error is None else text_of(error)
    if found is not None:
        text = f"{text}\n{str(found).splitlines()[0]}".strip()
    if text:
        print(text, file=sys.stderr, flush=True)
    if options.json:
        _write(options, status, error, text, found)
    return status


def _run(script, options):
    from shmemkit.emulated_scripts.runner import run_script

    names = "local_size races delivery seed gpu timeline".split()
    run_script(script, options.n, **{name: getattr(options, name) for name in names})


def _explore(script, options):
    from shmemkit.emulated_scripts.runner import surroundings

    with surroundings():
        return explore(
            script.program,
            options.n,
            seeds=range(options.explore),
            deliveries=options.delivery,
            races=schedule_of(options.races)[0],
            local_size=options.local_size,
        )


def _write(options, status, error, text, found):
    races, delivery, seed = schedule_of(options.races, options.delivery, options.seed)
    if found is not None:
        delivery, seed = found.delivery, found.seed
    from shmemkit.emulated_scripts.runner import OUTCOMES

    result = {
        "outcome": OUTCOMES.get(status, "failed"),
        "status": status,
        "report": text,
        "races": [_race(r) for r in getattr(error, "races", ())],
        "seed": seed,
        "delivery": delivery,
        "schedules": 1 if found is None else found.runs,
        "n_ranks": options.n,
        "n_pes": options.n,  # its earlier name, in this version
        "script": options.script,
        "versions": _versions(),
    }
    with open(options.json, "w") as file:
        json.dump(result, file, indent=1, default=str)
        file.write("\n")


def _race(race):
    def fields(of, names):
        return {name: getattr(of, name) for name in names.split()}

    of_access = "what rank block thread kernel file line source"
    sides = {side: fields(getattr(race, side), of_access) for side in ("first", "second")}
    return {**fields(race, "array index rank"), **sides, "missing": race.missing}


def _versions():
    packages = {name: metadata.version(name) for name in ("numba", "numba-cuda", "numpy")}
    return {"shmemkit": __version__, "python": platform.python_version(), **packages}


if __name__ == "__main__":
    sys.exit(main())
