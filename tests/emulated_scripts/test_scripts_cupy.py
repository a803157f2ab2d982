"""CuPy, cuda.core and the host functions of numba.cuda, for scripts on the emulator."""

import functools

import pytest
from scripted import run

import shmemkit as sk


@pytest.fixture
def script(tmp_path):
    return functools.partial(run, tmp_path)


def test_streams_are_the_same_in_all_libraries(script):
    script(
        """
        import cupy as cp
        from cuda.core import Device, Stream
        from cuda.core.experimental import Stream as Older
        from numba import cuda
        mine = cuda.stream()
        assert Stream.from_handle(mine.handle.value) is mine and Older is Stream
        assert cp.cuda.ExternalStream(mine.ptr) is mine and cuda.external_stream(mine.ptr) is mine
        assert mine.__cuda_stream__() == (0, int(mine.handle)) and int(mine.handle) != 0
        other = Device().create_stream()
        assert other is not mine and other.ptr != mine.ptr
        assert cp.cuda.Stream.null is cuda.default_stream() is Device().default_stream
        with other:
            assert cp.cuda.get_current_stream() is other
        assert cp.cuda.get_current_stream() is cp.cuda.Stream.null

        @cuda.jit
        def add(a, value):
            a[cuda.grid(1)] += value

        a = cp.zeros(8, cp.int32)
        third = cp.cuda.Stream(non_blocking=True)
        for stream in (0, mine, other, int(mine.handle), mine.handle.value, third):
            add[2, 4, stream](a, 1)
        event = mine.record()
        other.wait(event)
        event.sync()
        assert event.is_done and cp.cuda.get_elapsed_time(event, other.record()) >= 0
        cp.cuda.runtime.deviceSynchronize()
        assert (cp.asnumpy(a) == 6).all()
        """,
        2,
    )


def test_the_default_stream_waits_for_others_that_are_not_non_blocking(script):
    text = """
    import cupy as cp
    from numba import cuda

    @cuda.jit
    def add(a):
        a[0] += 1

    a = cp.zeros(1)
    for stream in ({streams}):
        add[1, 1, stream](a)
    """
    ordered = "0, cuda.stream(), 0, cp.cuda.Stream(), cp.cuda.Stream.null"
    script(text.format(streams=ordered), 1, races=True)
    for streams in ("0, cp.cuda.Stream(non_blocking=True)", "cuda.stream(), cuda.stream()"):
        with pytest.raises(sk.emu.RaceError):
            script(text.format(streams=streams), 1, races=True)


def test_cupy_arrays(script):
    script(
        """
        import numpy as np
        import cupy as cp
        a = cp.arange(6, dtype="float32").reshape(2, 3)
        assert isinstance(a, cp.ndarray) and a.shape == (2, 3) and cp.float32 is np.float32
        assert isinstance(a.get(), np.ndarray) and not isinstance(a.get(), cp.ndarray)
        assert isinstance(a[0, 1], cp.ndarray) and a[0, 1].get() == 1
        assert float(a.sum()) == 15 and a.max().item() == 5
        assert isinstance(a + 1, cp.ndarray) and isinstance(a.mean(), cp.ndarray) and int(a[1][2]) == 5
        a[0] = cp.asarray([7, 8, 9])
        a[1] += a[0]
        assert a.get().tolist() == [[7, 8, 9], [10, 12, 14]]
        host = np.ones(3)
        device = cp.asarray(host)
        device[:] = 2
        assert (host == 1).all() and cp.asnumpy(device).tolist() == [2, 2, 2]
        assert cp.allclose(device, 2) and bool((device == 2).all())
        assert a.data.ptr == a.ctypes.data and a.device.id == cp.cuda.Device().id
        out = np.empty((2, 3), "float32")
        assert a.get(out=out) is out and out[1, 2] == 14
        assert cp.get_array_module(a) is cp and cp.get_array_module(out) is np
        cp.random.seed(3)
        first = cp.random.rand(2)
        cp.random.seed(3)
        assert (cp.random.rand(2) == first).all() and isinstance(first, cp.ndarray)
        assert cp.concatenate([a, a]).shape == (4, 3) and cp.where(a > 9, 1, 0).sum() == 3
        q, r = cp.linalg.qr(a[:, :2])
        assert isinstance(q, cp.ndarray) and cp.linalg.norm(cp.asarray([3, 4])).get() == 5
        cp.testing.assert_allclose(q @ r, a[:, :2], rtol=1e-5)
        cp.get_default_memory_pool().free_all_blocks()
        with cp.cuda.Device(0):
            cp.cuda.Device().synchronize()
        """,
        1,
    )


def test_devices(script):
    script(
        """
        import cupy as cp
        from cuda.core import Device, system
        from mpi4py import MPI
        from numba import cuda
        me = MPI.COMM_WORLD.rank
        assert system.num_devices == cp.cuda.runtime.getDeviceCount() == len(cuda.gpus) == 3
        Device(me).set_current()
        MPI.COMM_WORLD.barrier()
        assert Device().device_id == cp.cuda.Device().id == cuda.get_current_device().id == me
        with cuda.gpus[(me + 1) % 3]:
            assert cp.cuda.Device().id == (me + 1) % 3
        assert cp.cuda.Device().id == me
        cuda.select_device(0)
        assert cp.cuda.runtime.getDevice() == 0 and Device(0) == Device() and cuda.is_available()
        for wrong in (Device, cp.cuda.Device):
            try:
                wrong(3)
            except ValueError:
                continue
            raise AssertionError
        """,
        3,
    )


def test_kernels_before_init_and_with_signatures(script):
    script(
        """
        import numpy as np
        from numba import cuda

        @cuda.jit("void(int32[:], int32)")
        def fill(a, value):
            i = cuda.grid(1)
            if i < a.size:
                a[i] = value

        a = cuda.to_device(np.zeros(5, np.int32))
        fill[2, 4](a, 3)
        cuda.synchronize()
        assert (a.copy_to_host() == 3).all()
        """,
        2,
    )


def test_arrays_of_numba_and_cupy_share_their_memory(script):
    script(
        """
        import cupy as cp
        import numpy as np
        from numba import cuda
        a = cuda.device_array(4, np.int32)
        b = cp.asarray(a)
        b[:] = 3
        assert (a.copy_to_host() == 3).all() and cp.asarray(b) is b
        cuda.as_cuda_array(b)[0] = 5
        assert cuda.as_cuda_array(b).copy_to_host().tolist() == [5, 3, 3, 3]
        assert cuda.is_cuda_array(a) and cuda.is_cuda_array(b) and not cuda.is_cuda_array(np.zeros(1))
        assert b.__cuda_array_interface__["data"] == (b.data.ptr, False)
        c = cp.asarray(b, np.float32)
        c[:] = 0
        assert cp.array(b) is not b and b[0] == 5 and cp.array(b, copy=False) is b
        assert cp.asarray(cp.ones((2, 3)), order="F").flags.f_contiguous
        assert repr(b) == "array([5, 3, 3, 3], dtype=int32)" and cp.array(b, ndmin=2).shape == (1, 4)
        """,
        1,
    )


def test_decorators_without_the_linker(script):
    script(
        """
        import numpy as np
        from numba import cuda

        @cuda.jit("void(int32[:])", lto=True, max_registers=32)
        def fill(a):
            a[cuda.grid(1)] = 1

        a = cuda.to_device(np.zeros(4, np.int32))
        with cuda.pinned(np.zeros(3)), cuda.defer_cleanup():
            fill[1, 4](a)
        assert (a.copy_to_host() == 1).all()
        """,
        1,
    )


def test_polls_of_streams_and_events(script):
    """The kernels wait for each other, in a circle that the second launch of rank 0 closes."""
    script(
        """
        import cupy as cp
        import nvshmem.core as nv
        from mpi4py import MPI
        from numba import cuda
        from nvshmem.core.device.numba import signal_op, signal_wait
        nv.init(mpi_comm=MPI.COMM_WORLD, initializer_method="mpi")
        me = nv.my_pe()

        @cuda.jit
        def wait(signal):
            signal_wait(signal, nv.ComparisonType.CMP_GE, 1)

        @cuda.jit
        def tell(signal, pe):
            signal_op(signal, 1, nv.SignalOp.SIGNAL_SET, pe)

        signal = nv.array((1,), "uint64")
        signal[:] = 0
        MPI.COMM_WORLD.barrier()
        stream, other, event = cuda.stream(), cuda.stream(), cp.cuda.Event()
        wait[1, 1, stream](signal)
        event.record(stream)
        if me == 1:
            tell[1, 1, other](signal, 0)
            assert any(stream.done for _ in range(1000))
        else:
            assert any(event.done for _ in range(1000))
            tell[1, 1, other](signal, 1)
        stream.synchronize()
        """,
        2,
    )
