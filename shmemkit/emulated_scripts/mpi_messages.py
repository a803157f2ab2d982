"""MPI's messages from rank to rank, and requests. A send does not wait."""

import dataclasses
import pickle
from collections import defaultdict

from shmemkit.emu.stand_in_modules import Served
from shmemkit.emu.vector_clock import joined

from .current_process import current
from .mpi_buffers import MPIError, chunk, elements

ANY_SOURCE, ANY_TAG, PROC_NULL = -1, -1, -2


class Status(Served):
    """Who sent a message."""

    def __init__(self):
        self.source, self.tag, self.n_bytes, self.error = ANY_SOURCE, ANY_TAG, 0, 0

    def Get_source(self):
        return self.source

    def Get_tag(self):
        return self.tag

    def Get_error(self):
        return self.error

    def Get_count(self, datatype=None):
        return self.n_bytes // (1 if datatype is None else datatype.dtype.itemsize)

    Get_elements = Get_count
    count = property(Get_count)


@dataclasses.dataclass(eq=False)
class Message:
    """`kind`: "object" or "buffer". `clock`: what its sender knows, where races are looked for."""

    source: int
    tag: int
    kind: str
    data: object
    clock: object


def _tell(status, message):
    if status is not None:
        status.source, status.tag = message.source, message.tag
        status.n_bytes = len(message.data) if message.kind == "object" else message.data.nbytes


@dataclasses.dataclass(eq=False)
class Receive:
    """What a receive, or a probe, asks for; `message`: what it got. `kind` None: either."""

    call: str
    source: int
    tag: int
    kind: str | None = None
    message: Message | None = None

    def takes(self, message):
        return (
            self.source in (ANY_SOURCE, message.source)
            and self.tag in (ANY_TAG, message.tag)
            and self.kind in (None, message.kind)
        )

    def why(self):
        sender = "any rank" if self.source == ANY_SOURCE else f"rank {self.source}"
        return f"a message of {sender} in MPI's {self.call}"


class Box:
    """Of one rank of a communicator, in order: messages without a receive, and receives without a message."""

    def __init__(self):
        self.messages, self.receives = [], []

    def deliver(self, message):
        for receive in self.receives:
            if receive.takes(message):
                receive.message = message
                self.receives.remove(receive)
                return
        self.messages.append(message)

    def post(self, receive):
        receive.message = self.find(receive)
        if receive.message is None:
            self.receives.append(receive)
        else:
            self.messages.remove(receive.message)

    def find(self, receive):
        return next((m for m in self.messages if receive.takes(m)), None)


class Mail:
    """Of one machine: messages, and the rendezvous of each communicator."""

    def __init__(self):
        self.boxes = defaultdict(Box)  # by communicator and PE
        self.rendezvous = {}


def mail(machine):
    if not hasattr(machine, "mail"):
        machine.mail = Mail()
    return machine.mail


def knows(machine, pe):
    """The clock of a host program; its kernels count as waited for, as in ``Races.hosts_met``."""
    return joined(machine.races.hosts[pe], *[s.clock for s in machine.streams[pe]])


class Request(Served):
    """A receive that has not been waited for, or a send, which is done at once."""

    def __init__(self, receive=None, finish=None):
        self._receive, self._finish, self._result = receive, finish, None

    def wait(self, status=None):
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish(status)
        return self._result

    def Wait(self, status=None):
        self.wait(status)
        return True

    def _is_ready(self):
        return self._receive is None or self._receive.message is not None

    def test(self, status=None):
        if not current("test").poll(self._is_ready, "a request, which it tests"):
            return False, None
        return True, self.wait(status)

    def Test(self, status=None):
        return self.test(status)[0]

    @staticmethod
    def waitall(requests, statuses=None):
        given = [None] * len(requests) if statuses is None else statuses
        return [request.wait(status) for request, status in zip(requests, given, strict=True)]

    @classmethod
    def Waitall(cls, requests, statuses=None):
        cls.waitall(requests, statuses)
        return True

    @classmethod
    def testall(cls, requests, statuses=None):
        def are_ready():
            return all(r._is_ready() for r in requests)

        if not current("testall").poll(are_ready, "requests, which it tests"):
            return False, None
        return True, cls.waitall(requests, statuses)

    @classmethod
    def Testall(cls, requests, statuses=None):
        return cls.testall(requests, statuses)[0]


class Messages(Served):
    """What a communicator has for them. It has rank, size, ``_key`` and ``_members()``."""

    def send(self, obj, dest, tag=0):
        self._post(dest, tag, "object", pickle.dumps(obj))

    def Send(self, buf, dest, tag=0):
        self._post(dest, tag, "buffer", elements(buf).copy())

    bsend, Bsend = send, Send

    def isend(self, obj, dest, tag=0):
        self.send(obj, dest, tag)
        return Request()

    def Isend(self, buf, dest, tag=0):
        self.Send(buf, dest, tag)
        return Request()

    ibsend, Ibsend = isend, Isend

    def recv(self, buf=None, source=ANY_SOURCE, tag=ANY_TAG, status=None):
        return self._irecv("recv", source, tag).wait(status)

    def Recv(self, buf, source=ANY_SOURCE, tag=ANY_TAG, status=None):
        self._Irecv("Recv", buf, source, tag).wait(status)

    def irecv(self, buf=None, source=ANY_SOURCE, tag=ANY_TAG):
        return self._irecv("irecv", source, tag)

    def Irecv(self, buf, source=ANY_SOURCE, tag=ANY_TAG):
        return self._Irecv("Irecv", buf, source, tag)

    def _irecv(self, call, source, tag):
        return self._request(call, source, tag, "object", pickle.loads)

    def _Irecv(self, call, buf, source, tag):
        return self._request(call, source, tag, "buffer", lambda data: chunk(call, elements(buf), data))

    def _request(self, call, source, tag, kind, use):
        """A receive; ``use(data)`` makes its result."""
        if source == PROC_NULL:
            return Request()
        if source != ANY_SOURCE:
            self._checked(source)
        box, receive = self._box(), Receive(call, source, tag, kind)
        box.post(receive)

        def finish(status):
            message = self._await(box, receive, lambda: receive.message)
            if message.clock is not None:
                process = current(call)
                process.machine.races.synchronized(process.pe, message.clock)
            _tell(status, message)
            return use(message.data)

        return Request(receive, finish)

    def probe(self, source=ANY_SOURCE, tag=ANY_TAG, status=None):
        box, wanted = self._box(), Receive("probe", source, tag)
        _tell(status, self._await(box, wanted, lambda: box.find(wanted)))
        return True

    def iprobe(self, source=ANY_SOURCE, tag=ANY_TAG, status=None):
        box, wanted = self._box(), Receive("iprobe", source, tag)
        found = current("iprobe").poll(lambda: box.find(wanted) is not None, "a message, which it probes")
        if found:
            _tell(status, box.find(wanted))
        return found

    Probe, Iprobe = probe, iprobe

    def sendrecv(
        self, sendobj, dest, sendtag=0, recvbuf=None, source=ANY_SOURCE, recvtag=ANY_TAG, status=None
    ):
        self.send(sendobj, dest, sendtag)
        return self.recv(None, source, recvtag, status)

    def Sendrecv(
        self, sendbuf, dest, sendtag=0, recvbuf=None, source=ANY_SOURCE, recvtag=ANY_TAG, status=None
    ):
        self.Send(sendbuf, dest, sendtag)
        self.Recv(recvbuf, source, recvtag, status)

    def _box(self):
        process = current("MPI")
        return mail(process.machine).boxes[self._key, process.pe]

    def _post(self, dest, tag, kind, data):
        if dest == PROC_NULL:
            return
        process = current("send")
        machine, target = process.machine, self._members()[self._checked(dest)]
        clock = None if machine.races is None else knows(machine, process.pe)
        box = mail(machine).boxes[self._key, target]
        box.deliver(Message(self.rank, tag, kind, data, clock))
        machine.scheduler.progress += 1
        machine.scheduler.wake(id(box))

    @staticmethod
    def _await(box, receive, find):
        """What `find()` finds, once there is something."""
        process = current(receive.call)
        process.machine.wait_on_host(
            process.pe, lambda: find() is not None, id(box), receive.why, can_go_on=False
        )
        return find()

    def _checked(self, rank):
        if not 0 <= rank < self.size:
            raise MPIError(f"MPI_ERR_RANK: rank is {rank}; it must be 0 to {self.size - 1}")
        return rank
