"""What each PE of a script has of its own, and what scripts do not get."""

import functools
import logging
import os
import re
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
from scripted import run

import shmemkit as sk
from shmemkit.emulated_scripts import mpi, nvshmem_core


@pytest.fixture
def script(tmp_path):
    return functools.partial(run, tmp_path)


def test_namespaces_arguments_and_random_numbers(script):
    script(
        """
        import random, sys
        import numpy as np
        from mpi4py import MPI
        comm = MPI.COMM_WORLD
        assert __name__ == "__main__" and sys.modules["__main__"].__dict__ is globals()
        mine = comm.rank
        assert sys.argv[1:] == ["a", "-b"]
        sys.argv.append(comm.rank)
        random.seed(comm.rank), np.random.seed(comm.rank)
        comm.barrier()
        assert mine == comm.rank and sys.argv[3:] == [comm.rank]
        assert sys.modules["__main__"].mine == comm.rank
        assert random.random() == random.Random(comm.rank).random()
        assert np.random.rand() == np.random.RandomState(comm.rank).rand()

        class Point:
            pass

        assert all(type(p) is Point for p in comm.allgather(Point()))
        """,
        3,
        ["a", "-b"],
    )


def test_modules_beside_the_script(script, tmp_path):
    (tmp_path / "beside.py").write_text(
        "from mpi4py import MPI\nrank = MPI.COMM_WORLD.Get_rank()\n"
        "MPI.COMM_WORLD.barrier()\nranks = MPI.COMM_WORLD.allgather(rank)\n"
    )
    script(
        """
        import sys
        import beside
        from mpi4py import MPI
        assert beside.rank == MPI.COMM_WORLD.rank and beside.ranks == [0, 1, 2]
        beside.ranks.append(beside.rank)
        MPI.COMM_WORLD.barrier()
        assert beside.ranks == [0, 1, 2, beside.rank] and sys.modules["beside"] is beside
        """,
        3,
    )
    assert "beside" not in sys.modules


def test_packages_without_init_and_modules_elsewhere(script, tmp_path, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (tmp_path / "parts").mkdir()
    for file in (tmp_path / "parts" / "one.py", elsewhere / "common.py"):
        file.write_text("from mpi4py import MPI\nrank = MPI.COMM_WORLD.rank\n")
    script(
        """
        import sys
        from mpi4py import MPI
        sys.path.insert(0, sys.argv[1])
        import common, parts.one
        MPI.COMM_WORLD.barrier()
        import common as again
        assert common.rank == again.rank == parts.one.rank == MPI.COMM_WORLD.rank and common is again
        """,
        3,
        [str(elsewhere)],
    )
    assert not {"common", "parts", "parts.one"} & {*sys.modules}


@pytest.mark.slow
def test_a_script_beside_the_libraries(tmp_path):
    """shmemkit itself may lie below the folder of the script."""
    os.symlink(os.path.dirname(sk.__file__), tmp_path / "shmemkit")
    (tmp_path / "script.py").write_text("import shmemkit as sk\nsk.init()\nprint(sk.current().rank)\n")
    command = [sys.executable, "-m", "shmemkit.emu", "-n", "2", "script.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert sorted(result.stdout.split()) == ["0", "1"], result.stderr


def test_everything_is_as_before_afterwards(script):
    from numba import cuda

    def state():
        modules = [sys.modules.get(n) for n in ("__main__", "mpi4py", "nvshmem", "cupy", "cuda", "cuda.core")]
        return modules, list(sys.argv), list(sys.path), list(sys.meta_path), cuda.stream

    before = state()
    script("import cupy, nvshmem.core, cuda.core, mpi4py, sys; sys.path.append('x')", 2)
    with pytest.raises(ZeroDivisionError):
        script("import cupy; 1 / 0", 2)
    assert state() == before


def test_what_a_launcher_tells(script):
    script(
        """
        import os
        from mpi4py import MPI
        comm = MPI.COMM_WORLD
        comm.barrier()
        assert int(os.environ["OMPI_COMM_WORLD_RANK"]) == int(os.environ["RANK"]) == comm.rank
        assert int(os.environ["WORLD_SIZE"]) == 4
        assert int(os.environ["LOCAL_RANK"]) == comm.rank % 2
        """,
        4,
        local_size=2,
    )
    assert "OMPI_COMM_WORLD_RANK" not in os.environ


def test_environment_folder_search_path_and_loggers(script, tmp_path, capsys):
    before = dict(os.environ), os.getcwd(), list(sys.path), list(logging.root.handlers), logging.root.level
    script(
        f"""
        import logging, os, sys
        from mpi4py import MPI
        comm = MPI.COMM_WORLD
        me = comm.rank
        mine = {str(tmp_path)!r} + f"/{{me}}"
        os.mkdir(mine), os.chdir(mine)
        os.environ["DEVICE"] = str(me)
        os.environ.pop("HOME", None) if me == 0 else os.environ.setdefault("HOME", "there")
        sys.path.append(mine)
        options = dict(level=logging.INFO + me, format=f"{{me}} %(message)s")
        logging.basicConfig(**options, stream=sys.stdout, force=True)
        logger = logging.getLogger("script")
        logger.addHandler(logging.NullHandler())
        comm.barrier()
        assert os.getcwd() == mine and os.environ["DEVICE"] == str(me)
        assert [p for p in sys.path if os.path.dirname(p) == os.path.dirname(mine)] == [mine]
        assert ("HOME" in os.environ) == (me > 0)
        assert logging.root.level == logging.INFO + me and logger.isEnabledFor(logging.INFO) == (me == 0)
        assert len(logging.getLogger("script").handlers) == 1
        logger.warning("careful")
        """,
        3,
    )
    assert sorted(capsys.readouterr().out.split("\n")) == ["", "0 careful", "1 careful", "2 careful"]
    assert before == (
        dict(os.environ),
        os.getcwd(),
        list(sys.path),
        list(logging.root.handlers),
        logging.root.level,
    )


def test_sleep_lets_the_others_go_on(script):
    sleep = time.sleep
    script(
        """
        import os
        from time import sleep
        from mpi4py import MPI
        comm = MPI.COMM_WORLD
        flag = os.path.dirname(__file__) + "/flag"
        if comm.rank == 1:
            open(flag, "w").close()
        for _ in range(1000):
            if os.path.exists(flag):
                break
            sleep(0.001)
        else:
            raise AssertionError
        """,
        2,
    )
    assert time.sleep is sleep


def test_functions_at_exit(script, capsys):
    script("import atexit\natexit.register(print, 'last')\natexit.register(print, 'first')\nprint('body')", 1)
    assert capsys.readouterr().out == "body\nfirst\nlast\n"


@pytest.mark.parametrize(
    "line, name",
    [
        ("import nvshmem.core as nv; nv.tensor", "nvshmem.core.tensor"),
        ("from nvshmem.core import team_split_strided", "nvshmem.core.team_split_strided"),
        ("import nvshmem.core.interop", "nvshmem.core.interop"),
        ("import nvshmem.bindings; nvshmem.bindings.mc_ptr", "nvshmem.bindings.mc_ptr"),
        ("import cupy; cupy.RawKernel", "cupy.RawKernel"),
        ("import cupy.fft", "cupy.fft"),
        ("import cupy; cupy.linalg.tensorinv", "cupy.linalg.tensorinv"),
        ("import cupyx", "cupyx"),
        ("from cuda.bindings import driver", "cuda.bindings"),
        ("from cuda import bindings", "cuda.bindings"),
        ("import cupy; cupy.zeros(1).toDlpack()", "ndarray.toDlpack"),
        ("import cupy; cupy.random.zipf", "cupy.random.zipf"),
        ("import cupy; cupy.cuda.nvtx", "cupy.cuda.nvtx"),
        ("from cuda.core import Program", "cuda.core.Program"),
        ("from cuda.core import Device; Device().create_graph_builder()", "Device.create_graph_builder"),
        ("from mpi4py import MPI; MPI.Win", "mpi4py.MPI.Win"),
        ("from mpi4py import MPI; MPI.COMM_WORLD.Create_cart([1])", "Comm.Create_cart"),
        ("from mpi4py import MPI; MPI.Request.Waitany([])", "Request.Waitany"),
        ("import mpi4py.futures", "mpi4py.futures"),
        ("from cuda.core import Device; Device().properties.l2_cache_size", "DeviceProperties.l2_cache_size"),
        ("from numba import cuda; cuda.current_context()", "numba.cuda.current_context"),
        ("from numba import cuda; cuda.detect()", "numba.cuda.detect"),
    ],
)
def test_unknown_names_are_not_emulated(line, name, script):
    with pytest.raises(NotImplementedError, match=name.replace(".", r"\.") + " is not emulated"):
        script(line, 1)


def test_devices_are_the_emulated_gpu(script):
    script(
        """
        import cupy
        from cuda.core import Device
        from numba import cuda
        here = cuda.get_current_device()
        assert Device().compute_capability == (8, 0) == here.compute_capability
        assert Device().properties.multiprocessor_count == 7 == here.MULTIPROCESSOR_COUNT
        found = cupy.cuda.runtime.getDeviceProperties(0)
        assert (found["major"], found["minor"], found["multiProcessorCount"]) == (8, 0, 7)
        """,
        1,
        gpu="A100,sms=7",
    )


def test_scripts_can_do_without_what_is_not_served(script):
    script(
        """
        import cupy
        try:
            import cupyx.scipy
        except ImportError:
            found = False
        assert not found and not hasattr(cupy.zeros(1), "toDlpack") and hasattr(cupy.zeros(1), "get")
        """,
        2,
    )


def listed(begin):
    """The names of functions that docs/scripts.md lists in the part that begins with `begin`."""
    page = Path(__file__).parents[2] / "docs" / "scripts.md"
    part = page.read_text().partition(begin)[2].partition("\n**")[0]
    return set(re.findall(r"`([a-z_]+)`", part))


def test_the_page_lists_what_is_served():
    served = nvshmem_core.modules()["nvshmem.core"].__dict__.items()
    functions = {n for n, f in served if n[0].islower() and isinstance(f, types.FunctionType)}
    assert listed("**nvshmem4py**") == functions
    members = {n for c in (mpi.Comm, mpi.Request) for n in dir(c) if n[0].islower()}
    assert listed("**mpi4py**") == members - {"rank", "size", "name", "ibsend"}
