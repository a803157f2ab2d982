"""Schedules: who goes on when several threads can, and when a message arrives.

Without a choice the emulator runs threads first come, first served, and holds messages back as long as
anything else can happen. `Seeded` makes any other schedule, the same for the same seed.
"""

import random

PATIENT = 0.7  # the share of the messages that arrive only when nothing else can happen
ARRIVAL = 0.3  # the probability that one of the others arrives before the next step of a thread


class Seeded:
    """A random schedule: any runnable thread may be next, and messages may arrive at any time, though most of
    them come as late as possible, which is what breaks programs."""

    def __init__(self, seed):
        self.random = random.Random(seed)

    def next(self, ready, network):
        """-> the index in `ready` of the thread that runs, or the message that arrives."""
        if network.under_way and self.random.random() < ARRIVAL:
            hasty = [m for m in network.deliverable() if not m.patient]
            if hasty:
                return self.random.choice(hasty)
        return self.random.randrange(len(ready))

    def patient(self):
        """Whether a new message arrives as late as possible."""
        return self.random.random() < PATIENT

    def late(self, messages):
        """Which of the `messages` arrives when nothing else can happen."""
        return self.random.choice(messages)
