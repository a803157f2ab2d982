"""Which method "auto" takes: from a small table of what was fastest, measured by the bench's ``--tune``.

The table's files are the user's ($SHMEMKIT_TUNING, else ``shmemkit/tuning.json`` in $XDG_CONFIG_HOME or
~/.config) and the package's own tuning.json, in this form:

    {"all_gather": [{"gpu": "NVIDIA H200", "n_ranks": 4, "n_nodes": 1,
                     "private": [[1048576, "ll"], [null, "push_1d"]], "symmetric": [...]}]}

"private" is for results in private memory, "symmetric" for those in symmetric memory. Of each the method is
that of the first pair whose limit, in bytes, is not exceeded; the last has none.

Which entry: one for this GPU model, number of ranks and number of nodes, the user's before the package's;
else the nearest. An entry for one node says nothing about several, nor the other way round: other methods are
possible there. GPU models come before numbers of ranks: where one method overtakes another depends on what
the links carry and how long they take, which is the model's, and at the same gathered size hardly on the
number of ranks, each of which receives nearly all of it. Then comes the nearest number of ranks, by their
ratio, and of nodes. The emulator's times mean nothing, so its entries are for it alone, and it takes no
others. Where no entry is left: DEFAULTS.

The files of rank 0 count, so that all ranks choose the same.
"""

import contextlib
import itertools
import json
import math
import os
from pathlib import Path

from shmemkit.support.agreement import shown_by
from shmemkit.support.settings import listed

VARIABLE = "SHMEMKIT_TUNING"
PACKAGED = Path(__file__).with_name("tuning.json")
EMULATOR = "emulator"  # in the place of the GPU model
OUTPUTS = ("private", "symmetric")
DEFAULTS = {  # op: on one node, on several
    "all_gather": (
        ((1 << 12, "ll"), (1 << 13, "ll128"), (None, "push_1d")),
        ((1 << 20, "ll_2d"), (None, "push_2d")),
    ),
    "all_to_all": (
        ((1 << 13, "ll128"), (None, "push")),
        ((None, "push_2d"),),
    ),
    "broadcast": (
        ((1 << 13, "ll128"), (None, "scatter")),
        ((1 << 18, "ll128"), (1 << 20, "ll128"), (1 << 62, "scatter"), (None, "push_2d")),
    ),
    "gather": (
        ((1 << 18, "ll"), (None, "push")),
        ((1 << 18, "ll"), (1 << 62, "push"), (None, "push_2d")),
    ),
    "scatter": (
        ((1 << 13, "ll128"), (None, "push")),
        ((1 << 13, "ll128"), (None, "push")),
    ),
    "reduce": (
        ((1 << 12, "ll"), (1 << 13, "ll128"), (None, "push")),
        ((1 << 12, "ll"), (1 << 13, "ll128"), (None, "push")),
    ),
    "all_reduce": (
        ((1 << 12, "one_shot_ll128"), (1 << 13, "two_shot_ll128"), (None, "push")),
        ((1 << 20, "double_tree"), (None, "ring")),
    ),
    "reduce_scatter": (
        ((1 << 13, "ll128"), (None, "push")),
        ((None, "push_2d"),),
    ),
}
"""For one node of GPUs the package's table has entries for most operations. So the first choices here are for
the emulator, which is slow at LL and LL128. On several nodes, the first choices of broadcast and gather can
run only where NVLink spans the nodes: up to 1 << 62 bytes, which is any size. The last one runs elsewhere.
Where a method stands twice in a row, SUBSTITUTES are for the smaller sizes alone."""
SUBSTITUTES = {"ll128": "ll", "one_shot_ll128": "one_shot"}
"""Of methods that NVLink is needed for, or few ranks; up to SMALL bytes."""
SMALL = 1 << 18


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
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or error
        raise ValueError(
            f"{path} is not a tuning table: {problem}. Repair it, or remove it and make a new one with "
            "'python -m shmemkit.bench all_gather --tune' and the like"
        ) from error
    return table


def tables():
    """-> those that count, the first one first. ValueError for a file that is broken, or that SHMEMKIT_TUNING
    names and that is not there."""
    theirs = user_file()
    found = [read(theirs)] if theirs.exists() or os.environ.get(VARIABLE) else []
    return [*found, read(PACKAGED)]


def _check(table):
    if (
        not isinstance(table, dict)
        or not table.keys() & DEFAULTS.keys()
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


def choices(op, gpu, n_ranks, n_nodes, symmetric):
    """-> [(limit in bytes, or None, method), ...] for `op`, as "all_gather", with this GPU model, so many
    ranks on so many nodes, and a symmetric result or a private one. ``method_at`` picks from them. ValueError
    as ``tables``.
    """
    possible = [
        entry
        for table in tables()
        for entry in table.get(op, [])
        if (entry["n_nodes"] == 1) == (n_nodes == 1) and (entry["gpu"] == EMULATOR) == (gpu == EMULATOR)
    ]
    if not possible:
        return list(DEFAULTS[op][n_nodes > 1])

    def distance(entry):
        ranks, nodes = entry["n_ranks"] / n_ranks, entry["n_nodes"] / n_nodes
        return entry["gpu"] != gpu, abs(math.log(ranks)), abs(math.log(nodes))

    nearest = min(possible, key=distance)  # the first of those that are as near: the user's
    return [tuple(pair) for pair in nearest[OUTPUTS[symmetric]]]


def choices_of(world, op, sms=None):
    """-> {symmetric: choices} for a World, the same on all ranks. Collective; ValueError on every rank.

    With a budget of multiprocessors, `sms`, the limits are smaller in proportion: methods for small arrays
    are limited by their threads, earlier if these are fewer."""
    found = error = None
    if world.rank == 0:
        place = world.backend.gpu_name, world.n_ranks, world.n_nodes
        try:
            found = {symmetric: choices(op, *place, symmetric) for symmetric in (False, True)}
            share = min(1, (sms or math.inf) / world.backend.multiprocessors)
            found = {
                symmetric: [(limit and max(1, int(limit * share)), name) for limit, name in those]
                for symmetric, those in found.items()
            }
        except ValueError as e:
            error = str(e)
    found, error = world.host_allgather((found, error))[0]
    if error is not None:
        raise shown_by(0, ValueError(error))
    return found


def method_at(choices, nbytes):
    """The method of `choices` for `nbytes` bytes."""
    return next(method for limit, method in choices if limit is None or nbytes <= limit)


def build(world, op, max_nbytes, make, sms=None):
    """Make the methods that "auto" needs for up to `max_nbytes` bytes. Collective.

    make(name, capacity)  -> the method, for up to `capacity` bytes; ValueError, on all ranks, where it cannot
                          run. It has free()
    sms                   the budget of multiprocessors, or None

    -> (methods, choices, refused):

    methods   {name: what ``make`` returned}, none larger than the sizes that it is for
    choices   {symmetric: [(limit, name), ...]}, of these methods, up to `max_nbytes`
    refused   {name: why} of those that the table wanted and that cannot run: in their place is one of
              SUBSTITUTES for up to SMALL bytes, else that of the next larger sizes, else of the next
              smaller, else one of DEFAULTS, first of those for as many nodes. If none can: MemoryError where
              that was the reason for any, else ValueError
    """
    table, refused, full = choices_of(world, op, sms), {}, set()
    several = world.n_nodes > 1
    spare = [name for those in (several, not several) for _, name in DEFAULTS[op][those]]
    while True:
        found = {
            symmetric: _without(of_table, refused, full, spare, max_nbytes)
            for symmetric, of_table in table.items()
        }
        methods = {}
        try:
            for name, capacity in _capacities(found, max_nbytes).items():
                methods[name] = make(name, capacity)
        except (ValueError, MemoryError) as error:  # on all ranks; others may need larger ones now
            refused[name] = str(error)
            if isinstance(error, MemoryError):
                full.add(name)
            for method in methods.values():
                method.free()
            continue
        return methods, found, refused


def _without(choices, refused, full, spare, max_nbytes):
    """`choices` up to `max_nbytes` with other methods in the place of the refused; `full` lacked memory."""
    names, result = [name for _, name in choices], []
    for i, (limit, wanted) in enumerate(choices):
        small = [SUBSTITUTES[wanted]] if wanted in SUBSTITUTES and (limit or math.inf) <= SMALL else []
        candidates = (wanted, *small, *names[i:], *reversed(names[:i]), *spare)
        name = next((name for name in candidates if name not in refused), None)
        if name is None:
            raise _none_is_left(refused, full)
        last = limit is None or limit >= max_nbytes
        if result and result[-1][1] == name:
            result.pop()
        result.append((None if last else limit, name))
        if last:
            return result


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
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(_text(table))
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _place(entry):
    return entry["gpu"], entry["n_ranks"], entry["n_nodes"]


def _text(table):
    """JSON with a line for each entry."""
    ops = (
        f" {json.dumps(op)}: [\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in entries) + "\n ]"
        for op, entries in sorted(table.items())
    )
    return "{\n" + ",\n".join(ops) + "\n}\n"
