"""What the commands have in common: their names, whole messages, and options that come too late."""

import contextlib
import os
import re
import sys
import time

STANDARD_ERROR = 2


def name_of(module):
    """-> the console script that this program was started by, or ``python -m module``"""
    name = os.path.basename(sys.argv[0])
    if name == "shmemkit":
        return f"shmemkit {module.rpartition('.')[2]}"
    return name if name.startswith("shmemkit") else f"python -m {module}"


def say(text):
    """Write `text` and the end of its last line to standard error by one write: ranks that write at the same
    time do not mix."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()


def say_at_last(text):
    """As ``say``, to the descriptor of standard error: PyTorch and test runners put a buffer in place of
    ``sys.stderr``, which nobody reads when the program ends. A log file in its place gets the text, too."""
    data = f"{text}\n".encode(errors="backslashreplace")
    descriptor = None
    try:
        sys.stderr.flush()
        descriptor = sys.stderr.fileno()
    except (AttributeError, OSError, ValueError):  # there is none, it is closed, or it has no file
        pass
    for file in {STANDARD_ERROR, descriptor} - {None}:
        _write_all(file, data)


def _write_all(descriptor, data):
    give_up = time.monotonic() + 5.0
    while data and time.monotonic() < give_up:
        try:
            data = data[os.write(descriptor, data) :]
        except BlockingIOError:  # a pipe that is full
            time.sleep(0.01)
        except OSError:  # it is closed: there is nobody to tell
            return


@contextlib.contextmanager
def messages_only(command):
    """Ends the command by the message alone if it cannot start here: variables are wrong, or ranks do not
    come."""
    try:
        yield
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        raise SystemExit(f"{command}: {error}") from None


def late_options(parser, options, arguments):
    """-> a line for each of the script's `arguments` that looks like one of the `options` of `parser`, which
    was not given before the script"""
    ours = [action for action in parser._actions if action.dest not in ("help", "module")]
    actions = {name: action for action in ours for name in action.option_strings}
    lines = []
    for argument, after in zip(arguments, [*arguments[1:], ""], strict=False):
        if argument == "--":
            break
        name, equal, value = re.sub(r"^(-n)(\d+)$", r"\1=\2", argument).partition("=")
        action = actions.get(name)
        if action is None or getattr(options, action.dest) != action.default:
            continue
        if action.dest == "n" and not (value if equal else after).isdecimal():  # such as pytest's -n auto
            continue
        lines.append(
            f"{argument} comes after the script or module, so it is an argument of that. Options of "
            f"{parser.prog} come before it"
        )
    return lines
