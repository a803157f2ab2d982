"""Documented modules by their earlier names, for programs that import those: ``shmemkit.kernels.queue`` and
``shmemkit.kernels.all_gather.copy_engine``. They are in ``shmemkit.collectives``."""

import sys

from .collectives import all_gather, queue
from .collectives.all_gather import copy_engine

__path__ = []  # a package, of these modules
for _name, _module in (("queue", queue), ("all_gather", all_gather), ("all_gather.copy_engine", copy_engine)):
    sys.modules[f"{__name__}.{_name}"] = _module
