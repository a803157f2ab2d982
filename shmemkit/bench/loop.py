"""The loop of all commands: each case's data, its contenders, and their rows."""

from typing import Any

from shmemkit.runtime.timer import Timer

from . import p2p
from .measure import measure, measure_all
from .refusal import Refused, agreed
from .results import METHOD_OF_ROUNDS

EMULATED = 1 << 24  # operations that are emulated without waiting too long


def run(command, world, results, options, progress):
    """Fill in the rows of a Command. Collective."""
    (entries, todo), emulated = command.plan(world, options), world.backend.name == "emulator"
    if emulated and max(cases[None].operations for cases in todo) > EMULATED:
        raise SystemExit(
            f"{command.name}: --shapes has one that is too large for the emulator; it must have up to "
            f"{EMULATED} operations, as {command.shapes.emulated}"
        )
    if command.together and not emulated:
        results.method = METHOD_OF_ROUNDS
    with progress(command.limited + len(todo) * (1 + len(entries))) as step:
        if command.limited and world.n_ranks > 1:
            step("what one rank can send to another")
            results.p2p_GBps = p2p.limit(world, Timer(world, options.iters, options.replays))
        while todo:  # the data of one case go before those of the next come
            measure_case(world, results, options, step, command.together, entries, todo.pop(0))
    for entry in entries:
        entry.contender.close()


def measure_case(world, results, options, step, together, entries, cases, before=""):
    """Fill in the rows of `cases`, {part, or None for all: its case}. Collective."""
    whole, refused = cases[None], None
    text = before + whole.text
    step(f"{text}, its data")
    iters = None if world.backend.name == "emulator" else whole.iters
    timer = Timer(world, options.iters or iters, options.replays)
    pairs = [(cases[entry.case or entry.alone], entry.contender) for entry in entries]
    used = {case for case, _ in pairs}
    texts = [f"{text}, {entry.method}{' alone' * bool(entry.alone)}" for entry in entries]
    try:
        for case in dict.fromkeys(case for case in cases.values() if case in used):
            agreed(world, case.make)
    except Refused as reason:
        refused = None, f"refused: {reason}"
        for entry in entries:
            entry.contender.forget()
    found: Any = [refused] * len(entries)  # None: each will be measured by itself
    if together and not refused:
        found = measure_all(world, timer, pairs, lambda i: step(texts[i]))
    for entry, pair, of_entry, known in zip(entries, pairs, texts, found, strict=True):
        if known is None:
            step(of_entry)
        us, note = known or measure(world, timer, *pair)
        about = entry.contender.about | {"shape": whole.shape_text, "alone": entry.alone}
        about |= whole.rates(us, entry) if us else {}
        results.add(whole.op, entry.method, whole.bytes or None, us, note=note, **about)
