"""Base of the host objects that multiply matrices across ranks. It handles calls on any stream and in graphs,
the order of calls, arrays of CuPy, PyTorch and other libraries, and symmetric outputs.

The order of calls: the kernels of a call take all multiprocessors and wait for other ranks. If the calls of
two objects ran at once, one could hold the multiprocessors of one rank, and the other those of another rank:
both would wait forever. So all calls of these objects of a World run one after another, on whatever streams,
in the order in which the host makes them, which is the same on all ranks. (Calls in a graph are ordered only
with calls in the same graph. The program orders its graphs.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shmemkit.operations.operation import WithOutputs
from shmemkit.operations.plans import Plans
from shmemkit.runtime.world import World
from shmemkit.support.settings import integer, listed, one_of, options_of

from .problem import HALVES

PLANS = 512  # bound calls that are kept


class Products(WithOutputs):
    """A subclass has

    methods               their names, without "auto"
    options               {name: default}: numbers of the methods
    methods_for(n_nodes)  the methods for this number of nodes

    and what an Operation has. Its bound calls have device memory of their own, tensor maps.

    world   the World
    method  one of `methods`, or "auto"
    options None, or a dict of some of `options`
    check   () -> {name: value}: the other arguments that must be equal on all ranks. It raises TypeError or
            ValueError, on any rank, for wrong ones
    sms     the budget of multiprocessors, or None
    """

    methods: tuple[str, ...]
    options: dict[str, Any]

    def __init__(
        self,
        world: World,
        method: str,
        options: dict[str, Any] | None,
        check: Callable[[], dict],
        sms: int | None = None,
    ):
        def checked():
            self.method = one_of(self._who, "method", method, (*self.methods, "auto"))
            self.options = checked_options(self._who, self.options, options)
            return {**check(), "method": method, "options": self.options}

        super().__init__(world, checked, sms)
        self._plans = Plans(PLANS, world.synchronize)


def checked_options(who, known, given):
    """`known` options of kernels like ``sm90.py``, with those that are `given`. TypeError or ValueError for
    wrong ones."""
    options = options_of(who, known, given)
    for name in given or ():
        value = options[name]
        if value is None or isinstance(value, bool) and name == "by_columns":
            continue
        if name != "tile":
            integer(who, f"options[{name!r}]", value, 1)
            continue
        rows, columns = value if isinstance(value, (tuple, list)) and len(value) == 2 else (0, 0)
        if rows not in (64, 128) or columns not in range(16, 257, 16):
            raise ValueError(
                f"{who}: options['tile'] is {value}; it must be (rows, columns): 64 or 128, and a multiple "
                "of 16 up to 256"
            )
        options[name] = int(rows), int(columns)
    return options


def not_for(n_ranks, dtype, most, least=1):
    """-> why a kernel for `least` to `most` ranks, of bfloat16 and float16, cannot be used, or None"""
    if not least <= n_ranks <= most:
        return f"there are {n_ranks} ranks; it is for {least} to {most}"
    if dtype not in HALVES:
        return f"dtype is {dtype}; it is for {listed(HALVES, 'and')}. 'sequential' takes others"
    return None


def multiprocessors_of_all(world, what, reason=None, sms=None):
    """-> the smallest number of multiprocessors of any rank, `sms` at most, from which all choose the same
    tiles. Collective. ValueError, on all ranks, if the GPU of one has no compute capability 9.0, or one has a
    `reason` why `what`, a name, cannot be used there."""
    major, minor = world.backend.compute_capability
    if major != 9:
        me = world.world_rank(world.rank)
        reason = f"the GPU of rank {me} has compute capability {major}.{minor}; it must be 9.0"
    reasons, numbers = zip(*world.host_allgather((reason, world.backend.multiprocessors)), strict=True)
    if reason := next(filter(None, reasons), None):
        raise ValueError(f"{what} cannot be used here: {reason}")
    return min(numbers) if sms is None else min(*numbers, sms)
