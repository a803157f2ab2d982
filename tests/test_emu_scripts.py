"""Scripts that know nothing of shmemkit: ``python -m shmemkit.emu``."""

import json
import os
import subprocess
import sys
import textwrap
import types

import numpy as np
import pytest

import shmemkit as sk
from shmemkit.emu.__main__ import main
from shmemkit.emu.scripts.runner import Script, ScriptExit, run_script

HERE = os.path.dirname(os.path.abspath(__file__))
RING = os.path.join(HERE, "scripts", "ring.py")
EXAMPLES = os.path.join(os.path.dirname(HERE), "examples")
RANKS = pytest.mark.parametrize("n", [1, 2, 3, 5])

RAN = "\nopen(f'{__file__}.{id(globals())}.ran', 'w').close()\n"
NVSHMEM = """
import numpy as np
import cupy as cp
import nvshmem.core as nv
from cuda.core import Device
from mpi4py import MPI
from numba import cuda
comm = MPI.COMM_WORLD
me, n = comm.rank, comm.size
device = Device(me)
device.set_current()
nv.init(device=device, mpi_comm=comm, initializer_method="mpi")
stream = device.create_stream()
world = nv.Teams.TEAM_WORLD
"""


@pytest.fixture
def script(tmp_path):
    """-> run(text, n, ...): the text as a script; its PEs leave files behind, so that none is left out."""

    def run(text, n, argv=(), **options):
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(text) + RAN)
        run_script(Script(str(path), argv), n, **options)
        ran = list(tmp_path.glob("*.ran"))
        assert len(ran) == n
        for file in ran:
            file.unlink()

    return run


def ended(tmp_path, text, *options):
    """-> (exit status, what --json wrote)"""
    path, out = tmp_path / "script.py", tmp_path / "out.json"
    path.write_text(textwrap.dedent(text))
    status = main([*options, "--json", str(out), str(path)])
    return status, json.loads(out.read_text())


# ---- the command


@pytest.mark.parametrize(
    "chunks, options, status",
    [
        ("1", ["--races", "--delivery", "unordered"], 0),
        ("3", ["--races"], 0),
        ("3", ["--races", "--delivery", "ordered"], 0),
        ("3", ["--delivery", "unordered"], 1),
        ("3", ["--races", "--delivery", "unordered"], 2),
    ],
)
def test_several_chunks_per_signal_need_order(chunks, options, status, capsys):
    assert main(["-n", "4", *options, RING, chunks]) == status
    out, err = capsys.readouterr()
    assert ("passed" in out) == (status == 0)
    assert (err == "") == (status == 0)
    assert ("the wait cannot tell them apart" in err) == (status == 2)
    assert ("AssertionError" in err) == (status == 1)


def test_as_a_command(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "shmemkit.emu", "-n", "3", "--races", "--delivery", "unordered"]
    result = subprocess.run(
        [*command, "--json", str(out), RING, "2"], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 2, result.stderr
    written = json.loads(out.read_text())
    assert written["outcome"] == "race" and written["report"] in result.stderr
    race = written["races"][0]
    assert race["array"] == "total" and race["first"]["kernel"] == "all_reduce"
    assert race["first"]["file"].endswith("ring.py") and race["second"]["line"] > 20
    assert "Traceback" not in result.stderr


def test_json_of_a_clean_run(tmp_path):
    status, written = ended(tmp_path, "pass", "-n", "3", "--seed", "7", "--delivery", "ordered")
    assert status == 0
    versions = written.pop("versions")
    assert versions["shmemkit"] == sk.__version__ and versions["numpy"] == np.__version__
    assert written == {
        "outcome": "clean",
        "status": 0,
        "report": "",
        "races": [],
        "seed": 7,
        "delivery": "ordered",
        "n_pes": 3,
        "script": str(tmp_path / "script.py"),
    }


def test_a_failure_is_shown_without_the_emulators_frames(tmp_path, capsys):
    text = """
    from mpi4py import MPI

    def check(rank):
        assert rank != 2, "rank two"

    check(MPI.COMM_WORLD.rank)
    MPI.COMM_WORLD.barrier()
    """
    status, written = ended(tmp_path, text, "-n", "3")
    err = capsys.readouterr().err
    assert status == 1 and written["outcome"] == "failed"
    assert "AssertionError: rank two" in err and "check(MPI.COMM_WORLD.rank)" in err
    assert err.count('File "') == 2


def test_a_deadlock(tmp_path, capsys):
    text = NVSHMEM + textwrap.dedent("""
    from nvshmem.core import ComparisonType
    from nvshmem.core.device.numba import signal_wait

    @cuda.jit
    def stuck(flag):
        signal_wait(flag, ComparisonType.CMP_GE, 1)

    flag = nv.array((1,), "uint64")
    flag[:] = 0
    stuck[1, 1, stream](flag)
    device.sync()
    """)
    status, written = ended(tmp_path, text, "-n", "2")
    assert (status, written["outcome"]) == (3, "deadlock")
    assert "waits for flag[0] on rank 1 >= 1, now 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    "ending, status",
    [
        ("sys.exit()", 0),
        ("sys.exit(0)", 0),
        ("sys.exit(7)", 7),
        ("sys.exit('gone')", 1),
        ("MPI.COMM_WORLD.Abort(5)", 5),
    ],
)
def test_scripts_that_exit(ending, status, tmp_path, capsys):
    text = f"import sys\nfrom mpi4py import MPI\nif MPI.COMM_WORLD.rank == 1:\n    {ending}\nprint('went on')"
    got, written = ended(tmp_path, text, "-n", "2")
    assert (got, written["status"]) == (status, status)
    assert written["outcome"] == ("failed" if status else "clean")
    out, err = capsys.readouterr()
    assert ("gone" in err) == ("gone" in ending)
    if not status:
        assert out == "went on\n"


def test_a_script_that_is_not_there_or_does_not_compile(tmp_path, capsys):
    assert main(["-n", "2", str(tmp_path / "none.py")]) == 1
    assert "none.py" in capsys.readouterr().err
    status, _ = ended(tmp_path, "if :")
    assert status == 1 and "SyntaxError" in capsys.readouterr().err


@pytest.mark.parametrize("name, status", [("01_notify_wait", 0), ("broken/hang", 3), ("broken/wrong", 2)])
def test_scripts_of_shmemkit(name, status, capsys):
    assert main(["-n", "2", "--races", os.path.join(EXAMPLES, f"{name}.py")]) == status


class Explored:
    """What ``shmemkit.emu.explore`` returns, of one run."""

    def __init__(self, failure):
        self.failure, self.seed, self.delivery = failure, 5, "unordered"

    def __str__(self):
        return "1 schedule"


def test_many_seeds(tmp_path, monkeypatch, capsys):
    def explore(main, n_pes, seeds, races):
        assert (n_pes, list(seeds), races) == (2, [0, 1, 2], False)
        for _ in range(2):
            try:
                sk.emu.run(main, n_pes)
            except AssertionError as error:
                failure = error
        return Explored(failure)

    monkeypatch.setitem(sys.modules, "shmemkit.emu.explore", types.SimpleNamespace(explore=explore))
    status, written = ended(tmp_path, "assert 0, 'wrong'", "-n", "2", "--explore", "3")
    assert status == written["status"] == 1
    assert (written["seed"], written["delivery"]) == (5, "unordered")
    err = capsys.readouterr().err
    assert "AssertionError: wrong" in err and err.endswith("1 schedule\n")


# ---- what each PE has of its own


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


def test_functions_at_exit(script, capsys):
    script("import atexit\natexit.register(print, 'last')\natexit.register(print, 'first')\nprint('body')", 1)
    assert capsys.readouterr().out == "body\nfirst\nlast\n"


# ---- what is not served


@pytest.mark.parametrize(
    "line, name",
    [
        ("import nvshmem.core as nv; nv.tensor", "nvshmem.core.tensor"),
        ("from nvshmem.core import team_split_strided", "nvshmem.core.team_split_strided"),
        ("import nvshmem.core.interop", "nvshmem.core.interop"),
        ("import nvshmem.bindings; nvshmem.bindings.mc_ptr", "nvshmem.bindings.mc_ptr"),
        ("from nvshmem.core.device.numba import tile_put", "nvshmem.core.device.numba.tile_put"),
        ("import cupy; cupy.RawKernel", "cupy.RawKernel"),
        ("import cupy.linalg", "cupy.linalg"),
        ("import cupyx", "cupyx"),
        ("import cupy; cupy.random.zipf", "cupy.random.zipf"),
        ("import cupy; cupy.cuda.nvtx", "cupy.cuda.nvtx"),
        ("from cuda.core import Program", "cuda.core.Program"),
        ("from cuda.core import Device; Device().create_graph_builder()", "Device.create_graph_builder"),
        ("from mpi4py import MPI; MPI.Win", "mpi4py.MPI.Win"),
        ("from mpi4py import MPI; MPI.COMM_WORLD.Create_cart([1])", "Comm.Create_cart"),
        ("import mpi4py.futures", "mpi4py.futures"),
        ("from numba import cuda; cuda.current_context()", "numba.cuda.current_context"),
    ],
)
def test_unknown_names_are_not_emulated(line, name, script):
    with pytest.raises(NotImplementedError, match=name.replace(".", r"\.") + " is not emulated"):
        script(line, 1)


# ---- mpi4py


@RANKS
def test_mpi_objects(n, script):
    script(
        """
        import math
        from mpi4py import MPI
        comm = MPI.COMM_WORLD
        me, n = comm.Get_rank(), comm.Get_size()
        root = n - 1
        sent = {"from": me}
        got = comm.bcast(sent, root=root)
        assert got == {"from": root} and (got is sent) == (me == root)
        assert comm.gather(me * 2, root=root) == ([2 * i for i in range(n)] if me == root else None)
        assert comm.allgather((me,)) == [(i,) for i in range(n)]
        assert comm.scatter([i + 10 for i in range(n)] if me == 0 else None) == me + 10
        assert comm.alltoall([(me, i) for i in range(n)]) == [(i, me) for i in range(n)]
        assert comm.allreduce(me + 1) == n * (n + 1) // 2
        assert comm.allreduce(me, op=MPI.MAX) == n - 1 and comm.allreduce(me, MPI.MIN) == 0
        assert comm.allreduce((me % 2, me), op=MPI.MAXLOC) == ((1, 1) if n > 1 else (0, 0))
        assert comm.reduce(me + 1, op=MPI.PROD) == (math.factorial(n) if me == 0 else None)
        assert comm.scan(1) == me + 1 and comm.exscan(1) == (me or None)
        comm.barrier(), comm.Barrier()
        assert comm.sendrecv(me, dest=(me + 1) % n, source=(me - 1) % n) == (me - 1) % n
        comm.send("a", dest=(me + 1) % n, tag=1)
        comm.isend("b", dest=(me + 1) % n, tag=2).wait()
        status = MPI.Status()
        request = comm.irecv(source=MPI.ANY_SOURCE, tag=2)
        assert comm.recv(source=(me - 1) % n, tag=1, status=status) == "a"
        assert (status.Get_source(), status.tag) == ((me - 1) % n, 1)
        assert request.wait() == "b"
        assert MPI.Is_initialized() and not MPI.Is_finalized()
        MPI.Finalize()
        assert MPI.Is_finalized()
        """,
        n,
    )


@RANKS
def test_mpi_buffers(n, script):
    script(
        """
        import numpy as np
        from mpi4py import MPI
        comm = MPI.COMM_WORLD
        me, n = comm.rank, comm.size
        everyone = np.arange(n)

        data = np.full(3, me, "f4")
        comm.Bcast(data, root=n - 1)
        assert (data == n - 1).all()
        out = np.empty(2, "i8")
        comm.Allreduce([np.array([me, 1]), MPI.LONG], out, op=MPI.SUM)
        assert list(out) == [n * (n - 1) // 2, n]
        comm.Allreduce(MPI.IN_PLACE, out, op=MPI.MAX)
        assert list(out) == [n * (n - 1) // 2, n]
        total = np.zeros(1, "f8")
        comm.Reduce(np.array([me + 1.0]), total, op=MPI.PROD, root=0)
        assert total[0] == (np.prod(everyone + 1.0) if me == 0 else 0)
        gathered = np.empty((n, 2), "i4")
        comm.Allgather(np.array([me, -me], "i4"), gathered)
        assert (gathered == np.stack([everyone, -everyone], 1)).all()
        gathered = np.zeros(n, "i4")
        comm.Gather(np.array([me], "i4"), gathered if me == 0 else None, root=0)
        assert (gathered == (everyone if me == 0 else 0)).all()
        part = np.empty(2, "i4")
        comm.Scatter(np.arange(2 * n, dtype="i4") if me == 0 else None, part)
        assert list(part) == [2 * me, 2 * me + 1]
        mixed = np.empty(n, "i8")
        comm.Alltoall(me * 10 + everyone, mixed)
        assert (mixed == everyone * 10 + me).all()
        counts = everyone + 1
        ragged = np.empty(counts.sum(), "i8")
        comm.Allgatherv(np.full(me + 1, me), [ragged, (counts, np.cumsum(counts) - counts), MPI.LONG])
        assert (ragged == np.repeat(everyone, counts)).all()
        got = np.empty(4, "i8")
        request = comm.Irecv(got, source=(me - 1) % n)
        comm.Send(np.full(4, me), dest=(me + 1) % n)
        request.Wait()
        assert (got == (me - 1) % n).all()
        comm.Sendrecv(got, (me + 1) % n, 0, got, (me - 1) % n)
        assert (got == (me - 2) % n).all()
        """,
        n,
    )


@RANKS
def test_mpi_splits(n, script):
    script(
        """
        from mpi4py import MPI
        world = MPI.COMM_WORLD
        me, n = world.rank, world.size
        half = world.Split(me % 2, key=-me)
        mine = [i for i in reversed(range(n)) if i % 2 == me % 2]
        assert half.allgather(me) == mine and half.rank == mine.index(me) and half.size == len(mine)
        assert half.bcast(me) == mine[0]
        copy = half.Dup()
        assert copy.sendrecv(me, (copy.rank + 1) % copy.size, source=(copy.rank - 1) % copy.size) in mine
        node = world.Split_type(MPI.COMM_TYPE_SHARED)
        assert node.size == n and node.rank == me
        assert (world.Split(MPI.UNDEFINED if me else 0) is MPI.COMM_NULL) == (me > 0)
        assert MPI.COMM_SELF.allgather(me) == [me]
        """,
        n,
    )


def test_nodes(script):
    text = NVSHMEM + textwrap.dedent("""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    assert node.allgather(me) == [me // 2 * 2, me // 2 * 2 + 1]
    assert nv.team_n_pes(nv.Teams.TEAM_NODE) == 2 and nv.team_my_pe(nv.Teams.TEAM_NODE) == node.rank
    assert nv.team_translate_pe(nv.Teams.TEAM_NODE, 1, world) == me // 2 * 2 + 1
    assert nv.team_n_pes(nv.Teams.TEAM_SAME_MYPE_NODE) == 2
    """)
    script(text, 4, local_size=2)


def test_ranks_in_different_mpi_calls(script):
    text = "from mpi4py import MPI\nc = MPI.COMM_WORLD\nc.bcast(1) if c.rank else c.gather(1)"
    with pytest.raises(Exception, match="rank 0 in gather, rank 1 in bcast"):
        script(text, 2)


def test_a_message_that_never_comes(script):
    with pytest.raises(
        sk.emu.DeadlockError, match="rank 1: its host program waits for a message of rank 0 in MPI's recv"
    ):
        script("from mpi4py import MPI\nc = MPI.COMM_WORLD\nif c.rank: c.recv(source=0)", 2)


# ---- nvshmem.core


@pytest.mark.parametrize(
    "init",
    [
        "nv.init(mpi_comm=comm, initializer_method='mpi')",
        "nv.init(device=None, uid=None, rank=None, nranks=None, mpi_comm=None, initializer_method='mpi')",
        "nv.init(mpi_comm=comm, initializer_method='emulated_mpi')",
        "uid = comm.bcast(nv.get_unique_id() if comm.rank == 0 else None)\n"
        "nv.init(uid=uid, rank=comm.rank, nranks=comm.size, initializer_method='uid')",
        "uid = nv.get_unique_id(empty=comm.rank != 0)\ncomm.Bcast(uid._data.view('int8'), root=0)\n"
        "nv.init(uid=uid, rank=comm.rank, nranks=comm.size, initializer_method='uid')",
    ],
)
def test_init_in_its_forms(init, script):
    script(
        f"""
import nvshmem, nvshmem.bindings, nvshmem.core as nv
from mpi4py import MPI
comm = MPI.COMM_WORLD
assert nv.init_status() == 0
for again in range(2):
    {init.replace(chr(10), chr(10) + "    ")}
    assert nv.init_status() == nv.InitStatus.STATUS_IS_INITIALIZED
    assert (nv.my_pe(), nv.n_pes()) == (comm.rank, 3)
    assert (nvshmem.bindings.my_pe(), nvshmem.bindings.n_pes()) == (comm.rank, 3)
    nv.finalize()
try:
    nv.my_pe()
except nv.NvshmemInvalid:
    pass
else:
    raise AssertionError
""",
        3,
    )


@pytest.mark.parametrize(
    "call, error",
    [
        ("nv.init(initializer_method='guess')", "'mpi', 'uid' or 'emulated_mpi'"),
        ("nv.init(initializer_method='uid')", "give uid, rank and nranks"),
        (
            "nv.init(uid=nv.get_unique_id(empty=True), rank=me, nranks=2, initializer_method='uid')",
            "uid is empty",
        ),
        ("nv.init(uid=nv.get_unique_id(), rank=me, nranks=2, initializer_method='uid')", "different uids"),
        ("nv.init(mpi_comm=MPI.COMM_SELF, initializer_method='mpi')", "as rank 0 of 1 on PE"),
        ("nv.array((1,))", "not initialized"),
    ],
)
def test_init_that_fails(call, error, script):
    text = "import nvshmem.core as nv\nfrom mpi4py import MPI\nme = MPI.COMM_WORLD.rank\n" + call
    with pytest.raises(Exception, match=error):
        script(text, 2)


@RANKS
@pytest.mark.parametrize("delivery", ["eager", "unordered"])
def test_operations_on_a_stream(n, delivery, script):
    text = NVSHMEM + textwrap.dedent("""
    following, preceding = (me + 1) % n, (me - 1) % n
    a, b = nv.array((4,), "int32"), nv.array((4,), "int32")
    signal = nv.buffer(8)
    flags = nv.array((1,), "uint64")
    flags[:] = 0
    cp.from_dlpack(signal)[:] = 0
    a[:] = me
    b[:] = -1
    nv.barrier_all(stream=stream)

    nv.put(b, a, following, stream=stream)
    nv.barrier(world, stream=stream)
    stream.sync()
    assert (b.get() == preceding).all()
    nv.get(b, a, remote_pe=following, stream=stream)
    nv.quiet(stream=stream)
    device.sync()
    assert (b.get() == following).all()
    nv.barrier_all(stream=stream)

    nv.put_signal(b, a, signal, 3, nv.SignalOp.SIGNAL_SET, remote_pe=following, stream=stream)
    nv.signal_wait(signal, 3, nv.ComparisonType.CMP_EQ, stream=stream)
    stream.sync()
    assert (b.get() == preceding).all()
    assert nv.signal_fetch(signal) == 3
    nv.signal_op(nv.array_get_buffer(flags)[0], 5, nv.SignalOp.SIGNAL_ADD, following, stream)
    nv.signal_wait(nv.array_get_buffer(flags)[0], 5, nv.ComparisonType.CMP_GE, stream)
    nv.barrier(world, stream)
    nv.put_nbi(b, a, following, stream)
    nv.sync_all(stream=stream)
    nv.barrier_all(stream=stream)
    stream.sync()
    peer = nv.get_peer_array(a, following)
    assert (peer.get() == following).all()
    nv.barrier_all(stream=stream)
    for array in (nv.get_peer_array(a, me), peer, a, b, flags):
        nv.free_array(array)
    nv.free(signal)
    nv.finalize()
    """)
    script(text, n, races=True, delivery=delivery)


@RANKS
def test_collectives_on_a_stream(n, script):
    text = NVSHMEM + textwrap.dedent("""
    mine, all_of = nv.array((n,), "float32"), nv.array((n * n,), "float32")
    out, one = nv.array((n,), "float32"), nv.array((1,), "float32")
    mine[:] = me * 10 + cp.arange(n)
    ranks = np.arange(n)
    nv.barrier(world, stream)
    nv.reduce(world, out, mine, "sum", stream)
    nv.barrier(world, stream)
    stream.sync()
    assert (out.get() == 10 * ranks.sum() + n * ranks).all()
    nv.reduce(world, out, mine, "max", stream)
    nv.barrier(world, stream)
    stream.sync()
    assert (out.get() == 10 * (n - 1) + ranks).all()
    nv.fcollect(world, all_of, mine, stream=stream)
    nv.alltoall(world, out, mine, stream=stream)
    stream.sync()
    assert (all_of.get().reshape(n, n) == 10 * ranks[:, None] + ranks).all()
    assert (out.get() == 10 * ranks + me).all()
    nv.barrier(world, stream)
    nv.broadcast(world, out, mine, root=n - 1, stream=stream)
    nv.reducescatter(world, one, mine, "sum", stream=stream)
    stream.sync()
    assert (out.get() == 10 * (n - 1) + ranks).all() and one[0] == 10 * ranks.sum() + n * me
    nv.sync(world, stream)
    """)
    script(text, n, races=True)


def test_a_race_of_a_stream_operation_names_the_line_of_the_script(script):
    text = NVSHMEM + textwrap.dedent("""
    a, b = nv.array((4,), "int32"), nv.array((4,), "int32")

    @cuda.jit
    def read(b, out):
        out[0] = b[0]

    nv.put(b, a, (me + 1) % n, stream)
    read[1, 1, stream](b, cuda.device_array(1, "int32"))
    """)
    with pytest.raises(sk.emu.RaceError) as caught:
        script(text, 2, races=True)
    sides = {access.source for race in caught.value.races for access in (race.first, race.second)}
    assert sides == {"out[0] = b[0]", "nv.put(b, a, (me + 1) % n, stream)"}


@pytest.mark.parametrize(
    "call, error",
    [
        ("nv.put(a, a, 0)", "give a stream"),
        ("nv.barrier(world)", "Stream may not be None"),
        ("nv.put(a[1:], a, 0, stream)", "a slice from further on"),
        ("nv.put(cp.zeros(3), a, 0, stream)", "not symmetric"),
        ("nv.signal_op(a, 1, nv.SignalOp.SIGNAL_SET, 0, stream)", "must be a Buffer"),
        ("nv.reduce(world, a, a, 'prod', stream)", "sum, max, min are allowed"),
        ("nv.array((2,), morder='F')", "is not emulated"),
        ("nv.team_n_pes(17)", "is not emulated"),
        ("nv.free_array(cp.zeros(3))", "not an array of nvshmem.core.array"),
        ("nv.put(a, a, 0, 12345)", "is not the address of a stream"),
    ],
)
def test_calls_that_are_wrong(call, error, script):
    with pytest.raises(Exception, match=error):
        script(NVSHMEM + "a = nv.array((3,), 'float32')\n" + call, 2)


# ---- cupy, cuda.core, numba.cuda


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


def test_exit_error():
    assert ScriptExit(3).code == 3 and "status 3" in str(ScriptExit(3))
