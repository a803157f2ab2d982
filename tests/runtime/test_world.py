"""The life of a World on the emulator: init, finalize, ranks and nodes, barriers."""

import importlib.machinery
import importlib.util
import io
import os
import re
import subprocess
import sys
import textwrap
import traceback
import types
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from numba import cuda
from started import OF_LAUNCHERS

import shmemkit as sk
from shmemkit.comm import SingleComm
from shmemkit.device import num_ranks, rank, symm_at
from shmemkit.runtime.world import choose_backend


def python(code, **variables):
    """Run `code` in a Python of its own. -> (exit status, stdout, stderr)"""
    hidden = ("OMPI_", "PMI", "PRTE_", "SLURM_", "SHMEMKIT_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(hidden)} | variables
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    return result.returncode, result.stdout, result.stderr


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for variable in ("SHMEMKIT_BACKEND", "SHMEMKIT_LOCAL_SIZE", "NVSHMEM_SYMMETRIC_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    yield
    assert sk.current() is None, "a test has left its World alive"


# ---- names


@pytest.mark.parametrize(
    ("name", "of_sk", "of_world"),
    [
        ("size", "world.n_ranks", "world.n_ranks"),
        ("Get_rank", "world.rank", "world.rank"),
        ("rank", "world.rank", None),
        ("barrier", "world.barrier()", None),
        ("Barrier", None, "sk.Barrier"),
        ("allgather", "world.host_allgather()", "world.host_allgather()"),
        ("all_reduce", None, "sk.all_reduce"),
        ("bcast", "world.comm.bcast() for Python objects, sk.broadcast()", "world.comm.bcast()"),
    ],
)
def test_names_of_mpi(name, of_sk, of_world):
    with sk.init("emulator") as world:
        for there, instead in ((sk, of_sk), (world, of_world)):
            if instead is None:
                assert hasattr(there, name)
            else:
                with pytest.raises(
                    AttributeError, match=re.escape(f"has no {name!r}; use {instead}")
                ) as raised:
                    getattr(there, name)
                assert "Did you mean" not in "".join(traceback.format_exception_only(raised.value))
        for there in sk, world:
            with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
                there.nonsense  # noqa: B018


def test_only_public_names_are_listed():
    assert {name for name in dir(sk) if not name.startswith("__")} == set(sk.__all__)


# ---- init and finalize


@pytest.mark.parametrize(
    ("launched", "started"), [({"PMI_SIZE": "3"}, 3), ({"PMI_SIZE": "1", "PMIX_RANK": "0"}, 0)]
)
def test_a_launcher_of_another_mpi_is_refused(monkeypatch, launched, started):
    """Each rank would take itself for the only one."""

    with sk.init("emulator") as world:
        comm = world.comm

    class MPI:
        COMM_WORLD = comm
        get_vendor = staticmethod(lambda: ("Open MPI", (5, 0, 8)))

    _no_launcher(monkeypatch)
    monkeypatch.setattr(os, "environ", os.environ | launched)
    monkeypatch.setattr("mpi4py.MPI", MPI, raising=False)
    if started:
        said = rf"started {started} ranks .*COMM_WORLD has one: .* Open MPI 5\.0\.8\. .*shmemkit run"
        with pytest.raises(RuntimeError, match=said):
            sk.init("emulator")
        sk.init("emulator", comm=comm).finalize()
    else:
        sk.init("emulator").finalize()


def _no_launcher(monkeypatch):
    for name in os.environ:
        if OF_LAUNCHERS.match(name) or name.startswith(("OMPI_", "PMI", "MPI_", "SLURM_")):
            monkeypatch.delenv(name)


def test_without_mpi4py(monkeypatch):
    """One rank needs none; where mpirun started several, the error says what to do."""
    _no_launcher(monkeypatch)
    for name in [name for name in sys.modules if name.partition(".")[0] == "mpi4py"]:
        monkeypatch.delitem(sys.modules, name)
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "mpi4py" else find(name))
    sk.init("emulator").finalize()
    assert "mpi4py" not in sys.modules
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="started 2 ranks .* but mpi4py is not installed: .*with torchrun"):
        sk.init("emulator")


@pytest.mark.parametrize("by", [{"RANK": "1"}, {"RANK": "1", "LOCAL_RANK": "1"}, {}])
def test_world_size_is_never_ignored(monkeypatch, by):
    """Whoever set it: one rank of several is no World of its own."""
    _no_launcher(monkeypatch)
    for name, value in ({"WORLD_SIZE": "2"} | by).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"there are 2 ranks \(WORLD_SIZE\), but .*no variable says wh"):
        sk.init("emulator")
    with sk.init("emulator", comm=SingleComm()) as world:
        assert world.n_ranks == 1
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.delenv("RANK", raising=False)
    sk.init("emulator").finalize()


def test_a_single_rank():
    with sk.init("emulator") as world:
        assert sk.current() is world
        assert (world.rank, world.n_ranks, world.local_rank, world.node, world.n_nodes, world.local_size) == (
            0,
            1,
            0,
            0,
            1,
            1,
        )
        assert world.xp.ndarray is np.ndarray and world.backend.name == "emulator" and not world.finalized
        assert "rank 0 of 1" in repr(world) and "emulator" in repr(world)
        assert world.comm.Get_rank() == 0 and world.comm.Get_size() == 1
        assert world.comm.allgather(5) == [5] and world.comm.bcast("x") == "x" and world.comm.gather(1) == [1]
        world.comm.barrier()
        world.barrier()
        world.host_barrier()
        world.synchronize()
    assert world.finalized and sk.current() is None


def test_finalize_twice_is_fine_and_init_again_too():
    for _ in range(3):
        world = sk.init("emulator")
        world.finalize()
        world.finalize()


def test_init_twice_is_an_error():
    with sk.init("emulator"), pytest.raises(RuntimeError, match="has a World already. Call finalize"):
        sk.init("emulator")
    with pytest.raises(RuntimeError, match="has a World already"):
        sk.emu.run(lambda: (sk.init(), sk.init()), 2)


def test_an_exception_leaves_the_world():
    with pytest.raises(KeyError), sk.init("emulator") as world:
        raise KeyError("mine")
    assert world.finalized
    sk.init("emulator").finalize()


def test_worlds_of_a_run_are_finalized_with_it():
    worlds = sk.emu.run(lambda: sk.init(), 3)
    assert [w.rank for w in worlds] == [0, 1, 2] and all(w.finalized for w in worlds)


@pytest.mark.parametrize(
    "use",
    [
        lambda w, x: w.zeros(3),
        lambda w, x: w.empty(3),
        lambda w, x: w.full(3, 1),
        lambda w, x: w.array([1]),
        lambda w, x: w.signals(3),
        lambda w, x: w.free(x),
        lambda w, x: w.peer_view(x, 0),
        lambda w, x: w.barrier(),
        lambda w, x: w.host_barrier(),
        lambda w, x: w.asnumpy(x),
        lambda w, x: w.synchronize(),
    ],
)
def test_use_after_finalize(use):
    with sk.init("emulator") as world:
        x = sk.zeros(3)
    with pytest.raises(RuntimeError, match=r"\w+\(\): this World is finalized\. Call shmemkit.init"):
        use(world, x)


@pytest.mark.parametrize("function", ["zeros", "empty", "signals", "free"])
def test_without_a_world(pes, function):
    def main():
        with pytest.raises(RuntimeError, match=r"there is no World yet. Call shmemkit.init\(\) first"):
            getattr(sk, function)(3)

    pes(1).run(main)


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_calls_of_another_thread(n_ranks):
    def main():
        world, x = sk.init("emulator"), np.ones(4)
        reduce = sk.AllReduce(world, 64)
        reduce(x, x)
        with ThreadPoolExecutor(1) as pool:
            for call in (lambda: reduce(x, x), world.barrier, world.host_barrier):
                error = pool.submit(call).exception()
                if n_ranks == 1 and call == world.host_barrier:
                    assert error is None
                else:
                    assert type(error) is RuntimeError
                    assert "from the thread that called sk.init()" in str(error)
        world.finalize()

    main() if n_ranks == 1 else sk.emu.run(main, n_ranks)


def test_after_the_end():
    sk.init("emulator").finalize()
    with pytest.raises(RuntimeError, match=r"the World is finalized. Call shmemkit.init\(\) again"):
        sk.zeros(3)


@pytest.mark.processes(1)
def test_at_exit():
    """Nobody called finalize: it is done at exit, after the kernels, and leaks are reported."""
    status, out, err = python(
        """
        import shmemkit as sk, atexit
        world = sk.init("emulator")
        atexit.register(lambda: print("alive at exit:", not world.finalized))
        sk.zeros(3, name="lost")
        world.__class__.__repr__  # still usable
        """
    )
    assert status == 0 and "alive at exit: True" in out
    assert "shmemkit: rank 0 dropped 1 symmetric array(s) without free: lost float32 (3,)" in err


@pytest.mark.slow
@pytest.mark.processes(1)
def test_at_exit_after_an_exception():
    """One traceback, and no complaint about what the failure left behind."""
    status, _, err = python(
        """
        import shmemkit as sk
        from numba import cuda
        from shmemkit.device import wait

        @cuda.jit
        def stuck(x):
            wait(x, 1, "sys", "acquire", 1)

        world = sk.init("emulator")
        stuck[1, 1](sk.signals(1))
        world.stream.synchronize()
        """
    )
    assert status == 1 and err.count("Traceback") == 1 and err.count("DeadlockError") == 1


# ---- which backend


@pytest.fixture
def installed(monkeypatch):
    """``installed(whether)``: of nvshmem4py and CuPy."""

    def change(whether):
        for name in ("nvshmem", "cupy"):
            module = types.ModuleType(name)
            module.__spec__ = importlib.machinery.ModuleSpec(name, None)
            monkeypatch.setitem(sys.modules, name, module if whether else None)

    return change


def test_choose_backend(monkeypatch, gpus, installed):
    gpus(0)
    assert choose_backend() == ("emulator", "no CUDA GPU was found")
    assert choose_backend("emulator")[0] == "emulator"
    assert choose_backend("nvshmem")[0] == "nvshmem"
    monkeypatch.setenv("SHMEMKIT_BACKEND", "nvshmem")
    assert choose_backend() == ("nvshmem", "SHMEMKIT_BACKEND asks for it")
    assert choose_backend("emulator")[0] == "emulator", "the argument wins"
    monkeypatch.setenv("SHMEMKIT_BACKEND", "")
    assert choose_backend()[0] == "emulator"
    gpus(2)
    installed(False)
    name, reason = choose_backend()
    assert name == "emulator" and "2 GPUs found" in reason and "pip install" in reason
    installed(True)
    assert choose_backend() == ("nvshmem", "2 GPUs found")


def test_the_variable_decides_in_init(monkeypatch, gpus):
    gpus(1)
    monkeypatch.setenv("SHMEMKIT_BACKEND", "emulator")
    with sk.init() as world:
        assert world.backend.name == "emulator"


def test_a_warning_when_gpus_are_not_used(gpus, installed):
    gpus(1)
    installed(False)
    with pytest.warns(UserWarning, match="CPU emulator: 1 GPU found, but nvshmem4py"), sk.init():
        pass


def test_wrong_backends(monkeypatch):
    with pytest.raises(
        ValueError, match=r"init\(\): backend is 'cuda'; it must be 'auto', 'nvshmem' or 'emulator'"
    ):
        sk.init("cuda")
    monkeypatch.setenv("SHMEMKIT_BACKEND", "gpu")
    with pytest.raises(ValueError, match="SHMEMKIT_BACKEND is 'gpu'; it must be auto, nvshmem or emulator"):
        sk.init()
    with pytest.raises(ValueError, match="SHMEMKIT_BACKEND is 'gpu'; it must be auto, nvshmem or emulator"):
        sk.emu.run(lambda: sk.init(), 1)
    monkeypatch.setenv("SHMEMKIT_BACKEND", "nvshmem")
    with pytest.raises(RuntimeError, match="SHMEMKIT_BACKEND asks for the backend 'nvshmem', .* with mpirun"):
        sk.emu.run(lambda: sk.init(), 1)
    sk.emu.run(lambda: sk.init("emulator"), 1)
    monkeypatch.delenv("SHMEMKIT_BACKEND")
    with pytest.raises(RuntimeError, match="program asks for the backend 'nvshmem', .* with mpirun"):
        sk.emu.run(lambda: sk.init("nvshmem"), 1)


class Ranks:
    """As much of a communicator as ranks need."""

    def __init__(self, size):
        self.size = size

    def Get_size(self):
        return self.size

    Get_rank = allgather = Get_size


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"comm": 5}, TypeError, "comm is 5; it must be an mpi4py communicator"),
        ({"comm": Ranks(3)}, ValueError, "comm has 3 ranks; it must have all 2 that"),
        ({"backend": 5}, TypeError, "backend is 5; it must be 'auto', "),
        ({"backend": ["auto"]}, TypeError, "backend is a list; it must be"),
        ({"local_size": "2"}, TypeError, "local_size is '2'; it must be an integer"),
        ({"local_size": True}, TypeError, "local_size is True; it must be an integer"),
        ({"local_size": 1.0}, TypeError, "local_size is 1.0; it must be an integer"),
        ({"local_size": 3}, ValueError, "local_size is 3; it must divide the number of ranks, 2"),
    ],
)
def test_bad_arguments_of_init(arguments, error, message):
    with pytest.raises(error, match=message):
        sk.emu.run(lambda: sk.init(**arguments), 2)
    if "comm" not in arguments or arguments["comm"] == 5:
        with pytest.raises(error, match=message.replace("ranks, 2", "ranks, 1")):
            sk.init(**{"backend": "emulator", **arguments})
    assert sk.current() is None
    sk.emu.run(lambda: sk.init(comm=Ranks(2), local_size=np.int64(2)), 2)


@cuda.jit
def store_one(x):
    x[0] = 1


def test_launches_after_finalize():
    with sk.init("emulator") as world:
        x, stream = world.xp.zeros(1), world.stream
        bound = sk.bind(store_one, 1, 1, (x,))
        other = cuda.stream()
    for launch in (bound, lambda: bound(stream=other)):
        with pytest.raises(RuntimeError, match="store_one: .*World.* (?i:call) shmemkit.init"):
            launch()
    for configuration in ((1, 1), (1, 1, stream), (1, 1, other)):
        with pytest.raises(RuntimeError, match="kernel store_one: this rank has no World"):
            store_one[configuration](x)
    with sk.init("emulator") as world:
        y = world.xp.zeros(1)
        for launch in (bound, lambda: store_one[1, 1, stream](y), lambda: store_one[1, 1, other](y)):
            with pytest.raises(RuntimeError, match="store_one: the World of its stream is finalized"):
                launch()
        store_one[1, 1](y)
        assert y[0] == 1


# ---- nodes


def places(local_size=None, **options):
    def main():
        w = sk.init(local_size=local_size)
        return w.rank, w.node, w.local_rank, w.local_size, w.n_nodes

    return sk.emu.run(main, 6, **options)


def test_logical_nodes(monkeypatch):
    assert places() == [(r, 0, r, 6, 1) for r in range(6)]
    by_two = [(r, r // 2, r % 2, 2, 3) for r in range(6)]
    assert places(2) == by_two and places(local_size=2) == by_two
    assert sk.emu.run(lambda: sk.init().local_size, 6, local_size=3) == [3] * 6
    monkeypatch.setenv("SHMEMKIT_LOCAL_SIZE", "2")
    assert places() == by_two
    assert places(3) == [(r, r // 3, r % 3, 3, 2) for r in range(6)], "the argument wins"


@pytest.mark.parametrize("value", ["4", "0", "-1", "two", "2.5", "7"])
def test_wrong_nodes(monkeypatch, value):
    monkeypatch.setenv("SHMEMKIT_LOCAL_SIZE", value)
    with pytest.raises(
        ValueError, match=f"SHMEMKIT_LOCAL_SIZE is '{value}'; it must divide the number of ranks, 6"
    ):
        places()
    with pytest.raises(ValueError, match="local_size is 4"):
        places(4)


def test_ranks_of_other_nodes_are_out_of_reach():
    def main():
        world = sk.init()
        n, me = world.n_ranks, world.rank
        assert list(world.node_ranks) == [me & ~1, me | 1]
        assert world.near() == [other in world.node_ranks for other in range(n)]
        x = sk.full(1, me, "int64")
        for other in range(n):
            if other in world.node_ranks:
                assert world.peer_view(x, other)[0] == other
            else:
                with pytest.raises(ValueError, match=f"rank {me} cannot access the memory of rank {other}"):
                    world.peer_view(x, other)
        world.check_reach("this", ranks=world.node_ranks)
        for ranks in (None, range(n), [3] if me == 1 else []):
            with pytest.raises(ValueError, match="this cannot be used here: .* which is on another node"):
                world.check_reach("this", ranks=ranks)

    sk.emu.run(main, 4, local_size=2)


def test_all_ranks_of_one_node_are_in_reach():
    def main():
        world = sk.init()
        world.check_reach("this")
        return world.near(), list(world.node_ranks)

    assert sk.emu.run(main, 3) == [([True] * 3, [0, 1, 2])] * 3


def test_numba_is_left_alone_after_a_failed_init():
    original = cuda.stream
    with pytest.raises(ValueError, match="local_size is 2"):
        sk.init("emulator", local_size=2)
    assert cuda.stream is original and sk.current() is None


# ---- barriers


@cuda.jit
def tell_everybody(told, turn):
    for pe in range(num_ranks()):
        symm_at(told, pe)[rank()] = turn


@pytest.mark.parametrize("n", [1, 2, 5])
def test_barrier_orders_kernels_of_all_ranks(n):
    def main():
        world = sk.init()
        told = sk.zeros(n, "int64")
        seen = []
        for turn in range(1, 6):
            for _ in range(world.rank):
                world.xp.sort(world.xp.ones(10))  # a little skew
            tell_everybody[1, 1, world.stream](told, turn)
            world.barrier()
            seen.append(int(world.asnumpy(told).min()) >= turn)
            world.host_barrier()
        return all(seen)

    assert sk.emu.run(main, n) == [True] * n


def test_barrier_on_another_stream_and_in_a_graph():
    def main():
        world = sk.init()
        other, told = cuda.stream(), sk.zeros(3, "int64")
        tell_everybody[1, 1, other](told, 7)
        world.barrier(stream=other)
        assert (world.asnumpy(told, stream=other) == 7).all()
        world.stream.begin_capture()
        tell_everybody[1, 1, world.stream](told, 9)
        world.barrier()
        graph = world.stream.end_capture()
        assert (told != 9).all()
        world.host_barrier()
        for _ in range(2):
            graph.launch()
            assert (world.asnumpy(told) == 9).all()

    sk.emu.run(main, 3)


def test_host_barrier():
    log = []

    def main():
        world = sk.init()
        for turn in range(3):
            log.append(turn)
            world.host_barrier()

    sk.emu.run(main, 4)
    assert log == sorted(log) and len(log) == 12


def test_collectives_of_the_communicator():
    def main():
        comm = sk.init().comm
        assert comm.rank == comm.Get_rank() and comm.size == comm.Get_size() == 3
        comm.Barrier()
        return comm.allgather(comm.rank**2), comm.bcast(comm.rank, root=2), comm.gather(comm.rank, root=1)

    assert sk.emu.run(main, 3) == [([0, 1, 4], 2, [0, 1, 2] if r == 1 else None) for r in range(3)]


@pytest.mark.parametrize("name", ["asarray", "asanyarray", "ascontiguousarray", "array"])
def test_arrays_of_the_host_are_copied(name):
    """As by CuPy; those of the device are shared."""
    with sk.init("emulator") as world:
        convert, xp = getattr(world.xp, name), world.xp
        host = np.zeros(3)
        for given in (host, host[::2], memoryview(host)):
            convert(given)[0] = 5
            assert host[0] == 0
        shared = [] if name == "array" else [xp.zeros(3), xp.arange(3.0)[1:], xp.ones(3) * 2, sk.zeros(3)]
        for device in [*shared, *([cuda.to_device(host)] if shared else [])]:
            convert(device)[0] = 5
            assert device[0] == 5 and isinstance(device, xp.ndarray)
        assert convert([1, 2], "int8").dtype == xp.int8 and xp.linalg.norm(xp.ones(4)) == 2


def test_streams_as_cupy_has_them():
    with sk.init("emulator") as world:
        assert world.stream.use() is world.stream and world.stream.ptr != 0 == cuda.default_stream().ptr
        with world.stream as stream:
            assert stream.done


def test_different_collective_calls():
    """They raise on every rank, instead of waiting for each other."""
    seen = []

    def main():
        world = sk.init()
        with pytest.raises(RuntimeError) as caught:
            if world.rank == 0:
                sk.zeros(3)
            else:
                world.finalize()
        seen.append(str(caught.value))
        world.abandon()

    sk.emu.run(main, 3)
    here = r"\(tests/runtime/test_world.py:\d+\)"
    calls = rf"rank 0 calls zeros\(\) {here}, ranks 1 and 2 call finalize\(\) {here}"
    assert len(seen) == 3 and all(re.search(calls, text) for text in seen), seen


class Unprintable:
    def __str__(self):
        return str(1 // 0)


@pytest.mark.parametrize(
    "call, value, errors, message",
    [
        ("host_allgather", [lambda: 0], (TypeError, TypeError), "value is a list, which cannot be pickled"),
        ("print", Unprintable(), (RuntimeError, ZeroDivisionError), "integer division"),
    ],
)
def test_a_value_that_one_rank_cannot_give(call, value, errors, message):
    """All ranks raise."""

    def main():
        with sk.init() as world:
            mine = world.rank == 1
            with pytest.raises(errors[mine], match=f"^{'' if mine else 'rank 1: '}.*{message}"):
                getattr(world, call)(value if mine else "text")

    sk.emu.run(main, 3)


def test_a_barrier_that_a_rank_leaves_out():
    """Its host program waits elsewhere: docs/host.md says what happens."""

    def main():
        world = sk.init()
        if world.rank == 0:
            sk.zeros(4)
        else:
            world.barrier()
            world.synchronize()

    with pytest.raises(sk.emu.DeadlockError, match=r"(?s)ranks 1 and 2 to call zeros\(\) .* in barrier\(\) "):
        sk.emu.run(main, 3)


def test_host_allgather():
    def main():
        world = sk.init()
        assert world.host_allgather({"rank": world.rank}) == [{"rank": r} for r in range(world.n_ranks)]

    sk.emu.run(main, 3)


def test_kernel_without_a_block_size():
    def main():
        sk.init()
        add_one[4](np.zeros(3))

    @cuda.jit
    def add_one(x):
        x[cuda.threadIdx.x] += 1

    with pytest.raises(ValueError, match="add_one: the launch configuration is 4; it must be"):
        sk.emu.run(main, 1)


# ---- print


def printed(n, *values, **options):
    """-> what rank 0 has written, where each rank prints its rank and `values`"""

    def main(world):
        file = io.StringIO()
        world.print(world.rank, *values, file=file, **options)
        return file.getvalue()

    first, *others = sk.emu.run(lambda: main(sk.init()), n)
    assert others == [""] * (n - 1)
    return first


@pytest.mark.parametrize(
    "ranks, expected",
    [(None, "0123"), (2, "2"), (np.int32(3), "3"), (range(1, 3), "12"), ([3, 0], "03"), ([], "")],
)
def test_print_in_the_order_of_ranks(ranks, expected):
    assert printed(4, ranks=ranks) == "".join(f"{r}\n" for r in expected)


def test_print_has_the_options_of_the_built_in_print(capsys):
    assert printed(2, "a", None, sep="-", end="|") == "0-a-None|1-a-None|"
    sk.emu.run(lambda: sk.init().print("here"), 2)
    assert capsys.readouterr().out == "here\nhere\n"


@pytest.mark.parametrize(
    "ranks, error, message",
    [
        ([4], ValueError, r"print\(\): a rank is 4; it must be 0 to 1"),
        (-1, ValueError, "a rank is -1"),
        ("01", TypeError, "a rank is '01'"),
        (1.0, TypeError, "a rank is 1.0"),
        (True, TypeError, "a rank is True"),
    ],
)
def test_ranks_that_print_refuses(ranks, error, message):
    """On every rank, also if only one has a mistake."""

    def main(world):
        for given in (ranks, ranks if world.rank == 1 else None):
            with pytest.raises(error, match=message):
                world.print("here", ranks=given)
        with pytest.raises(ValueError, match=r"rank 0 gives ranks=\[0\], rank 1 gives ranks=\[1\]"):
            world.print("here", ranks=world.rank)
        with pytest.raises(TypeError, match="sep must be None or a string"):
            world.print("here", sep=1)

    sk.emu.run(lambda: main(sk.init()), 2)
