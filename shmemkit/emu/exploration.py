"""``shmemkit.emu.explore(main, n_ranks)``: a program under many schedules, or under all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from shmemkit.support.notebook import html_table, html_text
from shmemkit.support.progress import showing
from shmemkit.support.renamed import renamed
from shmemkit.support.settings import shown

from ..typing import Delivery
from .dpor import Explorer, Redundant, Replay, TooLong
from .network import DELIVERIES
from .run import check_arguments, run, schedule_of


@dataclass(repr=False)
class Exploration:
    """What ``explore`` has found; ``str()`` says it, with the report of a failure.

    exhaustive   whether it runs all schedules
    races        whether it looked for races
    failure      what the first run that failed has raised, or None
    seed, delivery   of that run: ``run(main, n_ranks, races=, delivery=, seed=)`` does the same again
    schedule     of that run, if the exploration was exhaustive: whose step came when.
                 ``run(main, n_ranks, delivery=, choice=exploration.choice)`` does the same again
    runs         the schedules that have been run
    repeats      how many runs were ended early, since they would have repeated one of these
    finished     whether all schedules that were asked for have been run. If exhaustive and without a failure,
                 this is a proof
    """

    exhaustive: bool
    races: bool
    failure: Exception | None = None
    seed: int | None = None
    delivery: Delivery | None = None
    schedule: list = field(default_factory=list, repr=False)
    runs: int = 0
    repeats: int = 0
    finished: bool = False

    @property
    def choice(self) -> Replay:
        if not self.schedule:
            raise AttributeError(
                "this Exploration has no `choice`; an exhaustive one that found a failure has it"
            )
        return Replay(self.schedule)

    def _repr_html_(self):
        if self.failure is None:
            return html_text(repr(self))
        kind, seed = type(self.failure).__name__, "" if self.exhaustive else self.seed
        shown = getattr(self.failure, "_repr_html_", lambda: html_text(kind, str(self.failure)))()
        row = self.runs, f"{kind} in the last one", seed, repr(self.delivery)
        return html_table(("schedules", "outcome", "seed", "delivery"), [row]) + shown

    def __repr__(self):
        runs = f"{self.runs} schedule{'s' * (self.runs != 1)}"
        if self.failure is not None:
            which = f"seed {self.seed}, " if not self.exhaustive else ""
            which += f"delivery {self.delivery!r}"
            kind = type(self.failure).__name__
            return f"explored {runs}: {kind} in the last one ({which})\n{self.failure}".rstrip()
        clean = "no deadlock, no race, no failure" if self.races else "no deadlock, no failure"
        if not self.races:
            clean += "; races were not looked for"
        if not self.exhaustive:
            return f"explored {runs}: {clean}; other seeds are other schedules"
        if not self.finished:
            repeats = f" (and {self.repeats} that repeat one of them)" if self.repeats else ""
            return f"explored {runs}{repeats}, no failure among them, but these are not all: raise max_runs"
        return (
            f"explored all schedules ({self.runs} that {'differ' if self.runs != 1 else 'matters'}): {clean}"
        )


@renamed(n_pes="n_ranks")
def explore(
    main: Callable[..., object],
    n_ranks: int,
    args: Iterable = (),
    seeds: Iterable[int] | None = None,
    deliveries: Delivery | Iterable[Delivery] | None = None,
    races: bool = True,
    exhaustive: bool = False,
    max_runs: int = 10_000,
    local_size: int | None = None,
    heap_size: int | None = None,
) -> Exploration:
    """Run ``main(*args)`` on `n_ranks` ranks again and again, until a run fails. -> Exploration

    A run fails by a deadlock, a data race, or an exception of `main` or a kernel. Let `main` assert that its
    result is right. It must do the same whenever it is called.

    seeds        the random schedules (default: range(100)), each with all `deliveries`
    deliveries   default: "eager", "ordered", "unordered"; or, if `exhaustive`, "unordered", which includes
                 the others
    races        whether to look for races
    exhaustive   all schedules instead, one for each class of equivalent ones. If the result has `finished`
                 without a failure, no schedule of this program deadlocks, races or fails. Steps are accesses
                 to words by which threads signal each other, and arrivals of messages: only programs of few
                 threads, ranks and rounds have few enough. docs/schedules.md says what the proof leaves out
    max_runs     the most runs, repeats among them, if `exhaustive`
    local_size, heap_size   as in ``run``

    The environment (SHMEMKIT_SEED, ...) has no effect. TypeError or ValueError for wrong arguments,
    RuntimeError for a program with too many steps for `exhaustive`.
    """
    check_arguments("explore()", main, n_ranks, local_size, heap_size)
    if exhaustive and not races:
        raise ValueError(
            "explore(): exhaustive=True and races=False; an exhaustive exploration must look for races, "
            "since what it proves holds only without them"
        )
    if exhaustive and seeds is not None:
        raise ValueError(
            "explore(): exhaustive=True and seeds= are given; an exhaustive exploration has no seeds. Leave "
            "one of them out"
        )
    if deliveries is None:
        deliveries = ("unordered",) if exhaustive else DELIVERIES
    deliveries = (deliveries,) if isinstance(deliveries, str) else _several("deliveries", deliveries)
    for delivery in deliveries:
        schedule_of(races, delivery, 0)
    options = dict(args=_several("args", args, 0), local_size=local_size, heap_size=heap_size, races=races)
    if exhaustive:
        return _all(main, n_ranks, deliveries, max_runs, options)
    seeds = range(100) if seeds is None else _several("seeds", seeds)
    return _random(main, n_ranks, deliveries, [schedule_of(races, None, s)[2] for s in seeds], options)


def _several(name, values, at_least=1):
    try:
        values = tuple(values)
    except TypeError:
        raise TypeError(f"explore(): {name} is {shown(values)}; it must be a sequence") from None
    if len(values) < at_least:
        raise ValueError(f"explore(): {name} is empty; it must have one element or more")
    return values


def _random(main, n_ranks, deliveries, seeds, options):
    found = Exploration(False, options["races"])
    with showing("explore", len(seeds) * len(deliveries), "schedules") as task:
        for seed in seeds:
            for delivery in deliveries:
                task.done, found.runs = found.runs, found.runs + 1
                try:
                    run(main, n_ranks, delivery=delivery, seed=seed, timeline=False, **options)
                except Exception as error:
                    found.failure, found.seed, found.delivery = error, seed, delivery
                    return found
    found.finished = True
    return found


def _all(main, n_ranks, deliveries, max_runs, options):
    found, started = Exploration(True, True), 0
    with showing("explore", unit="runs") as task:
        for delivery in deliveries:
            explorer, more = Explorer(), True
            while more:
                if started == max_runs:
                    return found
                task.done, started = started, started + 1
                try:
                    run(main, n_ranks, delivery=delivery, choice=explorer, timeline=False, **options)
                    found.runs += 1
                except Redundant:
                    found.repeats += 1
                except TooLong:
                    raise
                except Exception as error:
                    found.runs += 1
                    found.failure, found.delivery, found.schedule = error, delivery, explorer.schedule
                    return found
                more = explorer.advance()
    found.finished = True
    return found
