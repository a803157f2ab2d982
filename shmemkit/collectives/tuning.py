"""Which method "auto" takes: by a table of what was the fastest, as ``bench tune`` and ``--tune`` write it,
else by a model.

The table's files are the user's ($SHMEMKIT_TUNING, else ``shmemkit/tuning.json`` in $XDG_CONFIG_HOME or
~/.config) and the package's own tuning.json, in this form:

    {"all_gather": [{"gpu": "NVIDIA H200", "n_ranks": 4, "n_nodes": 1, "date": "2026-11-22",
                     "digests": {"ll": "0123456789abcdef", ...},
                     "private": [[1048576, "ll"], [null, "push_1d"]], "symmetric": [...]}]}

"private" is for results in private memory, "symmetric" for those in symmetric memory. Of each the method is
that of the first pair whose limit, in bytes, is not exceeded; the last has none.

"digests" are of the methods' machine code and launches, as they were measured. An entry is current while they
are those of digests.json, which docs/checked.py makes. An entry that is not current is not used.

What counts, the user's entries before the package's:

  1. an entry for this GPU model, number of ranks and number of nodes
  2. on one node, entries for this GPU model with fewer and with more ranks: of the methods that these take at
     a size, the one that is the faster by the model
  3. on one node, the model (``cost_model.py``), for this GPU's links, memory and multiprocessors
  4. on several nodes, and of a collective that the model does not know: the collective's DEFAULTS

The emulator's times mean nothing. Its entries are for it alone, need no digests, and serve all numbers of
ranks; it takes no others, and else the DEFAULTS.

The files of rank 0 count, so that all ranks choose the same.
"""

import contextlib
import functools
import itertools
import json
import math
import os
from pathlib import Path
from typing import NamedTuple

from shmemkit.support.agreement import counted, reported_by
from shmemkit.support.settings import listed
from shmemkit.support.sizes import size_text
from shmemkit.support.whole_files import write_whole

from . import cost_model
from .cost_model import module_of

VARIABLE = "SHMEMKIT_TUNING"
PACKAGED = Path(__file__).with_name("tuning.json")
DIGESTS = Path(__file__).with_name("digests.json")
SIZES = [1 << e for e in range(10, 31)]  # bytes, for which the model decides
MARGIN = 0.03  # of the time, by which another method must be faster
EMULATOR = "emulator"  # in the place of the GPU model
_MOST_BY_PACKETS = 16  # ranks of the emulator: packets to more of them take it many seconds
OUTPUTS = ("private", "symmetric")
OPS = {path.parent.name for path in Path(__file__).parent.glob("*/__init__.py")}
SUBSTITUTES = {"ll128": "ll", "one_shot_ll128": "one_shot"}
"""Of methods that NVLink is needed for, or few ranks; up to SMALL bytes."""
SMALL = 1 << 18
MAKE = "'shmemkit run -n 4 -m shmemkit bench tune' makes it"


def user_file():
    """Where the user's table is, or would be."""
    if chosen := os.environ.get(VARIABLE):
        try:
            return Path(chosen).expanduser()
        except RuntimeError as error:
            raise ValueError(f"{VARIABLE} is {chosen!r}, which is not a path: {error}") from None
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "shmemkit" / "tuning.json"


def read(path):
    """-> the table in a file: {op: [entry, ...]}. ValueError, which names the file, for anything else."""
    try:
        table = json.loads(Path(path).read_text())
        _check(table)
    except OSError as error:
        raise ValueError(f"the tuning table {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not a tuning table: {error}. Repair or remove it; {MAKE}") from error
    return table


def tables():
    """-> those that count, the first one first. ValueError for a file that is broken, or that SHMEMKIT_TUNING
    names and that is not there."""
    theirs, chosen = user_file(), os.environ.get(VARIABLE)
    if chosen and not theirs.exists():
        raise ValueError(
            f"{VARIABLE} is {chosen!r}, and there is no such file; it must be a tuning table. Correct "
            f"the path, or unset {VARIABLE} to use the package's own table; {MAKE}"
        )
    found = [read(theirs)] if theirs.exists() else []
    return [*found, read(PACKAGED)]


def _check(table):
    if (
        not isinstance(table, dict)
        or not table.keys() & OPS
        or not all(isinstance(entries, list) for entries in table.values())
    ):
        raise ValueError('it must have the form {"all_gather": [...]}')
    for op, entries in table.items():
        for number, entry in enumerate(entries):
            with _naming(f"{op}, entry {number}"):
                _check_entry(entry)


def _check_entry(entry):
    if not isinstance(entry, dict) or not isinstance(entry.get("gpu"), str):
        raise ValueError('"gpu" must be the name of a GPU model')
    for key in ("n_ranks", "n_nodes"):
        if not _is_positive(entry.get(key)):
            raise ValueError(f'"{key}" must be a positive integer')
    digests = entry.get("digests", {})
    if not isinstance(digests, dict) or not all(isinstance(digest, str) for digest in digests.values()):
        raise ValueError('"digests" must be {method: digest}')
    for key in OUTPUTS:
        if not _are_choices(entry.get(key)):
            raise ValueError(
                f'"{key}" must be [[limit, method], ...] with increasing limits, the last one null'
            )


def _is_positive(value):
    return type(value) is int and value > 0


def _are_choices(value):
    a_list = list, tuple
    pairs = isinstance(value, a_list) and all(isinstance(p, a_list) and len(p) == 2 for p in value)
    if not pairs or not value or not all(isinstance(name, str) for _, name in value):
        return False
    *limits, last = [limit for limit, _ in value]
    return last is None and all(map(_is_positive, limits)) and limits == sorted(set(limits))


@contextlib.contextmanager
def _naming(what):
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from None


@functools.cache
def digests() -> dict[str, dict[str, str]]:
    """-> {op: {method: digest}} of this shmemkit's methods, where they were made."""
    return json.loads(DIGESTS.read_text())["methods"]


def digests_of(op, names):
    """-> {method: digest} of those of `names` that have one"""
    return {name: digests().get(op, {})[name] for name in sorted(names) if name in digests().get(op, {})}


def is_current(op, entry):
    """Whether `entry` was measured with this shmemkit's methods."""
    names = {name for output in OUTPUTS for _, name in entry[output]}
    known, measured = digests().get(op, {}), entry.get("digests", {})
    return all(name in known and known[name] == measured.get(name) for name in names)


class Place(NamedTuple):
    """Where "auto" chooses: the GPU model; the numbers of ranks, of nodes, of a GPU's SMs; whether NVLink
    connects all ranks."""

    gpu: str
    n_ranks: int
    n_nodes: int
    sms: int | None = None
    nvlink: bool = True


class Found(NamedTuple):
    """`choices`: {symmetric: [(limit in bytes, or None, method), ...]}; `by`: from where they came; `times`:
    {symmetric: {bytes: {method: microseconds}}} that the model compared, or None."""

    choices: dict
    by: str
    times: dict | None = None


def ranges(times, first=min):
    """`times`, {bytes: {method: microseconds}} -> [(limit in bytes, or None, method), ...]. From a size to
    the next one the method changes only if another is faster by more than MARGIN: the clock's own scatter
    makes no ranges, and each method costs memory. `first` is the size to begin with: min or max. By the model
    it is max: between methods as good for small arrays it takes the one that it needs anyway."""
    taken, method = {}, None
    for size in sorted(times, reverse=first is max):
        of_size = times[size]
        fastest = min(of_size, key=of_size.get)
        if method not in of_size or of_size[fastest] < (1 - MARGIN) * of_size[method]:
            method = fastest
        taken[size] = method
    result = []
    for size in sorted(taken):
        if result and result[-1][1] == taken[size]:
            result.pop()
        result.append((size, taken[size]))
    return [*result[:-1], (None, result[-1][1])]


def find(op, place):
    """-> Found for `op`, as "all_gather", at a Place. ValueError as ``tables``."""
    entries = [entry for table in tables() for entry in table.get(op, [])]
    emulated, one_node = place.gpu == EMULATOR, place.n_nodes == 1
    here = [e for e in entries if e["gpu"] == place.gpu and (e["n_nodes"] == 1) == one_node]
    if emulated:
        if here:
            nearest = min(here, key=lambda e: abs(math.log(e["n_ranks"] / place.n_ranks)))
            return Found(
                _choices_of(nearest), f"by the emulator's table of {counted(nearest['n_ranks'], 'rank')}"
            )
        return Found(_defaults(op, place), "by the defaults of the emulator, whose times mean nothing")
    current = [entry for entry in here if is_current(op, entry)]
    for entry in current:
        if (entry["n_ranks"], entry["n_nodes"]) == (place.n_ranks, place.n_nodes):
            return Found(_choices_of(entry), f"measured on this GPU model, {entry.get('date', 'no date')}")
    stale = len(here) > len(current)
    note = "; the table has entries of other kernels, which are not used: run 'bench tune'" if stale else ""
    if not one_node:
        return Found(_defaults(op, place), f"by the defaults of several nodes, not measured{note}")
    if not cost_model.methods(op):
        return Found(_defaults(op, place), f"by the defaults, not measured{note}")
    return _by_model(op, place, current, note)


def _choices_of(entry):
    return {symmetric: [tuple(pair) for pair in entry[OUTPUTS[symmetric]]] for symmetric in (False, True)}


def defaults(op, several):
    """-> [(limit in bytes, or None, method), ...] on one node, or on several: the first choices are for the
    emulator, which is slow at LL and LL128; GPUs of one node take them only where nothing else can run. Where
    a method stands twice in a row, SUBSTITUTES are for the smaller sizes alone."""
    return list(module_of(op).DEFAULTS[several])


def _defaults(op, place):
    choices = defaults(op, place.n_nodes > 1)
    if place.gpu == EMULATOR and place.n_ranks > _MOST_BY_PACKETS:
        choices = choices[-1:]
    return dict.fromkeys((False, True), choices)


def _by_model(op, place, current, note):
    gpu, known = cost_model.gpu_of(place.gpu, place.sms, place.nvlink)
    fewer = max((e for e in current if e["n_ranks"] < place.n_ranks), key=_n_ranks, default=None)
    more = min((e for e in current if e["n_ranks"] > place.n_ranks), key=_n_ranks, default=None)
    both = (fewer, more) if fewer and more else ()
    between = [_choices_of(entry) for entry in both]
    times = {}
    for symmetric in (False, True):
        of_output = times[symmetric] = {}
        for size in SIZES:
            modelled = cost_model.times(op, place.n_ranks, size, symmetric, gpu)
            taken = {method_at(choices[symmetric], size) for choices in between}
            of_output[size] = {k: v for k, v in modelled.items() if k in taken} or modelled
    if both:
        by = f"by tables of {both[0]['n_ranks']} and {both[1]['n_ranks']} ranks on this GPU model"
    else:
        by = f"by model, for {_gpu_text(gpu, known, place)}"
        few, *_, many = cost_model.fitted()["ranks"]
        if place.n_ranks > many:
            by += f"; it was fitted to {few} to {many} ranks"
    return Found({symmetric: ranges(of, first=max) for symmetric, of in times.items()}, by + note, times)


def _n_ranks(entry):
    return entry["n_ranks"]


def _gpu_text(gpu, known, place):
    links = f"links of {gpu.link} GB/s, memory of {gpu.memory} GB/s and {gpu.sms} SMs"
    listed_ = set(known.split()) <= set(place.gpu.replace("-", " ").split())
    return links if listed_ else f"{links}: {place.gpu} is taken for the {known}"


def found_by(world, op, sms=None):
    """-> Found for a World, the same on all ranks. Collective; ValueError on every rank.

    With a budget of multiprocessors, `sms`, the limits are smaller in proportion: methods for small arrays
    are limited by their threads, earlier if these are fewer."""
    found = error = None
    emulated = world.backend.gpu_name == EMULATOR
    nvlink = world.n_nodes == 1 and (
        emulated or not any(world.host_allgather(world.backend.unreached(nvlink=True) is not None))
    )
    if world.rank == 0:
        try:
            all_sms = world.backend.multiprocessors
            found = find(op, Place(world.backend.gpu_name, world.n_ranks, world.n_nodes, all_sms, nvlink))
        except ValueError as e:
            error = str(e)
    found, error = world.host_allgather((found, error))[0]
    if error is not None:
        raise reported_by(0, ValueError(error))
    return _within(found, min(1, (sms or math.inf) / world.backend.multiprocessors))


def _within(found, share):
    """`found` with limits, and sizes that the model compared, of this share."""
    if share == 1:
        return found
    choices = {
        symmetric: [(limit and max(1, int(limit * share)), name) for limit, name in those]
        for symmetric, those in found.choices.items()
    }
    times = found.times and {
        symmetric: {max(1, int(size * share)): those for size, those in of.items()}
        for symmetric, of in found.times.items()
    }
    return found._replace(choices=choices, times=times)


def method_at(choices, nbytes):
    """The method of `choices` for `nbytes` bytes."""
    return next(method for limit, method in choices if limit is None or nbytes <= limit)


def build(world, op, max_nbytes, make, sms=None):
    """Make the methods that "auto" needs for up to `max_nbytes` bytes. Collective.

    make(name, capacity)  -> the method, for up to `capacity` bytes; ValueError, on all ranks, where it cannot
                          run, MemoryError where memory is short. It has free()
    sms                   the budget of multiprocessors, or None

    -> (methods, choices, refused, by):

    methods   {name: what ``make`` returned}, none larger than the sizes that it is for
    choices   {symmetric: [(limit, name), ...]}, of these methods, up to `max_nbytes`
    refused   {name: why} of those that were wanted and that cannot run, or only up to a limit: where memory
              is short, the limit of the method that has no room is halved until it has. In their place is
              the fastest of the others by the model, if that chose. Else it is one of SUBSTITUTES for up to
              SMALL bytes, else that of the next larger sizes, else of the next smaller, else one of the other
              output's, else one of the defaults, first of those for as many nodes. If none can: MemoryError
              where that was the reason for any, else ValueError
    by        from where the choice came
    """
    found, several = found_by(world, op, sms), world.n_nodes > 1
    spare = [name for those in found.choices.values() for _, name in reversed(those)]
    spare += [name for those in (several, not several) for _, name in defaults(op, those)]
    most, refused, full = {}, {}, set()  # bytes that a refused method can be for; why; those without memory
    made = {}  # name: (capacity, method)
    while True:
        try:
            taken = {
                symmetric: _without(of_table, most, spare, max_nbytes)
                for symmetric, of_table in _but(found, most).items()
            }
        except LookupError:
            _free(made, made)
            raise _none_is_left(refused, full) from None
        needed = _capacities(taken, max_nbytes)
        # First those that all sizes need, then as many as have room: those for small arrays take little.
        order = sorted(needed, key=lambda name: (needed[name] < max_nbytes, needed[name]))
        changed = [name not in made or made[name][0] != needed[name] for name in order]
        todo = order[[*changed, True].index(True) :]
        _free(made, [name for name in made if name in todo or name not in order])
        name = ""
        try:
            for name in todo:
                made[name] = needed[name], make(name, needed[name])
        except (ValueError, MemoryError) as error:  # on all ranks; others may need larger ones now
            refused[name], half = str(error), needed[name] // 2
            most[name] = 0
            if isinstance(error, MemoryError):
                full.add(name)
                most[name] = half if half >= SIZES[0] else 0
            continue
        limited = {name: f"above {size_text(most[name])}: {refused[name]}" for name in full if name in needed}
        return {name: method for name, (_, method) in made.items()}, taken, refused | limited, found.by


def _free(made, names):
    for name in [*names]:
        made.pop(name)[1].free()


def _but(found, most):
    """The choices of `found` without those that are for smaller arrays at `most`, {name: bytes}, if the model
    compared others."""
    result = dict(found.choices)
    for symmetric, times in (found.times or {}).items() if most else ():
        left = {
            size: some
            for size, of_size in times.items()
            if (some := {name: us for name, us in of_size.items() if size <= most.get(name, size)})
        }
        if left:
            result[symmetric] = ranges(left, first=max)
    return result


def _without(choices, most, spare, max_nbytes):
    """`choices` up to `max_nbytes`, with other methods in the place of those that are for less: for `most`,
    {name: bytes}. LookupError where there is none."""
    names, result, low = [name for _, name in choices], [], 0
    for i, (limit, wanted) in enumerate(choices):
        small = [SUBSTITUTES[wanted]] if wanted in SUBSTITUTES and (limit or math.inf) <= SMALL else []
        candidates = (wanted, *small, *names[i:], *reversed(names[:i]), *spare)
        end = max_nbytes if limit is None else min(limit, max_nbytes)
        while not result or low < end:
            name = next((name for name in candidates if most.get(name, math.inf) > low), None)
            if name is None:
                raise LookupError
            low = min(end, most.get(name, end))
            if result and result[-1][1] == name:
                result.pop()
            result.append((low, name))
    return [*result[:-1], (None, result[-1][1])]


def _none_is_left(refused, full):
    others = {name: why for name, why in refused.items() if name not in full}
    reasons = "; ".join(f"{name}: {why}" for name, why in others.items())
    if not full:
        return ValueError(f"no method can run here. {reasons}")
    names = [name for name in refused if name in full]
    return MemoryError(
        f"no method can run here. There is not enough memory for {listed(names, 'and')}. {names[0]}: "
        f"{refused[names[0]]}. That is one array; a method allocates several times max_nbytes "
        f"(docs/methods.md says how many times)"
        + (f". Others cannot run at all. {reasons}" if others else "")
    )


def _capacities(found, max_nbytes):
    """-> {method: bytes of the largest call that may be its}"""
    result = {}
    for limit, name in itertools.chain(*found.values()):
        result[name] = max(result.get(name, 0), max_nbytes if limit is None else limit)
    return result


def update(path, op, entry):
    """Put `entry` into the table in a file, in the place of one for the same GPU model, ranks and nodes.

    Readers see the old table or the new one. The file, and its folder, are made where they are missing.
    ValueError for a file that is no table, OSError for one that cannot be written.
    """
    path = Path(path).resolve()
    table = read(path) if path.exists() else {}
    entries = {_place(other): other for other in table.get(op, [])} | {_place(entry): entry}
    table[op] = [entries[place] for place in sorted(entries)]
    _check(table)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, _text(table))


def _place(entry):
    return entry["gpu"], entry["n_ranks"], entry["n_nodes"]


def _text(table):
    """JSON with a line for each entry."""
    ops = (
        f" {json.dumps(op)}: [\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in entries) + "\n ]"
        for op, entries in sorted(table.items())
    )
    return "{\n" + ",\n".join(ops) + "\n}\n"
