"""Timelines of programs: what blocks did, and for what they waited. docs/timeline.md"""

from __future__ import annotations

import os
from typing import Any

from shmemkit.support import trace_file, trace_picture
from shmemkit.support.settings import integer, shown

from .gpu_timeline import GpuRecorder
from .symmetric_memory import SymmetricMemory


class Timeline:
    """Records what kernels do, on all ranks.

        with sk.Timeline(world) as timeline:
            step(x, out)
        timeline.save("run.json")  # for ui.perfetto.dev
        print(timeline)

    world    the World
    records  how many spans and marks each rank keeps, on GPUs each multiprocessor; default: 100,000, on GPUs
             1,000. More are counted, and not kept

    Entering and leaving the ``with`` block are collective; leaving it waits for all work of all ranks. On the
    emulator everything that kernels do for others to see is recorded, in steps (docs/timeline.md), with an
    arrow from each store, put and signal to the wait that it satisfied. On GPUs, in nanoseconds: the blocks,
    waits and launches of kernels that are bound inside the block (``sk.bind``, and objects of shmemkit that
    are made there), and their copies by copy engines. `begin_phase`, `end_phase` and `mark` of
    ``shmemkit.device`` add a kernel's own phases and marks.

    `data` is the dictionary that ``save`` writes: Chrome's trace events. ``print(timeline)`` prints its
    summary. A notebook shows its picture. TypeError or ValueError for wrong arguments; RuntimeError for what
    needs a recorded timeline before the block is left, or for a second block.
    """

    def __init__(self, world: Any, records: int | None = None):
        if not isinstance(world, SymmetricMemory):
            raise TypeError(
                f"Timeline: world is {shown(world)}; it must be the World that shmemkit.init() returns"
            )
        self.world: Any = world
        self._records = None if records is None else integer("Timeline", "records", records, 1)
        self._stop: Any = None
        self._abandon: Any = None
        self._data: Any = None

    def __enter__(self) -> Timeline:
        if self._stop is not None or self._data is not None:
            raise RuntimeError("Timeline: it records one block, and has begun that. Make another Timeline")
        if self.world.backend.name == "emulator":
            self._stop = self._abandon = self.world.backend.record(self._records)
        else:
            recorder = GpuRecorder(self.world, self._records)
            self._stop, self._abandon = recorder.stop, recorder.abandon
        self.world.host_barrier()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        try:
            if error is None:
                self.world.synchronize()
                self.world.host_barrier()
                self._data = trace_file.merged(self.world.host_allgather(self._stop()))
        finally:
            if self._data is None:  # the other ranks may never come
                self._data = trace_file.merged([self._abandon()])

    @property
    def data(self) -> dict[str, Any]:
        if self._data is None:
            raise RuntimeError("Timeline: nothing is recorded yet. Use it in a with block, and leave that")
        return self._data

    def save(self, path: str | os.PathLike) -> None:
        """Write the file `path`, whole or not at all. Rank 0 does it; on other ranks it does nothing. OSError
        if that fails."""
        data = self.data
        trace_file.timeline_file("save(): path", path)
        if self.world.rank == 0:
            trace_file.save(data, path)

    def svg(self) -> str:
        """-> a picture, as SVG. It needs matplotlib: ``pip install 'shmemkit[bench]'``"""
        return trace_picture.svg(self.data)

    def __str__(self) -> str:
        return trace_file.summary(self.data)

    def _repr_svg_(self):
        return None if self._data is None else self.svg()
