"""A rendezvous of threads: each brings a value, the last to arrive computes the result, and all get it."""

from .workers import running

CARRIED_OUT = "the thread that carries out "  # the beginning of what the others of a round wait for


class _Round:
    """One use of a rendezvous."""

    __slots__ = ("values", "parked", "result", "function")

    def __init__(self):
        self.values, self.parked, self.result, self.function = {}, [], [], None


class Rendezvous:
    """Reusable rendezvous of the `expected()` live threads of a warp, a block or a grid."""

    def __init__(self, scheduler, expected, what):
        self.scheduler, self.expected, self.what = scheduler, expected, what
        self.round = _Round()

    def join(self, thread, value, function):
        """Arrive with `value`; ``function(values by thread id)`` runs once, in the last thread. -> its
        result."""
        now = self.round
        now.values[thread.thread_id, thread.block] = value
        now.function = function
        if len(now.values) == self.expected():
            self._finish(now)
            return now.result[0]
        while not now.result:
            now.parked.append(thread)
            thread.why = lambda: self._why(now)
            self.scheduler.park()
            thread.why = None
            if now is self.round and len(now.values) == self.expected():
                self._finish(now)
        return now.result[0]

    def left(self):
        """A thread has ended: if only that one was missing, one of those who wait finishes the round."""
        now = self.round
        if now.parked and len(now.values) == self.expected():
            self.scheduler.ready.append(now.parked.pop())

    def _finish(self, now):
        self.round = _Round()  # the function may wait, and others begin the next round meanwhile
        timeline, here = self.scheduler.timeline, []
        if timeline is not None:
            here = [*now.parked, running()]
            timeline.met(here)
        now.result.append(now.function({thread_id: value for (thread_id, _), value in now.values.items()}))
        if timeline is not None:
            timeline.met(here)
        self.scheduler.ready.extend(now.parked)

    def _why(self, now):
        if now is self.round:
            return f"the other threads in {self.what} ({len(now.values)} of {self.expected()} have arrived)"
        return f"{CARRIED_OUT}{self.what} for all of them"
