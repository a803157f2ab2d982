"""A communicator over sockets, for ranks that no MPI started.

Rank 0 is the hub: it has a connection to each other rank, and a thread that answers them, whatever its own
program does. A collective call is one message to the hub, and one from it when all ranks of the call, those
of a group too, have sent theirs. So the hub knows who is missing.

A rank that leaves says so. If its connection ends without that, it has died: the hub ends all other ranks.
The thread of each other rank sees the end of the hub.

On one host the connections are Unix sockets, for which the kernel says whose process is at the other end: it
must be of the same user. Between hosts they are TCP, and both sides prove that they know the secret. Nothing
is unpickled before that.
"""

import atexit
import contextlib
import errno
import hashlib
import hmac
import os
import pickle
import secrets
import selectors
import socket
import struct
import sys
import threading
import time
import weakref
from typing import Any

from shmemkit.support.agreement import counted, ranks_text
from shmemkit.support.command_line import say, say_at_last
from shmemkit.support.timeouts import RankTimeout, missing_text

from .communicator import Communicator
from .environment import is_loopback

MAGIC = b"shmemkit1"
HELLO = struct.Struct(f"<{len(MAGIC)}sII16s")  # MAGIC, rank, size, nonce
ANSWER = struct.Struct(f"<{len(MAGIC)}s16s32s")  # MAGIC, nonce, proof
LENGTH = struct.Struct("<Q")
HANDSHAKE, PATIENT = 3.0, 10.0  # seconds: at the hub; at a rank, which may stand in line
LINGER = 3.0  # seconds in which rank 0, which ends, still says why to ranks that come
STUCK = 10  # seconds in which a rank must take what the hub sends
PATIENCE = 60.0  # seconds, until a line says who is missing
START_PATIENCE = 10.0  # seconds, while ranks start


class NotShmemkit(ConnectionError):
    """What answers is another program."""


# -- messages
def _receive(sock, n, deadline=None):
    data = bytearray()
    while len(data) < n:
        if deadline is not None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            sock.settimeout(left)
        part = sock.recv(min(n - len(data), 1 << 20))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def _packed(*message):
    data = pickle.dumps(message, 5)
    return LENGTH.pack(len(data)) + data


def _send(sock, *message):
    sock.sendall(_packed(*message))


def _next(sock, deadline=None):
    (n,) = LENGTH.unpack(_receive(sock, LENGTH.size, deadline))
    return pickle.loads(_receive(sock, n, deadline))


# -- who is at the other end
def _check_user(sock):
    """PermissionError if another user's process is at the other end of a Unix socket."""
    if sock.family == socket.AF_UNIX:
        credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _, uid, _ = struct.unpack("3i", credentials)
        if uid != os.getuid():
            raise PermissionError(f"the process there is of the user {uid}, not of {os.getuid()}")


def _proof(secret, who, *parts):
    return hmac.digest(secret, b"|".join((who, *parts)), hashlib.sha256)


def _greet(sock, secret, rank, size):
    """A rank's side of a new connection to the hub. PermissionError if that has another secret."""
    deadline = time.monotonic() + PATIENT
    _check_user(sock)
    sock.settimeout(PATIENT)
    hello = HELLO.pack(MAGIC, rank, size, secrets.token_bytes(16))
    sock.sendall(hello)
    found = b""
    while len(found) < len(MAGIC):  # another protocol may say less, and wait
        found += _receive(sock, 1, deadline)
        if not MAGIC.startswith(found):
            raise NotShmemkit
    magic, nonce, proof = ANSWER.unpack(found + _receive(sock, ANSWER.size - len(MAGIC), deadline))
    if not hmac.compare_digest(proof, _proof(secret, b"hub", hello, nonce)):
        raise PermissionError("SHMEMKIT_SECRET is not that of rank 0. Set it to the same text on all ranks")
    sock.sendall(_proof(secret, b"rank", hello, nonce))


def _admit(sock, secret):
    """The hub's side. -> (rank, size)"""
    deadline = time.monotonic() + HANDSHAKE
    _check_user(sock)
    hello = _receive(sock, HELLO.size, deadline)
    magic, rank, size, _ = HELLO.unpack(hello)
    if magic != MAGIC:
        raise NotShmemkit
    nonce = secrets.token_bytes(16)
    sock.sendall(ANSWER.pack(MAGIC, nonce, _proof(secret, b"hub", hello, nonce)))
    with contextlib.suppress(EOFError, ConnectionError):
        if hmac.compare_digest(_receive(sock, 32, deadline), _proof(secret, b"rank", hello, nonce)):
            return rank, size
    if secret:
        say(f"shmemkit: a process that calls itself rank {rank} has another SHMEMKIT_SECRET, or has gone")
    raise PermissionError


def _prepare(sock):
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", STUCK, 0))
    if sock.family != socket.AF_UNIX:  # a host that is gone is noticed after 15 s
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in (("KEEPIDLE", 5), ("KEEPINTVL", 2), ("KEEPCNT", 5)):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"), value)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 15_000)


# -- how ranks find each other
def listen(address):
    """-> a listening socket at `address`: bytes, the name of a Unix socket, or (host, port)"""
    if isinstance(address, bytes):
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(address)
        except OSError:
            listener.close()
            raise
        listener.listen(1024)
        return listener
    host, port = address
    known = []
    with contextlib.suppress(socket.gaierror):  # a service's name may be known only once this is ready
        known = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM) if host else []
    for family, *_, where in known:
        if is_loopback(where[0]) and not is_loopback(host):
            continue  # Debian's /etc/hosts says so of this host's own name: others could not come
        try:
            return socket.create_server(where, family=family, backlog=1024)
        except OSError as error:  # a service's address, which this host does not have
            if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                raise
    both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=1024, dualstack_ipv6=both)


def _connect(address):
    if isinstance(address, bytes):
        sock = socket.socket(socket.AF_UNIX)
        sock.settimeout(HANDSHAKE)
        try:
            sock.connect(address)
        except OSError:
            sock.close()
            raise
        return sock
    sock = socket.create_connection(address, HANDSHAKE)
    if sock.getsockname() == sock.getpeername():  # TCP may give it the very port that it looks for
        sock.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    return sock


def gather(listener, secret, size, limit, who):
    """-> {rank: connection} of ranks 1 to `size` - 1, which come to `listener` within `limit` seconds.
    RankTimeout, also there, if they do not; RuntimeError, also there, if they disagree. `who` begins
    messages."""
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        try:
            found = _all_that_come(listener, selector, secret, size, limit, who)
        finally:
            for key in list(selector.get_map().values()):
                sock: Any = key.fileobj
                if key.data is None:  # the listener, and strangers who say nothing
                    sock.close()
    for sock in found.values():
        _prepare(sock)
        with contextlib.suppress(OSError):  # it has died, as the Link will see
            _send(sock, "welcome")
    return found


def _all_that_come(listener, selector, secret, size, limit, who):
    found: dict[int, Any] = {}
    start, told, failed = time.monotonic(), False, None
    at = place(listener.getsockname())

    def fail(text):
        nonlocal failed, limit
        if failed is None:
            failed, limit = text, min(limit, waited + LINGER)
            for each in found.values():
                selector.unregister(each)
            _dismiss(found.values(), "refused", failed)

    def disagree(text):
        fail(
            f"{who}: {text}. Give each rank its own number, and all the same WORLD_SIZE. If an earlier run "
            f"still waits at {at}, end it, or take another port"
        )

    while len(found) < size - 1:
        waited = time.monotonic() - start
        missing = [rank for rank in range(1, size) if rank not in found]
        if waited >= limit and failed is not None:
            break
        if waited >= limit:
            text = missing_text(who.removesuffix("()"), missing, [0, *sorted(found)], limit)
            text = f"{text}. Are all {size} ranks started, with the same settings?"
            _dismiss(found.values(), "missing", text, missing)
            raise RankTimeout(text, 0, who, missing)
        if waited >= START_PATIENCE and not told:
            told = True
            say(f"shmemkit: {who} waits at {at} for {ranks_text(missing)}")
        ready = [key for key, _ in selector.select(min(limit - waited, START_PATIENCE))]
        if gone := [
            key.data for key in ready if key.data is not None
        ]:  # one that is there has nothing to say
            fail(f"{who}: {ranks_text(gone)} of {size} came, and died while others started")
        elif ready and ready[0].fileobj is listener:
            selector.register(listener.accept()[0], selectors.EVENT_READ)
        elif ready:
            sock: Any = ready[0].fileobj
            selector.unregister(sock)
            try:
                rank, theirs = _admit(sock, secret)
            except (OSError, EOFError):
                sock.close()  # a stranger
                continue
            if theirs != size:
                disagree(f"rank {rank} was told of {counted(theirs, 'rank')}, rank 0 of {size}")
            elif rank not in missing:
                disagree(f"there is a rank {rank} already, or a rank that there cannot be, of {size}")
            if rank in missing:
                found[rank] = sock
            if failed is None:
                selector.register(sock, selectors.EVENT_READ, rank)
            else:
                _dismiss([sock], "refused", failed)
    if failed is not None:
        raise RuntimeError(failed)
    return found


def _dismiss(socks, *message):
    for sock in socks:
        with contextlib.suppress(OSError):
            _send(sock, *message)
        sock.close()


def reach(addresses, secret, rank, size, limit, who):
    """-> this rank's connection to the hub, at one of `addresses`. RankTimeout if it does not come within
    `limit` seconds; PermissionError, ConnectionError or RuntimeError if it is another's."""
    start, pause, last, met, told = time.monotonic(), 0.01, None, None, False
    deadline, at = start + limit, " or ".join(map(place, addresses))
    while True:
        for address in addresses:
            sock = None
            try:
                sock = _connect(address)
                _greet(sock, secret, rank, size)
                met = address
                what, *rest = _next(sock, deadline + PATIENT)
                if what == "welcome":
                    _prepare(sock)
                    return sock
            except NotShmemkit:
                last = f"another program than rank 0 answers at {place(address)}"
                if len(addresses) == 1:
                    raise ConnectionError(
                        f"{who}: {last}. Choose another port: SHMEMKIT_PORT, the same on all ranks"
                    ) from None
            except PermissionError as error:
                raise PermissionError(f"{who}: {error}") from None
            except (OSError, EOFError, UnicodeError) as error:  # not there yet, or gone; no name of a host
                last = str(error) or type(error).__name__
                if met == address and isinstance(error, ConnectionRefusedError):
                    raise ConnectionError(f"{who}: rank 0 has died while ranks started") from None
            else:
                sock.close()
                text, *missing = rest
                raise RankTimeout(text, rank, who, *missing) if what == "missing" else RuntimeError(text)
            if sock is not None:
                sock.close()
        if time.monotonic() >= deadline:
            text = missing_text(who.removesuffix("()"), [0], [rank], limit)
            raise RankTimeout(f"{text}, and looks at {at}: {last}", rank, who, [0])
        if time.monotonic() - start >= START_PATIENCE and not told:
            told = True
            say(f"shmemkit: rank {rank} waits for rank 0 at {at}: {last}")
        time.sleep(pause)
        pause = min(2 * pause, 0.3)


def warn_rank_0(address, secret, size):
    """Another rank 0 listens at `address`, where this one cannot: tell it, so that it ends. -> whether it has
    said so"""
    try:
        with _connect(address) as sock:
            _greet(sock, secret, 0, size)
            return _next(sock, time.monotonic() + PATIENT)[0] == "refused"
    except (OSError, EOFError):
        return False


def place(address):
    if isinstance(address, bytes):
        return f"the Unix socket {address[1:].decode()}"
    return f"{address[0]}, port {address[1]}"


# -- the communicator
_links: Any = weakref.WeakSet()
os.register_at_fork(after_in_child=lambda: [link.forked() for link in _links])


class Link:
    """This process's part: its connections, and the thread that listens to them. `peers`: {rank: connection},
    of the hub those of all others, of others that of the hub."""

    def __init__(self, rank, size, peers):
        self.rank, self.size, self.peers = rank, size, peers
        self.answers: dict[Any, Any] = {}  # of the hub, to calls of this rank
        self.news = threading.Condition()
        self.lock = threading.RLock()  # of what follows, and of sending
        self.rounds: dict[Any, dict[int, bytes]] = {}  # of the hub: who has come to each call
        self.given_up: dict[Any, Any] = {}
        self.left: set[int] = set()
        self.closed: str | None = None  # why it can no longer be used
        self.forked_from: int | None = None
        self.selector = selectors.DefaultSelector()
        for peer, sock in peers.items():
            self.selector.register(sock, selectors.EVENT_READ, peer)
        threading.Thread(target=self._run, name="shmemkit-ranks", daemon=True).start()
        atexit.register(self.close)
        _links.add(self)

    def call(self, key, *message):
        """Send a message of the call `key` to the hub."""
        if self.closed is not None:
            raise RuntimeError(self.closed)
        if 0 in self.left:
            raise RuntimeError(f"rank 0 has ended, and with it the connections of rank {self.rank}")
        try:
            self._to_hub(*message[:1], key, *message[1:])
        except OSError:  # rank 0 has died: the thread that receives sees it, too, and ends this process
            time.sleep(2.0)
            raise

    def wait(self, key, seconds):
        """-> the hub's next answer to the call `key`, or None after `seconds`"""
        with self.news:
            self.news.wait_for(lambda: key in self.answers or 0 in self.left, seconds)
            if key in self.answers:
                return self.answers.pop(key)
        return ("left", [0]) if 0 in self.left else None

    def close(self):
        """This rank leaves."""
        atexit.unregister(self.close)
        if self.closed is not None:
            return
        self.closed = "this communicator is closed"
        with contextlib.suppress(OSError), self.lock:
            for peer, sock in self.peers.items():
                if peer not in self.left:
                    _send(sock, "bye")
        if self.rank != 0 and 0 not in self.left:
            with self.news:  # the hub's answer: nothing is left behind
                self.news.wait_for(lambda: 0 in self.left, 1.0)
        if self.rank != 0:
            with contextlib.suppress(OSError):  # both threads see the end, and close the connection
                self.peers[0].shutdown(socket.SHUT_RDWR)

    def abort(self, status):
        """End all ranks, this one too."""
        with contextlib.suppress(OSError):
            self._to_hub("abort", None, status)
        os._exit(status)

    # -- inside
    def _to_hub(self, *message):
        if self.rank == 0:
            self._take(0, *message)
        else:
            with self.lock:
                _send(self.peers[0], *message)

    def _to_rank(self, rank, *message):
        if rank == 0:
            self._answer(*message)
        elif rank not in self.left:
            try:
                _send(self.peers[rank], *message)
            except OSError:  # it has died, or is stuck: `_listen` sees the end of the connection
                with contextlib.suppress(OSError):
                    self.peers[rank].shutdown(socket.SHUT_RDWR)

    def _answer(self, what, key, *rest):
        with self.news:
            self.answers[key] = (what, *rest)
            self.news.notify_all()

    def _take(self, rank, what, key: Any = None, *rest):
        """The hub has a message of `rank`. A key: (ranks, number of the communicator, number of the call)"""
        with self.lock:
            if what == "join":
                if key in self.given_up:
                    self._to_rank(rank, "given up", key, self.given_up[key])
                    return
                there, ranks = self.rounds.setdefault(key, {}), key[0]
                there[rank] = rest[0]
                if len(there) == len(ranks):
                    del self.rounds[key]
                    for each in ranks:
                        self._to_rank(each, "all", key, [there[r] for r in ranks])
                else:
                    self._look_for_left(key)
            elif what == "who" and key in self.rounds:
                self._to_rank(rank, "there", key, sorted(self.rounds[key]))
            elif what == "give up" and key in self.rounds:
                there = self.rounds.pop(key)
                self.given_up[key] = [r for r in key[0] if r not in there], *rest
                for each in there:
                    self._to_rank(each, "given up", key, self.given_up[key])
            elif what == "bye":
                self._to_rank(rank, "bye", None)
                self.left.add(rank)
                for key in list(self.rounds):
                    self._look_for_left(key)
            elif what == "abort":
                self._end_all(rest[0], rank)

    def _look_for_left(self, key):
        """Of the ranks of a call, some will never come."""
        if late := self.left.intersection(key[0]) - self.rounds[key].keys():
            for each in self.rounds.pop(key):
                self._to_rank(each, "left", key, sorted(late))

    def _end_all(self, status, but=None, why=None):
        """The hub's. It waits for nobody: those who do not get the message see the end of this process."""
        free = self.lock.acquire(timeout=1.0)  # else a message to a rank that is stuck is on its way
        for rank in self.peers.keys() - self.left - {but} if free else ():
            with contextlib.suppress(OSError):
                self.peers[rank].send(_packed("abort", None, status), socket.MSG_DONTWAIT)
        if why is not None:
            say_at_last(why)
        if but != 0:
            _end(status)

    def _run(self):
        try:
            self._listen()
        except BaseException as error:
            if self.closed is None:  # nobody would answer any more
                say_at_last(
                    f"shmemkit: rank {self.rank}: its connections failed: {type(error).__name__}: {error}"
                )
                self._end_all(1) if self.rank == 0 else _end(1)

    def _listen(self):
        while True:
            for event, _ in self.selector.select():
                peer, sock = event.data, event.fileobj
                try:
                    message = _next(sock)
                except (OSError, EOFError):
                    if self._lost(peer):
                        return
                    continue
                if self.rank == 0:
                    self._take(peer, *message)
                elif message[0] == "abort":
                    _end(message[2])
                elif message[0] == "bye":
                    with self.news:
                        self.left.add(0)
                        self.news.notify_all()
                else:
                    self._answer(*message)

    def _lost(self, peer):
        """The connection has ended. -> whether no other is left"""
        with self.lock:
            self.selector.unregister(self.peers[peer])
            self.peers[peer].close()
            gone = peer in self.left or self.closed is not None
        if not gone:
            why = f"shmemkit: rank {self.rank}: rank {peer} has died: its connection is lost. All ranks end"
            if self.rank == 0:
                self._end_all(1, peer, why)
            say_at_last(why)
            _end(1)
        return not self.selector.get_map()

    def forked(self):
        """In a child of this process: the connections are the parent's."""
        self.forked_from = self.rank
        self.closed = f"this process is a child (fork) of rank {self.rank}: only that rank may call shmemkit"
        self.selector.close()
        for sock in self.peers.values():
            sock.close()


def _end(status):
    """End this process now, and show what it has printed."""
    flush = threading.Thread(target=_flush, daemon=True)  # the program may be in a write, which holds a lock
    flush.start()
    flush.join(0.5)
    os._exit(status)


def _flush():
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


class SocketComm(Communicator):
    """The communicator of `ranks` of a Link: of all, or of a group."""

    def __init__(self, link, ranks, number=()):
        self.link, self.ranks, self._number = link, tuple(ranks), number
        self.rank, self.size = self.ranks.index(link.rank), len(self.ranks)
        self._calls = self._children = 0

    def allgather(self, value: Any, /) -> list[Any]:
        def say_who(there):
            missing = [rank for rank in range(self.size) if rank not in there]
            say(f"shmemkit: allgather waits for {ranks_text(sorted(self.ranks[r] for r in missing))}")

        values, failed = self.meet(value, "allgather", None, PATIENCE, say_who)
        assert values is not None, failed
        return values

    def meet(self, value, call, limit, patience, waiting):
        """-> (the `value` of all ranks, None), or (None, (call, missing, limit)) if they have not come within
        a rank's `limit` of seconds. The first of those that wait for `patience` seconds calls
        ``waiting(ranks that are there)``."""
        link, start = self.link, time.monotonic()
        data = pickle.dumps(value, 5)  # if it fails, there was no call
        self._calls += 1
        key = self.ranks, self._number, self._calls
        link.call(key, "join", data)
        asked = False
        while True:
            first = limit is None or patience < limit
            until = patience if first and not asked else limit
            answer = link.wait(key, None if until is None else max(0.0, start + until - time.monotonic()))
            if answer is None:
                what = "who" if first and not asked else "give up"
                asked = True
                link.call(key, what, *((call, limit) if what == "give up" else ()))
                if what == "give up":
                    limit = None  # the answer comes
                continue
            what, *rest = answer
            if what == "all":
                return [pickle.loads(data) for data in rest[0]], None
            if what == "there":
                there = sorted(map(self.ranks.index, rest[0]))
                if there[0] == self.rank:
                    waiting(there)
            elif what == "left":
                raise RuntimeError(
                    f"{ranks_text(rest[0])} {'have' if len(rest[0]) > 1 else 'has'} ended, and "
                    f"will not come to {call}, for which rank {link.rank} waits"
                )
            else:
                missing, call, limit = rest[0]
                return None, (call, sorted(map(self.ranks.index, missing)), limit)

    def Dup(self) -> "SocketComm":
        """Collective, without a message."""
        self._children += 1
        return SocketComm(self.link, self.ranks, (*self._number, self._children))

    def Split(self, color: int = 0, key: int = 0) -> "SocketComm":
        self._children += 1
        asked = self.allgather((color, key))
        members = sorted((k, rank) for rank, (c, k) in enumerate(asked) if c == color)
        return SocketComm(self.link, [self.ranks[r] for _, r in members], (*self._number, self._children))

    def Free(self) -> None:
        if not self._number:
            self.link.close()

    def Abort(self, status: int = 1) -> None:
        self.link.abort(status)
