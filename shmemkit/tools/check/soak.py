"""Random calls of all operations, mixed, without end."""

from __future__ import annotations

import random
import time

from shmemkit.bench.refusal import Refused, agreed

from .subjects import Arrays
from .trials import Wrong

AT_ONCE = 8  # cases whose objects live at once
ROUNDS, CALLS = 60, 24  # of these, and calls in each
TELL = 30.0  # seconds


def soak(check):
    """-> exit status, when --seconds have passed"""
    world, options = check.world, check.options
    same = random.Random(options.seed)  # alike on all ranks
    emulated, calls, wrong, told = world.backend.name == "emulator", 0, 0, time.monotonic()
    refused = set()
    while not check.late():
        arrays, made, trials = Arrays(world), [], check.trials
        for case in same.sample(check.cases, min(AT_ONCE, len(check.cases))):
            if case.name in refused:
                continue
            check.watch(f"soak: {case.name}, which is made")
            try:
                made.append((case, agreed(world, lambda case=case: case.make(world, arrays))))
            except Refused:
                refused.add(case.name)
        subjects = []
        for case, those in made:
            for subject in those.subjects:
                check.watch(f"soak: {case.name}, {subject.name}, the first call")
                try:
                    agreed(world, lambda subject=subject: trials.first(subject))
                    subjects.append((case.name, subject))
                except Refused:
                    pass
        for _ in range((2 if emulated else ROUNDS) if subjects else 0):
            chosen = [same.choice(subjects) for _ in range(6 if emulated else CALLS)]
            check.watch("soak: " + ", ".join(dict.fromkeys(name for name, _ in chosen)))
            try:
                calls += trials.mixed(
                    [subject for _, subject in chosen], same.random() < 0.5, [name for name, _ in chosen]
                )
            except Wrong as error:
                wrong += 1
                check.say("\n    ".join(["WRONG: mixed calls", *error.findings]))
            if time.monotonic() - told > TELL:
                told = time.monotonic()
                check.say(
                    f"{calls} calls on each rank, {wrong} rounds with wrong results, after {told - check.begin:.0f} s"
                )
            if check.late():
                break
        for _, those in made:
            those.free()
    check.say(f"{calls} calls on each rank, {wrong} rounds with wrong results")
    return 1 if wrong else 0
