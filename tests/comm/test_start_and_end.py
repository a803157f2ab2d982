"""Communicators over sockets as they start and end: who dies then, which addresses are listened at, and that
nothing is left."""

import contextlib
import errno
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from started import free_port

from shmemkit.comm import sockets
from shmemkit.comm.sockets import Link, SocketComm, _admit, _greet, gather, listen, reach
from shmemkit.support.timeouts import RankTimeout

SECRET = b"the secret of the tests"


@pytest.mark.parametrize("host, seen", [("node1", False), ("127.0.0.1", True)])
def test_the_name_of_this_host_is_not_its_loopback(monkeypatch, host, seen):
    """Debian's /etc/hosts has 127.0.1.1 for it."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with listen((host, 0)) as listener:
        assert listener.getsockname()[0].startswith("127.") == seen


def test_an_address_keeps_its_scope(monkeypatch):
    """Of the link that it is on. One of a family that this host does not have is passed over."""
    tried = []

    def create_server(where, family, **_):
        tried.append(where)
        raise OSError(errno.EAFNOSUPPORT, "no such family") if where[0] else RuntimeError("enough")

    where = "fe80::1", 5, 0, 2
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(socket.AF_INET6, 1, 6, "", where)])
    monkeypatch.setattr(socket, "create_server", create_server)
    with pytest.raises(RuntimeError, match="enough"):
        listen(("fe80::1%eth0", 5))
    assert tried == [where, ("", 5)]


def test_a_connection_to_itself_is_none(monkeypatch, capsys):
    """TCP may give a socket the very port that it wants to reach. Who waits long says for whom, once."""

    def create_connection(address, timeout):
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.connect(address)
        return sock

    monkeypatch.setattr(sockets, "START_PATIENCE", 0.1)
    monkeypatch.setattr(socket, "create_connection", create_connection)
    with pytest.raises(RankTimeout, match=r"port \d+: \[Errno 111\] Connection refused"):
        reach([("127.0.0.1", free_port())], SECRET, 1, 2, 0.5, "start")
    said = r"shmemkit: rank 1 waits for rank 0 at 127.0.0.1, port \d+: \[Errno 111\] Connection refused\n"
    assert re.fullmatch(said, capsys.readouterr().err)


def test_a_rank_that_dies_while_others_start():
    """The rest learns it at once, not at the limit."""
    name = b"\0shmemkit-test-" + str(time.monotonic_ns()).encode()
    listener = listen(name)
    with ThreadPoolExecutor(2) as pool:
        hub = pool.submit(gather, listener, SECRET, 4, 20, "start")
        other = pool.submit(reach, [name], SECRET, 2, 4, 20, "start")
        with socket.socket(socket.AF_UNIX) as first:
            first.connect(name)
            _greet(first, SECRET, 1, 4)
            time.sleep(0.1)
        for each in (hub, other):
            with pytest.raises(RuntimeError, match=r"rank 1 of 4 came, and died"):
                each.result(10)


def test_who_comes_later_learns_that_ranks_disagree():
    name = b"\0shmemkit-test-" + str(time.monotonic_ns()).encode()
    listener = listen(name)
    with ThreadPoolExecutor(2) as pool:
        hub = pool.submit(gather, listener, SECRET, 3, 20, "start")
        said = "rank 1 was told of 4 ranks, rank 0 of 3"
        for rank, size in ((1, 4), (2, 3)):
            with pytest.raises(RuntimeError, match=said):
                reach([name], SECRET, rank, size, 5, "start")
        with pytest.raises(RuntimeError, match=said):
            hub.result(1)


def test_rank_0_dies_while_others_start():
    name = b"\0shmemkit-test-" + str(time.monotonic_ns()).encode()
    listener = listen(name)

    def accept_and_die():
        sock, _ = listener.accept()
        assert _admit(sock, SECRET) == (1, 2)
        listener.close()
        sock.close()

    with ThreadPoolExecutor(1) as pool:
        hub = pool.submit(accept_and_die)
        with pytest.raises(ConnectionError, match="rank 0 has died while ranks started"):
            reach([name], SECRET, 1, 2, 20, "start")
        hub.result(10)


def test_nothing_is_left_of_a_communicator_that_was_freed():
    a, b = socket.socketpair()
    links = [Link(0, 2, {1: a}), Link(1, 2, {0: b})]
    threads = {thread for thread in threading.enumerate() if thread.name == "shmemkit-ranks"}
    with ThreadPoolExecutor(2) as pool:
        comms = [SocketComm(link, range(2)) for link in links]
        assert list(pool.map(lambda comm: comm.allgather(comm.rank), comms)) == [[0, 1]] * 2
    for comm in reversed(comms):
        comm.Free()
    for thread in threads:
        thread.join(5)
    assert (a.fileno(), b.fileno()) == (-1, -1)
    assert not threads.intersection(threading.enumerate())


def test_one_rank_that_is_stuck_does_not_keep_the_others_from_ending(monkeypatch):
    """Nobody reads at the other end, and its buffer is full."""
    ended = threading.Event()

    def end(status):
        link.closed = "the test has seen it"
        ended.set()
        raise SystemExit  # of the thread

    monkeypatch.setattr(sockets, "_end", end)
    stuck, dying = socket.socketpair(), socket.socketpair()
    link = Link(0, 3, {1: stuck[0], 2: dying[0]})
    with contextlib.suppress(BlockingIOError):
        while True:
            stuck[0].send(bytes(1 << 16), socket.MSG_DONTWAIT)
    dying[1].close()
    assert ended.wait(5)
    for sock in (*stuck, dying[0]):
        sock.close()
