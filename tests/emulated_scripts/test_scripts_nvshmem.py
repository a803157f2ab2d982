"""nvshmem4py's host interface, for scripts on the emulator."""

import functools
import textwrap

import pytest
from scripted import NVSHMEM, run

import shmemkit as sk
from shmemkit.emulated_scripts import nvshmem_memory

RANKS = pytest.mark.parametrize("n", [1, 2, 3, 5])


@pytest.fixture
def script(tmp_path):
    return functools.partial(run, tmp_path)


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
        ("nv.init(initializer_method='uid')", "it needs uid, rank and nranks"),
        (
            "nv.init(uid=nv.get_unique_id(empty=True), rank=me, nranks=2, initializer_method='uid')",
            "uid is empty",
        ),
        ("nv.init(uid=nv.get_unique_id(), rank=me, nranks=2, initializer_method='uid')", "different uids"),
        ("nv.init(mpi_comm=MPI.COMM_SELF, initializer_method='mpi')", "this is rank 0 of 1; on the emulator"),
        ("nv.array((1,))", "not initialized"),
    ],
)
def test_init_that_fails(call, error, script):
    text = "import nvshmem.core as nv\nfrom mpi4py import MPI\nme = MPI.COMM_WORLD.rank\n" + call
    with pytest.raises(Exception, match=error):
        script(text, 2)


@pytest.mark.every(3)
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
        ("nv.put(a, a, 0)", "put: stream is None; it must be a stream"),
        ("nv.barrier(world)", "barrier: stream is None; it must be a stream"),
        ("nv.put(a[1:], a, 0, stream)", "a slice that does not begin where"),
        ("nv.put(cp.zeros(3), a, 0, stream)", "not symmetric"),
        ("nv.signal_op(a, 1, nv.SignalOp.SIGNAL_SET, 0, stream)", "must be a Buffer"),
        ("nv.reduce(world, a, a, 'prod', stream)", "op is 'prod'; it must be sum, max or min"),
        ("nv.array((2,), morder='F')", "morder is 'F'"),
        ("nv.team_n_pes(17)", "team is 17; on the emulator it must be TEAM_WORLD"),
        ("nv.free_array(cp.zeros(3))", "not one of nvshmem.core.array"),
        ("nv.put(a, a, 0, 12345)", "must be the address of a stream"),
    ],
)
def test_calls_that_are_wrong(call, error, script):
    with pytest.raises(Exception, match=error):
        script(NVSHMEM + "a = nv.array((3,), 'float32')\n" + call, 2)


def test_nodes(script):
    text = NVSHMEM + textwrap.dedent("""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    assert node.allgather(me) == [me // 2 * 2, me // 2 * 2 + 1]
    assert nv.team_n_pes(nv.Teams.TEAM_NODE) == 2 and nv.team_my_pe(nv.Teams.TEAM_NODE) == node.rank
    assert nv.team_translate_pe(nv.Teams.TEAM_NODE, 1, world) == me // 2 * 2 + 1
    assert nv.team_n_pes(nv.Teams.TEAM_SAME_MYPE_NODE) == 2
    array = nv.array((1,), "int32")
    array[:] = me
    comm.barrier()
    assert nv.get_peer_array(array, me ^ 1)[0] == me ^ 1
    try:
        nv.get_peer_array(array, me ^ 2)
    except nv.NvshmemError as error:
        assert f"PE {me ^ 2} is on another node" in str(error)
    else:
        raise AssertionError
    """)
    script(text, 4, local_size=2)


def test_as_many_finalize_as_init(script):
    text = NVSHMEM + textwrap.dedent("""
    nv.init(device=device, mpi_comm=comm, initializer_method="mpi")
    nv.finalize()
    assert nv.my_pe() == me
    nv.finalize()
    assert nv.init_status() == 0
    """)
    script(text, 2)


def test_names_of_errors():
    for error in (nvshmem_memory.NvshmemError, nvshmem_memory.NvshmemInvalid):
        assert error.__module__ == "nvshmem.core"  # as scripts know them, in their tracebacks
