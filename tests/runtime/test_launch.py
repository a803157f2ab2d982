"""bind: on the emulator; what it accepts; and, with the driver faked, what it hands to the GPU."""

import ctypes
import enum
import re
import types
from unittest import mock

import numpy as np
import pytest
from numba import cuda
from numba.cuda import types as nb

import shmemkit as sk
from shmemkit.backends.streams import address_of_stream
from shmemkit.runtime import launch


class Color(enum.IntEnum):
    RED = 3


@cuda.jit
def scale(x, factor, out):
    i = cuda.grid(1)
    if i < x.size:
        out[i] = factor * x[i]


@cuda.jit
def store(out, value):
    out[0] = value


@pytest.fixture
def world():
    with sk.init("emulator") as world:
        yield world


# -- on the emulator


def test_launches(world):
    x, out = np.arange(10.0), np.zeros(10)
    step = sk.bind(scale, 2, (8,), (x, 3.0, out))
    step()
    np.testing.assert_array_equal(out, 3 * x)
    assert "scale" in repr(step) and step.grid == (2, 1, 1) and step.block == (8, 1, 1)


def test_set_by_name_and_position(world):
    x, out = np.arange(4.0), np.zeros(4)
    step = sk.bind(scale, 1, 4, (x, 3.0, out))
    step.set("factor", 5.0)
    step()
    np.testing.assert_array_equal(out, 5 * x)
    step.set(0, np.ones(4))
    step.set("factor", 2)  # an int into a float64: it holds it
    step()
    np.testing.assert_array_equal(out, 2 * np.ones(4))


def test_set_refuses_another_type(world):
    step = sk.bind(scale, 1, 4, (np.arange(4.0), 3.0, np.zeros(4)))
    with pytest.raises(
        TypeError, match=r"x of kernel scale was bound as array\(float64, 1d, C\).*array\(float32, 1d, C\)"
    ):
        step.set("x", np.zeros(4, "float32"))
    with pytest.raises(TypeError, match=r"array\(float64, 2d, C\)"):
        step.set("x", np.zeros((2, 2)))
    with pytest.raises(TypeError, match="factor .* float64"):
        step.set("factor", np.float32(1))
    with pytest.raises(ValueError, match="no argument 'y'; it has x, factor, out"):
        step.set("y", 1)
    with pytest.raises(ValueError, match="no argument 3; it has 3, from 0 on"):
        step.set(3, 1)


def test_python_numbers_take_the_bound_type(world):
    out = np.zeros(1, "int64")
    step = sk.bind(store, 1, 1, (out, np.int8(5)))
    step.set("value", -7)
    step()
    assert out[0] == -7
    with pytest.raises(TypeError, match="int8"):
        step.set("value", 300)


def test_on_all_ranks_with_symmetric_arrays():
    def main():
        with sk.init() as world:
            x = sk.full(4, world.rank, "float32")
            out = sk.zeros(4, "float32")
            step = sk.bind(scale, 1, 4, (x, np.float32(2), out), co_resident=True, cooperative=True)
            step(), step(stream=world.stream)
            world.barrier()
            return float(sk.peer_view(out, (world.rank + 1) % world.n_ranks)[3])

    assert sk.emu.run(main, 3) == [2.0, 4.0, 0.0]


def test_the_emulator_refuses_a_grid_that_does_not_fit():
    def main():
        arguments = sk.init().xp.zeros(1, "int64"), 1
        fit = 2 * 16  # blocks of 128 threads, on two SMs with 2048
        for how in ({"co_resident": True}, {"cooperative": True}):
            sk.bind(store, fit, 128, arguments, **how)()
            with pytest.raises(ValueError, match=r"33 blocks; it must have 32 at most \(2 SMs with 16 each"):
                sk.bind(store, (11, 3), (64, 2), arguments, **how)
        with pytest.raises(ValueError, match="it must have 2 at most .* for an SM has 228 KB"):
            sk.bind(store, 3, 32, arguments, shared=200_000, co_resident=True)
        sk.bind(store, fit + 1, 128, arguments)()

    sk.emu.run(main, 1, gpu="H200,sms=2")


# -- what is refused, everywhere


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"grid": 0}, ValueError, "grid is 0; it must be 1 or more, and 2147483647 at most"),
        ({"grid": (1, 2, 3, 4)}, ValueError, "one to three"),
        ({"grid": ()}, ValueError, "one to three"),
        ({"grid": 1.5}, TypeError, "grid is 1.5"),
        ({"grid": (1, 65536)}, ValueError, "2147483647 by 65535 at most"),
        ({"block": 1025}, ValueError, "1024"),
        ({"block": (32, 33)}, ValueError, "1056 threads; it must have 1024"),
        ({"block": (1, 1, 65)}, ValueError, "64"),
        ({"shared": -1}, ValueError, "shared is -1; it must be 0 or more"),
        (
            {"cluster": 3, "grid": 4},
            ValueError,
            r"grid is \(4, 1, 1\); it must be a multiple of cluster, \(3, 1, 1\)",
        ),
        ({"args": (1,)}, TypeError, "args has 1 arguments; kernel store takes 2: out, value"),
        (
            {"args": (np.zeros(1), "text")},
            TypeError,
            "value of kernel store is 'text'; it must be an array",
        ),
        ({"args": (np.zeros(1), None)}, TypeError, "argument value of kernel store is"),
        ({"args": (np.zeros(1), object())}, TypeError, "argument value of kernel store is"),
        ({"kernel": print}, TypeError, "@cuda.jit"),
    ],
)
def test_refused(world, change, error, message):
    given = {"kernel": store, "grid": 1, "block": 1, "args": (np.zeros(1), 1.0)} | change
    with pytest.raises(error, match=message):
        sk.bind(**given)


def test_without_a_world_and_without_a_gpu(gpus):
    gpus(0)
    with pytest.raises(RuntimeError, match="init"):
        sk.bind(store, 1, 1, (np.zeros(1), 1))


# -- packing for the GPU


class DeviceArray:
    """An array on a GPU that is not there, by the CUDA Array Interface."""

    def __init__(self, shape, dtype, strides=None, address=0x7F0000001000):
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": np.dtype(dtype).str,
            "data": (address, False),
            "strides": strides,
            "version": 3,
        }


def cupy_array(shape, dtype, offset=0):
    cupy = pytest.importorskip("cupy")
    memory = cupy.cuda.UnownedMemory(0x7F0000000000, 1 << 20, None, 0)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, offset))


def numbers(ty, value):
    return [number for _, number in launch.flatten("a", ty, value)]


def test_array_structure():
    ty = nb.Array(nb.float32, 2, "A")
    assert numbers(ty, DeviceArray((3, 5), "float32")) == [0, 0, 15, 4, 0x7F0000001000, 3, 5, 20, 4]
    assert numbers(ty, DeviceArray((3, 5), "float32", (40, 8))) == [0, 0, 15, 4, 0x7F0000001000, 3, 5, 40, 8]
    assert numbers(nb.Array(nb.int8, 0, "C"), DeviceArray((), "int8")) == [0, 0, 1, 1, 0x7F0000001000]
    assert numbers(ty, DeviceArray((0, 5), "float32")) == [0, 0, 0, 4, 0x7F0000001000, 0, 5, 20, 4]
    array = cupy_array((4, 6), "float32", 256)
    assert numbers(ty, array[1:, ::2]) == [0, 0, 9, 4, 0x7F0000000100 + 24, 3, 3, 24, 8]
    with pytest.raises(TypeError, match="host memory"):
        numbers(ty, np.zeros((2, 2), "float32"))


def test_type_of_cupy_arrays():
    pytest.importorskip("cupy")
    import ml_dtypes

    launch._prepare_process()
    array = cupy_array((4, 6), "float32")
    assert store.typeof_pyval(array) == nb.Array(nb.float32, 2, "C")
    assert store.typeof_pyval(array.T) == nb.Array(nb.float32, 2, "F")
    assert store.typeof_pyval(array[:, 1:]) == nb.Array(nb.float32, 2, "A")
    assert store.typeof_pyval(cupy_array(3, ml_dtypes.bfloat16)) == nb.Array(nb.bfloat16, 1, "C")


ARGUMENTS = [
    True,
    5,
    2.5,
    1 + 2j,
    Color.RED,
    (1, np.float32(2), (np.uint8(3),)),
    *(np.dtype(t).type(7) for t in "bool int8 int16 int32 int64 uint8 uint16 uint32 uint64".split()),
    *(np.dtype(t).type(1.5) for t in "float16 float32 float64 complex64 complex128".split()),
    DeviceArray((2, 3), "float32"),
]


@pytest.mark.parametrize("value", ARGUMENTS, ids=lambda value: f"{type(value).__name__}")
def test_parameters_are_those_of_the_compiled_kernel(value):
    """Number and size of each, against the PTX."""
    from ptx import compile_ptx

    def kernel(a):
        pass

    ty = store.typeof_pyval(value)
    ptx = compile_ptx(cuda.jit(kernel), (ty,))
    entry = ptx[ptx.index(".entry") :]
    declared = re.findall(r"\.param \.[usbf](\d+)", entry[: entry.index("{")])
    sizes = [ctypes.sizeof(LETTERS[form[-1]]) for form, _ in launch.flatten("a", ty, value)]
    assert sizes == [int(bits) // 8 for bits in declared]


LETTERS = {
    **{"b": ctypes.c_int8, "h": ctypes.c_int16, "i": ctypes.c_int32, "q": ctypes.c_int64, "?": ctypes.c_bool},
    **{"B": ctypes.c_uint8, "H": ctypes.c_uint16, "I": ctypes.c_uint32, "Q": ctypes.c_uint64},
    **{"e": ctypes.c_uint16, "f": ctypes.c_float, "d": ctypes.c_double},
}


def test_integers_out_of_range():
    with pytest.raises(ValueError, match="a is 300; an int8 is -128 to 127"):
        launch.flatten("a", nb.int8, 300)


def test_streams():
    class Protocol:
        def __cuda_stream__(self):
            return 0, 11

    for stream, address in [(None, 0), (7, 7), (Protocol(), 11), (types.SimpleNamespace(ptr=12), 12)]:
        assert address_of_stream(stream) == address
    with pytest.raises(TypeError, match="stream is 'stream'; it must be a CuPy"):
        address_of_stream("stream")


# -- the calls to the driver


class FakeDriver:
    """cuda.bindings.driver without a GPU: records launches; an H100-like device with `fit` blocks per SM."""

    def __init__(self, driver):
        self.real, self.launches, self.set_attributes, self.fit, self.static, self.error = (
            driver,
            [],
            [],
            2,
            0,
            0,
        )

    def __getattr__(self, name):
        return getattr(self.real, name)

    def cuKernelGetFunction(self, kernel):
        return 0, self.real.CUfunction(5)

    def cuFuncLoad(self, function):
        return (0,)

    def cuCtxGetDevice(self):
        return 0, self.real.CUdevice(0)

    def cuFuncGetAttribute(self, which, function):
        name = which.name.removeprefix("CU_FUNC_ATTRIBUTE_")
        values = {"NUM_REGS": 32, "SHARED_SIZE_BYTES": self.static, "MAX_THREADS_PER_BLOCK": 512}
        return 0, values.get(name, DEFAULT_SHARED)

    def cuDeviceGetAttribute(self, which, device):
        name = which.name.removeprefix("CU_DEVICE_ATTRIBUTE_")
        limits = {
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": 232448,
            "MULTIPROCESSOR_COUNT": 132,
            "CLUSTER_LAUNCH": 1,
        }
        return 0, limits[name]

    def cuKernelSetAttribute(self, which, value, kernel, device):
        self.set_attributes.append((which.name, value))
        return (0,)

    def cuFuncSetAttribute(self, function, which, value):
        self.set_attributes.append((which.name, value))
        return (0,)

    def cuOccupancyMaxActiveBlocksPerMultiprocessor(self, function, threads, shared):
        return 0, self.fit

    def cuOccupancyMaxActiveClusters(self, function, config):
        return 0, self.fit

    def cuLaunchKernel(self, f, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra):
        self.launches.append(((gx, gy, gz), (bx, by, bz), shared, int(stream), parameters))
        return (self.error,)

    def cuLaunchCooperativeKernel(self, f, gx, gy, gz, bx, by, bz, shared, stream, parameters):
        self.launches.append(("cooperative", (gx, gy, gz), int(stream)))
        return (self.error,)

    def cuLaunchKernelEx(self, config, f, parameters, extra):
        cluster = config.attrs[0].value.clusterDim
        self.launches.append(
            ("cluster", (cluster.x, cluster.y, cluster.z), config.numAttrs, int(config.hStream))
        )
        return (self.error,)

    def cuGetErrorString(self, error):
        return 0, b"what the driver says"


DEFAULT_SHARED = 48 * 1024


@pytest.fixture
def driver(monkeypatch, gpus):
    bindings = pytest.importorskip("cuda.bindings")
    import cuda.bindings.driver

    fake = FakeDriver(cuda.bindings.driver)
    monkeypatch.setattr(bindings, "driver", fake)
    gpus(1)
    monkeypatch.setattr(launch, "_prepare_process", lambda: None)

    def compile(kernel, argument_types):
        library = types.SimpleNamespace(get_cufunc=lambda: types.SimpleNamespace(handle=3))
        return types.SimpleNamespace(
            argument_types=argument_types, cooperative=False, bind=mock.Mock(), _codelibrary=library
        )

    monkeypatch.setattr("numba.cuda.dispatcher.CUDADispatcher.compile", compile)
    return fake


def parameters(address, *kinds):
    """What the kernel would read at `address`, a table of pointers."""
    table = (ctypes.c_void_p * len(kinds)).from_address(address)
    return [kind.from_address(pointer).value for kind, pointer in zip(kinds, table, strict=True)]


KINDS = [ctypes.c_int64] * 7 + [ctypes.c_int32]


def test_gpu_launch(driver):
    step = sk.bind(store, (3, 2), 64, (DeviceArray((9,), "int64"), np.int32(-5)), stream=77, shared=100)
    step()
    grid, block, shared, stream, table = driver.launches.pop()
    assert (grid, block, shared, stream) == ((3, 2, 1), (64, 1, 1), 100, 77)
    assert parameters(table, *KINDS) == [0, 0, 9, 8, 0x7F0000001000, 9, 8, -5]
    step.set("value", 6)
    step.set(0, DeviceArray((2,), "int64", address=0x7F0000002000))
    step(stream=types.SimpleNamespace(ptr=78))
    *_, stream, table = driver.launches.pop()
    assert stream == 78 and parameters(table, *KINDS) == [0, 0, 2, 8, 0x7F0000002000, 2, 8, 6]
    assert driver.set_attributes == []


def test_gpu_shared_memory(driver):
    arguments = DeviceArray((1,), "int64"), 1
    sk.bind(store, 1, 1, arguments, shared=100_000)
    assert set(driver.set_attributes) == {("CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES", 100_000)}
    driver.static = 150_000
    with pytest.raises(ValueError, match="250000 bytes.*100000 dynamic and 150000 static.*232448"):
        sk.bind(store, 1, 1, arguments, shared=100_000)


def test_gpu_co_resident(driver):
    arguments = DeviceArray((1,), "int64"), 1
    sk.bind(store, 264, 64, arguments, co_resident=True)
    sk.bind(store, 265, 64, arguments)
    with pytest.raises(
        ValueError, match=r"265 blocks; it must have 264 at most \(2 on each of its 132 SMs\), since .* waits"
    ):
        sk.bind(store, 265, 64, arguments, co_resident=True)
    with pytest.raises(ValueError, match="is cooperative"):
        sk.bind(store, 265, 64, arguments, cooperative=True)
    with pytest.raises(ValueError, match="have 8 at most .2 clusters of 4"):
        sk.bind(store, 12, 64, arguments, cluster=4, co_resident=True)


def test_gpu_cooperative_and_cluster(driver):
    arguments = DeviceArray((1,), "int64"), 1
    sk.bind(store, 4, 64, arguments, cooperative=True, stream=5)()
    sk.bind(store, 4, 64, arguments, cluster=(2,), stream=6)()
    sk.bind(store, 32, 64, arguments, cluster=16, cooperative=True, stream=7)(stream=8)
    assert driver.launches == [
        ("cooperative", (4, 1, 1), 5),
        ("cluster", (2, 1, 1), 1, 6),
        ("cluster", (16, 1, 1), 2, 8),
    ]
    assert driver.set_attributes == [("CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED", 1)]


def test_gpu_errors(driver):
    arguments = DeviceArray((1,), "int64"), 1
    with pytest.raises(ValueError, match="513 threads; it must have 512 at most, .* uses 32 registers"):
        sk.bind(store, 1, 513, arguments)
    step = sk.bind(store, 4, 64, arguments, shared=10)
    results = driver.real.CUresult
    driver.error = results.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(ValueError, match=r"store: CUDA_ERROR_INVALID_VALUE.*grid \(4, 1, 1\).*10 bytes"):
        step()
    driver.error = results.CUDA_ERROR_INVALID_CONTEXT
    with pytest.raises(RuntimeError, match="current in this thread"):
        step()
    driver.error = results.CUDA_ERROR_ILLEGAL_ADDRESS
    with pytest.raises(RuntimeError, match="what the driver says"):
        step()
    with pytest.raises(TypeError, match="host memory"):
        sk.bind(store, 1, 1, (np.zeros(1), 1.0))


def test_arguments_are_a_tuple(world):
    with pytest.raises(TypeError, match="args is a numpy.ndarray; it must be a tuple"):
        sk.bind(store, 1, 1, np.zeros(3))
