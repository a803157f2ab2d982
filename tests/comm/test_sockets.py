"""Communicators over sockets, of ranks that are threads of this process."""

import contextlib
import os
import pickle
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from fast import examples
from hypothesis import given
from hypothesis import strategies as st

from shmemkit.comm.sockets import HELLO, MAGIC, Link, SocketComm, _send, gather, listen, reach
from shmemkit.runtime import host_barrier
from shmemkit.runtime.host_barrier import BoundedBarrier
from shmemkit.support.timeouts import RankTimeout


@pytest.fixture
def ranks():
    """``ranks(n, function)``: -> what ``function(comm)`` returns on each rank"""
    links = []

    def run(n, function):
        pairs = {rank: socket.socketpair() for rank in range(1, n)}
        mine = [Link(0, n, {rank: pair[0] for rank, pair in pairs.items()})]
        mine += [Link(rank, n, {0: pair[1]}) for rank, pair in pairs.items()]
        links.extend(reversed(mine))
        with ThreadPoolExecutor(n) as pool:
            return list(pool.map(lambda link: function(SocketComm(link, range(n))), mine))

    yield run
    for link in links:
        link.close()


def test_calls(ranks):
    def main(comm):
        me = comm.Get_rank()
        assert comm.Get_size() == 3 and comm.allgather((me, "x" * me)) == [(0, ""), (1, "x"), (2, "xx")]
        assert comm.bcast(me, root=2) == 2 and comm.gather(me, 1) == ([0, 1, 2] if me == 1 else None)
        comm.barrier()
        big = comm.allgather(bytes([me]) * (5 << 20))
        assert [(part[0], len(part)) for part in big] == [(r, 5 << 20) for r in range(3)]
        return True

    assert ranks(3, main) == [True] * 3


def test_groups(ranks):
    """Of groups, too; rank 0 answers their calls while it is in none."""

    def main(comm):
        me = comm.rank
        group = comm.Split(0 if me == 0 else 1, -me)
        if me:
            assert group.allgather(me) == [3, 2, 1]
            pair = group.Split(int(me == 2), 0)
            assert pair.allgather(me) == ([2] if me == 2 else [3, 1])
        again = comm.Dup()
        return again.allgather(me), comm.allgather(-me)

    assert ranks(4, main) == [([0, 1, 2, 3], [0, -1, -2, -3])] * 4


@examples(40)
@given(st.data())
def test_any_program_of_calls(data):
    """Ranks run ahead of each other; each call gets the values of its own."""
    n = data.draw(st.integers(2, 5))
    programs = data.draw(
        st.lists(st.tuples(st.lists(st.integers(0, 1), min_size=n, max_size=n), st.binary()), max_size=6)
    )
    pairs = {rank: socket.socketpair() for rank in range(1, n)}
    links = [Link(0, n, {rank: pair[0] for rank, pair in pairs.items()})]
    links += [Link(rank, n, {0: pair[1]}) for rank, pair in pairs.items()]

    def main(link):
        comm = SocketComm(link, range(n))
        for colors, value in programs:
            group = comm.Split(colors[comm.rank], 0)
            members = [r for r in range(n) if colors[r] == colors[comm.rank]]
            assert group.allgather((link.rank, value)) == [(r, value) for r in members]
            assert group.bcast(link.rank) == members[0]

    with ThreadPoolExecutor(n) as pool:
        list(pool.map(main, links))
    for link in reversed(links):
        link.close()


def test_who_does_not_come_is_named_on_all_ranks_and_to_itself(ranks):
    late = threading.Event()

    def main(comm):
        barrier, said = BoundedBarrier(comm), []
        barrier.wait("zeros")
        barrier.limit = 1.0  # only now, when all threads run
        if comm.rank == 1:
            late.wait(20)
        for _ in range(2):
            with pytest.raises(RankTimeout) as error:
                barrier.wait("full")
            said.append(error.value)
        if comm.rank == 0:
            late.set()
        assert [e.missing for e in said] == [[1], [1]] and said[0].call == "full"
        return str(said[1])

    text = "rank 1 has not come to full() within 1 s; ranks 0 and 2 are there{}. No further barrier"
    for rank, said in enumerate(ranks(3, main)):
        assert said.startswith(text.format("; rank 1 came too late" if rank == 1 else ""))


def test_without_a_limit_one_rank_says_who_is_missing(ranks, monkeypatch, capsys):
    monkeypatch.setattr(host_barrier, "PATIENCE", 1.0)
    told, say = threading.Event(), host_barrier.say
    monkeypatch.setattr(host_barrier, "say", lambda line: (say(line), told.set()))
    begun = threading.Barrier(3)

    def main(comm):
        barrier = BoundedBarrier(comm.Split(0, -comm.rank), None, [12, 11, 10])
        begun.wait(20)
        if comm.rank == 1:
            assert told.wait(20)
            time.sleep(0.3)  # another rank that says it does so now
        barrier.wait("finalize")

    ranks(3, main)
    said = "rank 11 has not come to finalize() within 1 s; ranks 10 and 12 are there"
    assert capsys.readouterr().err.count(said) == 1


def test_a_value_that_cannot_be_sent_is_no_call(ranks):
    def main(comm):
        if comm.rank == 1:
            with pytest.raises((AttributeError, pickle.PicklingError)):
                comm.allgather(lambda: None)
        return comm.meet(comm.rank, "call", 2, 60, print)

    assert ranks(2, main) == [([0, 1], None)] * 2


def test_who_has_ended_is_named(ranks):
    def main(comm):
        if comm.rank == 1:
            comm.Free()
            with pytest.raises(RuntimeError, match="this communicator is closed"):
                comm.allgather(1)
        else:
            with pytest.raises(RuntimeError, match="rank 1 has ended, and will not come to allgather"):
                comm.allgather(1)

    ranks(3, main)


def test_when_rank_0_has_ended(ranks):
    def main(comm):
        if comm.rank == 0:
            comm.Free()
        else:
            with pytest.raises(RuntimeError, match="rank 0 has ended|this communicator is closed"):
                comm.allgather(1)

    ranks(3, main)


class Evil:
    def __reduce__(self):
        return os._exit, (77,)


def test_strangers(capsys):
    """Nothing that they send is unpickled, and ranks still come."""
    listener = listen(("127.0.0.1", 0))
    address = listener.getsockname()
    with ThreadPoolExecutor(1) as pool, socket.create_connection(address) as silent:
        found = pool.submit(gather, listener, b"the secret", 2, 20, "start")
        since = time.monotonic()
        with socket.create_connection(address) as other, contextlib.suppress(ConnectionResetError):
            other.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" + bytes(64))
            assert other.recv(1) == b""
        with socket.create_connection(address) as other, contextlib.suppress(ConnectionError):
            other.sendall(HELLO.pack(MAGIC, 1, 2, bytes(16)) + bytes(32))
            _send(other, Evil())
            other.recv(1000)
        with reach([address], b"the secret", 1, 2, 20, "start"):
            (connection,) = found.result().values()
            connection.close()
        assert time.monotonic() - since < 2.5, "it waited for the one who says nothing"
        assert silent.recv(1) == b""
    assert "calls itself rank 1 has another SHMEMKIT_SECRET" in capsys.readouterr().err


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to be another user")
def test_another_user():
    name = b"\0shmemkit-test-%d" % os.getpid()
    listener = listen(name)
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        other, got = socket.socket(socket.AF_UNIX), b""
        other.connect(name)
        with contextlib.suppress(ConnectionError):
            other.sendall(HELLO.pack(MAGIC, 1, 2, bytes(16)))
            got = other.recv(100)
        os._exit(len(got))
    with pytest.raises(RankTimeout):
        gather(listener, b"", 2, 2, "start")
    assert os.waitpid(child, 0)[1] == 0
