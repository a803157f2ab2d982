"""``mpi4py.MPI`` for the PEs of a script.

Lower-case methods pass pickled objects, upper-case ones buffers: arrays of NumPy or CuPy, ``[array, type]``
or ``[array, count, type]``. Collectives order the PEs of the communicator as a barrier does. A send does not
wait.
"""

import pickle
import time
import types
from collections import defaultdict, deque

from ..clock import joined
from ..meeting import Meeting
from .modules import Served, StandIn
from .mpi_buffers import IN_PLACE, TYPES, Parts, chunk, elements
from .mpi_ops import OPS, Op
from .process import current

ANY_SOURCE, ANY_TAG, PROC_NULL, UNDEFINED = -1, -1, -2, -32766
COMM_TYPE_SHARED = 0


class MPIError(Exception):
    """``MPI.Exception``"""

    def Get_error_class(self):
        return 16

    Get_error_code = Get_error_class


class Aborted(Exception):
    """``Comm.Abort(code)``"""

    def __init__(self, pe, code):
        super().__init__(f"MPI.Abort({code}) on rank {pe}")
        self.code = code


class Status:
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


class _Mail:
    """Of one machine: messages that were sent and not received, and meetings of communicators."""

    def __init__(self):
        self.boxes = defaultdict(deque)  # (communicator, target) -> (source, tag, kind, data, clock)
        self.meetings = {}


def _mail(machine):
    if not hasattr(machine, "mail"):
        machine.mail = _Mail()
    return machine.mail


class Request(Served):
    """A receive that has not been waited for, or a send, which is done at once."""

    def __init__(self, finish=None, ready=None):
        self._finish, self._ready, self._result = finish, ready, None

    def wait(self, status=None):
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._result = finish(status)
        return self._result

    def Wait(self, status=None):
        self.wait(status)
        return True

    def test(self, status=None):
        if self._finish is not None and not self._ready():
            return False, None
        return True, self.wait(status)

    def Test(self, status=None):
        return self.test(status)[0]

    @staticmethod
    def waitall(requests, statuses=None):
        return [request.wait() for request in requests]

    @classmethod
    def Waitall(cls, requests, statuses=None):
        cls.waitall(requests)
        return True


class Comm(Served):
    """A communicator. COMM_WORLD is one object for all PEs, so rank and size are of the PE that calls."""

    def __init__(self, key, members=None):
        self._key, self._fixed = key, members

    # -- who
    def _members(self):
        return range(current("MPI").machine.n_pes) if self._fixed is None else self._fixed

    def Get_rank(self):
        return self._members().index(current("MPI").pe)

    def Get_size(self):
        return len(self._members())

    rank, size = property(Get_rank), property(Get_size)

    def __reduce__(self):
        raise TypeError("communicators cannot be sent")

    # -- meeting
    def _meet(self, call, value=None):
        """All members come, in the same `call`. -> their values, by rank"""
        process = current(call)
        machine, members = process.machine, self._members()
        meetings = _mail(machine).meetings
        if self._key not in meetings:
            meetings[self._key] = Meeting(machine.scheduler, lambda: len(members), "an MPI collective")
        if len(members) < machine.n_pes:
            who = f"ranks {', '.join(map(str, members))} of COMM_WORLD"
        else:
            who = "the other ranks"
        machine.host_waits[process.pe] = lambda: f"{who} to call MPI's {call}, too"
        try:
            values = meetings[self._key].join(process.host, (call, value), lambda v: self._met(machine, v))
        finally:
            machine.host_waits.pop(process.pe, None)
        calls = {theirs for theirs, _ in values.values()}
        if len(calls) > 1:
            where = ", ".join(f"rank {members.index(pe)} in {c}" for pe, (c, _) in sorted(values.items()))
            raise MPIError(f"the ranks are in different collective calls: {where}")
        return [values[pe][1] for pe in members]

    @staticmethod
    def _met(machine, values):
        if machine.races is not None:
            clock = joined(*[_knows(machine, pe) for pe in values])
            for pe in values:
                machine.races.synchronized(pe, clock)
        return values

    def barrier(self):
        self._meet("barrier")

    Barrier = barrier

    # -- objects
    def bcast(self, obj=None, root=0):
        data = self._meet("bcast", pickle.dumps(obj) if self.rank == self._checked(root) else None)[root]
        return obj if self.rank == root else pickle.loads(data)

    def allgather(self, sendobj):
        return [pickle.loads(v) for v in self._meet("allgather", pickle.dumps(sendobj))]

    def gather(self, sendobj, root=0):
        values = self._meet("gather", pickle.dumps(sendobj))
        return [pickle.loads(v) for v in values] if self.rank == self._checked(root) else None

    def scatter(self, sendobj=None, root=0):
        mine = None
        if self.rank == self._checked(root):
            if len(sendobj) != self.size:
                raise ValueError(f"scatter: expecting {self.size} items, got {len(sendobj)}")
            mine = [pickle.dumps(v) for v in sendobj]
        return pickle.loads(self._meet("scatter", mine)[root][self.rank])

    def alltoall(self, sendobj):
        if len(sendobj) != self.size:
            raise ValueError(f"alltoall: expecting {self.size} items, got {len(sendobj)}")
        values = self._meet("alltoall", [pickle.dumps(v) for v in sendobj])
        return [pickle.loads(v[self.rank]) for v in values]

    def allreduce(self, sendobj, op=OPS["SUM"]):
        return op.of_objects([pickle.loads(v) for v in self._meet("allreduce", pickle.dumps(sendobj))])

    def reduce(self, sendobj, op=OPS["SUM"], root=0):
        values = self._meet("reduce", pickle.dumps(sendobj))
        return op.of_objects([pickle.loads(v) for v in values]) if self.rank == self._checked(root) else None

    def scan(self, sendobj, op=OPS["SUM"]):
        values = self._meet("scan", pickle.dumps(sendobj))[: self.rank + 1]
        return op.of_objects([pickle.loads(v) for v in values])

    def exscan(self, sendobj, op=OPS["SUM"]):
        values = self._meet("exscan", pickle.dumps(sendobj))[: self.rank]
        return op.of_objects([pickle.loads(v) for v in values]) if values else None

    # -- buffers
    def Bcast(self, buf, root=0):
        mine = elements(buf)
        data = self._meet("Bcast", mine.copy() if self.rank == self._checked(root) else None)[root]
        if self.rank != root:
            _fill("Bcast", mine, data)

    def Allreduce(self, sendbuf, recvbuf, op=OPS["SUM"]):
        out = elements(recvbuf)
        mine = out if sendbuf is IN_PLACE else elements(sendbuf)
        _fill("Allreduce", out, op.of_arrays(self._meet("Allreduce", mine.copy())))

    def Reduce(self, sendbuf, recvbuf, op=OPS["SUM"], root=0):
        is_root = self.rank == self._checked(root)
        mine = elements(recvbuf if sendbuf is IN_PLACE else sendbuf)
        values = self._meet("Reduce", mine.copy())
        if is_root:
            _fill("Reduce", elements(recvbuf), op.of_arrays(values))

    def Allgather(self, sendbuf, recvbuf):
        parts = Parts(recvbuf, self.size)
        mine = parts[self.rank] if sendbuf is IN_PLACE else elements(sendbuf)
        parts.fill("Allgather", self._meet("Allgather", mine.copy()))

    Allgatherv = Allgather

    def Gather(self, sendbuf, recvbuf, root=0):
        is_root = self.rank == self._checked(root)
        parts = Parts(recvbuf, self.size) if is_root else None
        mine = parts[self.rank] if sendbuf is IN_PLACE else elements(sendbuf)
        values = self._meet("Gather", mine.copy())
        if is_root:
            parts.fill("Gather", values)

    Gatherv = Gather

    def Scatter(self, sendbuf, recvbuf, root=0):
        is_root = self.rank == self._checked(root)
        parts = [p.copy() for p in Parts(sendbuf, self.size)] if is_root else None
        data = self._meet("Scatter", parts)[root][self.rank]
        if recvbuf is not IN_PLACE:
            _fill("Scatter", elements(recvbuf), data)

    Scatterv = Scatter

    def Alltoall(self, sendbuf, recvbuf):
        out = Parts(recvbuf, self.size)
        parts = out if sendbuf is IN_PLACE else Parts(sendbuf, self.size)
        values = self._meet("Alltoall", [p.copy() for p in parts])
        out.fill("Alltoall", [v[self.rank] for v in values])

    Alltoallv = Alltoall

    # -- messages
    def send(self, obj, dest, tag=0):
        self._post(dest, tag, "object", pickle.dumps(obj))

    def Send(self, buf, dest, tag=0):
        self._post(dest, tag, "buffer", elements(buf).copy())

    def isend(self, obj, dest, tag=0):
        self.send(obj, dest, tag)
        return Request()

    def Isend(self, buf, dest, tag=0):
        self.Send(buf, dest, tag)
        return Request()

    def recv(self, buf=None, source=ANY_SOURCE, tag=ANY_TAG, status=None):
        data = self._take("recv", source, tag, "object", status)
        return None if data is None else pickle.loads(data)

    def Recv(self, buf, source=ANY_SOURCE, tag=ANY_TAG, status=None):
        data = self._take("Recv", source, tag, "buffer", status)
        if data is not None:
            chunk("Recv", elements(buf), data)

    def irecv(self, buf=None, source=ANY_SOURCE, tag=ANY_TAG):
        return Request(
            lambda status: self.recv(None, source, tag, status),
            lambda: self._find(self._box(), source, tag, "object") is not None,
        )

    def Irecv(self, buf, source=ANY_SOURCE, tag=ANY_TAG):
        return Request(
            lambda status: self.Recv(buf, source, tag, status),
            lambda: self._find(self._box(), source, tag, "buffer") is not None,
        )

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
        return _mail(process.machine).boxes[self._key, process.pe]

    def _post(self, dest, tag, kind, data):
        if dest == PROC_NULL:
            return
        process = current("send")
        machine, target = process.machine, self._members()[self._checked(dest)]
        clock = None if machine.races is None else _knows(machine, process.pe)
        box = _mail(machine).boxes[self._key, target]
        box.append((self.rank, tag, kind, data, clock))
        machine.scheduler.progress += 1
        machine.scheduler.wake(id(box))

    @staticmethod
    def _find(box, source, tag, kind):
        for message in box:
            if source in (ANY_SOURCE, message[0]) and tag in (ANY_TAG, message[1]) and message[2] == kind:
                return message
        return None

    def _take(self, call, source, tag, kind, status):
        if source == PROC_NULL:
            return None
        if source != ANY_SOURCE:
            self._checked(source)
        process, box = current(call), self._box()
        sender = "any rank" if source == ANY_SOURCE else f"rank {source}"
        process.machine.wait_on_host(
            process.pe,
            lambda: self._find(box, source, tag, kind) is not None,
            id(box),
            lambda: f"a message of {sender} in MPI's {call}",
            can_go_on=False,
        )
        message = self._find(box, source, tag, kind)
        box.remove(message)
        sender, tag, _, data, clock = message
        if clock is not None:
            process.machine.races.synchronized(process.pe, clock)
        if status is not None:
            status.source, status.tag = sender, tag
            status.n_bytes = len(data) if kind == "object" else data.nbytes
        return data

    # -- other communicators
    def Split(self, color=0, key=0):
        process = current("Split")
        number = process.splits[self._key]  # of this communicator, so far
        process.splits[self._key] += 1
        values = self._meet("Split", (color, key))
        if color == UNDEFINED:
            return COMM_NULL
        mine = sorted((theirs, rank) for rank, (c, theirs) in enumerate(values) if c == color)
        members = [self._members()[rank] for _, rank in mine]
        return Comm((self._key, number, color), members)

    def Split_type(self, split_type, key=0, info=None):
        if split_type == UNDEFINED:
            return self.Split(UNDEFINED, key)
        if split_type != COMM_TYPE_SHARED:
            raise NotImplementedError(f"Split_type({split_type}) is not emulated: COMM_TYPE_SHARED is")
        process = current("Split_type")
        return self.Split(process.pe // process.machine.local_size, key)

    def Dup(self, info=None):
        return self.Split(0, self.rank)

    def Clone(self):
        return self.Dup()

    def Free(self):
        pass

    Disconnect = Free

    def Abort(self, errorcode=0):
        raise Aborted(current("Abort").pe, errorcode)

    def Set_errhandler(self, errhandler):
        pass

    def Is_inter(self):
        return False

    def Is_intra(self):
        return True

    def _checked(self, rank):
        if not 0 <= rank < self.size:
            raise MPIError(f"MPI_ERR_RANK: rank {rank} does not exist: ranks are 0 to {self.size - 1}")
        return rank


class _Self(Comm):
    """COMM_SELF"""

    _key = property(lambda self: ("self", current("MPI").pe))

    def __init__(self):
        self._fixed = None

    def _members(self):
        return [current("MPI").pe]


class _Null(Served):
    """COMM_NULL"""

    def __bool__(self):
        return False

    def __repr__(self):
        return "COMM_NULL"


def _knows(machine, pe):
    """The clock of a host program; its kernels count as waited for, as in ``Races.hosts_met``."""
    return joined(machine.races.hosts[pe], *[s.clock for s in machine.streams[pe]])


def _fill(call, out, data):
    if data.nbytes > out.nbytes:
        raise MPIError(f"MPI_ERR_TRUNCATE: {call}: {data.nbytes} bytes came, the buffer has {out.nbytes}")
    chunk(call, out, data)


COMM_WORLD, COMM_SELF, COMM_NULL = Comm("world"), _Self(), _Null()
_THREADS = {"THREAD_SINGLE": 0, "THREAD_FUNNELED": 1, "THREAD_SERIALIZED": 2, "THREAD_MULTIPLE": 3}


def _finalized(value=None):
    process = current("MPI")
    if value is not None:
        process.finalized = value
    return process.finalized


def _processor_name():
    process = current("MPI.Get_processor_name")
    return f"emulated{process.pe // process.machine.local_size}"


def modules():
    """-> the stand-ins, by name"""
    members = {
        **OPS,
        **TYPES,
        **_THREADS,
        "ANY_SOURCE": ANY_SOURCE,
        "ANY_TAG": ANY_TAG,
        "COMM_NULL": COMM_NULL,
        "COMM_SELF": COMM_SELF,
        "COMM_TYPE_SHARED": COMM_TYPE_SHARED,
        "COMM_WORLD": COMM_WORLD,
        "Comm": Comm,
        "ERRORS_ARE_FATAL": "ERRORS_ARE_FATAL",
        "ERRORS_RETURN": "ERRORS_RETURN",
        "Exception": MPIError,
        "Finalize": lambda: _finalized(True),
        "Get_library_version": lambda: "shmemkit emulator",
        "Get_processor_name": _processor_name,
        "Get_version": lambda: (4, 0),
        "IN_PLACE": IN_PLACE,
        "INFO_NULL": None,
        "Init": lambda: None,
        "Init_thread": lambda required=3: 3,
        "Intracomm": Comm,
        "Is_finalized": _finalized,
        "Is_initialized": lambda: True,
        "Op": Op,
        "PROC_NULL": PROC_NULL,
        "Query_thread": lambda: 3,
        "Request": Request,
        "Status": Status,
        "UNDEFINED": UNDEFINED,
        "Wtick": lambda: time.get_clock_info("perf_counter").resolution,
        "Wtime": time.perf_counter,
    }
    rc = types.SimpleNamespace(initialize=True, finalize=True, threads=True, thread_level="multiple")
    return {
        "mpi4py": StandIn("mpi4py", {"rc": rc, "__version__": "4.0 (emulated)"}),
        "mpi4py.MPI": StandIn("mpi4py.MPI", members),
    }
