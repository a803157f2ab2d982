"""Who takes part in what the threads of a warp, a warpgroup or a block do together.

All of them make such a call, with the same arguments, and lanes of one warp make it at one position in the
code. A block's barrier takes whole warps: they may come to it at different positions, and warps that have
returned are left out. As soon as it is certain that somebody will not come, that is an error, which says
where they are.
"""

import sys
from collections import defaultdict
from typing import Any

import numpy as np

from .device_arrays import address
from .errors import EmulatorError
from .race_report import line_of
from .rendezvous import Rendezvous
from .report import kernel_frame, kernel_line, place, shown_line, threads_shown, who

WARPGROUP = 128


class Memory:
    """An array as an argument: views of the same bytes are the same."""

    __slots__ = ("at", "n_bytes")

    def __init__(self, array):
        self.at, self.n_bytes = address(array), array.nbytes

    def __eq__(self, other):
        return type(other) is Memory and self.at == other.at and self.n_bytes == other.n_bytes


def _identity(argument):
    if isinstance(argument, np.ndarray):
        return Memory(argument)
    local = getattr(argument, "local", None)  # of a multicast view
    return argument if local is None else Memory(local)


class Call:
    """One that threads `first` to `end` - 1 of a block make together; those before `next` and the `others`
    have, and `left` have not. With `meets` there is a barrier inside of it."""

    __slots__ = (
        *("name", "scope", "names", "arguments", "meets", "first", "end", "next", "others", "left"),
        *("n_arrays", "rest", "code", "at", "sites"),
    )

    def __init__(self, name, scope, names, arguments, meets, first, end, frame):
        self.name, self.scope, self.names, self.meets = name, scope, names, meets
        self.arguments = [_identity(a) for a in arguments]
        self.first, self.end, self.next, self.others, self.left = first, end, first, set(), end - first
        # Arrays that come first, before all others, which the C of tuples compares.
        n = sum(type(a) is Memory for a in self.arguments)
        leading = all(type(a) is Memory for a in self.arguments[:n])
        self.n_arrays, self.rest = (n, arguments[n:]) if leading else (None, ())
        self.code, self.at = frame.f_code, frame.f_lasti  # where the first one made it
        self.sites = {}  # warp -> where its first lane did, once some do elsewhere

    def takes(self, i):
        """Thread `i` makes it. -> whether all have"""
        if i == self.next:
            self.next += 1
        else:
            self.others.add(i)
        self.left -= 1
        return not self.left

    made = property(lambda self: self.others.union(range(self.first, self.next)))

    def lacks(self, i):
        return self.next <= i < self.end and i not in self.others

    def has(self, arguments):
        for mine, theirs in zip(self.arguments, arguments, strict=True):
            if mine is not theirs:
                theirs = _identity(theirs)
                if mine != theirs and (mine == mine or theirs == theirs):  # NaN is as good as NaN
                    return False
        return True

    def line(self, i):
        code, at = self.sites.get(i >> 5, (self.code, self.at))
        return shown_line(code.co_filename, line_of(code, at))


class Part(Rendezvous):
    """A rendezvous of the lanes `mask` of a warp, or of a warpgroup, which `first` begins. Those that have
    ended are not waited for. With `orders`, it is a barrier."""

    def __init__(self, block, first, mask, what, orders):
        live = block.warps
        if mask < 1 << 32:
            super().__init__(block.scheduler, lambda: (live[first >> 5] & mask).bit_count(), what)
        else:
            super().__init__(block.scheduler, mask.bit_count, what)
        self.block, self.first, self.mask, self.orders = block, first, mask, orders

    def takes(self, i):
        return i >= self.first and self.mask >> i - self.first & 1

    def threads(self):
        """Those that wait here."""
        return [thread_id for thread_id, _ in self.round.values]

    def join(self, thread, value, function):
        block = self.block
        # Mostly it follows the lane before, and nothing else is under way.
        if not self.round.values or block.open or block.waiting != [self] or not self.takes(thread.thread_id):
            block.comes_to_part(thread, self)
        return super().join(thread, value, function)

    def _finish(self, now):
        if self in self.block.waiting:
            self.block.waiting.remove(self)
        super()._finish(now)


class Participation:
    """What a block knows of it: a base of ``grid.Block``, which has the other attributes."""

    launch: Any
    machine: Any
    n_threads: int
    threads: list
    parked: Any
    alive: int
    warps: Any

    def __init__(self):
        self.open = []  # Calls that some have made, and others not yet
        self.only = None  # such a call, if it is the only one and nobody waits in a Part: see group_thread
        self.waiting = []  # Parts where threads wait
        self.barrier = None  # the last of this block that is no syncthreads: its name, Rendezvous, round
        self.kernel = self.launch.function.__code__
        # Where threads are in the current syncthreads: all at one position, if they were since it began,
        # (code, at) then, and nothing else is under way; or warp -> position.
        self.code, self.at, self.common, self.sites = None, 0, None, {}
        self.torn = 0  # warps of which some lanes have ended
        self.whole_warps = tuple(self.warps)

    # -- calls of a whole warp, warpgroup or block
    def enters(self, thread, scope, name, arguments, meets, frame):
        """`thread` makes the call at `frame`, or calls there what makes it for it."""
        frame = kernel_frame(frame) or frame
        i = thread.thread_id
        for call in self.open:
            if call.name == name and call.lacks(i):
                n = call.n_arrays
                if n is None or arguments[n:] != call.rest:
                    if call.has(arguments):
                        break
                elif i & 31 and i > 7 or call.has(arguments):  # arrays take long: those of some threads
                    break
        else:
            call = self._opened(thread, scope, name, arguments, meets, frame)
        code, at = frame.f_code, frame.f_lasti
        if call.sites or at != call.at or code is not call.code:
            self._is_elsewhere(thread, call, (code, at))
        if call.takes(i):
            self.open.remove(call)
        simple = len(self.open) == 1 and self.open[0] is call and call.n_arrays is not None
        self.only = call if simple and not (call.sites or self.waiting) else None
        if meets and (len(self.open) > 1 or self.waiting):
            self._leaves_nobody_waiting(thread, call)

    def _opened(self, thread, scope, name, arguments, meets, frame):
        i = thread.thread_id
        first, n = {"block": (0, self.n_threads), "warp": (i & ~31, thread.warp_size())}.get(
            scope, (i & ~(WARPGROUP - 1), WARPGROUP)
        )
        code = sys._getframe(3).f_code  # of the primitive
        names = code.co_varnames[: code.co_argcount]
        call = Call(name, scope, names, arguments, meets, first, min(first + n, self.n_threads), frame)
        for other in self.open:
            waits = other.meets and other.lacks(i)  # for this thread, which may come to it after this call
            if waits and (other.scope == scope or not all(map(other.lacks, range(call.first, call.end)))):
                call.takes(i)
                self.open.append(call)
                raise self._of_call(other, thread, f"{self._me(thread)} is in {name}() instead", other=call)
        members = self.threads[call.first : call.end]
        if self.alive < self.n_threads and any(t.dead for t in members):
            raise self._of_call(call, thread, "some of them have returned")
        there = set(self._at_barrier()[1])
        if any(t in there for t in members):
            raise self._of_call(call, thread, "some of them are at a barrier of the block")
        for part in self.waiting:
            if part.orders and scope == "warp" and part.first == call.first and part.takes(i):
                raise self._of_call(call, thread, f"some of them are in {part.what}")
        self.open.append(call)
        return call

    def _is_elsewhere(self, thread, call, site):
        """Threads of `call` make it at different positions: those of one warp must not."""
        if not call.sites:
            call.sites = {j >> 5: (call.code, call.at) for j in call.made}
        if call.sites.setdefault(thread.thread_id >> 5, site) != site:
            raise self._of_call(call, thread, "lanes of one warp make it at different places")

    def _leaves_nobody_waiting(self, thread, call):
        """`thread` does not go on until all have made `call`: whoever waits for it in another call, or in its
        warp, must not be among them."""
        i = thread.thread_id
        for other in self.open:
            if other is not call and other.lacks(i) and call.first <= other.first and other.end <= call.end:
                raise self._of_call(other, thread, f"{self._me(thread)} is in {call.name}() instead")
        for part in self.waiting:
            if part.takes(i) and any(call.lacks(j) for j in part.threads()):
                raise self._of_part(part, thread, f"{self._me(thread)} is in {call.name}() instead")

    # -- barriers
    def comes(self, thread, kind, frame, rendezvous=None):
        """`thread` comes to a barrier of the block (of `rendezvous`, if it is no syncthreads), at `frame`."""
        if self.parked and rendezvous is None and self.common is not None and not (self.waiting or self.torn):
            outer = frame
            for code, at in self.common:
                if frame.f_lasti != at or frame.f_code is not code:
                    break
                frame = frame.f_back
            else:
                return
            frame = outer
        i = thread.thread_id
        for call in self.open:
            if call.lacks(i):
                raise self._of_call(call, thread, f"{self._me(thread)} is in {kind}() instead")
        for part in self.waiting:
            if part.takes(i) and i not in part.threads():
                raise self._of_part(part, thread, f"{self._me(thread)} is in {kind}() instead")
        if self.torn and self.warps[i >> 5].bit_count() < thread.warp_size():
            raise self._of_barrier(thread, kind, "some lanes of the warp have returned")
        pending, threads = self._at_barrier()
        if threads and pending != kind:
            raise self._of_barrier(thread, pending, f"{self._me(thread)} is in {kind}() instead")
        site = _site(frame, self.kernel)
        if not threads:
            self.sites, self.common, self.code = {}, None, None
            if rendezvous is None and not (self.waiting or self.torn):
                self.common = site
                if len(site) == 1:
                    self.code, self.at = site[0]
        elif self.common is not None:  # nobody has kept positions so far
            self.sites = {t.thread_id >> 5: self.common for t in threads}
            self.code = self.common = None
        if self.common is None and self.sites.setdefault(i >> 5, site) != site:
            raise self._of_barrier(thread, kind, "lanes of one warp are at different places")
        if rendezvous is not None:
            self.barrier = kind, rendezvous, rendezvous.round

    def check_calls(self):
        """All threads have come to a barrier: there is no call that some have made, and others not."""
        error = self.missed_call(self.threads)
        if error is not None:
            raise error

    def missed_call(self, threads=None):
        """-> EmulatorError if `threads`, who are at a barrier, have not made a call which others have"""
        for call in self.open:
            for t in self._at_barrier()[1] if threads is None else threads:
                if call.lacks(t.thread_id):
                    return self._of_call(call, t, f"{self._me(t)} has come to a barrier without it")
        return None

    def _at_barrier(self):
        """-> name of the block's barrier at which threads wait, and these"""
        if self.parked:
            return "syncthreads", self.parked
        if self.barrier is not None:
            kind, rendezvous, now = self.barrier
            if rendezvous.round is now:
                return kind, [b.threads[i] for i, b in now.values if b is self]
        return None, ()

    def comes_to_part(self, thread, part):
        i = thread.thread_id
        if not part.takes(i):
            raise self._of_part(part, thread, f"{self._me(thread)} is not among these, and calls it")
        for call in self.open:
            if call.lacks(i):
                of_warp = part.orders and part.first <= call.first and part.mask >> call.end - part.first - 1
                if of_warp or call.meets and any(part.takes(j) for j in call.made):
                    raise self._of_call(call, thread, f"{self._me(thread)} is in {part.what} instead")
        for other in self.waiting:
            if other is not part and other.takes(i) and any(part.takes(j) for j in other.threads()):
                raise self._of_part(other, thread, f"{self._me(thread)} is in {part.what} instead")
        if not part.round.values:
            kind, threads = self._at_barrier()
            if any(part.takes(t.thread_id) for t in threads):
                raise self._of_barrier(thread, kind, f"{self._me(thread)} is in {part.what} instead")
            self.waiting.append(part)
            self.only = None
            self.code = None

    def loses(self, thread):
        """`thread` has ended. -> EmulatorError if others need it, or None"""
        i = thread.thread_id
        warp = i >> 5
        live = self.warps[warp]
        self.warps[warp] = left = live & ~(1 << (i & 31))
        if live == self.whole_warps[warp]:
            self.torn += 1
        if not left:
            self.torn -= 1
        self.code = None
        if not (self.open or self.parked or self.barrier):
            return None
        for call in self.open:
            if call.lacks(i):
                return self._of_call(call, thread, f"{self._me(thread)} has returned without it")
        kind, threads = self._at_barrier()
        if any(t.thread_id >> 5 == warp for t in threads):
            return self._of_barrier(thread, kind, "some lanes of the warp have returned")
        return None

    # -- reports
    def _me(self, thread):
        return threads_shown([thread])

    def _of_call(self, call, thread, why, other=None):
        if other is not None and other.name == call.name:
            why = "they differ"
        head = f"{call.name}(): all threads of the {call.scope} call it, with the same arguments; {why}"
        return self._refusal(head, thread, call.first, call.end, lambda t: self._in_call(call, t))

    def _in_call(self, call, thread):
        i = thread.thread_id
        if i in call.made:
            return f"called {call.name}()", call.line(i)
        for other in self.open:
            if other.name == call.name and i in other.made:
                given = [
                    f"{name}={self._shown(thread, b)}, not {self._shown(thread, a)}"
                    for name, a, b in zip(call.names, call.arguments, other.arguments, strict=False)
                    if not a == b
                ]
                return f"called it with {', '.join(given)}", other.line(i)
        return None

    def _shown(self, thread, argument):
        if type(argument) is not Memory:
            return repr(argument)
        return f"{argument.n_bytes} bytes from {place(self.machine, thread, argument.at)}"

    def _of_part(self, part, thread, why):
        mask = "" if part.mask >= 1 << 32 else f" with the mask {part.mask:#x}"
        head = f"{part.what}{mask}: all lanes that it names come to it; {why}"
        end = min(part.first + part.mask.bit_length(), self.n_threads)
        return self._refusal(head, thread, part.first, max(end, thread.thread_id + 1), lambda t: None)

    def _of_barrier(self, thread, kind, why):
        first = thread.thread_id & ~31
        head = f"{kind}(): all lanes of a warp come to it, at one place; {why}"
        first, end = (first, first + 32) if kind else (0, self.n_threads)
        return self._refusal(head, thread, first, min(end, self.n_threads), lambda t: None)

    def _refusal(self, head, current, first, end, known):
        """EmulatorError: `head`, and where each of the threads `first` to `end` - 1 is."""
        groups = defaultdict(list)
        _, at_barrier = self._at_barrier()
        for t in self.threads[first:end]:
            groups[known(t) or self._state(t, current, at_barrier)].append(t)
        lines = [head]
        for (what, line), threads in groups.items():
            lines.append(f"  {who(threads[0], alone=False)} {threads_shown(threads)}: {what}")
            if line:
                lines.append(f"      {line}")
        return EmulatorError("\n".join(lines))

    def _state(self, thread, current, at_barrier):
        if thread is current and (line := kernel_line(sys._getframe())) is not None:
            return "is at", line
        if thread.dead or thread is current:
            return "returned", None
        if thread.worker is None:
            return "has not started yet", None
        line = kernel_line(thread.gr_frame)
        if thread in at_barrier:
            return "waited in a barrier of the block", line
        return (f"waited for {thread.why()}" if thread.why else "still runs"), line


def _site(frame, kernel):
    """The position of a call: of its line, and of those that led there, to the kernel's own."""
    site = ((frame.f_code, frame.f_lasti),)
    while frame.f_code is not kernel and frame.f_back is not None:
        frame = frame.f_back
        site += ((frame.f_code, frame.f_lasti),)
    return site
