"""The communication libraries that this process has loaded. A package's metadata may say otherwise."""

import ctypes
import os
import sys
from pathlib import Path


def _nccl(library):
    code = ctypes.c_int()
    library.ncclGetVersion(ctypes.byref(code))
    return code.value // 10000, code.value // 100 % 100, code.value % 100


def _nvshmem(library):
    numbers = [ctypes.c_int() for _ in range(3)]
    library.nvshmemx_vendor_get_version_info(*map(ctypes.byref, numbers))
    return [number.value for number in numbers]


LIBRARIES = {"NVSHMEM": ("libnvshmem_host.so", _nvshmem), "NCCL": ("libnccl.so", _nccl)}


def loaded(maps="/proc/self/maps"):
    """-> {"NVSHMEM library": version, "file of the NVSHMEM library": path} and the same of NCCL, as loaded.

    Paths begin at a folder of sys.path. Two copies in one process are both named.
    """
    with open(maps) as file:
        paths = sorted({line.split(maxsplit=5)[5].rstrip("\n") for line in file if "/" in line})
    found = {}
    for name, (start, version_of) in LIBRARIES.items():
        copies = [path for path in paths if os.path.basename(path).startswith(start)]
        if copies:
            found[f"{name} library"] = " and ".join(dict.fromkeys(_version(version_of, p) for p in copies))
            found[f"file of the {name} library"] = " and ".join(map(_shown, copies))
    return found


def _version(version_of, path):
    try:
        return ".".join(map(str, version_of(ctypes.CDLL(path))))
    except (OSError, AttributeError):  # its file is gone, or it is something else
        return "unknown"


def _shown(path):
    """`path` without the folders that only this user has."""
    for folder in sorted(sys.path, key=len, reverse=True):
        if folder.strip("/") and Path(path).is_relative_to(folder):
            return os.path.relpath(path, folder)
    return path if path.startswith(("/usr/", "/opt/")) else os.path.basename(path)
