"""What the Python bodies of primitives take from the emulator, which runs them. No other module of `device`,
and no room above that has primitives of its own, imports the emulator.

  current_thread, group_thread   the emulated thread that calls: alone, or with its warp or block
  address, address_of, place     where an array or an element is, for accesses and for reports
  Unsigned, from_scalar, wrap    integers as kernels have them
  device_view, uninitialised     arrays as kernels have them
  rebind                         a function of a kernel as the emulator runs it
  the rest                       parts of the machine: mbarriers, the TMA, tensor cores, multicast memory
"""

from shmemkit.emu import mbarriers, multicast_memory, tensor_cores, tensor_maps
from shmemkit.emu.async_copies import copies_of
from shmemkit.emu.async_proxy import fence as fence_proxy
from shmemkit.emu.async_proxy import reads_shared
from shmemkit.emu.cuda_integers import Unsigned, from_scalar, wrap
from shmemkit.emu.device_arrays import address, device_view, uninitialised
from shmemkit.emu.report import place
from shmemkit.emu.thread import address_of, current_thread, group_thread
from shmemkit.emu.translation import rebind

__all__ = [
    "Unsigned",
    "address",
    "address_of",
    "copies_of",
    "current_thread",
    "device_view",
    "fence_proxy",
    "from_scalar",
    "group_thread",
    "mbarriers",
    "multicast_memory",
    "place",
    "reads_shared",
    "rebind",
    "tensor_cores",
    "tensor_maps",
    "uninitialised",
    "wrap",
]
