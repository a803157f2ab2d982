"""Random calls of all operations, mixed, without end."""

from __future__ import annotations

import random
import time
from functools import partial

from shmemkit.bench.refusal import Refused, agreed

from .subjects import Arrays
from .trials import Wrong

OBJECTS, ROUNDS, CALLS = 8, 60, 24  # cases at once; rounds of each such set; calls of a round
EMULATED = 4, 2, 6
TELL = 30.0  # seconds


def soak(check):
    """-> exit status, when --seconds have passed"""
    world, same = check.world, random.Random(check.options.seed)  # alike on all ranks
    objects, rounds, n_calls = EMULATED if world.backend.name == "emulator" else (OBJECTS, ROUNDS, CALLS)
    calls, wrong, told = 0, 0, time.monotonic()

    def said():
        return f"{calls} calls on each rank, {wrong} rounds with wrong results"

    while not check.late():
        made, subjects = _made(check, same.sample(check.cases, min(objects, len(check.cases))))
        for _ in range(rounds if subjects else 0):
            chosen = [same.choice(subjects) for _ in range(n_calls)]
            check.watch("soak: " + ", ".join(dict.fromkeys(name for name, _ in chosen)))
            try:
                calls += check.trials.mixed(chosen, same.random() < 0.5)
            except Wrong as error:
                wrong += 1
                check.say("\n    ".join(["WRONG: mixed calls", *error.findings]))
            if time.monotonic() - told > TELL:
                told = time.monotonic()
                check.say(f"{said()}, after {told - check.begin:.0f} s")
            if check.late():
                break
        for each in made:
            each.free()
    check.say(said())
    return 1 if wrong else 0 if calls else 3


def _made(check, cases):
    """-> what those that are not refused have made, and (name, subject) of all of them"""
    world, arrays, made, subjects = check.world, Arrays(check.world), [], []
    for case in cases:
        check.watch(f"soak: {case.name}, its construction")
        try:
            made.append(agreed(world, partial(case.make, world, arrays)))
        except Refused:
            continue
        for subject in made[-1].subjects:
            check.watch(f"soak: {case.name}, {subject.name}, the first call")
            try:
                agreed(world, partial(check.trials.first, subject))
                subjects.append((f"{case.name}, {subject.name}", subject))
            except Refused:
                pass
    return made, subjects
