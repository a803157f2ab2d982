"""``cuda.core`` and ``cuda.core.experimental``: devices, streams and events."""

from shmemkit.emu.stand_in_modules import Served, StandIn

from .current_process import current
from .streams import ScriptEvent, ScriptStream, find

COMPUTE_CAPABILITY = (9, 0)


class Device(Served):
    """A GPU of the machine. Every PE may use any: there are as many as PEs, and they are all alike."""

    def __init__(self, device_id=None):
        process = current("Device")
        n = process.machine.n_ranks
        device_id = process.device if device_id is None else device_id
        if not 0 <= device_id < n:
            raise ValueError(
                f"Device(): device_id is {device_id}; it must be 0 to {n - 1}: the emulator has a "
                "device for each rank"
            )
        self.device_id = int(device_id)
        self.name, self.arch = "shmemkit emulator", "".join(map(str, COMPUTE_CAPABILITY))
        self.pci_bus_id = f"0000:{self.device_id:02X}:00.0"
        self.uuid = f"00000000-0000-0000-0000-{self.device_id:012d}"
        self.properties = DeviceProperties()

    compute_capability = property(lambda self: _Capability(*COMPUTE_CAPABILITY))
    default_stream = property(lambda self: current("default_stream").null)

    def set_current(self, ctx=None):
        if ctx is not None:
            raise NotImplementedError(
                "Device.set_current(ctx) is not emulated. Call set_current() without a context"
            )
        current("set_current").device = self.device_id

    def sync(self):
        current("Device.sync").synchronize()

    def create_stream(self, obj=None, options=None):
        """A stream: non-blocking unless `options` say otherwise; or `obj`, a stream of another library."""
        if obj is not None:
            return find(obj)
        return ScriptStream(non_blocking=_option(options, "nonblocking", True))

    def create_event(self, options=None):
        return ScriptEvent()

    def __int__(self):
        return self.device_id

    def __eq__(self, other):
        return isinstance(other, Device) and other.device_id == self.device_id

    def __hash__(self):
        return hash(self.device_id)

    def __repr__(self):
        return f"<Device {self.device_id} ({self.name})>"


class DeviceProperties(Served):
    """``Device.properties``"""

    multiprocessor_count, warp_size, max_threads_per_block = 132, 32, 1024
    compute_capability_major, compute_capability_minor = COMPUTE_CAPABILITY
    multicast_supported = False


class _Capability(tuple):
    def __new__(cls, major, minor):
        return super().__new__(cls, (major, minor))

    major = property(lambda self: self[0])
    minor = property(lambda self: self[1])


def _option(options, name, default):
    if isinstance(options, dict):
        return options.get(name, default)
    value = getattr(options, name, default)
    return default if value is None else value


class StreamOptions:
    """What ``Device.create_stream`` is asked for."""

    def __init__(self, nonblocking=True, priority=None):
        self.nonblocking, self.priority = nonblocking, priority


class EventOptions:
    """What ``Device.create_event`` is asked for."""

    def __init__(self, enable_timing=False, **_):
        self.enable_timing = enable_timing


class _System(Served):
    @property
    def num_devices(self):
        return current("system.num_devices").machine.n_ranks

    def get_num_devices(self):
        return self.num_devices

    @property
    def devices(self):
        return tuple(Device(i) for i in range(self.num_devices))


def modules():
    """-> the stand-ins, by name; ``cuda.core.experimental`` was there until cuda-core 0.7"""
    members = {
        "Device": Device,
        "Event": ScriptEvent,
        "EventOptions": EventOptions,
        "Stream": ScriptStream,
        "StreamOptions": StreamOptions,
        "system": _System(),
    }
    return {
        "cuda": StandIn("cuda", {}),
        "cuda.core": StandIn("cuda.core", members),
        "cuda.core.experimental": StandIn("cuda.core.experimental", members),
    }
