"""The command: options, starting the ranks, running the cases, and what is said of them."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fnmatch
import json
import os
import platform
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import shmemkit as sk
from shmemkit import __version__
from shmemkit.bench.refusal import Refused, agreed
from shmemkit.comm.choice import launched
from shmemkit.compiler import jit_cache
from shmemkit.compiler.machine_code import compiled_kernels
from shmemkit.emu.errors import EmulatorError
from shmemkit.runtime.world import choose_backend
from shmemkit.support import timeouts
from shmemkit.support.agreement import counted
from shmemkit.support.command_line import messages_only, say
from shmemkit.support.gpus import Driver, n_gpus
from shmemkit.support.host_program import host_program
from shmemkit.support.installed import driver_release, versions
from shmemkit.support.progress import showing

from .. import ledger, machine_code, mpirun
from . import records
from .plan import cases
from .soak import soak
from .subjects import Arrays
from .trials import Trials, Wrong

PACKAGES = ["numba", "numba-cuda", "llvmlite", "numpy", "ml-dtypes", "mpi4py", *jit_cache.PACKAGES]
HELP = "check that every operation is right on this machine, with its GPUs and this Python"
RIGHT, WRONG, USAGE, INCOMPLETE = 0, 1, 2, 3
EMULATED_RANKS = 4
LIMIT = 120.0  # seconds that a step of a case may take
A_CASE, FROM_CACHE, A_CASE_EMULATED = 1.2, 0.5, 0.5  # seconds, about, where no check has run yet
DETAILS = """
It runs every collective by each of its methods, GEMMs, MoE layers, attention, RMSNorm, queues, barriers and
groups: eagerly, back to back, in graphs, and under random skew between ranks. It compares all elements with
the expected results. It starts a rank on each GPU; without a GPU, 4 ranks on the emulator.

Exit status: 0 passed; 1 wrong, or a rank failed or hung; 3 incomplete: something was not tried that
method="auto" can take here, or of an operation without "auto".
"""


# ---- options


class Parser(argparse.ArgumentParser):
    def error(self, message):
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def parse(arguments):
    parser = Parser(
        prog="shmemkit check",
        description=f"{HELP[0].upper()}{HELP[1:]}.",
        epilog=DETAILS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "-n", type=_positive, metavar="N", help="ranks; default: one for each GPU, or 4 emulated ones"
    )
    text = (
        'start no case after S seconds; first come those that "auto" takes here, then each protocol once, '
        "then the rest"
    )
    parser.add_argument("--seconds", type=_seconds, metavar="S", help=text)
    text = (
        "only cases of these names; those that contain one; or, with a *, those that are like it; see --list"
    )
    parser.add_argument("--only", default="", metavar="A,B", help=text)
    text = "random calls of all operations, mixed, until --seconds have passed or you stop it"
    parser.add_argument("--soak", action="store_true", help=text)
    parser.add_argument("--json", metavar="FILE", help="write all results to FILE")
    parser.add_argument("--list", action="store_true", help="print the cases in running order, and stop")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of what is random; default 0")
    options = parser.parse_args(arguments)
    if options.json and options.soak:
        parser.error("--soak writes no file: leave --json out")
    if options.json:
        folder = os.path.dirname(os.path.abspath(options.json))
        if not os.path.isdir(folder):
            parser.error(f"--json is {options.json}, and there is no folder {folder}")
    return options


def _positive(text):
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"it is {text!r}; it must be an integer of 1 or more")
    return int(text)


def _seconds(text):
    try:
        return timeouts.as_seconds(text, timeouts.VARIABLE)
    except ValueError:
        raise argparse.ArgumentTypeError(f"it is {text!r}; it must be a number greater than 0") from None


# ---- starting


def main(arguments):
    """Run the command in the ranks that there are, or start some. -> exit status, the same on all ranks"""
    options = parse(arguments)
    host = host_program()
    with messages_only("shmemkit check"):
        in_ranks = host.n_ranks is not None or launched()
        backend, _ = choose_backend()
    if in_ranks:
        return check(options)
    if backend == "emulator":
        return emulated(options)
    gpus = n_gpus()
    n = options.n or max(1, gpus)
    if n > gpus and "SHMEMKIT_OVERSUBSCRIBE" not in os.environ:
        say(f"shmemkit check: {n} ranks share {counted(gpus, 'GPU')}")
        os.environ["SHMEMKIT_OVERSUBSCRIBE"] = "1"
    if n == 1:
        return check(options)
    return mpirun.main(["-n", str(n), "-m", "shmemkit", "check", *arguments])


def emulated(options):
    try:
        return max(sk.emu.run(check, options.n or EMULATED_RANKS, (options,)))
    except EmulatorError as error:
        say(f"shmemkit check: failed in {Watch.step}\n{error}")
        return WRONG


# ---- running


class Watch:
    """Ends the process, and says where, when a step takes longer than its limit: nothing hangs."""

    step = ""  # of this process, the last one

    def __init__(self, world, limit):
        self.world, self.limit, self.since = world, limit, time.monotonic()
        self.ended = threading.Event()
        if host_program().n_ranks is None:  # the emulator finds deadlocks by itself
            threading.Thread(target=self._look, daemon=True).start()

    def __call__(self, step):
        Watch.step, self.since = step, time.monotonic()

    def _look(self):
        while not self.ended.wait(0.5):
            if time.monotonic() - self.since > self.limit:
                self._give_up()

    def _give_up(self):
        say(
            f"shmemkit check: rank {self.world.rank} hangs in {self.step}: it has not ended in "
            f"{self.limit:g} s. SHMEMKIT_TIMEOUT=S allows 2 S + 10 seconds, and names the waits that are late"
        )
        time.sleep(1.0)  # the others say where they are
        if self.world.n_ranks > 1:
            self.world.comm.Abort(WRONG)
        os._exit(WRONG)


def check(options):
    """On each rank. -> exit status"""
    with messages_only("shmemkit check"):
        world = sk.init()
    with world:
        if options.n not in (None, world.n_ranks):
            text = f"-n is {options.n}, and the launcher started {counted(world.n_ranks, 'rank')}"
            raise SystemExit(f"shmemkit check: {text}. Leave it out")
        watch = Watch(world, _limit(world))
        try:
            noted = ledger.Launches(world) if world.rank == 0 else contextlib.nullcontext()
            with compiled_kernels() as compiled, noted as launches:
                return Check(world, options, watch, compiled, launches).run()
        finally:
            watch.ended.set()


def _limit(world):
    limit = timeouts.default()
    if limit is None:
        return LIMIT if world.backend.name != "emulator" else 10 * LIMIT
    return 2 * limit + 10  # kernels' waits end first, and say more


class Check:
    def __init__(self, world, options, watch, compiled, launches):
        self.launches, self.ledger = launches, ledger.about(world)
        self.world, self.options, self.watch, self.compiled = world, options, watch, compiled
        self.begin, self.first = time.monotonic(), world.rank == 0
        self.results: list[dict[str, Any]] = []
        self.takes = set()  # what "auto" has been seen to take
        self.all = cases(world)
        chosen = {name for wanted in options.only.split(",") for name in self.named(wanted)}
        self.cases = [case for case in self.all if case.name in chosen]
        self.trials = Trials(world, options.seed, watch)
        self.gpu, self.gpus = (self.ledger["machine"][name] for name in ("gpu", "gpus"))

    def named(self, wanted):
        """-> the name, the names that contain it, or with a * those that are like it"""
        names = [case.name for case in self.all]
        if "*" in wanted:
            return fnmatch.filter(names, wanted)
        return [wanted] if wanted in names else [name for name in names if wanted in name]

    def run(self):
        options = self.options
        if not self.cases:
            self.watch.ended.set()
            if self.first:
                text = f"--only is {options.only!r}, and no case has that in its name"
                say(f"shmemkit check: {text}; see --list")
            return USAGE
        if options.list:
            self.say("\n".join(case.name + (", auto" if case.needed else "") for case in self.cases))
            return RIGHT
        self.say(self.about())
        if options.soak:
            return soak(self)
        with showing("check", len(self.cases), "cases") as task:
            for case in self.cases:
                task.done, task.detail = len(self.results), case.name
                self.results.append(self.one(case))
        self.look_at_machine_code()
        return self.conclude()

    def say(self, text):
        if self.first:
            print(text, flush=True)

    # -- before
    def about(self):
        world, n = self.world, len(self.cases)
        where = ", ".join(f"{count} x {name}" for name, count in self.gpus.items()) or "the emulator"
        where = ", ".join(f"{count} x {name}" for name, count in self.gpus.items()) or "the emulator"
        ranks = counted(world.n_ranks, "rank")
        text = f"shmemkit {__version__}, Python {platform.python_version()}, {ranks} on {where}"
        text += f": {n} of {len(self.all)} cases" if n < len(self.all) else f": {counted(n, 'case')}"
        if self.options.soak:
            return f"{text}, mixed"
        last = records.read(self.gpu, world.n_ranks) if n == len(self.all) else None
        if last and last["seconds"]:
            whole, compiling = last["seconds"]
            times = f"{_time(whole)}, and {_time(whole - compiling)} without compiling, as the last time here"
        elif world.backend.name == "emulator":
            times = f"about {_time(n * A_CASE_EMULATED)}"
        else:
            times = f"about {_time(n * A_CASE)} cold, {_time(n * FROM_CACHE)} from the cache"
        if self.options.seconds:
            times += f"; --seconds {self.options.seconds:g} ends it before, if need be"
        return f"{text}, {times}"

    # -- cases
    def one(self, case):
        """-> what there is to say of the case: a dictionary, the same on all ranks"""
        begin = time.monotonic()
        row = {"case": case.name, "of": case.of, "method": case.method, "dtype": case.dtype}
        row |= {"variant": case.variant, "protocol": case.protocol, "needed": case.needed}
        if self.late():
            return row | {"answer": "not tried", "why": "out of time"}
        try:
            answer = self.tried(case)
        except Exception as error:
            say(f"shmemkit check: rank {self.world.rank} failed in {Watch.step}: {type(error).__name__}")
            raise
        if self.launches is not None:
            row["rooms"] = self.launches.take()
        return row | answer | {"seconds": round(time.monotonic() - begin, 3)}

    def late(self):
        """Whether --seconds have passed, on rank 0. Collective."""
        seconds, passed = self.options.seconds, time.monotonic() - self.begin
        return bool(seconds) and self.world.host_allgather(passed > seconds)[0]

    def tried(self, case):
        world, trials, arrays = self.world, self.trials, Arrays(self.world)
        begin = trials.call

        def step(text):
            self.watch(f"{case.name}, {text}")

        trials.step = step
        step("its construction")
        try:
            made = agreed(world, partial(case.make, world, arrays))
        except Refused as reason:
            return {"answer": "not tried", "why": _why_not(reason)}
        self.takes |= {(case.of, method) for method in made.takes}
        answer: dict[str, Any] = {"answer": "right", "ways": [], "sizes": [], "refused": made.refused}
        for subject in made.subjects:
            step(f"{subject.name}, the first call")
            try:
                agreed(world, partial(trials.first, subject))
                ways = trials.run(subject, case.thin)
            except Refused as reason:
                answer["refused"].append(f"{subject.name}: {reason}")
                continue
            except Wrong as wrong:
                answer |= {"answer": "wrong", "where": Watch.step, "findings": wrong.findings}
                self.say("\n    ".join([f"WRONG: {Watch.step}", *wrong.findings]))
                break
            answer["sizes"].append(subject.name)
            answer["ways"] += [way for way in ways if way not in answer["ways"]]
        made.free()
        answer["calls"] = trials.call - begin
        if answer["answer"] == "right" and not answer["sizes"]:
            return {"answer": "not tried", "why": _why_not(answer["refused"][0])}
        return answer

    # -- after
    def look_at_machine_code(self):
        """A row of results: whether lines are whole in the machine code that was run."""
        self.watch("reading the machine code")
        tool, found, failed = machine_code.disassembler(), [], None
        if tool is not None and self.first:

            def look(each):
                name, cubin, lines, packets = each
                code = machine_code.disassembled(tool, cubin)
                stores, loads, torn = machine_code.lines_of(code, lines, packets)
                return sum(stores) + sum(loads), [f"kernel {name}: {line}" for line in torn]

            try:
                with ThreadPoolExecutor(4) as pool:
                    found = list(pool.map(look, self.compiled.cubins))
            except (OSError, subprocess.CalledProcessError) as error:  # older than the GPU, for one
                failed = f"{' '.join(tool)} fails: {(getattr(error, 'stderr', None) or str(error)).strip()}"
        seen, torn = sum(n for n, _ in found), [line for _, lines in found for line in lines]
        torn, seen, failed = self.world.host_allgather((torn, seen, failed))[0]
        row: dict[str, Any] = {"case": "machine code", "of": "machine code", "method": "LL128", "dtype": ""}
        row |= {"variant": "", "protocol": "lines", "needed": False, "accesses": seen}
        if not seen and not torn:
            why = "no LL128 kernel was compiled" if tool else "neither nvdisasm nor cuobjdump is installed"
            row |= {"answer": "not tried", "why": failed or why}
        else:
            row |= {"answer": "wrong" if torn else "right", "findings": torn}
        if torn:
            self.say(
                "\n    ".join(["WRONG: LL128 lines not accessed by one instruction of a warp", *torn[:8]])
            )
        self.results.append(row)

    def conclude(self):
        """Write what was asked for, print the table and the answer. -> exit status"""
        rows, seconds = self.results, time.monotonic() - self.begin
        wrong = [row for row in rows if row["answer"] == "wrong"]
        untried = self.untried()
        status = WRONG if wrong else INCOMPLETE if untried else RIGHT
        answer = {RIGHT: "passed", WRONG: "wrong", INCOMPLETE: "incomplete"}[status]
        if self.first:
            whole = len(self.cases) == len(self.all) and not self.options.seconds
            times = (round(seconds, 1), round(self.compiled.seconds, 1)) if whole else None
            why = left_out(untried) if answer == "incomplete" else ""
            records.write(self.gpu, self.world.n_ranks, answer, times, len(rows), why)
            if self.options.json:
                self.write(answer, status, seconds)
            print(table(rows))
            print(conclusion(answer, rows, wrong, untried, seconds), flush=True)
        return status

    def untried(self):
        """What "auto" can take here, or has no "auto", and was not tried: names. A method may refuse this
        machine, and then "auto" takes another. But "auto" refuses nothing, an operation without it has no
        other, and what fits on no GPU is no refusal."""
        done = {row["case"]: row for row in self.results}
        with_auto = {case.of for case in self.all if case.method == "auto"}
        tried = {(row["of"], row["method"]) for row in self.results if row["answer"] != "not tried"}
        names = []
        for case in self.all:
            row, method = done.get(case.name), (case.of, case.method)
            if not case.needed and method not in self.takes:
                continue
            strict = case.method == "auto" or case.of not in with_auto or method in self.takes - tried
            if row is None:
                names.append(case.name)
            elif row["answer"] == "not tried":
                if strict or not row["why"].startswith("refused"):
                    names.append(case.name)
            elif any(strict or _unfit(reason) for reason in row["refused"]):
                names.append(f"{case.name} in all sizes")
        return names

    def write(self, answer, status, seconds):
        found = {
            "format": records.FORMAT,
            "answer": answer,
            "exit_status": status,
            "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "seconds": round(seconds, 1),
            "compiling": round(self.compiled.seconds, 1),
            "arguments": {name: value for name, value in vars(self.options).items() if value},
            "machine": {
                "gpus": self.gpus,  # as in "ledger": ranks may share one
                "ranks": self.world.n_ranks,
                "nodes": self.world.n_nodes,
                **records.identity(self.gpu),
                "platform": platform.platform(),
                "driver": _driver(),
                "packages": versions(PACKAGES),
            },
            "ledger": self.ledger,
            "untried": self.untried(),
            "cases": self.results,
        }
        with open(self.options.json, "w") as file:
            json.dump(found, file, indent=1)


def _unfit(reason):
    """Whether the launch of a kernel was refused: it needs more registers or memory than there are."""
    return "bind(): " in str(reason)


def _why_not(reason):
    return f"{'does not fit' if _unfit(reason) else 'refused'}: {reason}"


def _driver():
    try:
        return {"cuda": ".".join(map(str, Driver().version())), "release": driver_release() or ""}
    except OSError:
        return None


def _time(seconds):
    minutes, seconds = divmod(round(seconds), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


# ---- what is printed


def table(rows):
    """A line for each operation and method: how many of its cases are right, wrong and not tried."""
    found = {}
    for row in rows:
        found.setdefault((row["of"], row["method"]), []).append(row)
    lines: list[tuple[str, ...]] = [
        ("operation", "method", "right", "wrong", "not tried", "seconds", "why not")
    ]
    for (of, method), those in found.items():
        counts = [sum(row["answer"] == answer for row in those) for answer in ("right", "wrong", "not tried")]
        reasons = [
            why for row in those for why in (row.get("why"), *map(_why_not, row.get("refused", ()))) if why
        ]
        why = "; ".join(dict.fromkeys(reasons))
        seconds = sum(row.get("seconds", 0) for row in those)
        lines.append((of, method, *(str(c or "") for c in counts), f"{seconds:.1f}" if seconds else "", why))
    widths = [max(map(len, column)) for column in zip(*(line[:-1] for line in lines), strict=True)]
    return "\n".join("  ".join([*map(str.ljust, line, widths), _short(line[-1])]).rstrip() for line in lines)


def _short(text, most=100):
    return text if len(text) <= most else f"{text[: most - 3]}..."


def left_out(untried):
    names = f"{', '.join(untried[:4])}{', ..' * (len(untried) > 4)}"
    return f"not tried, of what must be right here: {counted(len(untried), 'case')}: {names}"


def conclusion(answer, rows, wrong, untried, seconds):
    right = sum(row["answer"] == "right" for row in rows)
    rest = len(rows) - right - len(wrong)
    counts = f"{right} right, {len(wrong)} wrong, {rest} not tried, in {_time(seconds)}"
    if wrong:
        return f"WRONG: {', '.join(row['case'] for row in wrong[:6])}{', ..' * (len(wrong) > 6)}. {counts}"
    if untried:
        return f"incomplete: {left_out(untried)}. {counts}"
    return f'passed: all that "auto" takes here is right. {counts}'
