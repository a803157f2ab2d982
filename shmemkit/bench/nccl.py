"""NCCL in four ways, called through ctypes: what a user would take otherwise, and NCCL at its best.

nccl         plain buffers: CuPy's
nccl_graph   buffers of ncclMemAlloc, which NCCL registers when a CUDA graph captures the call
nccl_window  such buffers, registered as windows (NCCL_WIN_COLL_SYMMETRIC): NCCL's symmetric kernels
nccl_ce      windows, and CTAPolicy NCCL_CTA_POLICY_ZERO: copy engines; NCCL takes kernels for reductions

Each has a communicator of its own. Those of all but the first are told that one graph runs at a time
(graphUsageMode 1, NCCL 2.29 and newer), as is the case here: NCCL leaves its own bookkeeping out of the
graph. graphStreamOrdering stays at its default: 0 brought the bookkeeping back (2.32.3).
"""

import contextlib
import ctypes
import functools
import gc
import importlib.util
import math
import os
import re
from typing import Any

from shmemkit.support.command_line import say

from .measure import Contender
from .refusal import agreed
from .results import NCCL, NCCL_CE, NCCL_GRAPH, NCCL_WINDOW

os.environ.setdefault("NCCL_CUMEM_ENABLE", "1")  # windows need it

UINT8, SUM = 1, 0  # ncclUint8, ncclSum
TYPES = {"float16": 6, "float32": 7, "bfloat16": 9}  # ncclDataType_t
SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC
NO_SM = 2  # NCCL_CTA_POLICY_ZERO
BEST = {"graphUsageMode": 1}
CONFIGS = {NCCL: None, NCCL_GRAPH: BEST, NCCL_WINDOW: BEST, NCCL_CE: {**BEST, "CTAPolicy": NO_SM}}
SINCE_2_28 = 22800  # ncclAlltoAll, ncclGather, and windows as they are tried here
GRANULE = 2 << 20  # bytes; what NCCL allocates is a multiple of it


class UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class Config(ctypes.Structure):
    """``ncclConfig_t`` of NCCL 2.29, or without its last two fields that of 2.28. Newer ones take it, too:
    they read as many bytes as `size` says."""

    UNDEFINED = -(2**31)
    _fields_ = [("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint)] + [
        (name, ctypes.c_char_p if name in ("netName", "commName") else ctypes.c_int)
        for name in (
            "blocking cgaClusterSize minCTAs maxCTAs netName splitShare trafficClass commName collnetEnable "
            "CTAPolicy shrinkShare nvlsCTAs nChannelsPerNetPeer nvlinkCentricSched graphUsageMode numRmaCtx"
        ).split()
    ]

    def __init__(self, code, values):
        size, version = (88, 22907) if code >= 22900 else (80, 22809)
        fields: Any = self._fields_[3:]
        unset = {name: self.UNDEFINED for name, kind in fields if kind is ctypes.c_int}
        super().__init__(**{"size": size, "magic": 0xCAFEBEEF, "version": version, **unset, **values})


class Library:
    """libnccl: ``library("AllReduce", ...)`` calls ncclAllReduce. ValueError for what NCCL refuses.

    path     of the file; default: that of the package nvidia-nccl-cu13 or -cu12, else the system's
    code     the version as NCCL says it, 23203 for 2.32.3
    version  as a text
    """

    TYPES = {"p": ctypes.c_void_p, "n": ctypes.c_size_t, "i": ctypes.c_int, "u": UniqueId}
    SIGNATURES = {
        **dict.fromkeys(("AllGather", "AlltoAll"), "ppnipp"),
        **dict.fromkeys(("AllReduce", "Broadcast", "Gather", "ReduceScatter", "Scatter"), "ppniipp"),
        **dict.fromkeys(("CommDestroy", "GetUniqueId", "GetVersion", "MemFree"), "p"),
        **dict.fromkeys(("GroupEnd", "GroupStart"), ""),
        **dict.fromkeys(("Recv", "Send"), "pniipp"),
        **{"CommInitRankConfig": "piuip", "CommWindowDeregister": "pp", "CommWindowRegister": "ppnpi"},
        **{"MemAlloc": "pn", "Reduce": "ppniiipp"},
    }

    def __init__(self, path=None):
        try:
            self._library = ctypes.CDLL(path or _installed())
        except OSError as error:
            raise ValueError(
                f"NCCL cannot be loaded ({error}). Install it, pip install nvidia-nccl-cu13 (or -cu12), or "
                "name its file: --nccl /path/of/libnccl.so.2"
            ) from error
        self.version, code = f"of {path}", ctypes.c_int()
        self("GetVersion", ctypes.byref(code))
        self.code = code.value
        self.version = f"{self.code // 10000}.{self.code // 100 % 100}.{self.code % 100}"

    def __call__(self, name, *arguments):
        try:
            function = getattr(self._library, f"nccl{name}")
        except AttributeError:
            raise ValueError(f"NCCL {self.version} has no nccl{name}. Name another one by --nccl") from None
        function.argtypes = [self.TYPES[letter] for letter in self.SIGNATURES[name]]
        if status := function(*arguments):
            texts = self._library.ncclGetErrorString, self._library.ncclGetLastError
            for text in texts:
                text.restype = ctypes.c_char_p
            why, more = texts[0](status), texts[1](None)
            raise ValueError(": ".join([f"nccl{name}", *(text.decode() for text in (why, more) if text)]))


def _installed():
    """The file of the installed package, or the name that the system's loader looks for."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        path = os.path.join(folder, "nccl", "lib", "libnccl.so.2")
        if os.path.exists(path):
            return path
    return "libnccl.so.2"


library = functools.cache(Library)  # one for all contenders, as long as the program runs
# None, or {(rank's World, way, library): an Nccl that was closed}, whose communicator and memory others take.
kept: dict | None = None


class Communicator:
    """All ranks, on their Worlds' streams: ``communicator("AllReduce", ...)`` with all that comes before the
    communicator and the stream in NCCL's own call. Making one is collective. Refused on all ranks where one
    has an error before or after NCCL connects them; in between the others wait, as NCCL does."""

    def __init__(self, world, library, values):
        self.library, self._stream = library, world.stream.ptr
        number, self._handle = UniqueId(), ctypes.c_void_p()
        agreed(world, lambda: world.rank or library("GetUniqueId", ctypes.byref(number)))
        number = UniqueId.from_buffer_copy(world.comm.bcast(bytes(number), root=0))
        config = ctypes.byref(Config(library.code, values)) if values else None
        arguments = world.n_ranks, number, world.rank, config
        agreed(world, lambda: library("CommInitRankConfig", ctypes.byref(self._handle), *arguments))

    def __call__(self, name, *arguments):
        self.library(name, *arguments, self._handle, self._stream)

    def exchange(self, sent, received):
        """Send and receive in one group: `sent` and `received` are [(address, bytes, rank), ...]."""
        self.library("GroupStart")
        try:
            for name, parts in (("Send", sent), ("Recv", received)):
                for address, size, rank in parts:
                    self(name, address, size, UINT8, rank)
        finally:
            self.library("GroupEnd")

    def register(self, address, size):
        """-> a window. Collective."""
        window = ctypes.c_void_p()
        self.library("CommWindowRegister", self._handle, address, size, ctypes.byref(window), SYMMETRIC)
        if not window.value:
            raise ValueError(
                "NCCL makes no window here: it needs NCCL_CUMEM_ENABLE=1 and GPUs joined by NVLink"
            )
        return window

    def destroy(self, windows, addresses):
        """Give these windows, the communicator and the memory at these addresses back."""
        for window in windows:
            self.library("CommWindowDeregister", self._handle, window)
        self.library("CommDestroy", self._handle)
        for address in addresses:
            self.library("MemFree", address)


class Nccl(Contender):
    """The case's call, in one of the ways. ValueError from ``start`` where there is no NCCL.

    mode  one of CONFIGS
    path  of the library

    ran      the kernels and copies of one captured call, as a text
    version  of NCCL
    """

    version: str | None = None
    _comm: Any = None
    _x: Any = None

    def __init__(self, world, mode=NCCL, path=None):
        super().__init__(world)
        self.method = self._mode = mode
        self._path, self._plain = path, mode == NCCL
        self._windows = mode in (NCCL_WINDOW, NCCL_CE)
        self._memory = []  # addresses, to give back
        self._blocks, self._free = [], []  # what arrays may be in: (address, bytes, window or None)

    def connect(self):
        """Have a communicator. Collective; ``start`` does it, and ``empty`` needs it."""
        if self._comm is not None:
            return
        if old := (kept or {}).pop(self._name, None):
            self._comm, self._memory, self._blocks = old._comm, old._memory, old._blocks
            self._free, self.version = list(self._blocks), old.version
            return
        if self.world.backend.name == "emulator":
            raise ValueError("NCCL needs GPUs")
        found = agreed(self.world, self._load)
        values = CONFIGS[self._mode] if found.code >= SINCE_2_28 else None
        self._comm = Communicator(self.world, found, values)
        self.version = found.version

    @property
    def _name(self):
        return id(self.world), self._mode, self._path

    def _load(self):
        found = library(self._path)
        if self._windows and found.code < SINCE_2_28:
            raise ValueError(
                f"{self.method} needs NCCL 2.28 or newer; this is {found.version}. Name one by --nccl"
            )
        return found

    def start(self, case):
        self.ran = None
        self.connect()
        self._case = case
        self.out = case.output(self.empty)
        self._x = case.x if self._plain or self._owns(case.x) else self.empty(case.x.shape, case.x.dtype)
        self._fill()

    def call(self):
        address = self.world.backend.address
        self._case.nccl(self._comm, address(self._x), address(self.out))

    def captured(self, graph, iters):
        with contextlib.suppress(Exception):  # only a remark
            self.ran = nodes_of(graph, iters)

    def repeat(self, replay):
        self._fill()
        replay()

    def stop(self):
        super().stop()
        self._x, self._free = None, list(self._blocks)

    def close(self):
        if self._comm is None:
            return
        if kept is not None and self._name not in kept:
            kept[self._name] = self
            return
        gc.collect()  # NCCL waits for graphs that have captured its calls
        try:
            windows = [window for _, _, window in self._blocks if window is not None]
            self._comm.destroy(windows, self._memory)
        except ValueError as error:  # what was measured is not lost
            say(f"{self.method} cannot be closed: {error}")

    def empty(self, shape, dtype):
        """-> an array in memory of the kind that is compared. Collective.

        It is the caller's until ``stop``. Memory is given back at the end only: NCCL may have registered it
        for a graph."""
        xp = self.world.xp
        if self._plain:
            return xp.empty(shape, dtype)
        shape = shape if isinstance(shape, tuple) else (shape,)
        size = -(-max(1, math.prod(shape) * dtype.itemsize) // GRANULE) * GRANULE
        fitting = [block for block in self._free if block[1] >= size]
        block = min(fitting, key=lambda block: block[1]) if fitting else self._allocate(size)
        if fitting:
            self._free.remove(block)
        memory = xp.cuda.UnownedMemory(block[0], block[1], self)
        return xp.ndarray(shape, dtype, xp.cuda.MemoryPointer(memory, 0))

    def _allocate(self, size):
        def memory():
            address = ctypes.c_void_p()
            self._comm.library("MemAlloc", ctypes.byref(address), size)
            self._memory.append(address.value)
            return address.value

        address, window = agreed(self.world, memory), None
        if self._windows:
            window = agreed(self.world, lambda: self._comm.register(address, size))
        self._blocks.append((address, size, window))
        return self._blocks[-1]

    def _owns(self, array):
        at = self.world.backend.address(array)
        return any(address <= at < address + size for address, size, _ in self._blocks)

    def _fill(self):
        if self._x is not self._case.x:
            with self.world.stream:
                self._x[...] = self._case.x


def nodes_of(graph, iters):
    """-> what a call in CuPy's `graph` of `iters` calls does: kernels, with their blocks, and other nodes."""
    from cuda.bindings import driver

    def of(result) -> Any:
        status, *values = result
        if int(status):
            raise ValueError(f"the graph's nodes cannot be read: {status.name}")
        return values[0] if len(values) == 1 else values

    handle, names = driver.CUgraph(graph.graph), []
    nodes, _ = of(driver.cuGraphGetNodes(handle, of(driver.cuGraphGetNodes(handle))[1]))
    for node in nodes:
        kind = of(driver.cuGraphNodeGetType(node)).name.removeprefix("CU_GRAPH_NODE_TYPE_").lower()
        if kind == "kernel":
            about = of(driver.cuGraphKernelNodeGetParams(node))
            if int(about.func):
                name = of(driver.cuFuncGetName(about.func))
            else:
                name = of(driver.cuKernelGetName(about.kern))
            kind = f"{_demangled(name.decode())} of {about.gridDimX} blocks"
        names.append(kind)
    counts = {name: names.count(name) / iters for name in dict.fromkeys(names)}
    return ", ".join(f"{count:g} {name}" if count != 1 else name for name, count in counts.items())


def _demangled(name):
    """ "_Z3fooPiS_" -> "foo" """
    match = re.match(r"_Z(\d+)", name)
    return name[match.end() :][: int(match[1])] if match else name
