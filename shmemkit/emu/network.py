"""Messages between PEs: put, get, signals and atomics that nobody waits for.

delivery "eager"      every message is delivered when it is issued
         "ordered"    messages are held back; those from one PE to another arrive in order
         "unordered"  messages are held back and overtake each other, as far as NVSHMEM's memory model allows:
                      only a fence orders those from one PE to another; the latest one comes first
         "node K late"  as "unordered", but only of messages between node K and other nodes; all others are
                      delivered when they are issued

A message that is held back arrives when nothing else can happen, when its PE is quiet, or when the schedule
says so. A non-blocking put reads its source only then. The data of put_signal and its signal arrive together;
words that somebody polls do not, if "unordered": every third one goes into one message. Each of these is an
order that NVSHMEM allows, so a correct program gives its result in all of them.
"""

import re
from collections.abc import Iterable
from typing import get_args

import numpy as np

from shmemkit.support.settings import shown

from ..typing import Delivery
from .device_arrays import address
from .shadow_arrays import untracked

DELIVERIES = get_args(Delivery)
LATE = re.compile(r"node (\d+) late")


def checked_delivery(who, delivery):
    """-> `delivery`; TypeError or ValueError unless it is one."""
    if isinstance(delivery, str) and (delivery in DELIVERIES or LATE.fullmatch(delivery)):
        return delivery
    kind = ValueError if isinstance(delivery, str) else TypeError
    names = ", ".join(map(repr, DELIVERIES))
    raise kind(f"{who} is {shown(delivery)}; it must be {names}, or as 'node 1 late'")


class Message:
    """One that is under way from PE `source` to PE `target`; ``arrive(None)`` delivers it."""

    __slots__ = ("source", "target", "arrive", "after", "fenced", "patient", "done")

    def __init__(self, source, target, arrive):
        self.source, self.target, self.arrive = source, target, arrive
        self.after: Iterable[Message] = ()  # messages that must have arrived before
        self.fenced = self.done = False
        self.patient = True  # it arrives only when nothing else can happen


class Network:
    def __init__(self, machine, delivery="eager"):
        self.machine, late = machine, LATE.fullmatch(delivery)
        self.delivery, self.late = ("unordered", int(late[1])) if late else (delivery, None)
        self.under_way = []  # in the order in which they were issued

    def check_nodes(self, n_nodes):
        """ValueError unless there is a node that is late."""
        if self.late is not None and self.late >= n_nodes:
            raise ValueError(
                f"delivery is 'node {self.late} late', but the nodes are 0 to {n_nodes - 1}; a smaller "
                "local_size makes more"
            )

    # -- what threads ask for
    def put(self, thread, dst, src, pe, nbi, signal, value, op, word):
        """Copy min(dst.size, src.size) elements of `src` to `dst` on `pe`, then apply the signal there, if
        there is one. With `word` each element is loaded and stored in one piece, and somebody may wait for
        any of them."""
        machine = self.machine
        target = machine.peer(thread.block, dst, pe)
        there, here = matching(target, src, "put")
        if word and not there.size:
            raise IndexError("p(): dst has no elements; it must have one or more")
        flag = None if signal is None else machine.peer(thread.block, signal, pe)
        operation = machine.races and machine.races.put(thread, target, src, pe, nbi, flag, op, word)
        by = None if flag is None else machine.writers.by(thread)
        if self.delivery != "eager" and not nbi:
            here = here.copy()  # a blocking put has read its source when it returns

        def arrive(thread):
            if there.size == 1:  # it may be a flag that others change by atomics
                with machine.lock:
                    np.copyto(there, here)
            else:
                np.copyto(there, here)
            machine.written(address(there))
            if flag is not None:
                self._apply(thread, flag, value, op, operation, by)

        if not word:
            self._send(thread, int(pe), arrive, here.nbytes)
            return
        messages = min(3, there.size) if self.delivery == "unordered" else 1
        for i in range(messages):
            self._send_words(thread, int(pe), there[i::messages], here[i::messages], nbi, operation)

    def _send_words(self, thread, pe, there, here, nbi, operation):
        """Store the elements of `here`, which with `nbi` are read then, to `there`, each in one piece."""
        machine = self.machine
        scheduler, keys = machine.scheduler, _addresses(there)
        sources = _addresses(here) if nbi else ()

        def arrive(thread):
            for key in sources:
                scheduler.effect(thread, "read", key)
            for key in keys:
                scheduler.effect(thread, "write", key)
            size = there.itemsize
            histories = [machine.races.history(key, size) for key in keys] if operation else ()
            with machine.lock:
                np.copyto(there, here)
            if operation:
                machine.races.words_arrived(operation, histories, nbi)
            for key in keys:
                machine.written(key)

        self._send(thread, pe, arrive, here.nbytes)

    def get(self, thread, dst, src, pe, nbi, word):
        """Copy min(dst.size, src.size) elements of `src` on `pe` to `dst`. A `word` is read in one piece."""
        source = self.machine.peer(thread.block, src, pe)
        here, there = matching(dst, source, "get")
        if word and not there.size:
            raise IndexError("g(): src has no elements; it must have one or more")
        if word:
            self.machine.scheduler.effect(thread, "read", address(there))
        if there.size and thread.look(address(there), there.item(0)) and word:  # it was a poll
            thread.turn("read", address(there))
        if self.machine.races:
            self.machine.races.get(thread, dst, source, nbi, word)

        if nbi:
            self._send(thread, int(pe), lambda _: np.copyto(here, there))
        else:
            np.copyto(here, there)

    def signal(self, thread, signal, value, op, pe):
        """Set signal[0] on `pe` to `value`, or add `value` to it."""
        flag = self.machine.peer(thread.block, signal, pe)
        operation = self.machine.races and self.machine.races.signal(thread, flag, pe, op)
        by = self.machine.writers.by(thread)
        self._send(thread, int(pe), lambda thread: self._apply(thread, flag, value, op, operation, by))

    def atomic(self, thread, array, pe, function):
        """``array[0] = function(array[0])`` on `pe`, when the message arrives."""
        there = self.machine.peer(thread.block, array, pe)
        operation = self.machine.races and self.machine.races.signal(thread, there, pe, None)
        by = self.machine.writers.by(thread)
        self._send(
            thread, int(pe), lambda thread: self._update(thread, "write", there, function, operation, by=by)
        )

    def fence(self, thread):
        """Messages so far reach each PE before later ones."""
        if self.delivery == "unordered":
            self.machine.scheduler.effect(thread, "write", ("fence", thread.pe))
        for message in self.under_way:
            if message.source == thread.pe:
                message.fenced = True
        if self.machine.races:
            self.machine.races.fence(thread)

    def quiet(self, thread):
        """Wait until the messages of the thread's PE have arrived."""
        if self.delivery != "eager":
            thread.wait_until(
                ("under way", thread.pe),
                lambda: all(m.source != thread.pe for m in self.under_way),
                lambda: "its messages to arrive",
            )
        if self.machine.races:
            self.machine.races.quiet(thread)

    # -- delivery
    def _is_held_back(self, source, target):
        if self.late is None:
            return self.delivery != "eager"
        nodes = {pe // self.machine.local_size for pe in (source, target)}
        return self.late in nodes and len(nodes) == 2

    def _send(self, thread, target, arrive, n_bytes=0):
        if self.machine.timeline is not None:
            arrive = self.machine.timeline.carried(thread, arrive, n_bytes)
        if not self._is_held_back(thread.pe, target):
            arrive(thread)
            return
        scheduler = self.machine.scheduler
        scheduler.effect(thread, "add", ("under way", thread.pe))
        if self.delivery == "ordered":
            scheduler.effect(thread, "write", ("way", thread.pe, target))
        else:
            scheduler.effect(thread, "add", ("fence", thread.pe))
        message = Message(thread.pe, target, arrive)
        same_way = [m for m in self.under_way if m.source == message.source and m.target == target]
        message.after = [m for m in same_way if m.fenced or self.delivery == "ordered"]
        if scheduler.choice is not None:
            scheduler.choice.sent(message, thread)
        self.under_way.append(message)
        scheduler.progress += 1

    def deliverable(self):
        """The messages that may arrive next."""
        return [m for m in self.under_way if all(earlier.done for earlier in m.after)]

    def deliver_one(self):
        """Nothing else can happen."""
        choice, messages = self.machine.scheduler.choice, self.deliverable()
        self.deliver(messages[-1] if choice is None else choice.late(messages))

    def settle(self):
        """All messages arrive, one after the other. Nothing else can happen."""
        while self.under_way:
            self.deliver_one()

    def deliver(self, message):
        scheduler, key = self.machine.scheduler, ("under way", message.source)
        self.under_way.remove(message)
        message.done, message.after = True, ()
        scheduler.progress += 1
        scheduler.effect(None, "arrive", key)
        message.arrive(None)
        if self.machine.timeline is not None:
            self.machine.timeline.completed(key)
        scheduler.wake(key)

    # -- arrival
    def _apply(self, thread, flag, value, op, operation, by):
        if op == "set":
            self._update(thread, "write", flag, lambda old: value, operation, op, by)
        elif op == "add":
            self._update(thread, "add", flag, lambda old: old + value, operation, by=by)
        else:
            raise ValueError(f"the signal operation is {op!r}; it must be 'set' or 'add'")

    def _update(self, thread, kind, there, function, operation, op="add", by=None):
        machine = self.machine
        machine.scheduler.effect(thread, kind, address(there))
        there = untracked(there)
        there = there[(0,) * (there.ndim - 1)] if there.ndim > 1 else there
        history = machine.races.history(address(there), there.itemsize) if operation else None
        with machine.lock:
            there[0] = function(there[0])
        if operation:
            machine.races.arrived(operation, history, op)
        if by is not None:
            machine.writers.note(address(there), by, there.item(0))
        machine.written(address(there))


def _addresses(array):
    """Those of the elements of a one-dimensional array."""
    first, step = address(array), array.strides[0]
    return range(first, first + array.size * step, step)


def matching(dst, src, name):
    """As many elements of both contiguous arrays as the smaller holds, as plain one-dimensional arrays."""
    if dst.dtype != src.dtype:
        raise TypeError(f"{name}(): dst is {dst.dtype}, src is {src.dtype}; they must have the same dtype")
    dst, src = flat(dst, name, "dst"), flat(src, name, "src")
    n = min(dst.size, src.size)
    return dst[:n], src[:n]


def copy(dst, src, name):
    """Copy elements of contiguous arrays, as many as the smaller holds."""
    np.copyto(*matching(dst, src, name))


def flat(array, name, label):
    """The elements of `array`, which must be contiguous, in one dimension."""
    if not array.flags.c_contiguous:
        raise TypeError(
            f"{name}(): {label} is a non-contiguous {array.ndim}-D array of {array.dtype}; it must be a "
            "contiguous array. Slice only the first axis, without a step, and pass contiguous arrays to the "
            "kernel"
        )
    return np.asarray(array).reshape(-1)
