"""Launch a kernel many times, cheaply: compiled, loaded and packed once, then one driver call per launch.

    step = bind(kernel, grid=20, block=128, args=(x, out, signals, n))
    step()                      # on the World's stream
    step.set("n", 7)            # the next launch takes 7
    step(stream=other)

Numba's own ``kernel[grid, block, stream, shared](...)`` still works; it costs more, because it looks at
each argument's type and packs it at every launch.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import inspect
import math
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numba.cuda import types

from shmemkit.backends.streams import address_of_stream
from shmemkit.compiler import kernel_cache, type_check
from shmemkit.compiler.bounded_compile import compile_form
from shmemkit.compiler.numba_internals import CUDADispatcher
from shmemkit.device.cuda.marks import begin_kernel, end_kernel
from shmemkit.device.cuda.timeline_records import host_call, modules
from shmemkit.device.shmem import bounded_waits
from shmemkit.support import gpus, timeouts
from shmemkit.support.arrays import as_array, is_tensor
from shmemkit.support.garbage_collection import uncollected
from shmemkit.support.host_program import current_world
from shmemkit.support.settings import integer, listed, shown
from shmemkit.typing import AnyStream, Shape

from .symmetric_memory import SymmetricMemory

MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
MAX_THREADS = 1024
PORTABLE_CLUSTER = 8  # blocks; larger clusters need the device's consent
DEFAULT_SHARED = 48 * 1024  # bytes a block may have without asking the driver


def bind(
    kernel: Callable,
    grid: Shape,
    block: Shape,
    args: tuple | list,
    *,
    stream: AnyStream | None = None,
    shared: int = 0,
    cluster: Shape | None = None,
    cooperative: bool = False,
    co_resident: bool = False,
    pdl: bool = False,
    timeout: float | None = None,
    group: SymmetricMemory | None = None,
) -> Launch:
    """Bind `kernel` to a launch configuration and arguments, and return a bound launch `b`.

    kernel        a @cuda.jit function
    grid, block   blocks, and threads per block: an integer or a tuple of one to three
    args          a tuple of the kernel's arguments: arrays of the World's array module, PyTorch tensors and
                  others with __cuda_array_interface__ or DLPack, NumPy and Python numbers (int is int64,
                  float is float64, as in Numba), enum members, and tuples of those
    stream        where ``b()`` launches. Default: the World's stream, also of PyTorch tensors. A CuPy,
                  Numba, cuda.core or PyTorch stream, or an address
    shared        dynamic shared memory per block, in bytes. bind() asks the driver for more than 48 KiB once,
                  for `kernel`, so that Numba's own launches of it may use as much
    cluster       blocks per cluster, like grid; the grid must be a multiple of it in each direction
    cooperative   launch cooperatively; implies co_resident. Kernels with Numba's grid.sync() do so anyway
    co_resident   the kernel's blocks wait for each other: raise ValueError unless the whole grid fits on the
                  GPU at once (other kernels that run there are not counted). The emulator knows no
                  registers, and may take a grid that the GPU refuses
    pdl           programmatic dependent launch: the kernel's blocks may start while the previous kernel on
                  the stream still runs, if that one calls griddepcontrol_launch_dependents(). All threads
                  must call griddepcontrol_wait() before they touch its data. Not for cooperative launches.
                  No effect before Hopper
    timeout       seconds that a wait in the kernel may take before it raises SignalTimeout (see
                  docs/timeouts.md). Default: SHMEMKIT_TIMEOUT, else no limit. The emulator, which finds
                  deadlocks by itself, only checks the number

    group         a Group: rank(), num_ranks(), symm_at, notify, puts, barriers and teams of the kernel are
                  the group's. Default: the World's, as in ``kernel[grid, block](...)``

    ``b()`` launches; ``b(stream=s)`` launches on another stream. ``b.set(which, value)`` replaces an
    argument, by position or name, from the next launch on; the type stays the same. Both work while a stream
    captures a CUDA graph: the graph keeps the arguments that it was captured with, and the caller keeps their
    arrays alive for it. `b` keeps its current arguments alive. bind() compiles, links and loads the kernel,
    so that no launch waits for that (loading waits for running kernels).

    It does not raise the exceptions of kernels with debug=True: only Numba's own launch looks for them.

    TypeError for arguments that a kernel cannot take, ValueError for a configuration that cannot run,
    RuntimeError without a World on a machine without a GPU. ``b()`` raises SignalTimeout, and launches
    nothing, when waits of an earlier launch have expired, and RuntimeError when its group has ended.
    """
    if not isinstance(kernel, CUDADispatcher):
        raise TypeError(f"bind(): kernel is {shown(kernel)}; it must be a function decorated with @cuda.jit")
    grid, block = _dimensions(grid, "grid", MAX_GRID), _dimensions(block, "block", MAX_BLOCK)
    threads = block[0] * block[1] * block[2]
    if threads > MAX_THREADS:
        raise ValueError(f"bind(): block is {block}, {threads} threads; it must have {MAX_THREADS} at most")
    shared = integer("bind()", "shared", shared, 0)
    if cluster is not None:
        cluster = _dimensions(cluster, "cluster", grid)
        if any(g % c for g, c in zip(grid, cluster, strict=True)):
            raise ValueError(
                f"bind(): grid is {grid}; it must be a multiple of cluster, {cluster}, in each direction"
            )
    for name, flag in (("cooperative", cooperative), ("co_resident", co_resident), ("pdl", pdl)):
        if not isinstance(flag, (bool, np.bool_)):
            raise TypeError(f"bind(): {name} is {shown(flag)}; it must be True or False")
    if pdl and cooperative:
        raise ValueError("bind(): pdl and cooperative are both True; CUDA takes only one of them")
    if timeout is not None:
        timeout = timeouts.as_seconds(timeout, "bind(): timeout")
    timeouts.default()  # a bad one is refused here, not while a kernel is compiled
    world = current_world()
    if group is not None:
        if not isinstance(group, SymmetricMemory):
            raise TypeError(f"bind(): group is {shown(group)}; it must be a Group, as World.split() returns")
        group._check_alive("bind")
        group = None if group is world else group
    if world is None and gpus.n_gpus() == 0:
        raise RuntimeError(
            "bind(): there is no GPU, and no World to emulate one. Call shmemkit.init() first, in this thread"
        )
    emulated = world is not None and world.backend.name == "emulator"
    if stream is None:
        stream = world.stream if world is not None else None
    launch = _EmulatedLaunch if emulated else _GpuLaunch
    how = {"cooperative": cooperative, "co_resident": co_resident, "pdl": pdl, "timeout": timeout}
    return launch(kernel, grid, block, args, stream, shared, cluster, group=group, **how)


def _dimensions(value, name, most):
    """`value` as three integers between 1 and `most`."""
    sizes = value if isinstance(value, (tuple, list)) else (value,)
    try:
        result = tuple(integer("bind()", name, size) for size in sizes)
    except TypeError:
        given = value if sizes is value else shown(value)
        needed = "an integer or a tuple of one to three integers"
        raise TypeError(f"bind(): {name} is {given}; it must be {needed}") from None
    if not 1 <= len(result) <= 3:
        raise ValueError(f"bind(): {name} is {value}; it must have one to three numbers")
    full = result + (1,) * (3 - len(result))
    if any(not 1 <= size <= limit for size, limit in zip(full, most, strict=True)):
        limits = " by ".join(map(str, most[: len(result)]))
        raise ValueError(f"bind(): {name} is {value}; it must be 1 or more, and {limits} at most")
    return full


class Launch:
    """What ``bind`` returns. `kernel`, `grid`, `block`, `shared`, `cluster` and `stream` are read-only.

    resident_blocks   with co_resident, how many blocks such a grid may have; on the emulator, any number
    """

    @property
    def args(self) -> tuple:
        """The arguments of the next launch; None in the place of those that it has forgotten."""
        return tuple(self._args)

    resident_blocks = 2**31 - 1
    _module = np  # of the arrays that it takes; None if that is not there

    def __init__(self, kernel, grid, block, args, stream, shared, cluster):
        self.kernel, self.grid, self.block, self.shared, self.cluster = kernel, grid, block, shared, cluster
        self.stream = stream
        self.name = kernel.py_func.__name__
        self._names = list(inspect.signature(kernel.py_func).parameters)
        if not isinstance(args, (tuple, list)):
            raise TypeError(
                f"bind(): args is {shown(args)}; it must be a tuple of the kernel's arguments: (x,) for one"
            )
        self._check_number("bind(): args", args)
        self._args = args = [self._shared(*each) for each in zip(self._names, args, strict=True)]
        self._types = [self._type_of(name, value) for name, value in zip(self._names, args, strict=True)]

    def __call__(self, stream: AnyStream | None = None) -> None:
        """Launch on `stream`, or where it was bound to. Returns at once."""
        raise NotImplementedError

    def set(self, which: int | str, value: Any) -> None:
        """Replace argument `which` (position or name) from the next launch on.

        Earlier launches and captured graphs keep the old value. TypeError when the type changes: bind the
        kernel again for that. A Python number takes the type of the NumPy number that it replaces, if it
        fits.
        """
        index = self._index(which)
        name, declared = self._names[index], self._types[index]
        value = self._shared(name, value)
        if not _accepts(declared, self._type_of(name, value), value):
            raise TypeError(
                f"set(): argument {name} of kernel {self.name} was bound as {declared}, and the new value is "
                f"{self._type_of(name, value)}. Bind the kernel again for another type"
            )
        self._replace(index, value)

    def with_args(self, *args: Any) -> Launch:
        """Return a launch of the same kernel and configuration with other arguments of the same types.

        It compiles and loads nothing, so that it may be called while kernels wait.
        """
        self._check_number("with_args()", args)
        other = copy.copy(self)
        other._own_arguments()
        for index, value in enumerate(args):
            other.set(index, value)
        return other

    def _check_number(self, who, args):
        if len(args) != len(self._names):
            names = f"{len(self._names)}: {', '.join(self._names)}"
            raise TypeError(f"{who} has {len(args)} arguments; kernel {self.name} takes {names}")

    def _check_fit(self, fit, how, waits, room):
        """ValueError for a grid of more than `fit` blocks; a block takes its threads, and `room`."""
        blocks, threads = math.prod(self.grid), math.prod(self.block)
        if blocks > fit:
            raise ValueError(
                f"bind(): grid is {self.grid}, {blocks} blocks; it must have {fit} at most ({how}), since "
                f"kernel {self.name} {'waits across blocks' if waits else 'is cooperative'}, and this GPU "
                f"holds no more blocks of {threads} threads, {room} at once. Use fewer blocks and loop in "
                "the kernel, or smaller blocks, or less shared memory"
            )

    def forget_arrays(self) -> None:
        """From now on the caller keeps the arrays alive (the emulator keeps them all the same)."""

    def _own_arguments(self):
        """Share the arguments with no other launch."""
        self._args = list(self._args)

    def _replace(self, index, value):
        raise NotImplementedError

    def _index(self, which):
        if isinstance(which, str):
            if which not in self._names:
                raise ValueError(
                    f"set(): kernel {self.name} has no argument {which!r}; it has {', '.join(self._names)}"
                )
            return self._names.index(which)
        if not isinstance(which, int) or isinstance(which, bool):
            which = integer("set()", "which", which)
        if not 0 <= which < len(self._names):
            raise ValueError(
                f"set(): kernel {self.name} has no argument {which}; it has {len(self._names)}, from 0 on"
            )
        return which

    def _shared(self, name, value):
        """`value`; a PyTorch tensor, and others that Numba does not take, as an array of the same memory."""
        module = self._module
        if module is None or isinstance(value, (int, float, np.generic, np.ndarray, module.ndarray)):
            return value
        if not is_tensor(value):  # one with requires_grad raises where it is asked for an interface
            if module is not np and hasattr(value, "__cuda_array_interface__"):
                return value
            if not (hasattr(value, "__dlpack__") or hasattr(value, "__array_interface__")):
                return value
        return as_array(f"kernel {self.name}", name, value, module)

    def _type_of(self, name, value):
        try:
            found = self.kernel.typeof_pyval(value)
        except (ValueError, NotImplementedError) as error:
            found, reason = None, f": {error}"
        else:
            reason = ""
        if found is None or not _can_be_passed(found):
            raise TypeError(
                f"argument {name} of kernel {self.name} is {shown(value)}; it must be an array, a NumPy or "
                f"Python number, an enum member, or a tuple of those{reason}"
            )
        return found

    def __repr__(self):
        return f"<{self.name} bound to grid {self.grid}, block {self.block}, {self.shared} bytes shared>"


def _can_be_passed(ty):
    if isinstance(ty, types.BaseTuple):
        return all(_can_be_passed(element) for element in ty)
    if isinstance(ty, types.EnumMember):
        return _can_be_passed(ty.dtype)
    return (
        isinstance(ty, (types.Array, types.Integer, types.Float, types.Complex, types.Boolean))
        or ty == types.bfloat16
    )


def _accepts(declared, actual, value):
    """Whether an argument of type `declared` can be given `value`, of type `actual`."""
    if declared == actual:
        return True
    if isinstance(declared, types.Array) and isinstance(actual, types.Array):
        same = declared.dtype == actual.dtype and declared.ndim == actual.ndim
        return same and declared.layout in ("A", actual.layout) and (actual.mutable or not declared.mutable)
    if type(value) is int:
        if isinstance(declared, types.Integer):
            return declared.minval <= value <= declared.maxval
        return isinstance(declared, types.Float)
    return type(value) is float and isinstance(declared, types.Float)


class _EmulatedLaunch(Launch):
    """Launches through ``kernel[...]``, which the emulator has taken over."""

    def __init__(self, *given, cooperative, co_resident, pdl, group, **_):
        super().__init__(*given)
        type_check.check(self.kernel, self._args)
        self._pdl = pdl
        self._blocks_of_cluster = 1 if self.cluster is None else self.cluster[0]
        if cooperative or co_resident:
            gpu, threads = current_world().backend.machine.gpu, math.prod(self.block)
            fit, how = gpu.fit(threads, self.shared, self._blocks_of_cluster)
            self._check_fit(fit, how, co_resident, f"{self.shared} bytes of dynamic shared memory")
        self._group, self._members = group, None if group is None else group.backend.members
        self._default = self._on(self.stream)

    def _on(self, stream):
        return self.kernel.configure(
            *(self.grid, self.block, stream, self.shared),
            *(self._pdl, self._blocks_of_cluster, self._members),
        )

    def __call__(self, stream=None):
        if self._group is not None:
            self._group._check_alive(f"kernel {self.name}")
        (self._default if stream is None else self._on(stream))(*self._args)

    def _replace(self, index, value):
        if isinstance(self._args[index], np.generic) and not isinstance(value, np.generic):
            value = self._args[index].dtype.type(value)
        self._args[index] = value


class _GpuLaunch(Launch):
    """Launches with cuLaunchKernel on a buffer of packed arguments."""

    def __init__(self, *given, cooperative, co_resident, pdl, timeout, group):
        from cuda.bindings import driver

        _prepare_process()
        self._driver, self._module = driver, sys.modules.get("cupy")
        self._recorded, self._group = modules.recorder is not None, group
        super().__init__(*given)
        compiled = self._compile(timeout)
        self._types = list(compiled.argument_types)
        self._pack()
        self._load(compiled)
        if timeout is not None:
            (library,) = self._check(self._driver.cuKernelGetLibrary(self._kernel))
            bounded_waits.set_limit(int(library), timeout)
        self._cooperative = cooperative or compiled.cooperative
        if pdl and self._cooperative:
            raise ValueError(
                f"bind(): kernel {self.name} calls grid.sync(), and pdl is True; CUDA takes only one of them"
            )
        self._pdl = pdl and self._device_attribute("COMPUTE_CAPABILITY_MAJOR") >= 9
        self._configure_shared()
        self._configure_cluster()
        self._check_block()
        if self._cooperative or co_resident:
            self._check_co_resident(co_resident)
        self._bind_call(self.stream)

    # -- compiling and loading
    @uncollected()  # it would take a tenth of the time
    def _compile(self, timeout):
        argument_types = self._types_to_compile()
        around = (begin_kernel, end_kernel) if self._recorded else None
        if timeout is not None or self._recorded:
            compiled = compile_form(self.kernel, argument_types, timeout, around)
        else:
            compiled = self.kernel.compile(argument_types)
        if self._group is not None and _calls_nvshmem(compiled):
            return compile_form(self.kernel, argument_types, timeout, around, grouped=True)
        return compiled

    def _types_to_compile(self):
        """The arguments' types, or those that the kernel was declared for."""
        kernel, wanted = self.kernel, tuple(self._types)
        if wanted in kernel.overloads or (kernel._can_compile and not kernel.specialized):
            return wanted
        for declared in kernel.overloads:
            if all(map(_accepts, declared, wanted, self._args)):
                return declared
        raise TypeError(
            f"bind(): the arguments' types are {wanted}, and kernel {self.name} was declared only for "
            f"{listed(kernel.overloads)}. Declare it without types, or give arguments of these"
        )

    def _load(self, compiled):
        """Load all of the module now, and initialize it (NVSHMEM's state, the table of peers)."""
        if self._group is None:
            compiled.bind()
            numba_function = compiled._codelibrary.get_cufunc()
        else:
            numba_function = self._group.backend.load(compiled)
        self._keep = compiled, numba_function
        driver = self._driver
        self._kernel = driver.CUkernel(int(numba_function.handle))
        (self._function,) = self._check(driver.cuKernelGetFunction(self._kernel))
        self._check(driver.cuFuncLoad(self._function))
        (self._device,) = self._check(driver.cuCtxGetDevice())
        attribute = driver.CUfunction_attribute
        self._registers = self._attribute(attribute.CU_FUNC_ATTRIBUTE_NUM_REGS)
        self._static = self._attribute(attribute.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES)

    def _attribute(self, which):
        (value,) = self._check(self._driver.cuFuncGetAttribute(which, self._function))
        return value

    def _device_attribute(self, name):
        which = getattr(self._driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        (value,) = self._check(self._driver.cuDeviceGetAttribute(which, self._device))
        return value

    def _configure_shared(self):
        total, most = self._static + self.shared, self._device_attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        if total > most:
            raise ValueError(
                f"bind(): kernel {self.name} needs {total} bytes of shared memory per block ({self.shared} "
                f"dynamic and {self._static} static); this GPU has {most}"
            )
        which = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        # A maximum for all launches of the kernel: never lowered, since another bound launch may need it.
        if total > DEFAULT_SHARED and self._attribute(which) < self.shared:
            self._check(self._driver.cuKernelSetAttribute(which, self.shared, self._kernel, self._device))
            self._check(self._driver.cuFuncSetAttribute(self._function, which, self.shared))

    def _configure_cluster(self):
        if self.cluster is None:
            return
        size = self.cluster[0] * self.cluster[1] * self.cluster[2]
        if not self._device_attribute("CLUSTER_LAUNCH"):
            raise ValueError("bind(): cluster needs a GPU of compute capability 9.0 or newer")
        if size > PORTABLE_CLUSTER:
            which = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            self._check(self._driver.cuFuncSetAttribute(self._function, which, 1))

    def _check_block(self):
        most = self._attribute(self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK)
        threads = self.block[0] * self.block[1] * self.block[2]
        if threads > most:
            raise ValueError(
                f"bind(): block is {self.block}, {threads} threads; it must have {most} at most, since "
                f"kernel {self.name} uses {self._registers} registers per thread. Use smaller blocks, or "
                "@cuda.jit(max_registers=...) or launch_bounds"
            )

    def _check_co_resident(self, waits):
        driver, threads = self._driver, math.prod(self.block)
        if self.cluster is None:
            occupancy = driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                self._function, threads, self.shared
            )
            (per_sm,) = self._check(occupancy)
            sms = self._device_attribute("MULTIPROCESSOR_COUNT")
            fit, how = per_sm * sms, f"{per_sm} on each of its {sms} SMs"
        else:
            config = self._config(0)
            (clusters,) = self._check(driver.cuOccupancyMaxActiveClusters(self._function, config))
            size = self.cluster[0] * self.cluster[1] * self.cluster[2]
            fit, how = clusters * size, f"{clusters} clusters of {size}"
        self.resident_blocks = fit
        room = (
            f"{self._registers} registers per thread and {self._static + self.shared} bytes of shared memory"
        )
        self._check_fit(fit, how, waits, room)

    # -- arguments
    def _pack(self):
        """Lay all arguments out in one buffer, 8 bytes for each parameter of the compiled kernel."""
        self._offsets, formats = [], []
        for name, ty, value in zip(self._names, self._types, self._args, strict=True):
            self._offsets.append(8 * len(formats))
            formats += flatten(name, ty, value)
        self._lay_out(bytes(8 * max(len(formats), 1)))
        for i, (form, number) in enumerate(formats):
            struct.pack_into(form, self._buffer, 8 * i, number)

    def _lay_out(self, packed):
        self._buffer = ctypes.create_string_buffer(packed, len(packed))
        start, n = ctypes.addressof(self._buffer), len(packed) // 8
        self._table = (ctypes.c_void_p * n)(*(start + 8 * i for i in range(n)))

    def forget_arrays(self):
        self._args = [None] * len(self._args)

    def _own_arguments(self):
        super()._own_arguments()
        self._lay_out(self._buffer.raw)
        self._bind_call(self.stream)

    def _replace(self, index, value):
        packed = flatten(self._names[index], self._types[index], value)
        for i, (form, number) in enumerate(packed):
            struct.pack_into(form, self._buffer, self._offsets[index] + 8 * i, number)
        self._args[index] = value

    # -- launching
    def _bind_call(self, stream):
        # cuda.bindings converts an int to a handle at every call; handles made once are faster.
        driver, parameters = self._driver, ctypes.addressof(self._table)
        dims = (*self.grid, *self.block, self.shared)
        if self.cluster is not None or self._pdl:

            @functools.lru_cache(maxsize=4)
            def on(stream):
                config = self._config(stream)
                return functools.partial(driver.cuLaunchKernelEx, config, self._function, parameters, 0)
        else:
            call, tail = driver.cuLaunchKernel, (parameters, 0)
            if self._cooperative:
                call, tail = driver.cuLaunchCooperativeKernel, (parameters,)

            def on(stream):
                return functools.partial(call, self._function, *dims, driver.CUstream(stream), *tail)

        self._on, self._default = on, on(address_of_stream(stream))

    def __call__(self, stream=None):
        bounded_waits.check()
        if self._group is not None:  # its module is gone with it
            self._group._check_alive(f"kernel {self.name}")
        launch = self._default if stream is None else self._on(address_of_stream(stream))
        if self._recorded:
            with host_call(f"launch {self.name}"):
                result = launch()
        else:
            result = launch()
        if result[0]:
            self._fail(result[0])

    def _config(self, stream):
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = self.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = self.block
        config.sharedMemBytes = self.shared
        config.hStream = driver.CUstream(stream)
        attributes = []

        def attribute(name):
            attributes.append(driver.CUlaunchAttribute())
            attributes[-1].id = getattr(driver.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
            return attributes[-1].value

        if self.cluster is not None:
            shape = attribute("CLUSTER_DIMENSION").clusterDim
            shape.x, shape.y, shape.z = self.cluster
        if self._cooperative:
            attribute("COOPERATIVE").cooperative = 1
        if self._pdl:
            attribute("PROGRAMMATIC_STREAM_SERIALIZATION").programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = attributes, len(attributes)
        return config

    # -- errors
    def _check(self, result):
        error, *values = result
        if error:
            self._fail(error)
        return values

    def _fail(self, error):
        driver = self._driver
        _, text = driver.cuGetErrorString(error)
        name = getattr(error, "name", error)
        message = f"kernel {self.name}: {name}: {text.decode() if text else 'unknown error'}"
        results = driver.CUresult
        if error in (
            results.CUDA_ERROR_INVALID_VALUE,
            results.CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES,
            results.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE,
            results.CUDA_ERROR_INVALID_CLUSTER_SIZE,
        ):
            raise ValueError(
                f"{message}. The launch: grid {self.grid} (at most {MAX_GRID}), block {self.block} (at most "
                f"{MAX_BLOCK} and {MAX_THREADS} threads), cluster {self.cluster}, {self.shared} bytes of "
                f"dynamic and {self._static} of static shared memory, {self._registers} registers per thread"
            )
        if error == results.CUDA_ERROR_INVALID_CONTEXT:
            message += ". No GPU is current in this thread: call cupy.cuda.Device(number).use() in it first"
        raise RuntimeError(f"{message} (in it, or in work enqueued before)")


def _calls_nvshmem(compiled):
    """Whether a compiled kernel calls functions of NVSHMEM, which take the World's ranks."""
    return any("nvshmem" in str(module) for module in compiled._codelibrary.modules)


@functools.cache
def _prepare_process():
    """The JIT cache and the types of CuPy arrays, as a World installs them, for processes without one."""
    kernel_cache.install()
    try:
        from shmemkit.compiler.cupy_arrays import register_arrays
    except ImportError:  # without CuPy the arrays are others
        return
    register_arrays()


def flatten(name, ty, value):
    """The kernel parameters that an argument of Numba type `ty` becomes: (struct format, number) each."""
    if isinstance(ty, types.Array):
        return _flatten_array(name, value)
    if isinstance(ty, types.BaseTuple):
        return [part for element, v in zip(ty, value, strict=True) for part in flatten(name, element, v)]
    if isinstance(ty, types.EnumMember):
        return flatten(name, ty.dtype, value.value)
    if isinstance(ty, types.Integer):
        if not ty.minval <= value <= ty.maxval:
            raise ValueError(f"argument {name} is {value}; an {ty} is {ty.minval} to {ty.maxval}")
        letter = {8: "b", 16: "h", 32: "i", 64: "q"}[ty.bitwidth]
        return [("<" + (letter if ty.signed else letter.upper()), int(value))]
    if isinstance(ty, types.Boolean):
        return [("<?", bool(value))]
    if ty == types.bfloat16:
        return [("<H", int(np.asarray(value).view(np.uint16)))]
    if isinstance(ty, types.Complex):
        form = "<f" if ty == types.complex64 else "<d"
        return [(form, float(value.real)), (form, float(value.imag))]
    return [({16: "<e", 32: "<f", 64: "<d"}[ty.bitwidth], float(value))]


def _flatten_array(name, array):
    """Numba's array structure: two unused pointers, size, bytes per element, address, shape, strides."""
    if hasattr(getattr(array, "data", None), "ptr"):  # CuPy: its interface dictionary would ask the stream
        address, shape, strides, itemsize = array.data.ptr, array.shape, array.strides, array.dtype.itemsize
    elif (interface := getattr(array, "__cuda_array_interface__", None)) is not None:
        address, shape, strides = interface["data"][0], interface["shape"], interface.get("strides")
        itemsize = np.dtype(interface["typestr"]).itemsize
        if strides is None:
            strides = tuple(
                itemsize * int(np.prod(shape[i + 1 :], dtype=np.int64)) for i in range(len(shape))
            )
    else:
        raise TypeError(
            f"argument {name} is {shown(array)} in host memory; it must be on the GPU. cupy.asarray() copies "
            "it there"
        )
    size = int(np.prod(shape, dtype=np.int64))
    return [("<q", 0), ("<q", 0), ("<q", size), ("<q", itemsize), ("<Q", address)] + [
        ("<q", n) for n in (*shape, *strides)
    ]
