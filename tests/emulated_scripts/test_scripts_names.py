"""The modules that the emulator stands in for have names that the real ones have, and no other."""

from pathlib import Path

import pytest
from scripted import run

from shmemkit import device
from shmemkit.emu.cuda_module import Cuda
from shmemkit.emulated_scripts import cuda_core, cupy, mpi, nvshmem_core

REAL = {}  # name of a module -> its names (real_names.py says where they are from)
for part in (Path(__file__).parent / "real_names.txt").read_text().split("== ")[1:]:
    head, *lines = part.splitlines()
    REAL[head.partition(",")[0]] = set(" ".join(lines).split())
REAL["cuda.core.experimental"] = REAL["cuda.core"]
REAL["cuda"] = set()
STAND_INS = {**cuda_core.modules(), **cupy.modules(), **mpi.modules(), **nvshmem_core.modules()}
NUMBA = "nvshmem.core.device.numba"
BINDINGS = "nvshmem.bindings.device.numba"


@pytest.mark.parametrize("name", STAND_INS)
def test_no_other_names(name):
    assert {n for n in vars(STAND_INS[name]) if not n.startswith("_")} - REAL[name] == set()


def test_no_other_names_in_kernels():
    public = {n for n in dir(Cuda) if not n.startswith("_")}
    assert public - REAL["numba.cuda"] == {"bf16", "fp16"}  # modules, which it does not import by itself


def test_all_names_for_kernels():
    names = REAL[NUMBA]
    assert len(names) == 73 and set(STAND_INS[NUMBA].__all__) == names
    assert all(getattr(STAND_INS[NUMBA], n) is getattr(device, n) for n in names)


@pytest.mark.parametrize(
    "line, error, message",
    [
        (f"from {NUMBA} import quiet", ImportError, rf"no attribute 'quiet'; {BINDINGS}\.quiet is there"),
        (f"from {NUMBA} import notify", ImportError, r"no attribute 'notify'; shmemkit\.device\.notify is"),
        (f"from {NUMBA} import SignalOp", ImportError, r"'SignalOp'; nvshmem\.core\.SignalOp is there"),
        (f"from {NUMBA} import signal_wait_until", ImportError, rf"; {NUMBA}\.signal_wait is there"),
        (f"from {NUMBA} import putt", ImportError, rf"module '{NUMBA}' has no attribute 'putt'(\n|$)"),
        (f"import {NUMBA} as nv; nv.fence()", AttributeError, rf"'fence'; {BINDINGS}\.fence is there"),
        (f"from {BINDINGS} import signal_wait_until", NotImplementedError, "until is not emulated"),
        (f"from {BINDINGS} import signal_op", NotImplementedError, rf"pointers, .* Use {NUMBA}\.signal_op"),
        (f"from {BINDINGS} import int_p", NotImplementedError, rf"{BINDINGS}\.int_p is not emulated"),
    ],
)
def test_names_that_are_not_there(tmp_path, line, error, message):
    with pytest.raises(error, match=message):
        run(tmp_path, line, 1)


def test_names_that_a_kernel_looks_up(tmp_path):
    with pytest.raises(Exception, match="has no attribute 'notify'; shmemkit.device.notify is there"):
        run(
            tmp_path,
            f"""
            import {NUMBA} as nv
            from numba import cuda

            @cuda.jit
            def kernel():
                nv.notify(None, 0, 1)

            kernel[1, 1]()
            cuda.synchronize()
            """,
            1,
        )


def test_fence_and_quiet_come_from_the_bindings(tmp_path):
    run(
        tmp_path,
        f"""
        import nvshmem.core as nv
        import nvshmem.core.device.numba as on_device
        from mpi4py import MPI
        from numba import cuda
        from {BINDINGS} import fence, quiet
        from {NUMBA} import my_pe, n_pes, put_nbi, signal_op, signal_wait
        from nvshmem.core import ComparisonType, SignalOp

        @cuda.jit
        def kernel(box, mine, signal):
            to = (my_pe() + 1) % n_pes()
            put_nbi(box, mine, to)
            fence()
            signal_op(signal, 1, SignalOp.SIGNAL_SET, to)
            signal_wait(signal, ComparisonType.CMP_EQ, 1)
            quiet()

        assert not hasattr(on_device, "quiet") and hasattr(on_device, "put")
        nv.init(mpi_comm=MPI.COMM_WORLD, initializer_method="mpi")
        box, mine, signal = nv.array(4, "int32"), nv.array(4, "int32"), nv.array(1, "uint64")
        signal[:] = 0
        mine[:] = nv.my_pe()
        nv.barrier_all(stream := cuda.stream())
        kernel[1, 1, stream](box, mine, signal)
        nv.barrier_all(stream)
        stream.synchronize()
        assert (box == (nv.my_pe() - 1) % nv.n_pes()).all()
        for array in (box, mine, signal):
            nv.free_array(array)
        nv.finalize()
        """,
        2,
    )
