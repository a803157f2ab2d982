"""``shmemkit bench everything``: measure all that this machine's GPUs can, into the files of a folder.

This process starts the ranks and watches them. What hangs or fails is ended, its case says so in its file,
and new ranks go on with the next case. It touches no GPU itself.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from shmemkit.bench.options import positive
from shmemkit.bench.results import ranks_of
from shmemkit.support.command_line import say
from shmemkit.support.gpus import n_gpus

from . import files, plan

FOLDER, LIMIT = Path("benchmarks", "results"), 60
EPILOG = """Interrupt it, or let --seconds end it: all cases that are over are in their files, and the same
command goes on. To measure on several machines, give each a part and a folder, and --merge the folders."""
WORKER = "shmemkit.tools.everything.worker"
POLL = 0.05  # seconds


def _part(text):
    k, _, n = text.partition("/")
    if not (k.isdecimal() and n.isdecimal() and 1 <= int(k) <= int(n)):
        raise argparse.ArgumentTypeError(f"it is {text!r}; it must be K/N, as 1/6, with K up to N")
    return int(k), int(n)


def _parser():
    parser = argparse.ArgumentParser(
        prog="shmemkit bench everything",
        description="Measure every operation beside its peers on this machine's GPUs, and write all files of "
        "results. What the files have of these very sources is not measured again.",
        epilog=EPILOG,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--quick", action="store_true", help="auto and its peers at four sizes, one shape of each layer")
    add("--part", type=_part, metavar="K/N", help="the K-th of N parts; the first have what matters most")
    text = f"stop after so long; default of --quick {plan.QUICK_SECONDS}, of --part {plan.PART_SECONDS}"
    add("--seconds", type=positive, metavar="N", help=text)
    text = "seconds that one step may take before it counts as hung (%(default)s)"
    add("--limit", type=positive, default=LIMIT, metavar="N", help=text)
    add("--folder", type=Path, help=f"of the files; default {FOLDER}, in a clone of the repository")
    text = "the libnccl.so.2 to compare with; default: the installed one"
    add("--nccl", metavar="FILE", help=text)
    add("--only", default="", metavar="A,B", help="these files, as all_reduce,ag_gemm")
    add("--dry-run", action="store_true", help="say what would be measured, and about how long it takes")
    text = "measure nothing; take what is newer from the files there"
    add("--merge", type=Path, metavar="FOLDER", help=text)
    text = "ranks on the emulator, whose times mean nothing; needs --folder"
    add("--emulate", type=positive, metavar="N", help=text)
    return parser


def main(arguments):
    """-> exit status: 1 if a case failed, or hung."""
    parser = _parser()
    options = parser.parse_args(arguments)
    gpus = options.emulate or n_gpus()
    if options.folder is None and options.emulate:
        parser.error("--emulate needs --folder: times of the emulator do not belong to the results")
    options.folder = options.folder or FOLDER
    if not options.folder.is_dir():
        parser.error(f"the folder {options.folder} does not exist. Make it, or name another one by --folder")
    if options.nccl:
        if not os.path.isfile(options.nccl):
            parser.error(f"--nccl: the file {options.nccl} does not exist; it must be a libnccl.so.2")
        options.nccl = os.path.abspath(options.nccl)
    if options.merge:
        if not options.merge.is_dir():
            parser.error(f"--merge: the folder {options.merge} does not exist")
        changed = files.merge(options.folder, options.merge)
        print(f"changed: {', '.join(changed) or 'nothing'}")
        return 0
    if not gpus:
        parser.error("there is no GPU. On the emulator: --emulate 2 --folder FOLDER")
    try:
        only = [name for name in options.only.split(",") if name]
        whole = plan.batches(gpus, options.quick, only, bool(options.emulate))
    except ValueError as error:
        parser.error(str(error))
    if not options.seconds and not options.emulate:
        options.seconds = plan.QUICK_SECONDS if options.quick else options.part and plan.PART_SECONDS
    k, n = options.part or (1, 1)
    made = plan.parts(whole, gpus, n)[k - 1]
    _announce(made, whole, gpus, options)
    if options.dry_run:
        return 0
    run = Run(gpus, options)
    try:
        for ranks in dict.fromkeys(batch.ranks for batch in made):
            run.measure([batch for batch in made if batch.ranks == ranks], ranks)
    except KeyboardInterrupt:
        say("interrupted; the same command goes on")
        return 130
    finally:
        run.end()
    return int(run.report())


def _announce(made, whole, gpus, options):
    where = "emulated " * bool(options.emulate) + ("rank" if options.emulate else "GPU") + "s" * (gpus > 1)
    seconds = plan.expected(made, gpus)
    print(f"{gpus} {where}, into {options.folder}; about {_time(seconds)}:", flush=True)
    for batch in made:
        print(f"  {_time(plan.wall(batch, gpus)):>6}  {batch.text}", flush=True)
    total = plan.expected(whole, gpus)
    if not options.part and total > plan.PART_SECONDS:
        n = plan.parts_of_limit(whole, gpus)
        print(f"in parts of at most {plan.PART_SECONDS} s: --part 1/{n}, and so on", flush=True)


def _time(seconds):
    return f"{seconds:.0f} s" if seconds < 300 else f"{seconds / 60:.0f} min"


class Run:
    """What was done so far."""

    def __init__(self, gpus, options):
        self.gpus, self.options = gpus, options
        self.stop = time.monotonic() + options.seconds if options.seconds else None
        self.failed, self.late, self._lanes = [], False, []
        self.begun, self._shown = time.monotonic(), 0.0

    def measure(self, batches, ranks):
        """Run `batches`, all of `ranks` ranks each. Groups of GPUs share them, side by side."""
        if self.late:
            return
        count = 1 if self.options.emulate else plan.lanes(self.gpus, ranks)
        work = [[] for _ in range(count)]
        for of_file in _by_file(batches):
            min(work, key=lambda lane: sum(batch.total for batch in lane)).extend(of_file)
        visible = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
        visible = visible if len(visible) >= self.gpus else [str(i) for i in range(self.gpus)]
        self._lanes = [
            Lane(self, mine, ranks, visible[i * ranks : (i + 1) * ranks], count)
            for i, mine in enumerate(work)
            if mine
        ]
        while any([lane.poll() for lane in self._lanes]):  # all of them
            if self.stop and time.monotonic() > self.stop:
                self.late = True
                self.end()
                return
            time.sleep(POLL)

    def end(self):
        """Stop what runs."""
        for lane in self._lanes:
            lane.end()
        self._lanes = []

    def tell(self, text):
        print(f"{time.monotonic() - self.begun:6.0f} s  {text}", flush=True)

    def report(self):
        if self.late:
            self.tell("--seconds is over; the same command goes on")
        self.tell(f"{len(self.failed)} cases failed" if self.failed else "no case failed")
        return bool(self.failed)


def _by_file(batches):
    """Two groups never write one file at a time."""
    found = {}
    for batch in batches:
        found.setdefault(batch.file, []).append(batch)
    return found.values()


class Lane:
    """Some GPUs, and the batches for them. ``poll()`` says whether there is more to do."""

    _process: Any

    def __init__(self, run, batches, ranks, gpus, lanes):
        self._run, self._batches, self._ranks, self._gpus, self._lanes = run, batches, ranks, gpus, lanes
        self._skip, self._before, self._process = [], set(), None
        self._folder = tempfile.TemporaryDirectory()
        self._beat, self._seen, self._since = Path(self._folder.name, "beat.json"), None, 0.0
        self._start()

    def poll(self):
        if self._process is None:
            return False
        status, beat = self._process.poll(), self._read()
        if beat != self._seen:
            if beat and (not self._seen or beat["batch"] != self._seen["batch"]):
                batch = self._batches[beat["batch"]]
                self._run.tell(f"{batch.file}, {ranks_of(batch.ranks)}: {beat['cases']} cases")
            self._seen, self._since = beat, time.monotonic()
        # The first one waits for all imports and for MPI.
        limit = self._run.options.limit * (1 if self._seen else 2)
        if status is None and time.monotonic() > self._since + limit:
            self._kill()
            self._failed(f"hung: no step ended within {limit} s")
        elif status == 0:
            self.end()
        elif status is not None:
            self._failed(f"failed: {_reason(Path(self._folder.name, 'errors').read_text()) or status}")
        return self._process is not None

    def end(self):
        if self._process is not None:
            self._kill()
        self._process = None
        self._folder.cleanup()

    def _failed(self, answer):
        """Note it, and go on with the next case."""
        beat, self._process = self._seen, None
        if beat is None:
            say(Path(self._folder.name, "errors").read_text())
            self._run.failed.append(answer)
            self._run.tell(f"the ranks did not start: {answer}")
            return
        number, at = beat["batch"], beat["at"]
        batch, path = self._batches[number], Path(beat["file"])
        skipped = {key for of, key in self._skip if of == number}
        data = files.read(path)
        left = [c for c in batch.cases if batch.key(c) not in skipped and not files.is_done(data, batch, c)]
        failed = [case for case in left if at.split(",")[0] == batch.shown(batch.key(case))]
        if not failed:  # before a case, or at what several have in common: then it happens again
            failed = left if (number, at) in self._before else left[:1]
            self._before.add((number, at))
        for case in failed:
            text = f"{answer}, at {at}" if at else answer
            files.note(path, batch, case, text, data and {})
            self._skip.append([number, batch.key(case)])
            self._run.failed.append(case)
            self._run.tell(f"{batch.file}, {case or 'all'}: {text}")
        if not left:
            self._skip += [[number, batch.key(case)] for case in batch.cases]
        self._start()

    def _read(self):
        with contextlib.suppress(OSError, ValueError):
            return json.loads(self._beat.read_text())
        return None

    def _start(self):
        self._beat.unlink(missing_ok=True)
        work = {"batches": self._batches, "folder": str(self._run.options.folder)}
        work |= {"nccl": self._run.options.nccl}
        work |= {"heartbeat": str(self._beat), "skip": self._skip}
        path = Path(self._folder.name, "work.json")
        path.write_text(json.dumps(work))
        environment, n = dict(os.environ), self._ranks
        if self._run.options.emulate:
            command = [sys.executable, "-m", WORKER, str(path), "--emulate", str(n)]
        else:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus)
            if self._lanes > 1:  # each MPI would bind its ranks to the same cores
                environment.setdefault("OMPI_MCA_hwloc_base_binding_policy", "none")
            ranks = [] if n == 1 else ["-m", "shmemkit", "run", "-n", str(n)]
            command = [sys.executable, *ranks, "-m", WORKER, str(path)]
        self._seen, self._since = None, time.monotonic()
        with open(Path(self._folder.name, "errors"), "w") as errors:
            self._process = subprocess.Popen(
                command, env=environment, stdout=errors, stderr=errors, start_new_session=True
            )

    def _kill(self):
        """The process and all that it started."""
        for kind, seconds in ((signal.SIGTERM, 10), (signal.SIGKILL, 5)):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, kind)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(seconds)
                if kind is signal.SIGKILL:
                    return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)


def _reason(text):
    """The last line that names an error, without what a launcher adds."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception", "Exit"))]
    return (named or lines or [""])[-1][:300]
