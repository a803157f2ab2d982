"""``shmemkit.emu.run(main, n_ranks)``: an SPMD main function on several ranks in this process, for tests and
notebooks."""

from __future__ import annotations

import gc
import os
import shlex
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from greenlet import GreenletExit, getcurrent, greenlet

from shmemkit.comm.communicator import Communicator
from shmemkit.support.agreement import of_group, ranks_text
from shmemkit.support.call_site import Call
from shmemkit.support.host_program import HostProgram
from shmemkit.support.progress import showing
from shmemkit.support.renamed import renamed
from shmemkit.support.settings import integer, shown, switch
from shmemkit.support.trace_file import timeline_file

from ..typing import Delivery
from .errors import DeadlockError, EmulatorError, add_text
from .heap import heap_size as default_heap_size
from .heap import private_memory, whole_pages
from .machine import Machine
from .network import checked_delivery
from .rendezvous import Rendezvous
from .schedules import Choice, Seeded
from .timeline import recorded

T = TypeVar("T")
MAX_PES = 1024  # host programs, each with a stack


class Host(greenlet, HostProgram):
    """The host program of one rank."""

    def __init__(self, program, pe):
        super().__init__(parent=program.machine.scheduler.hub)
        self.program, self.pe = program, pe
        self.thread_id, self.block = pe, None  # as Rendezvous wants them
        self.why, self.at_turn = None, False
        self.can_go_on = self.goes_on = False
        self.n_ranks = program.machine.n_ranks
        self.grad = program.grad
        self.result: Any = None

    @property
    def worker(self):
        """What runs it, as of a thread: itself, once it has begun."""
        return self if self else None

    def switch(self, *args):
        if self.process is not None:
            self.process.enter()
        self.program.enter(self)
        return super().switch(*args)

    def run(self):
        program = self.program
        try:
            self.result = program.main(*program.args)
            if self.world is not None:
                self.world.ends_with_main = True
                self.world.finalize()
        except Exception as error:
            if not isinstance(error, EmulatorError):
                add_text(error, f"raised on rank {self.pe} of {program.machine.n_ranks}")
            scheduler = program.machine.scheduler
            scheduler.failure = scheduler.failure or error
        program.machine.ended.add(self.pe)
        program.running -= 1


class Program:
    """All ranks' host programs, and how they wait."""

    def __init__(self, main, args, machine):
        self.main, self.args, self.machine = main, args, machine
        torch = sys.modules.get("torch")
        machine.host_waiter = self.wait
        self.inside, self.grad = self, torch is None or torch.is_grad_enabled()
        self.hosts = [Host(self, pe) for pe in machine.local_pes]
        self.running = len(self.hosts)
        self.rendezvous = self.meeting_of(len(self.hosts))

    def meeting_of(self, n):
        """-> the Rendezvous of `n` of them"""
        return Rendezvous(self.machine.scheduler, lambda: n, "a host collective")

    def enter(self, who):
        """`who`, a Host or this Program at the end, goes on, with PyTorch's grad mode as it left it: that is
        a thread's, and all run in one."""
        if who is not self.inside:
            torch = sys.modules.get("torch")
            if torch is not None:
                self.inside.grad = torch.is_grad_enabled()
                torch.set_grad_enabled(who.grad)
            self.inside = who

    def wait(self, pe, is_done, key, can_go_on):
        host: Any = getcurrent()
        host.can_go_on, host.goes_on = can_go_on, False
        self.machine.scheduler.wait_for(
            host, key, lambda: is_done() or host.goes_on, self.machine.host_waits[pe]
        )
        host.can_go_on = False

    def run(self):
        scheduler, races = self.machine.scheduler, self.machine.races
        scheduler.ready.extend(self.hosts)
        thresholds = gc.get_threshold()
        gc.set_threshold(200_000, *thresholds[1:])  # threads, and the record of all accesses, are no garbage
        try:
            with showing(self.machine.under_way):
                while not scheduler.run_until(lambda: not self.running):
                    can_go_on = [h for h in self.hosts if h.can_go_on]
                    if not can_go_on:
                        raise self.machine.deadlock()
                    for host in can_go_on:
                        host.goes_on = True
                self.machine.network.settle()
                if races is not None:
                    races.judge()
        except Exception as error:
            self.machine.blame(error)
            raise
        finally:
            scheduler.kill()
            for host in self.hosts:
                if host:
                    host.throw(GreenletExit)
                if host.world is not None:
                    host.world.abandon()
            self.enter(self)
            if races is not None:
                races.forget()
            gc.set_threshold(*thresholds)  # now, for there is little left to look at
        return [h.result for h in self.hosts]


class LocalComm(Communicator):
    """That of host programs of one process. Rank k is PE ``pes[k]``; all of them join `rendezvous`."""

    def __init__(self, host, pes=None, rendezvous=None):
        self._host = host
        self._pes = range(host.program.machine.n_ranks) if pes is None else pes
        self._rendezvous = rendezvous or host.program.rendezvous
        self.rank, self.size = self._pes.index(host.pe), len(self._pes)

    def allgather(self, value, call="allgather"):
        machine = self._host.program.machine
        call, rendezvous = Call(call), self._rendezvous

        def why():
            late = sorted(set(self._pes) - {pe for pe, _ in rendezvous.round.values})
            return f"{ranks_text(late)} to call {call}, too{of_group(self._pes, machine.n_ranks)}"

        with machine.host_waits_for(self._host.pe, why):
            values = rendezvous.join(self._host, value, self._met)
        return [values[pe] for pe in self._pes]

    def _met(self, values):
        races = self._host.program.machine.races
        if races is not None:
            races.hosts_met(self._pes)
        return values

    def Split(self, color, key=0):
        """-> the LocalComm of the ranks with this `color`, in the order of `key` and rank."""
        program = self._host.program

        def split(values):
            self._met(values)
            comms, colors = {}, {}
            for pe in self._pes:
                colors.setdefault(values[pe][0], []).append(pe)
            for members in colors.values():
                members.sort(key=lambda pe: values[pe][1])  # ranks in order where the keys are equal
                comms.update(dict.fromkeys(members, (members, program.meeting_of(len(members)))))
            return comms

        with program.machine.host_waits_for(self._host.pe, lambda: "others to call Split(), too"):
            comms = self._rendezvous.join(self._host, (color, key), split)
        return LocalComm(self._host, *comms[self._host.pe])

    def exchange(self, value, call):
        return self.allgather(value, call)


def current_host():
    """The host program that runs, or None outside of ``run``."""
    host = getcurrent()
    return host if isinstance(host, Host) else None


@renamed(n_pes="n_ranks")
def run(
    main: Callable[..., T],
    n_ranks: int,
    args: Iterable = (),
    local_size: int | None = None,
    heap_size: int | None = None,
    *,
    races: bool | None = None,
    delivery: Delivery | str | None = None,
    seed: int | None = None,
    choice: Choice | None = None,
    gpu: str | None = None,
    timeline: str | os.PathLike | bool | None = None,
) -> list[T]:
    """Run ``main(*args)`` on `n_ranks` ranks in this process. -> the list of what each returned.

    In `main`, ``shmemkit.init()`` gives that rank's World.

    local_size   ranks of a logical node. Default: all are in one node
    heap_size    bytes of the symmetric heap of each rank. Default: NVSHMEM_SYMMETRIC_SIZE or 1 GiB; pages
                 that nobody touches cost nothing
    races        True: find accesses that nothing orders. Default: whether SHMEMKIT_RACES is on
    delivery     when messages arrive: "eager" (when they are issued), "ordered" (as late as possible, in
                 order from rank to rank), "unordered" (as late as possible, overtaking each other), or
                 "node 1 late" (likewise, but only those between node 1 and others). Default:
                 SHMEMKIT_DELIVERY or "eager"
    seed         an integer: the random schedule of that number. Default: SHMEMKIT_SEED, or None: first come,
                 first served. The same arguments give the same run
    gpu          the GPU that decides which kernels and how many blocks run, and how many at once: "H200",
                 "A100", "H200,sms=8", ... Default: SHMEMKIT_EMULATED_GPU, or "H200"
    timeline     a file to write the timeline to, also if the program fails (docs/timeline.md). Default:
                 SHMEMKIT_TIMELINE, or none; False: none
    choice       instead of `seed`: that of an ``Exploration``, or a schedule of your own (``schedules.py``)

    It raises what `main` raises on any rank, ``EmulatorError`` when a kernel fails, and ``DeadlockError``
    when no rank can go on. ``RaceError`` lists races when nothing else has failed. Other errors have the
    races that were found before in their report and in their attribute `races`.
    """
    check_arguments("run()", main, n_ranks, local_size, heap_size)
    races, delivery, seed = schedule_of(races, delivery, seed)
    timeline = timeline_file("run(): timeline", timeline)
    size = whole_pages(default_heap_size() if heap_size is None else heap_size)
    local_size = n_ranks if local_size is None else local_size
    if isinstance(args, (str, bytes)) or not hasattr(args, "__iter__"):
        raise TypeError(f"run(): args is {shown(args)}; it must be a tuple of main's arguments, as (x,)")
    if choice is not None:
        if not hasattr(choice, "needs_races"):
            raise TypeError(
                f"run(): choice is {shown(choice)}; it must be an Exploration's `choice` or a schedule "
                "of your own"
            )
        seed, races = None, races or choice.needs_races
        again = f"the same again: delivery={delivery!r}, choice=exploration.choice"
    else:
        choice = None if seed is None else Seeded(seed)
        again = repeat_with(races, delivery, seed)
    memory = private_memory(n_ranks * size)
    machine = Machine(
        memory, n_ranks, range(n_ranks), local_size, delivery=delivery, choice=choice, races=races, gpu=gpu
    )
    try:
        with recorded(machine, timeline):
            return Program(main, args, machine).run()
    except Exception as error:
        if isinstance(error, EmulatorError):
            error.delivery, error.seed = delivery, seed
        if races or isinstance(error, DeadlockError) or (delivery, seed) != ("eager", None):
            add_text(error, again)
        raise


def check_arguments(who, main, n_ranks, local_size, heap_size):
    """Of ``run`` and ``explore``."""
    if current_host() is not None:
        raise RuntimeError(
            "shmemkit.emu.run() and explore() cannot be called by a program that they run. Call them one "
            "after the other"
        )
    if not callable(main):
        raise TypeError(
            f"{who}: main is {shown(main)}; it must be a function. Pass the function itself, and its "
            "arguments as args=(...)"
        )
    integer(who, "n_ranks", n_ranks, 1, MAX_PES)
    if heap_size is not None:
        integer(who, "heap_size", heap_size, 1)
    if local_size is not None and n_ranks % integer(who, "local_size", local_size, 1):
        raise ValueError(f"{who}: local_size is {local_size}; it must be a divisor of n_ranks ({n_ranks})")


def schedule_of(races=None, delivery=None, seed=None) -> tuple[bool, str, int | None]:
    """-> (races, delivery, seed): as given, or as the environment says, or the defaults; checked."""
    if races is None:
        races = switch("SHMEMKIT_RACES", False)
    elif races not in (True, False):
        raise TypeError(f"races is {shown(races)}; it must be True, False or None")
    source = "delivery"
    if delivery is None:
        source, delivery = "SHMEMKIT_DELIVERY", os.environ.get("SHMEMKIT_DELIVERY") or "eager"
    checked_delivery(source, delivery)
    if seed is None:
        text = os.environ.get("SHMEMKIT_SEED", "").strip()
        try:
            seed = int(text) if text else None
        except ValueError:
            raise ValueError(f"SHMEMKIT_SEED is {text!r}; it must be an integer") from None
    elif isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise TypeError(f"seed is {shown(seed)}; it must be an integer or None")
    return bool(races), delivery, seed


def repeat_with(races, delivery, seed):
    """The line of a report that says how to see it again."""
    setting = f"SHMEMKIT_DELIVERY={shlex.quote(delivery)}"
    if seed is not None:
        setting += f" SHMEMKIT_SEED={seed}"
    if races:
        setting += " SHMEMKIT_RACES=1"
    return f"the same again: delivery={delivery!r}, seed={seed}{', races=True' if races else ''} ({setting})"
