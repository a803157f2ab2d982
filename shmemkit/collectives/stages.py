"""Methods made of other methods, their stages: an all-reduce is a reduce-scatter and an all-gather.

The stages get n_ranks segments of a multiple of 16 bytes. What remains of an array, fewer than 16 * n_ranks
bytes, follows them in a launch of its own, by LL packets: no array is copied to be padded.
"""

from typing import Any, ClassVar

from shmemkit.device.packets.transports import LL
from shmemkit.operations.method import Method


class Staged(Method):
    """A subclass has

    name         of it, as "all_reduce push"
    rest         (schedule, settings) of the method for what remains
    make_stages  (room, *options): appends to `stages` those for arrays of `room` bytes
    bind_stages  (x, out, in_place, dtype) -> run(stream): for whole segments, of uint64 or uint8

    of_stages    settings of the stages
    """

    name: str
    rest: tuple[type[Method], dict[str, Any]]
    of_stages: ClassVar[dict[str, Any]] = {}

    def prepare(self, max_nbytes, *options):
        schedule, settings = self.rest
        self.unit, self.stages = 16 * self.world.n_ranks, []
        try:
            self.make_stages(max(1, max_nbytes // self.unit) * self.unit, *options)
            name = f"{self.name} rest"
            self.stages.append(
                schedule(self.world, self.unit, *options, name=name, t=LL, sms=self.sms, **settings)
            )
        except ValueError as refusal:
            raise type(refusal)(f"{self.name}: {refusal}") from None

    def bind(self, x, out, in_place, dtype):
        x, out = x.view("uint8"), out.view("uint8")
        whole, steps = x.size // self.unit * self.unit, []
        if whole:
            segments = LL.wide(self.world, x[:whole], out[:whole], whole)
            steps.append(self.bind_stages(*segments, in_place, dtype))
        if whole < x.size:
            steps.append(self.stages[-1].bind(x[whole:], out[whole:], in_place, dtype))
        return steps[0] if len(steps) == 1 else in_turn(*steps)

    def free(self):
        while self.stages:
            self.stages.pop().free()
        super().free()


def in_turn(*steps):
    """-> run(stream): one after the other"""

    def run(stream):
        for step in steps:
            step(stream)

    return run
