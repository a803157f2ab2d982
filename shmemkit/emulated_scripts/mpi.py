"""``mpi4py.MPI`` for the PEs of a script.

Lower-case methods pass pickled objects, upper-case ones buffers: arrays of NumPy or CuPy, ``[array, type]``
or ``[array, count, type]``. Collectives order the PEs of the communicator as a barrier does. A send does not
wait.
"""

import pickle
import time
import types

from shmemkit.emu.rendezvous import Rendezvous
from shmemkit.emu.stand_in_modules import Served, StandIn, named
from shmemkit.emu.vector_clock import joined

from .current_process import current
from .mpi_buffers import IN_PLACE, TYPES, MPIError, Parts, chunk, elements
from .mpi_messages import ANY_SOURCE, ANY_TAG, PROC_NULL, Messages, Request, Status, knows, mail
from .mpi_ops import OPS, Op

UNDEFINED, COMM_TYPE_SHARED = -32766, 0


class Aborted(Exception):
    """``Comm.Abort(code)``"""

    def __init__(self, pe, code):
        super().__init__(f"MPI.Abort({code}) on rank {pe}")
        self.code = code


class Comm(Messages):
    """A communicator. COMM_WORLD is one object for all PEs, so rank and size are of the PE that calls."""

    def __init__(self, key, members=None):
        self._key, self._fixed = key, members

    # -- who
    def _members(self):
        return range(current("MPI").machine.n_ranks) if self._fixed is None else self._fixed

    def Get_rank(self):
        return self._members().index(current("MPI").pe)

    def Get_size(self):
        return len(self._members())

    def Get_name(self):
        return {"world": "MPI_COMM_WORLD"}.get(self._key, "")

    rank, size, name = property(Get_rank), property(Get_size), property(Get_name)

    def __reduce__(self):
        raise TypeError("MPI: the message holds a communicator, which cannot be sent. Send its ranks")

    # -- collective calls
    def _collective(self, call, value=None):
        """All members make the same `call`. -> their values, by rank"""
        process = current(call)
        machine, members = process.machine, self._members()
        rendezvous = mail(machine).rendezvous
        if self._key not in rendezvous:
            rendezvous[self._key] = Rendezvous(machine.scheduler, lambda: len(members), "an MPI collective")
        if len(members) < machine.n_ranks:
            who = f"ranks {', '.join(map(str, members))} of COMM_WORLD"
        else:
            who = "the other ranks"
        with machine.host_waits_for(process.pe, lambda: f"{who} to call MPI's {call}, too"):
            values = rendezvous[self._key].join(process.host, (call, value), lambda v: self._met(machine, v))
        calls = {theirs for theirs, _ in values.values()}
        if len(calls) > 1:
            where = ", ".join(f"rank {members.index(pe)} calls {c}" for pe, (c, _) in sorted(values.items()))
            raise MPIError(
                f"ranks disagree: {where}. All ranks must make the same collective calls in the same order"
            )
        return [values[pe][1] for pe in members]

    @staticmethod
    def _met(machine, values):
        if machine.races is not None:
            clock = joined(*[knows(machine, pe) for pe in values])
            for pe in values:
                machine.races.synchronized(pe, clock)
        return values

    def barrier(self):
        self._collective("barrier")

    Barrier = barrier

    # -- objects
    def _objects(self, call, sendobj):
        """-> the objects of all ranks"""
        return [pickle.loads(v) for v in self._collective(call, pickle.dumps(sendobj))]

    def _one_for_each(self, call, sendobj):
        if len(sendobj) != self.size:
            raise ValueError(
                f"{call}(): sendobj has {len(sendobj)} items; it must have {self.size}, one for each rank"
            )
        return [pickle.dumps(v) for v in sendobj]

    def bcast(self, obj=None, root=0):
        mine = pickle.dumps(obj) if self.rank == self._checked(root) else None
        data = self._collective("bcast", mine)[root]
        return obj if self.rank == root else pickle.loads(data)

    def allgather(self, sendobj):
        return self._objects("allgather", sendobj)

    def gather(self, sendobj, root=0):
        values = self._objects("gather", sendobj)
        return values if self.rank == self._checked(root) else None

    def scatter(self, sendobj=None, root=0):
        mine = self._one_for_each("scatter", sendobj) if self.rank == self._checked(root) else None
        return pickle.loads(self._collective("scatter", mine)[root][self.rank])

    def alltoall(self, sendobj):
        values = self._collective("alltoall", self._one_for_each("alltoall", sendobj))
        return [pickle.loads(v[self.rank]) for v in values]

    def allreduce(self, sendobj, op=OPS["SUM"]):
        return op.of_objects(self._objects("allreduce", sendobj))

    def reduce(self, sendobj, op=OPS["SUM"], root=0):
        values = self._objects("reduce", sendobj)
        return op.of_objects(values) if self.rank == self._checked(root) else None

    def scan(self, sendobj, op=OPS["SUM"]):
        return op.of_objects(self._objects("scan", sendobj)[: self.rank + 1])

    def exscan(self, sendobj, op=OPS["SUM"]):
        values = self._objects("exscan", sendobj)[: self.rank]
        return op.of_objects(values) if values else None

    # -- buffers
    def Bcast(self, buf, root=0):
        mine = elements(buf)
        data = self._collective("Bcast", mine.copy() if self.rank == self._checked(root) else None)[root]
        if self.rank != root:
            chunk("Bcast", mine, data)

    def Allreduce(self, sendbuf, recvbuf, op=OPS["SUM"]):
        out = elements(recvbuf)
        mine = out if sendbuf is IN_PLACE else elements(sendbuf)
        chunk("Allreduce", out, op.of_arrays(self._collective("Allreduce", mine.copy())))

    def Reduce(self, sendbuf, recvbuf, op=OPS["SUM"], root=0):
        is_root = self.rank == self._checked(root)
        mine = elements(recvbuf if sendbuf is IN_PLACE else sendbuf)
        values = self._collective("Reduce", mine.copy())
        if is_root:
            chunk("Reduce", elements(recvbuf), op.of_arrays(values))

    def Allgather(self, sendbuf, recvbuf):
        parts = Parts(recvbuf, self.size)
        mine = parts[self.rank] if sendbuf is IN_PLACE else elements(sendbuf)
        parts.fill("Allgather", self._collective("Allgather", mine.copy()))

    Allgatherv = Allgather

    def Gather(self, sendbuf, recvbuf, root=0):
        is_root = self.rank == self._checked(root)
        parts = Parts(recvbuf, self.size) if is_root else None
        mine = parts[self.rank] if sendbuf is IN_PLACE else elements(sendbuf)
        values = self._collective("Gather", mine.copy())
        if is_root:
            parts.fill("Gather", values)

    Gatherv = Gather

    def Scatter(self, sendbuf, recvbuf, root=0):
        is_root = self.rank == self._checked(root)
        parts = [p.copy() for p in Parts(sendbuf, self.size)] if is_root else None
        data = self._collective("Scatter", parts)[root][self.rank]
        if recvbuf is not IN_PLACE:
            chunk("Scatter", elements(recvbuf), data)

    Scatterv = Scatter

    def Alltoall(self, sendbuf, recvbuf):
        out = Parts(recvbuf, self.size)
        parts = out if sendbuf is IN_PLACE else Parts(sendbuf, self.size)
        values = self._collective("Alltoall", [p.copy() for p in parts])
        out.fill("Alltoall", [v[self.rank] for v in values])

    Alltoallv = Alltoall

    # -- other communicators
    def Split(self, color=0, key=0):
        process = current("Split")
        number = process.splits[self._key]  # of this communicator, so far
        process.splits[self._key] += 1
        values = self._collective("Split", (color, key))
        if color == UNDEFINED:
            return COMM_NULL
        mine = sorted((theirs, rank) for rank, (c, theirs) in enumerate(values) if c == color)
        members = [self._members()[rank] for _, rank in mine]
        return Comm((self._key, number, color), members)

    def Split_type(self, split_type, key=0, info=None):
        if split_type == UNDEFINED:
            return self.Split(UNDEFINED, key)
        if split_type != COMM_TYPE_SHARED:
            raise NotImplementedError(
                f"Split_type(): split_type is {split_type}; on the emulator it must be COMM_TYPE_SHARED"
            )
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


class _Options(types.SimpleNamespace):
    """``mpi4py.rc``, which changes nothing here."""

    def __init__(self):
        super().__init__(initialize=True, finalize=True, threads=True, thread_level="multiple")

    def __call__(self, **options):
        self.__dict__.update(options)


def modules():
    """-> the stand-ins, by name"""
    members = {
        **OPS,
        **TYPES,
        **_THREADS,
        **named(Comm, Op, Request, Status),
        "ANY_SOURCE": ANY_SOURCE,
        "ANY_TAG": ANY_TAG,
        "COMM_NULL": COMM_NULL,
        "COMM_SELF": COMM_SELF,
        "COMM_TYPE_SHARED": COMM_TYPE_SHARED,
        "COMM_WORLD": COMM_WORLD,
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
        "Is_finalized": lambda: _finalized(),
        "Is_initialized": lambda: True,
        "PROC_NULL": PROC_NULL,
        "Query_thread": lambda: 3,
        "UNDEFINED": UNDEFINED,
        "Wtick": lambda: time.get_clock_info("perf_counter").resolution,
        "Wtime": time.perf_counter,
    }
    return {
        "mpi4py": StandIn("mpi4py", {"rc": _Options(), "__version__": "4.0 (emulated)"}),
        "mpi4py.MPI": StandIn("mpi4py.MPI", members),
    }
