"""``cuda.core`` and ``cuda.core.experimental``: devices, streams and events."""

from typing import NamedTuple

from shmemkit.emu.stand_in_modules import Served, StandIn, named, not_served

from .current_process import current
from .devices import EmulatedDevice
from .streams import ScriptEvent, ScriptStream, find


class Device(EmulatedDevice):
    def __init__(self, device_id=None):
        super().__init__(device_id)
        self.device_id = int(self)
        self.name, self.arch = "shmemkit emulator", "".join(map(str, self._gpu.compute_capability))
        self.pci_bus_id = f"0000:{self.device_id:02X}:00.0"
        self.uuid = f"00000000-0000-0000-0000-{self.device_id:012d}"
        self.properties = DeviceProperties(self._gpu)

    compute_capability = property(lambda self: _Capability(*self._gpu.compute_capability))
    default_stream = property(lambda self: current("default_stream").null)

    def set_current(self, ctx=None):
        if ctx is not None:
            raise not_served("Device.set_current(ctx)", "Call set_current() without a context")
        self.make_current()

    def sync(self):
        current("Device.sync").synchronize()

    def create_stream(self, obj=None, options=None):
        """A stream: non-blocking unless `options` say otherwise; or `obj`, a stream of another library."""
        if obj is not None:
            return find(obj)
        return ScriptStream(non_blocking=_option(options, "nonblocking", True))

    def create_event(self, options=None):
        return ScriptEvent()

    def __repr__(self):
        return f"<Device {self.device_id} ({self.name})>"


class DeviceProperties(Served):
    """``Device.properties``"""

    warp_size, max_threads_per_block, multicast_supported = 32, 1024, False

    def __init__(self, gpu):
        self.multiprocessor_count = gpu.sms
        self.compute_capability_major, self.compute_capability_minor = gpu.compute_capability


class _Capability(NamedTuple):
    major: int
    minor: int


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
    members = {"Event": ScriptEvent, "Stream": ScriptStream, "system": _System()}
    members |= named(Device, EventOptions, StreamOptions)
    return {
        "cuda": StandIn("cuda", {}),
        "cuda.core": StandIn("cuda.core", members),
        "cuda.core.experimental": StandIn("cuda.core.experimental", members),
    }
