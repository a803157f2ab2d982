"""mpi4py, for scripts on the emulator."""

import functools
import time

import pytest
from scripted import run

import shmemkit as sk

RANKS = pytest.mark.parametrize("n", [1, 2, 3, 5])


@pytest.fixture
def script(tmp_path):
    return functools.partial(run, tmp_path)


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


def test_ranks_in_different_mpi_calls(script):
    text = "from mpi4py import MPI\nc = MPI.COMM_WORLD\nc.bcast(1) if c.rank else c.gather(1)"
    with pytest.raises(Exception, match="ranks disagree: rank 0 calls gather, rank 1 calls bcast"):
        script(text, 2)


def test_a_message_that_never_comes(script):
    with pytest.raises(
        sk.emu.DeadlockError, match="rank 1: its host program waits for a message of rank 0 in MPI's recv"
    ):
        script("from mpi4py import MPI\nc = MPI.COMM_WORLD\nif c.rank: c.recv(source=0)", 2)


def test_a_truncated_message(script):
    text = """
    import numpy as np
    from mpi4py import MPI
    MPI.COMM_SELF.Send(np.zeros(3), 0)
    MPI.COMM_SELF.Recv(np.zeros(2), 0)
    """
    with pytest.raises(Exception, match="MPI_ERR_TRUNCATE: .* 24 bytes came, more than the 16") as caught:
        script(text, 1)
    assert f"{type(caught.value).__module__}.{type(caught.value).__qualname__}" == "mpi4py.MPI.Exception"


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize(
    "poll",
    [
        "request = comm.irecv(); wait_for(request.Test); assert request.wait() == 'late'",
        "request = comm.irecv(); assert wait_for(lambda: request.test()[1]) == 'late'",
        "requests = [comm.irecv()]; assert wait_for(lambda: MPI.Request.testall(requests)[1]) == ['late']",
        "wait_for(lambda: comm.iprobe(0, 5, status)); assert (status.tag, comm.recv()) == (5, 'late')",
        "comm.Probe(0, 5, status); assert status.source == 0 and comm.recv() == 'late'",
    ],
)
def test_polls_let_the_others_go_on(poll, seed, script):
    script(
        f"""
        from mpi4py import MPI
        comm, status = MPI.COMM_WORLD, MPI.Status()

        def wait_for(poll):
            for _ in range(1000):
                got = poll()
                if got:
                    return got
            raise AssertionError

        if comm.rank == 1:
            {poll}
        else:
            comm.bsend("late", 1, tag=5)
        """,
        2,
        seed=seed,
    )


@pytest.mark.slow
def test_a_poll_in_vain(script, monkeypatch):
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: 30 * clock())
    text = "from mpi4py import MPI\nr = MPI.COMM_WORLD.irecv()\nwhile not r.Test(): pass"
    began = time.monotonic()
    with pytest.raises(
        sk.emu.DeadlockError, match="rank 1: its host program waits for a request, which it tests"
    ):
        script(text, 2)
    assert time.monotonic() - began > 10  # of these seconds; by another clock a third of one


def test_a_poll_until_a_time(script):
    script(
        """
        import time
        from mpi4py import MPI
        request, end = MPI.COMM_WORLD.irecv(), time.monotonic() + 0.2
        while not request.Test() and time.monotonic() < end:
            pass
        assert time.monotonic() >= end
        """,
        2,
    )


@RANKS
def test_receives_take_messages_in_the_order_in_which_they_are_posted(n, script):
    script(
        """
        import numpy as np
        from mpi4py import MPI
        comm = MPI.COMM_WORLD
        following, preceding = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        a, b, c = np.zeros((3, 1), int)
        comm.Isend(np.array([1]), following)  # before its receive is posted, and the others after
        comm.barrier()
        first = comm.Irecv(a, preceding)
        second = comm.Irecv(b)
        comm.barrier()
        for value in (2, 3):
            comm.Send(np.array([value]), following, tag=value)
        comm.Recv(c, source=preceding, tag=MPI.ANY_TAG)
        second.Wait(), first.Wait()
        assert (a, b, c) == (1, 2, 3)
        """,
        n,
    )


def test_no_process(script):
    script(
        """
        from mpi4py import MPI
        comm = MPI.COMM_WORLD
        comm.send(1, MPI.PROC_NULL)
        assert comm.recv(source=MPI.PROC_NULL) is None
        assert comm.irecv(source=MPI.PROC_NULL).test() == (True, None)
        """,
        1,
    )
