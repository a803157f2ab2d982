"""The scheduler: which emulated thread runs next.

Every CUDA thread runs in a greenlet (``workers.py``), and so does each PE's host program when several PEs
share a process. A thread runs until it waits: for a value in memory (`wait_for`), for the other threads of
its block or warp (`park`), or for a turn in a spin loop (`spin`). Then the next runnable thread goes on,
first come, first served; the same program gives the same schedule. A `choice` (``schedules.py``) makes other
schedules: it picks who goes on, threads give it a chance before everything that others may see (`turn`),
messages under way are delivered when it says so, and spin loops rest until something that they look at is
written.

When no thread can run, or only spin loops can, a message that is under way is delivered. When there is none,
the waits are polled once more (memory may have been written by an ordinary store, or by another process),
then `idle` is asked: it says whether somebody outside of this process may still change something. If not, the
machine is stuck, and whoever started it decides whether that is a deadlock.
"""

import operator
from collections import defaultdict, deque
from typing import Any

from greenlet import getcurrent

from .spin_loops import Spinning

COMPARE = {name: getattr(operator, name) for name in "eq ne gt ge lt le".split()}


class Scheduler:
    def __init__(self, choice=None):
        self.choice: Any = choice  # None: first come, first served
        self.network: Any = None  # has `under_way`, the messages that are not delivered yet, and `deliver`
        self.hub = getcurrent()  # the greenlet that runs the loop; threads that end return to it
        self.ready = deque()
        self.waiters = defaultdict(list)  # address -> [(thread, is_satisfied)]
        self.launches = {}  # that run (an ordered set)
        self.progress = 0  # grows with everything that happens but polling
        self.spinning = Spinning()
        self.writes = {}  # with a choice: address -> how often a word there was written
        self.resting = []  # with a choice: (spin loop, the addresses that it looks at)
        self.vain = None  # the progress at which nobody but they could do anything: they do not rest then
        self.idle = None  # () -> True when somebody outside of this process may still act
        self.failure = None  # the first exception of a kernel thread
        self.timeline: Any = None  # the machine's

    # -- for threads
    def park(self):
        """Leave the current greenlet; it goes on when somebody puts it back into `ready`."""
        self.progress += 1
        ready = self.ready
        if ready and self.choice is None:
            following = ready[0].worker
            if following is not None:  # it has begun: switch to it directly, without the loop
                ready.popleft()
                return following.switch()
        self.hub.switch()

    def wait_for(self, thread, key, is_satisfied, why):
        """Park `thread` until `is_satisfied()`; checked when `key` (an address) is written, and when nothing
        else runs."""
        while not is_satisfied():
            thread.why = why
            self.waiters[key].append((thread, is_satisfied))
            self.park()
        thread.why = None

    def spin(self, thread, why, looks=None):
        """Let the others run between two polls of a spin loop. `looks`: the addresses that it looks at, if
        nothing else can end it."""
        thread.why = why
        if looks and self.choice is not None and not self._take_turns():
            self.resting.append((thread, looks))
        else:
            self.ready.append(thread)
            self.spinning.poll(self.progress, len(self.ready))
        self.hub.switch()
        thread.why = None

    def turn(self, thread):
        """`thread` is about to do what others may see: with a `choice`, another one may go first."""
        if self.choice is not None:
            thread.at_turn = True
            self.ready.append(thread)
            self.hub.switch()
            thread.at_turn = False

    def effect(self, thread, kind, key):
        """`thread` (None: a message that arrives) accesses a word, at address `key`, by which others may be
        told something, or does what `key`, a tuple, names.

        kind   "read", "wait" (a read that had to be possible), "write", "add" (commutes with others of its
               kind) or "arrive" (of messages, for which waits on `key` wait in any case)
        """
        if self.choice is not None:
            if thread is not None and kind != "read":
                thread.block.effects += 1
            self.choice.effect(thread, kind, key)

    def wake(self, key):
        """Something was stored at address `key`: whoever looks at it may go on."""
        if self.choice is not None:
            self.writes[key] = self.writes.get(key, 0) + 1
            self.ready.extend(thread for thread, looks in self.resting if key in looks)
            self.resting[:] = [r for r in self.resting if key not in r[1]]
        self._check(key)

    def _check(self, key):
        """Make those ready whose wait at `key` is satisfied. -> whether there are any"""
        waiting = self.waiters.get(key)
        if not waiting:
            return False
        left = []
        for waiter in waiting:
            if waiter[1]():
                self.ready.append(waiter[0])
            else:
                left.append(waiter)
        if len(left) == len(waiting):
            return False
        if left:
            self.waiters[key] = left
        else:
            del self.waiters[key]
        return True

    # -- the loop
    def run_until(self, is_done):
        """Run threads until `is_done()`. -> False when nothing can run any more before that."""
        ready = self.ready
        while not is_done():
            if not ready or self.spinning.polls and self._turns_in_vain():
                if not self._deliver() and not self.poll() and not (self.idle and self.idle()):
                    return False
            elif self.choice is None:
                ready.popleft().switch()
            else:
                self._choose()
            if self.failure is not None:
                failure, self.failure = self.failure, None
                raise failure
        return True

    def _turns_in_vain(self):
        """Only spin loops are left, and what they look at does not change."""
        if self.network.under_way and self._all_have_polled():
            return self.choice is None or self.choice.takes_turns
        return self.spinning.stuck(self.progress, self.ready)

    def _take_turns(self):
        """Whether spin loops are not to rest."""
        return self.progress == self.vain and self.choice.takes_turns

    def _all_have_polled(self):
        return self.spinning.polls and self.spinning.all_have_polled(self.progress, self.ready)

    def _deliver(self):
        """Nothing else can happen: deliver one message. -> whether there was one"""
        if not self.network.under_way:
            return False
        self.network.deliver_one()
        return True

    def _choose(self):
        """Run the thread, or deliver the message, that the `choice` picks. Spin loops alone take turns."""
        if self._all_have_polled() and self.choice.takes_turns:
            self.ready.popleft().switch()
            return
        picked = self.choice.next(self.ready, self.network)
        if isinstance(picked, int):
            thread = self.ready[picked]
            del self.ready[picked]
            thread.switch()
        else:
            self.network.deliver(picked)

    def poll(self):
        """Check every wait, and let spin loops look. -> whether anybody can go on now."""
        if any([self._check(key) for key in list(self.waiters)]):
            return True
        if self.resting and (self.progress != self.vain or self.choice.takes_turns):
            self.vain = self.progress
            self.ready.extend(thread for thread, _ in self.resting)
            self.resting.clear()
            return True
        if self.choice is not None:
            self.choice.stuck()
        return False

    def live_threads(self):
        return [t for launch in self.launches for block in launch.blocks for t in block.threads if not t.dead]

    def kill(self):
        """End every thread (after a failure)."""
        threads = self.live_threads()
        self.ready.clear()
        self.waiters.clear()
        self.resting.clear()
        launches = list(self.launches)
        self.launches.clear()
        for thread in threads:
            if thread.worker is not None:
                thread.worker.throw()
        for launch in launches:
            launch.thaw()
            launch.let_go()
