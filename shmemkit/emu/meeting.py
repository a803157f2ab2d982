"""A place where threads meet: each brings a value, the last to arrive computes the result, all take it away."""


class Meeting:
    """Reusable rendezvous of the `expected()` live threads of a warp, a block or a grid."""

    def __init__(self, scheduler, expected, what):
        self.scheduler, self.expected, self.what = scheduler, expected, what
        self._begin()

    def _begin(self):
        self.values, self.parked, self.result, self.function = {}, [], [], None

    def join(self, thread, value, function):
        """Arrive with `value`; `function(values by thread id)` runs once. -> its result."""
        self.values[thread.thread_id, thread.block] = value
        self.function = function
        result = self.result
        if len(self.values) == self.expected():
            self._finish()
        else:
            self.parked.append(thread)
            thread.why = self._why
            self.scheduler.park()
            thread.why = None
        return result[0]

    def left(self):
        """A thread has ended: if only that one was missing, go on without it."""
        if self.parked and len(self.values) == self.expected():
            self._finish()

    def _finish(self):
        values, parked, result, function = self.values, self.parked, self.result, self.function
        self._begin()
        result.append(function({thread_id: value for (thread_id, _), value in values.items()}))
        self.scheduler.ready.extend(parked)

    def _why(self):
        return f"the other threads in {self.what} ({len(self.values)} of {self.expected()} have arrived)"
