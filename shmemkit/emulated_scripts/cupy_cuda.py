"""``cupy.cuda``: devices, streams, events, the runtime."""

from shmemkit.emu.stand_in_modules import Served, StandIn

from .cuda_core import COMPUTE_CAPABILITY
from .current_process import current
from .streams import ScriptEvent, ScriptStream, find


class MemoryPointer(Served):
    """Where an array is: ``array.data``."""

    def __init__(self, array, ptr):
        self.mem, self.ptr = array, ptr

    def __int__(self):
        return self.ptr


class Device(Served):
    """A device, as a context manager too."""

    def __init__(self, device=None):
        process = current("cupy.cuda.Device")
        self.id = process.device if device is None else int(device)
        n = process.machine.n_ranks
        if not 0 <= self.id < n:
            raise ValueError(
                f"cupy.cuda.Device(): the number is {self.id}; it must be 0 to {n - 1}: the emulator "
                "has a device for each rank"
            )
        self.compute_capability = "".join(map(str, COMPUTE_CAPABILITY))
        self.attributes = {"MultiProcessorCount": 132, "WarpSize": 32, "CooperativeLaunch": 1}

    def use(self):
        current("Device.use").device = self.id
        return self

    def synchronize(self):
        current("Device.synchronize").synchronize()

    def __enter__(self):
        self.before = current("Device").device
        return self.use()

    def __exit__(self, *_):
        current("Device").device = self.before

    def __int__(self):
        return self.id

    def __eq__(self, other):
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self):
        return hash(self.id)

    def __repr__(self):
        return f"<CUDA Device {self.id}>"


def _external_stream(ptr, device_id=-1):
    return find(ptr)


def _properties(device):
    return {
        "name": b"shmemkit emulator",
        "multiProcessorCount": 132,
        "warpSize": 32,
        "maxThreadsPerBlock": 1024,
        "major": COMPUTE_CAPABILITY[0],
        "minor": COMPUTE_CAPABILITY[1],
    }


def _set_device(device):
    Device(device).use()


def modules():
    """-> the stand-ins, by name"""
    runtime = StandIn(
        "cupy.cuda.runtime",
        {
            "deviceSynchronize": lambda: current("deviceSynchronize").synchronize(),
            "getDevice": lambda: current("getDevice").device,
            "getDeviceCount": lambda: current("getDeviceCount").machine.n_ranks,
            "getDeviceProperties": _properties,
            "is_hip": False,
            "runtimeGetVersion": lambda: 13000,
            "driverGetVersion": lambda: 13000,
            "setDevice": _set_device,
            "streamSynchronize": lambda stream: find(stream).synchronize(),
        },
    )
    cuda = StandIn(
        "cupy.cuda",
        {
            "Device": Device,
            "Event": ScriptEvent,
            "ExternalStream": _external_stream,
            "MemoryPointer": MemoryPointer,
            "Stream": ScriptStream,
            "get_current_stream": lambda: current("get_current_stream").stream,
            "get_device_id": lambda: current("get_device_id").device,
            "get_elapsed_time": lambda start, end: start.elapsed_time(end),
            "is_available": lambda: True,
        },
    )
    stream = StandIn(
        "cupy.cuda.stream",
        {name: cuda.__dict__[name] for name in ("Event", "ExternalStream", "Stream", "get_current_stream")},
    )
    return {"cupy.cuda": cuda, "cupy.cuda.runtime": runtime, "cupy.cuda.stream": stream}
