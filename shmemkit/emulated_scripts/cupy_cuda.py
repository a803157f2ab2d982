"""``cupy.cuda``: devices, streams, events, the runtime."""

from shmemkit.emu.stand_in_modules import Served, StandIn, named

from .current_process import current
from .devices import ContextDevice
from .streams import ScriptEvent, ScriptStream, find


class MemoryPointer(Served):
    """Where an array is: ``array.data``."""

    def __init__(self, array, ptr):
        self.mem, self.ptr = array, ptr

    def __int__(self):
        return self.ptr


class Device(ContextDevice):
    call = "cupy.cuda.Device()"

    def __init__(self, device=None):
        super().__init__(device)
        self.id = int(self)
        self.compute_capability = "".join(map(str, self._gpu.compute_capability))
        self.attributes = {"MultiProcessorCount": self._gpu.sms, "WarpSize": 32, "CooperativeLaunch": 1}

    use = ContextDevice.make_current

    def synchronize(self):
        current("Device.synchronize").synchronize()

    def __repr__(self):
        return f"<CUDA Device {self.id}>"


def _external_stream(ptr, device_id=-1):
    return find(ptr)


def _properties(device):
    gpu = current("getDeviceProperties").machine.gpu
    major, minor = gpu.compute_capability
    return {
        "name": b"shmemkit emulator",
        "multiProcessorCount": gpu.sms,
        "warpSize": 32,
        "maxThreadsPerBlock": 1024,
        "major": major,
        "minor": minor,
    }


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
            "setDevice": lambda device: Device(device).use(),
            "streamSynchronize": lambda stream: find(stream).synchronize(),
        },
    )
    cuda = StandIn(
        "cupy.cuda",
        {
            **named(Device, MemoryPointer),
            "Event": ScriptEvent,
            "ExternalStream": _external_stream,
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
