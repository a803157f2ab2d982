"""shmemkit: SHMEM kernels in Python, on GPUs with NVSHMEM and on a CPU emulator."""

from . import emu
from .kernels.queue import Queue
from .launch import bind
from .memory import array, empty, free, full, peer_view, signals, zeros
from .world import World, current, init

__version__ = "0.1.0"
__all__ = "Queue World array bind current emu empty free full init peer_view signals zeros".split()
