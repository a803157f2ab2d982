"""What the methods of host objects share: symmetric memory, and kernels that are bound once for each grid."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shmemkit.runtime.budget import check_budget, within
from shmemkit.runtime.launch import Launch, bind
from shmemkit.runtime.world import World
from shmemkit.support.agreement import as_message, check_equal, raise_on_all
from shmemkit.support.settings import listed
from shmemkit.typing import Array, DType, Shape

_MANY_RANKS = 16  # of the emulator: blocks have fewer threads then, where their kernels need no whole warp


def agree(world, prepare, free):
    """Call ``prepare()``: all ranks complete it, or none. Collective.

    When it raises TypeError, ValueError or MemoryError on any rank, all ranks call ``free()`` and raise
    their own error, or else the error of the first rank that has one. They agree on that when prepare has
    ended: prepare makes all its collective calls before the first check that can fail on one rank only.
    """
    error = None
    try:
        prepare()
    except (TypeError, ValueError, MemoryError) as e:
        error = e
    errors = world.host_allgather(as_message(error))
    if any(errors):
        free()
    raise_on_all(error, errors)


def agree_on(world, who, check):
    """Call ``check()`` -> {name: value}, the arguments of a `who`. Collective.

    All ranks raise, as of ``agree``, when it raises TypeError or ValueError on any of them; and ValueError
    unless all make a `who` with the same arguments.
    """
    error = None
    arguments: Any = None
    try:
        arguments = check()
    except (TypeError, ValueError) as e:
        error = e
    answers = world.host_allgather((as_message(error), who, arguments))
    errors, made, given = zip(*answers, strict=True)
    raise_on_all(error, errors)
    check_equal(made, "All ranks must make the same objects in the same order", "make")
    differ = [name for name in arguments if any(other[name] != arguments[name] for other in given)]
    texts = [", ".join(f"{name}={other[name]!r}" for name in differ) for other in given]
    check_equal(texts, f"{who} needs the same {listed(differ, 'and')} on all ranks" if differ else "")


def parts_of(max_nbytes, segments, most, least, unit=128):
    """-> how many parts a segment has at most, and bytes of the largest, where so many segments have
    `max_nbytes` at most; `most`, `least` and `unit` as in ``cut``."""
    segment = max(1, -(-max_nbytes // segments))
    parts = min(most, -(-segment // least))
    return parts, max(min(least, segment), -(-segment // parts)) + unit - 1 & -unit


def cut(segment, most, least, unit=128):
    """-> (the number of parts of a segment of `segment` bytes, bytes of a part). There is a part for each
    `least` bytes, but `most` at most; its size is a multiple of `unit`."""
    parts = min(most, -(-segment // least))
    return parts, -(-segment // parts) + unit - 1 & -unit


class Method:
    """One way to do a collective operation. A subclass has

    prepare(*args)   called once, by all ranks; ValueError, which says why, where it cannot run. First come
                     all collective calls: ``World.check_reach`` and others that raise on all ranks,
                     ``zeros``, ``empty``. Then what one rank alone may refuse: each kernel is bound for each
                     dtype, so that none is compiled while others wait
    bind(...)        -> run(stream): enqueues one operation on these arrays; a stream of None is the World's

    kernel_of(n_ranks, op, dtype, **settings)
                     -> the kernel, of those of one kernel that programs may launch (``shmemkit.kernels``);
                     op and dtype, a name as "float16", are None where it moves data. Without a World
    _keeps_arrays    whether bound calls keep their arguments, for ``Launch.args``
    counts(dtype)    how many times an array of the dtype of this name counts, of max_nbytes: mostly once
    sms              the budget: the most blocks of a launch, which ``within`` keeps to. None: as many as are
                     tuned. Kernels of one method do not run at the same time, so it uses no more
                     multiprocessors

    and `threads`, per block; on the emulator, which is quicker with few, 32, or of many ranks `_fewest`.
    `settings` are attributes.

    To make one is collective. When prepare refuses on any rank, all ranks do (``agree``), and free what they
    have allocated.
    """

    name: str  # of it, as "all_gather push": of its arrays, and in its messages
    threads = 512
    _fewest = 32
    sms: int | None = None
    _keeps_arrays = False
    prepare: Callable[..., None]

    def __init__(self, world: World, *args, **settings: Any):
        self.world = world
        self._arrays, self._launches = [], {}
        if world.backend.name == "emulator":
            self.threads = 32 if world.n_ranks < _MANY_RANKS else self._fewest
        vars(self).update(settings)
        agree(world, lambda: self.prepare(*args), self.free)

    @staticmethod
    def counts(dtype: str) -> int:
        return 1

    def array_name(self, what: str) -> str:
        """The name of a symmetric array."""
        return f"{self.name.replace(' ', '.')}.{what}"

    def zeros(self, shape: Shape, dtype: DType, name: str) -> Array:
        """A symmetric array that lives as long as the method. Collective."""
        self._arrays.append(self.world.zeros(shape, dtype, name))
        return self._arrays[-1]

    def empty(self, shape: Shape, dtype: DType, name: str) -> Array:
        """As ``zeros``, with undefined content."""
        self._arrays.append(self.world.empty(shape, dtype, name))
        return self._arrays[-1]

    def _who(self):
        return getattr(self, "name", type(self).__name__)

    def within(self, blocks: int, rows: int = 1) -> int:
        """-> how many blocks a row of a grid of so many `rows` has within the budget, of `blocks` that are
        wanted. ValueError if there is no block for each row."""
        return within(self._who(), self.sms, blocks, rows)

    def offsets_of(self, array: Array, ranks: range) -> Array:
        """-> what `peer_at` and `notify_at` take as a table, for those up to the last of `ranks`, consecutive
        ones whose symmetric memory is mapped here; `array` is any of it."""
        world, address = self.world, self.world.backend.address
        offsets = [address(world.peer_view(array, rank)) - address(array) for rank in ranks]
        return world.xp.array([0] * ranks.start + offsets, "int64")

    def launch(
        self,
        kernel: Callable,
        grid: Shape,
        *args: Any,
        pdl: bool = False,
        threads: int | None = None,
        shared: int = 0,
    ) -> Launch:
        """-> `kernel` bound to `grid` and `args`; its blocks wait for each other, so all must fit at once.
        With `pdl` (see ``bind``), for short kernels, calls in a row overlap a little; not within a budget,
        which two launches at once would exceed. `threads` of a block, if not those of the method; `shared`:
        bytes of dynamic shared memory.

        The caller keeps the arrays alive: bound calls outlive what users gather.
        """
        threads, pdl = threads or self.threads, pdl and self.sms is None
        check_budget(self._who(), self.sms, grid)
        key = kernel, grid, threads, tuple(getattr(arg, "dtype", None) for arg in args)
        if key not in self._launches:
            self._launches[key] = bind(
                kernel, grid, threads, args, shared=shared, co_resident=True, pdl=pdl, group=self.world
            )
            self._launches[key].forget_arrays()
        bound = self._launches[key].with_args(*args)
        if not self._keeps_arrays:
            bound.forget_arrays()
        return bound

    def free(self) -> None:
        """Give the symmetric memory back. Collective."""
        while self._arrays:
            self.world.free(self._arrays.pop(0))


class InParts(Method):
    """A method of one kernel: a row of its grid has a block for each part of a segment. A subclass has

    name        of it, as "all_gather pull"
    given       an example of what a call gives: mostly, whether x is in out already
    part        bytes that are worth a block
    max_parts   of a segment
    max_blocks  of a grid, unless there are more segments: one per multiprocessor of A100
    unit        elements, of which a part has a multiple
    """

    given: int = False
    part, max_parts, max_blocks, unit = 1 << 15, 32, 108, 128

    def cut_in_parts(self, max_nbytes, segments):
        """-> (parts of a segment at most, elements of a part at most), of `segments` segments."""
        most = self.within(min(self.max_parts, max(1, self.max_blocks // segments)), segments)
        self.parts, capacity = parts_of(max_nbytes, segments, most, self.part, self.unit)
        return self.parts, capacity

    def use(self, kernel, rows, *arguments):
        """Calls launch ``kernel(x, out, given, part, *arguments)`` with a grid of (parts, *rows): x and out
        are uint8, 1-D; `given` is what a call gives; a part has `part` elements."""
        self.kernel, self.rows, self.arguments = kernel, rows, arguments
        nothing = self.world.xp.empty(0, "uint8")
        self._launch(self.parts, nothing, nothing, self.given, 0)

    def bind(self, x, out, in_place):
        """For those whose x is a segment."""
        return self.bind_parts(x.nbytes, x, out, in_place)

    def bind_parts(self, segment, x, out, given):
        """-> run(stream), for segments of `segment` bytes."""
        parts, part = cut(segment, self.parts, self.part, self.unit)
        return self._launch(parts, x.view("uint8"), out.view("uint8"), given, part)

    def _launch(self, parts, *args):
        return self.launch(self.kernel, (parts, *self.rows), *args, *self.arguments)
