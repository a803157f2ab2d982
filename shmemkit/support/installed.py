"""Which versions are installed: of packages, and of NVIDIA's kernel driver."""

import contextlib
import importlib.metadata
import re

DRIVER = "/proc/driver/nvidia/version"


def versions(names):
    """-> {name: version} of those packages that are installed"""
    found = {}
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def driver_release():
    """-> the version of NVIDIA's kernel driver, as "580.65.06", or None where /proc does not say"""
    found = re.search(r"\b(\d{3,}(?:\.\d+)+)\b", text_of(DRIVER))
    return found and found[1]


def text_of(path):
    """-> what is in a small file of the system, or "" if it cannot be read"""
    try:
        with open(path) as file:
            return file.read().strip()
    except OSError:
        return ""
