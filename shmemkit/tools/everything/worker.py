"""What each rank runs: ``python -m shmemkit.tools.everything.worker WORK.json [--emulate N]``.

WORK.json has the `batches`, the `folder` of results, the `heartbeat` file, in which the first rank says what
it is about to do, and `skip`: [[batch's number, case's key], ...], what has failed before.
"""

import contextlib
import json
import os
import sys
from pathlib import Path

import shmemkit as sk
from shmemkit.bench import measure, nccl
from shmemkit.bench.__main__ import NO_MULTICAST, parse, take_usual_sizes
from shmemkit.bench.torch_peer import TorchCall, leave
from shmemkit.support.whole_files import write_whole
from shmemkit.typing import Backend

from .. import ledger
from . import files
from .plan import WITH_NCCL, Batch


def run(work, backend: Backend = "emulator"):
    """All batches. Collective."""
    for name, value in NO_MULTICAST.items():
        os.environ.setdefault(name, value)
    with sk.init(backend) as world:
        nccl.kept, TorchCall.kept = {}, True
        before = measure.noting
        if world.rank == 0:  # on the emulator, for all ranks
            measure.noting = lambda of: ledger.Launches(of) if of is world else contextlib.nullcontext()
        try:
            for number, batch in enumerate(work["batches"]):
                _measure(world, work, number, Batch(*batch))
        finally:
            measure.noting = before
            kept, nccl.kept, TorchCall.kept = nccl.kept or {}, None, False
        for contender in kept.values():
            contender.close()
        leave()


def _measure(world, work, number, batch):
    path = files.path_of(work["folder"], batch, world.backend.gpu_name)
    skipped, cases = {key for of, key in work["skip"] if of == number}, []
    if world.rank == 0:
        data = files.read(path)
        cases = [
            case
            for case in batch.cases
            if batch.key(case) not in skipped and not files.is_done(data, batch, case)
        ]
    cases = world.host_allgather(cases)[0]
    if not cases:
        return
    about = {"batch": number, "file": str(path), "cases": len(cases)}
    beat = Heartbeat(work["heartbeat"] if world.rank == 0 else None, about)
    results = files.Recorder(world, batch, cases, path if world.rank == 0 else None)
    beat("")
    arguments = batch.command(cases)
    if work.get("nccl") and batch.arguments[0] in WITH_NCCL:
        arguments += ["--nccl", work["nccl"]]
    try:
        options = parse(arguments, tables=False)
        take_usual_sizes(world, options)
        options.run(world, results, options, beat.progress)
    except SystemExit as refused:  # on all ranks alike, before anything runs
        results.end(f"refused: {refused}")
    else:
        results.end()
    beat("over")


class Heartbeat:
    """Says in a file what comes next."""

    def __init__(self, path, about):
        self._path, self._about, self._n = path and Path(path), about, 0

    def __call__(self, text):
        if self._path:
            self._n += 1
            write_whole(self._path, json.dumps(self._about | {"at": text, "n": self._n}))

    @contextlib.contextmanager
    def progress(self, total):
        yield self


def main(arguments):
    work = json.loads(Path(arguments[0]).read_text())
    if arguments[1:2] == ["--emulate"]:
        sk.emu.run(run, int(arguments[2]), (work,))
    else:
        run(work, "nvshmem")


if __name__ == "__main__":
    main(sys.argv[1:])
