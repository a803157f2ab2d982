"""shmemkit: SHMEM kernels in Python, on GPUs with NVSHMEM and on a CPU emulator."""

import ast
import importlib
from pathlib import Path

__version__ = "0.2.0"

# Public name -> the module it lives in, as __init__.pyi says to type checkers, too. Imported when first asked
# for, so that `python -m shmemkit doctor` can say what is missing where these cannot be imported.
_HOMES = {
    name.name: statement.module or name.name
    for statement in ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8")).body
    if isinstance(statement, ast.ImportFrom)
    for name in statement.names
}
__all__ = sorted(_HOMES)
_OF_WORLD = "rank n_ranks local_rank node n_nodes xp stream finalize host_allgather host_barrier".split()
_OF_WORLD += ["asnumpy", "print", "synchronize"]
# What mpi4py's users look for, here and in the World.
_AS_IN_MPI = {
    **dict.fromkeys(("size", "Get_size"), "world.n_ranks"),
    "Get_rank": "world.rank",
    **dict.fromkeys(("barrier", "Barrier"), "world.barrier(), or world.host_barrier() for the host programs"),
    "allgather": "world.host_allgather() for Python objects, sk.all_gather() for arrays",
    **dict.fromkeys(("allreduce", "Allreduce"), "sk.all_reduce()"),
    **dict.fromkeys(("alltoall", "Alltoall"), "sk.all_to_all()"),
    "Allgather": "sk.all_gather()",
    **{
        name: f"world.comm.{name}() for Python objects, sk.{sk}() for arrays"
        for name, sk in (("bcast", "broadcast"), ("gather", "gather"))
    },
}


def __getattr__(name):
    if name not in _HOMES:
        instead = f"world.{name}" if name in _OF_WORLD else _AS_IN_MPI.get(name)
        if instead is not None:
            text = f"shmemkit has no {name!r}; use {instead} (world: what init() returns)"
            raise AttributeError(text, name=name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_HOMES[name]}", __name__)
    value = module if name == _HOMES[name] else getattr(module, name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
