"""Whether spin loops turn in vain: all threads are where they were some turns ago, with the same variables.

Then, as long as memory does not change, they will come there again and again. A loop that counts its tries
may end by itself, so that a number of polls alone says little.
"""

import numpy as np

from .device_arrays import address
from .report import is_kernel_code

FIRST_CHECK = 2_000  # polls in a row, without a change anywhere
LAST_CHECK = 1_000_000  # after so many, loops that count count as stuck too
LONGEST = 32  # turns in which a loop comes back to where it was


class Spinning:
    """The polls of spin loops since something else happened."""

    def __init__(self):
        self.polls, self.since = 0, -1  # and the scheduler's progress at the first
        self._begin(0)

    def _begin(self, n_ready):
        self.check_at = FIRST_CHECK + 20 * n_ready
        self.turn, self.saved_turn, self.saved = 0, 0, None
        self.period = 0  # turns after which everything is as it was, once that is known

    def poll(self, progress, n_ready):
        """A spin loop gives the others a turn."""
        if self.since != progress:
            self.polls, self.since = 0, progress
            self._begin(n_ready)
        self.polls += 1

    def all_have_polled(self, progress, ready):
        """Whether every thread of `ready` has looked twice since something else happened."""
        return self.since == progress and self.polls > 2 * len(ready)

    def stuck(self, progress, ready):
        """Whether only spin loops are left in `ready`, which will find nothing new. All of them look at
        everything again between two calls that say so."""
        if self.polls < self.check_at or self.since != progress:
            return False
        if not self.period:
            self._compare(ready)
        self.check_at = self.polls + len(ready) * (self.period or 1)
        return self.period > 0

    def _compare(self, ready):
        """Find the period: compare with a saved state for some turns; save another after twice as many."""
        turn, self.turn = self.turn, self.turn + 1
        if self.polls > LAST_CHECK:
            self.period = LONGEST
        elif turn >= 2 * self.saved_turn:
            self.saved_turn, self.saved = turn, [state_of(t.gr_frame) for t in ready]
        elif turn - self.saved_turn <= LONGEST and [state_of(t.gr_frame) for t in ready] == self.saved:
            self.period = turn - self.saved_turn


def state_of(frame, with_local_arrays=False):
    """Where a thread is, and the variables of its kernel and device functions."""
    state = []
    while frame is not None:
        state.append(frame.f_lasti)
        if is_kernel_code(frame):
            state += [_value(v, with_local_arrays) for v in frame.f_locals.values()]
        frame = frame.f_back
    return state


def _value(variable, with_local_arrays):
    if isinstance(variable, np.ndarray):
        is_local = with_local_arrays and not hasattr(variable, "region")
        return address(variable), variable.shape, variable.tobytes() if is_local else None
    if isinstance(variable, tuple):
        return tuple(_value(v, with_local_arrays) for v in variable)
    return variable if isinstance(variable, (int, float, np.generic)) else id(variable)
