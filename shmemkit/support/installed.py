"""Which versions are installed: of packages, and of NVIDIA's kernel driver."""

import contextlib
import importlib.metadata
import re


def versions(names):
    """-> {name: version} of those packages that are installed"""
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def driver_release():
    """-> the version of NVIDIA's kernel driver, as "580.65.06", or None where /proc does not say"""
    try:
        with open("/proc/driver/nvidia/version") as file:
            found = re.search(r"\b(\d{3,}(?:\.\d+)+)\b", file.readline())
    except OSError:
        return None
    return found and found[1]
