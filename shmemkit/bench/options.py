"""What options of the bench may be. Of all ranks, the first one speaks."""

import argparse
import os
from pathlib import Path

from shmemkit.comm.choice import default as default_comm
from shmemkit.emu.run import current_host
from shmemkit.support.settings import listed

from . import compare
from .results import Results

PLOTS = ".svg", ".png", ".pdf"
DEFAULT = "default %(default)s"


class Parser(argparse.ArgumentParser):
    def _print_message(self, message, file=None):
        if is_first():
            super()._print_message(message, file)


def is_first():
    """Whether this is rank 0, before there is a World."""
    host = current_host()
    if host is not None:
        return host.pe == 0
    comm = default_comm()
    return comm is None or comm.Get_rank() == 0


def by(parse):
    """-> `parse`, whose ValueError says what is wrong with an option"""

    def parsed(text):
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def positive(text):
    if not text.strip().isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"it is {text!r}; it must be 1 or more")
    return int(text)


def number(text, default=None):
    """-> argparse's settings of an option that takes one"""
    text += f"; {DEFAULT}" * bool(default)
    return {"type": positive, "default": default, "metavar": "N", "help": text}


def integers(text):
    return list(dict.fromkeys(positive(part) for part in text.split(",")))


def some_of(allowed):
    """A list with commas of the words that ``allowed()`` gives."""

    def parse(text):
        words = list(dict.fromkeys(filter(None, (part.strip() for part in text.split(",")))))
        for word in words:
            if word not in allowed():
                raise argparse.ArgumentTypeError(f"{word!r} is given; it must be {listed(allowed())}")
        return words

    return parse


def file(path):
    """A file that is written at the end: what cannot be one is refused before anything runs."""
    if is_first() and os.path.isdir(path):
        raise argparse.ArgumentTypeError(f"{path!r} is a folder; it must be a file")
    if is_first() and not os.path.isdir(os.path.dirname(path) or "."):
        raise argparse.ArgumentTypeError(f"the folder of {path!r} does not exist. Make it first")
    return path


def path(text):
    return Path(file(text))


def plot(path):
    if Path(path).suffix not in PLOTS:
        raise argparse.ArgumentTypeError(f"it is {path!r}; it must end with {listed(PLOTS)}")
    return file(path)


def library(path):
    if not os.path.isfile(path):
        raise argparse.ArgumentTypeError(f"the file {path!r} does not exist; it must be a libnccl.so.2")
    return os.path.abspath(path)


def results_file(path):
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
