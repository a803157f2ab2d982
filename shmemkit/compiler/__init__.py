"""What shmemkit takes from inside numba-cuda, and changes there: intrinsics as PTX, the JIT cache,
kernels with bounded waits."""

import contextlib
import os


def stamps(folder):
    """-> {path: (bytes, times and number)} of the Python files in a folder: what differs after any change"""
    found = {}
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".py"):
                file = entry.stat()
                found[entry.path] = file.st_size, file.st_mtime_ns, file.st_ctime_ns, file.st_ino
            elif entry.name != "__pycache__" and entry.is_dir():
                found |= stamps(entry.path)
    return found


PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
IMPORTED = stamps(PACKAGE)
"""The package's sources, as a module that makes code of them finds them: each imports this one first."""
