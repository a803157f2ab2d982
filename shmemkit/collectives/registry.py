"""The collectives: each folder here that has METHODS is one, as all_gather, and has its class, AllGather."""

import functools
import importlib
import pkgutil
from pathlib import Path

from .collective import Collective


@functools.cache
def collectives() -> dict[str, type[Collective]]:
    """-> {"all_gather": AllGather, ...}; those with a root come last"""
    found = {}
    for _, name, is_folder in pkgutil.iter_modules([str(Path(__file__).parent)]):
        module = importlib.import_module(f".{name}", __package__) if is_folder else None
        if hasattr(module, "METHODS"):
            found[name] = getattr(module, name.title().replace("_", ""))
    return dict(sorted(found.items(), key=lambda item: bool(item[1]._rooted)))
