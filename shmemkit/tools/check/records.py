"""What a check leaves in the user's cache folder, one file for each version, GPU, Python and number of ranks:
whether all was right, when, and how long it took. ``shmemkit doctor`` and the next check read it."""

import datetime
import json
import platform

from shmemkit import __version__
from shmemkit.compiler.jit_cache import digest, folder
from shmemkit.support.whole_files import write_whole

PREFIX, FORMAT = "check-", 1


def identity(gpu):
    """What a check is of; the number of ranks is not in it."""
    return {"shmemkit": __version__, "gpu": gpu, "python": platform.python_version()}


def write(gpu, ranks, answer, seconds, cases, why=""):
    """Keep that a check was run, where there is a cache folder; an incomplete one replaces none that
    passed or was wrong. `seconds`: (all, of them compiling), or None if it was no whole one; the last ones
    stay then. `why` it is incomplete."""
    where = folder()
    if where is None:
        return
    last = read(gpu, ranks)
    if answer == "incomplete" and last is not None and last["answer"] != answer:
        return
    if seconds is None and last is not None:
        seconds = last["seconds"]
    found = {**identity(gpu), "ranks": ranks, "answer": answer, "seconds": seconds, "cases": cases}
    found["why"] = why
    found |= {"format": FORMAT, "date": datetime.datetime.now().isoformat(timespec="seconds")}
    try:
        where.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(_path(where, gpu, ranks), json.dumps(found))
    except OSError:
        return  # the result was printed; the next doctor says that it never ran


def read(gpu, ranks):
    """-> the record of the last check, or None"""
    where = folder()
    return None if where is None else _read(_path(where, gpu, ranks))


def all_of(gpu):
    """-> the records of this version, GPU and Python, of any number of ranks"""
    where = folder()
    found = [] if where is None else [_read(path) for path in sorted(where.glob(f"{PREFIX}*.json"))]
    return [record for record in found if record and identity(gpu).items() <= record.items()]


def _path(where, gpu, ranks):
    return where / f"{PREFIX}{digest(identity(gpu), ranks)[:16]}.json"


def _read(path):
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("format") == FORMAT else None
