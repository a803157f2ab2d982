"""Which kernels were checked on GPUs: docs/checked.md and a line of README, from benchmarks/checked.json.

python docs/checked.py                        write them, with all modules of kernels that there are
python docs/checked.py digests DIGESTS.json   take the digests that tests/machine_code.py wrote, also for
                                              results that were measured with the same sources
python docs/checked.py add CHECK.json ...     take what `shmemkit check --json`, or GPU tests, wrote
python docs/checked.py state DIGESTS.json     print which modules of kernels have no check; never fails
python docs/checked.py tables DIGESTS.json    fail where "auto" would use a table of other kernels

"digests" also writes shmemkit/collectives/digests.json, which is small and ships: by it "auto" knows whether
a tuning table is of these kernels (shmemkit/collectives/tuning.py). Its digest of a method is of the rooms
that the method's module takes names from.

The digest of a module of kernels, a room, is of what runs:

- the machine code of its kernels for Hopper, by one toolchain, whose versions are in the file
- the numbers that launches are made of: public constants, and public attributes of classes, in the room and
  in the modules that take names from it and are no rooms themselves
- of collectives: settings and transports in the tables of methods

Source text, names of kernels and of classes are no part of it. Neither are numbers inside of functions, how
functions make a grid of all these, and the sizes by which "auto" chooses: checks are of methods, and a
figure of "auto" names the method that it took (docs/earlier.py).
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "benchmarks" / "checked.json"
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ROOT / "README.md", ROOT / "docs" / "checked.md"
UNCHECKED = "not checked on GPUs yet"

sys.path[:0] = [str(ROOT), str(ROOT / "docs")]  # this shmemkit, installed or not

from bench_page import table  # noqa: E402

from shmemkit.bench.cases import CASES, host_of  # noqa: E402
from shmemkit.bench.results import ranks_of  # noqa: E402
from shmemkit.collectives import tuning  # noqa: E402
from shmemkit.tools import ledger  # noqa: E402
from shmemkit.tools.everything import files  # noqa: E402

PARTS = {host_of(op) for op in CASES}  # of which others may be made

# ---- digests


def digests_of(made, of=""):
    """-> {room: digest} of this checkout, of rooms whose names begin with `of`; `made`: what a digests.json
    has."""
    if made["sources"] != ledger.sources():
        raise ValueError(
            f"it is of a shmemkit/ with the digest {made['sources']}; here it is {ledger.sources()}. Run "
            "tests/machine_code.py again"
        )
    users, launches = {}, {}
    for module in ledger.modules():
        launches[module.__name__] = list(_launches_by(module))
        for name in {module.__name__, *map(_module_of, vars(module).values())}:
            users.setdefault(name, set()).add(module.__name__)
    result, rooms = {}, {f"shmemkit.{room}" for room in ledger.rooms()}  # who uses two rooms has both digests
    for room, names in sorted(ledger.rooms().items()):
        if not room.startswith(of):
            continue
        try:
            code = sorted(made["kernels"][f"{name}-sm_90a"] for name in names)
        except KeyError as missing:
            raise ValueError(f"{room} has no digest of {missing}; tests/machine_code.py makes all") from None
        by = {name for name in users[f"shmemkit.{room}"] if name not in rooms or name == f"shmemkit.{room}"}
        text = json.dumps([code, sorted({text for user in by for of, text in launches[user] if of in by})])
        result[room] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return result


def digests_of_methods(made):
    """-> {op: {method: digest}} of this checkout, for tuning tables; `made`: what a digests.json has."""
    rooms, result = digests_of(made, "collectives."), {}
    for op in sorted(CASES):
        kind = host_of(op)
        of_op = result[op] = {}
        for name in sorted(kind._METHODS):
            used = {room: rooms[room] for room in sorted(rooms_of(kind, name))}
            of_op[name] = hashlib.sha256(json.dumps([name, used]).encode()).hexdigest()[:16]
    return result


def rooms_of(kind, name):
    """-> the rooms of collectives whose kernels a method may launch. One that is made of other collectives
    has those of their methods whose names begin alike."""
    entry, begin = kind._METHODS[name], name.partition("_")[0]
    made = entry[0] if isinstance(entry, tuple) else entry
    if isinstance(made, type):
        todo = {_module_of(each) for each in made.__mro__}
    else:  # a function, which makes one of the classes that it names
        todo = {_module_of(made.__globals__.get(name)) for name in made.__code__.co_names}
    packages, found, parts = {_module_of(made)} & todo, set(), set()  # others have all methods of theirs
    while todo:
        name = todo.pop() or ""
        module = sys.modules.get(name)
        inside = name.startswith("shmemkit.collectives.") and name not in found
        if inside and (name in packages or not hasattr(module, "__path__")):
            found.add(name)
            todo |= {_module_of(getattr(value, "py_func", value)) for value in vars(module).values()}
            parts |= {value for value in vars(module).values() if isinstance(value, type) and value in PARTS}
    of_parts = [rooms_of(part, m) for part in parts - {kind} for m in part._METHODS if m.startswith(begin)]
    return set().union(*of_parts) | {name.removeprefix("shmemkit.") for name in found} & ledger.rooms().keys()


def stale_tables(made):
    """-> what the package's tuning table has of other kernels, though digests.json calls it current."""
    now, shipped = digests_of_methods(made), tuning.digests()
    found = []
    for op, entries in tuning.read(tuning.PACKAGED).items():
        for entry in entries:
            names = {name for output in tuning.OUTPUTS for _, name in entry[output]}
            wrong = sorted(n for n in names if now[op].get(n) != shipped.get(op, {}).get(n))
            if tuning.is_current(op, entry) and wrong:
                found.append(f"{op}, {entry['gpu']}, {entry['n_ranks']} ranks: {', '.join(wrong)}")
    return found


def _launches_by(module):
    """(of which module, JSON) of what decides how kernels are launched, as the file's docstring says."""
    found = []
    kinds = [v for v in vars(module).values() if isinstance(v, type) and _module_of(v) == module.__name__]
    found.append((module.__name__, _numbers({k: v for k, v in vars(module).items() if k.isupper()})))
    for kind in kinds:
        found.append((module.__name__, _numbers({k: getattr(kind, k) for k in dir(kind)})))
        for name, entry in getattr(kind, "_METHODS", {}).items():
            made, transport, *settings = entry if isinstance(entry, tuple) else (entry, None)
            given = _numbers(dict(*settings)), _plain(transport)
            found.append((_module_of(made), [kind._table, name, *given]))
    return [(of, json.dumps(what, sort_keys=True)) for of, what in found if what]


def _module_of(value):
    return getattr(value, "__module__", None)


def _numbers(named):
    return {k: _plain(v) for k, v in named.items() if not k.startswith("_") and _plain(v) is not None}


def _plain(value):
    """Numbers, tuples of those, and those of a dataclass; None of anything else."""
    if hasattr(value, "__dataclass_fields__"):
        return _numbers(vars(value))
    if type(value) in (tuple, list):
        parts = [_plain(part) for part in value]
        return None if None in parts else parts
    return value if type(value) in (bool, int, float) else None


# ---- the file


def take_digests(data, made):
    """Put the digests of this checkout into the file's `data`; `made`: what a digests.json has."""
    new = {"toolchain": made["toolchain"], "sources": ledger.sources(), "commit": commit()}
    data |= new | {"rooms": digests_of(made)}


def add(data, check, commit):
    """Put a run on GPUs into the file's `data`; ValueError where it says nothing of these digests."""
    about = check["ledger"]
    if not about["gpus"]:
        raise ValueError("it ran on the emulator; it must run on GPUs")
    if about["sources"] != data["sources"]:
        raise ValueError(
            f"shmemkit/ had the digest {about['sources']}; it must be {data['sources']}, of which the "
            "digests are. Check out what ran; then tests/machine_code.py, 'digests' and 'add'"
        )
    answers = {}
    for case in check["cases"]:
        for room in case.get("rooms", ()) if case["answer"] != "not tried" else ():
            answers.setdefault(room, []).append(case["answer"] == "right")
    if unknown := answers.keys() - data["rooms"].keys():
        raise ValueError(f"it names {min(unknown)}; that is no module of kernels")
    right = "incomplete" if check["answer"] == "incomplete" else "right"
    rooms = {
        room: {"digest": data["rooms"][room], "answer": right if all(some) else "wrong", "cases": len(some)}
        for room, some in sorted(answers.items())
    }
    new = about | {"commit": commit, "rooms": rooms}
    if right == "incomplete" and "untried" in check:
        new["untried"] = check["untried"]
    data["checks"] = _together([new, *(old for old in data["checks"] if not _replaces(new, old))])


def _together(checks):
    """`checks`, of which those of parts, ``check --only``, of one commit, place and day are one."""
    found = {}
    for check in checks:
        program, part, _ = check["command"].partition(" --only ")
        alike = program.partition(" --seconds")[0], check["commit"], check["n_ranks"], where(check)
        key = (*alike, check["date"][:10], str(check["versions"])) if part else id(check)
        if (first := found.setdefault(key, check)) is not check:
            first["command"] = f"{alike[0]} --only ..."
            first["rooms"] = _summed(first["rooms"], check["rooms"])
            _leave_out(first, check)
    return list(found.values())


def _leave_out(check, part):
    """`check` has another part: it has not tried what none of them has."""
    if "untried" not in check or "untried" not in part:
        return
    check["untried"] = [name for name in check["untried"] if name in part["untried"]]
    for entry in check["rooms"].values():
        if not check["untried"] and entry["answer"] == "incomplete":
            entry["answer"] = "right"


def _summed(rooms, more):
    worst = "wrong", "incomplete", "right"
    rooms = dict(rooms)
    for room, entry in more.items():
        if (known := rooms.get(room, entry)) is not entry and known["digest"] == entry["digest"]:
            answer = min(known["answer"], entry["answer"], key=worst.index)
            entry = known | {"answer": answer, "cases": known["cases"] + entry["cases"]}
        rooms[room] = entry if room not in rooms or rooms[room]["digest"] == entry["digest"] else known
    return dict(sorted(rooms.items()))


def _replaces(new, old):
    """Whether `new` says all that `old` says. What is wrong stays until the code changes."""
    same = all(new[k] == old[k] for k in ("command", "gpus", "n_ranks")) and where(new) == where(old)
    wrong = [room for room, entry in old["rooms"].items() if entry["answer"] == "wrong"]
    more = old["rooms"].keys() <= new["rooms"].keys()
    return same and more and all(old["rooms"][k]["digest"] != new["rooms"][k]["digest"] for k in wrong)


def where(check):
    """As "4 x NVIDIA H200, Python 3.12"."""
    gpus = ", ".join(f"{n} x {name}" for name, n in check["gpus"].items())
    return f"{gpus}, Python {check['machine']['python'].rpartition('.')[0]}"


def state_of(data, room):
    """-> (answer, [(number of a check, its entry)]). The answer is "wrong", "right" or "incomplete", of the
    room as it is; else "stale", or "unchecked"."""
    entries = [(n, c["rooms"][room]) for n, c in enumerate(data["checks"], 1) if room in c["rooms"]]
    current = [each for each in entries if each[1]["digest"] == data["rooms"][room]]
    current = [each for each in current if each[1]["answer"] != "incomplete"] or current
    answers = {entry["answer"] for _, entry in current}
    answer = next((a for a in ("wrong", "right", "incomplete") if a in answers), None)
    return answer or ("stale" if entries else "unchecked"), current or entries


# ---- the pages


def _cases(n):
    return f"{n} case{'s' * (n > 1)}"


def checked(data=None):
    """The tables of docs/checked.md."""
    data = data or json.loads(FILE.read_text())
    rooms, checks = [], []
    marked = {"wrong": "**wrong**", "incomplete": "right, but not all was tried,", "right": "right"}
    for room, digest in data["rooms"].items():
        answer, entries = state_of(data, room)
        text = "; ".join(f"{marked[e['answer']]} in {_cases(e['cases'])} ({n})" for n, e in entries)
        if answer == "stale":
            day = max(data["checks"][n - 1]["date"] for n, _ in entries)[:10]
            text = f"{UNCHECKED}; stale, the code of {day}: {text}"
        rooms.append([f"`{room}`", f"`{digest[:8]}`" if digest else "", text or UNCHECKED])
    for number, check in enumerate(data["checks"], 1):
        about, versions, commit = check["machine"], check["versions"], f", {check['commit']}"
        on = f"{ranks_of(check['n_ranks'])}, {about['n_nodes']} node{'s' * (about['n_nodes'] > 1)}"
        tools = [f"{k} {v}" for k, v in versions.items() if k.startswith(("numba-cuda", *ledger.COMPILERS))]
        made = f"driver {about['driver']}", f"NVSHMEM {versions.get('NVSHMEM library')}", *tools
        shown = f"{where(check)}; {on}", ", ".join(made), check["shmemkit"] + commit, check["date"][:10]
        checks.append([str(number), *shown, f"`{check['command']}`"])
    made = ", ".join(f"{name} {version}" for name, version in (data["toolchain"] or {}).items())
    parts = [table(["module of kernels", "digest", "checked on GPUs"], rooms)]
    parts += [f"The digests are of commit {data['commit']}, by {made}."] if made else []
    parts += [table(["check", "where", "with", "shmemkit", "when", "command"], checks)] if checks else []
    return "\n\n".join(parts)


def checked_line(data=None):
    """README's sentence."""
    data = data or json.loads(FILE.read_text())
    found, on = {room: state_of(data, room) for room in data["rooms"]}, {}
    for room, (answer, entries) in found.items():
        for check in (data["checks"][n - 1] for n, e in entries if answer == e["answer"] == "right"):
            on.setdefault(where(check), set()).add(room)
    wrong = [f"`{room}`" for room, (answer, _) in found.items() if answer == "wrong"]
    others = sum(answer not in ("right", "wrong") for answer, _ in found.values())
    parts = [f"checked on {at}: {len(rooms)} of {len(found)} modules of kernels" for at, rooms in on.items()]
    parts += [f"**wrong** in a check: {', '.join(wrong)}"] if wrong else []
    parts += [f"{UNCHECKED}: {others} of {len(found)} modules of kernels"] if others else []
    text = "; ".join(parts)
    return f"- {text[0].upper()}{text[1:]}. [Which, and how](docs/checked.md)."


def state(data, made):
    """-> lines: which rooms of this checkout have no check; `made`: what a digests.json has."""
    pinned = data["toolchain"] or {"toolchain": "not made yet"}
    if differ := [f"{k} {v}" for k, v in pinned.items() if made["toolchain"].get(k) != v]:
        return [f"made by another toolchain: cannot be compared with the digests by {', '.join(differ)}"]
    data, by_answer = data | {"rooms": digests_of(made)}, {}
    for room in data["rooms"]:
        by_answer.setdefault(state_of(data, room)[0], []).append(room)
    return [f"{a}: {len(r)}" + (f": {', '.join(r)}" if a != "right" else "") for a, r in by_answer.items()]


def with_tables(text, data):
    """`text` with what ``<!-- table: checked -->`` and ``<!-- table: checked_line -->`` ask for."""
    return re.sub(
        r"(<!-- table: (checked|checked_line) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}{globals()[found[2]](data)}\n{found[3]}",
        text,
        flags=re.S,
    )


def stamp_results(data):
    """Put the digests into the results that were measured with the same sources."""
    for path in sorted(RESULTS.glob("*.json")):
        found = json.loads(path.read_text())
        about = data["sources"], data["rooms"], data["commit"]
        if isinstance(found.get("measured"), dict) and files.stamp(found, *about):
            files.write(path, found)


def commit():
    git = ["git", "-C", str(ROOT)]
    status = [*git, "status", "--porcelain", "--", "shmemkit"]
    changed = subprocess.run(status, stdout=subprocess.PIPE, text=True).stdout  # also of files that are new
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], stdout=subprocess.PIPE, text=True).stdout
    return head.strip() + (" with changes" if changed else "")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=f"{__doc__}".partition("\n")[0])
    parser.add_argument(
        "what", nargs="?", choices=["pages", "digests", "add", "state", "tables"], default="pages"
    )
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE.json")
    options = parser.parse_args(arguments)
    if options.what != "pages" and not options.files:
        parser.error(f"{options.what} needs FILE.json")
    data = json.loads(FILE.read_text())
    for file in options.files:
        try:
            found = json.loads(file.read_text())
            if options.what == "state":
                print(f"{file}:", *state(data, found), sep="\n  ")
            elif options.what == "tables":
                if stale := stale_tables(found):
                    raise ValueError(
                        f"tuning.json has entries of other kernels: {'; '.join(stale)}. Run 'docs/checked.py "
                        "digests', so that they are not used, and 'bench tune' on GPUs for new ones"
                    )
            elif options.what == "digests":
                take_digests(data, found)
                made = {"toolchain": found["toolchain"], "commit": data["commit"]}
                methods = digests_of_methods(found)
                tuning.DIGESTS.write_text(json.dumps({**made, "methods": methods}, indent=1) + "\n")
            else:
                add(data, found, commit())
        except (OSError, ValueError, KeyError) as error:
            print(f"{file}: {f'it has no {error}' if type(error) is KeyError else error}", file=sys.stderr)
            if options.what != "state":
                return True
    if options.what not in ("state", "tables"):
        data["rooms"] = {room: data["rooms"].get(room) for room in sorted(ledger.rooms())}
        FILE.write_text(json.dumps(data, indent=1) + "\n")
        stamp_results(data)
        for page in PAGES:
            page.write_text(with_tables(page.read_text(), data))
    return False


if __name__ == "__main__":
    sys.exit(main())
