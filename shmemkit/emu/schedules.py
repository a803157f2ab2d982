"""Schedules: who goes on when several threads can, and when a message arrives.

Without a choice the emulator runs threads first come, first served, and holds messages back as long as
anything else can happen. A `Choice` decides instead: `Seeded` at random, the same for the same seed;
``dpor.py`` so that in the end every schedule has been seen.
"""

import random

PATIENT = 0.7  # the share of the messages that arrive only when nothing else can happen
ARRIVAL = 0.3  # the probability that one of the others arrives before the next step of a thread


class Choice:
    """What the scheduler and the network ask."""

    needs_races = False  # whether it needs threads that are checked for races
    takes_turns = True  # whether spin loops do that when nothing else is left, without being asked

    def next(self, ready, network):
        """-> the index in `ready` of the thread that runs, or the message that arrives."""
        raise NotImplementedError

    def late(self, messages):
        """Which of the `messages` arrives when nothing else can happen."""
        raise NotImplementedError

    def sent(self, message, thread):
        """`thread` has sent a new message."""

    def polled_in_vain(self):
        """A spin loop looks again, after something was written that it had looked at too early. -> whether it
        is to stop for good"""
        return False

    def stuck(self):
        """Nobody can go on."""

    def effect(self, thread, kind, key):
        """What the step that runs does to what others may wait for. See ``Scheduler.effect``."""


class Seeded(Choice):
    """A random schedule: any runnable thread may be next, and messages may arrive at any time, though most of
    them come as late as possible, which is what breaks programs."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def next(self, ready, network):
        if network.under_way and self.random.random() < ARRIVAL:
            hasty = [m for m in network.deliverable() if not m.patient]
            if hasty:
                return self.random.choice(hasty)
        return self.random.randrange(len(ready))

    def late(self, messages):
        return self.random.choice(messages)

    def sent(self, message, thread):
        message.patient = self.random.random() < PATIENT
