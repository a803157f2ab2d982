"""Communicators: how the host programs of the ranks find each other and exchange objects.

``sk.init()`` takes the right one by itself. MPI's, if mpirun or srun started the ranks; else PyTorch's, if
torch.distributed is initialized; else one over sockets, if the environment says that there are several ranks.
``sk.init(comm=)`` takes any object with the three methods of ``shmemkit.typing.Comm``.
"""

from .choice import from_env, from_torch
from .communicator import SingleComm

__all__ = ["SingleComm", "from_env", "from_torch"]


def __dir__():
    return sorted({*(name for name in globals() if name.startswith("__")), *__all__})
