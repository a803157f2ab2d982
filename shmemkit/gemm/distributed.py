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

from shmemkit.collectives.bound_calls import Plans
from shmemkit.collectives.method import agree_on
from shmemkit.runtime.budget import checked_sms
from shmemkit.runtime.stream_order import shared_order
from shmemkit.runtime.world import World, check_world
from shmemkit.support.arrays import call_on, converted, keyed, new_output, unowned, with_shape
from shmemkit.support.settings import integer, listed, one_of, options_of
from shmemkit.typing import Array, DType, Shape

from .problem import HALVES

PLANS = 512  # bound calls that are kept


class Products:
    """A subclass has

    methods               their names, without "auto"
    options               {name: default}: numbers of the methods
    optional              prefixes of the names of arrays that may be None
    alike                 names of arrays that have the same size and dtype on all ranks
    methods_for(n_nodes)  the methods for this number of nodes
    _shape(*arrays)       -> the shape of the result, by the operands, which have shapes; for ``_call``
    _plan(arrays, *how)   -> run(stream): a call for these arrays, {name: array of the World's, or None}. The
                          caller keeps them alive. TypeError or ValueError for wrong arrays

    world   the World
    method  one of `methods`, or "auto"
    options None, or a dict of some of `options`
    sms     the budget of multiprocessors, or None
    check   () -> {name: value}: the other arguments that must be equal on all ranks. It raises TypeError or
            ValueError, on any rank, for wrong ones
    """

    methods: tuple[str, ...]
    options: dict[str, Any]
    optional: str | tuple[str, ...] = ()
    alike: tuple[str, ...]
    sms: int | None
    _shape: Callable[..., Shape]
    _plan: Callable[..., Callable]

    def __init__(
        self,
        world: World,
        method: str,
        options: dict[str, Any] | None,
        check: Callable[[], dict],
        sms: int | None = None,
    ):
        name = type(self).__name__
        check_world(name, world)
        self.world, self.method = world, method
        self._parts: Any = []  # None once it is freed
        self._outputs, self._of_graphs = [], set()
        self._plans = Plans(PLANS, world.synchronize)

        def checked():
            one_of(name, "method", method, (*self.methods, "auto"))
            self.options = checked_options(name, self.options, options)
            self.sms = checked_sms(name, sms)
            return {**check(), "method": method, "options": self.options, "sms": self.sms}

        agree_on(world, name, checked)
        self._order = shared_order(world)

    def _part(self, kind, *args):
        """-> kind(*args), within the budget, which ``free`` frees."""
        self._parts.append(kind(*args, sms=self.sms))
        return self._parts[-1]

    def _call(self, operands, out, stream, *how):
        """Enqueue a call of `operands`, {name: array}. -> out; where None is given, a new array of the kind
        of the first one, and of its dtype."""
        self._check_alive()
        world, who = self.world, type(self).__name__
        stream, waits = call_on(world, stream, *operands.values(), out)
        arrays: Any = {name: with_shape(who, name, array, world.xp) for name, array in operands.items()}
        if out is None:
            like, dtype = next(iter(operands.values())), next(iter(arrays.values())).dtype
            out = new_output(like, self._shape(**arrays), dtype, world.xp, stream, world.backend.follow)
        self._enqueue({**arrays, "out": out}, stream, waits, *how)
        return out

    def _enqueue(self, arrays, stream, waits, *how):
        """Enqueue the call that ``_plan`` makes, on the stream that ``call_on`` returns. The call is kept by
        the addresses, shapes, strides and dtypes of the arrays, {name: array or None}."""
        world, who = self.world, type(self).__name__
        key, arrays = keyed(who, arrays, world.xp, self.optional)
        key = *how, *key
        run = self._plans.get(key)
        if run is None:
            those = converted(who, arrays, world.xp, self.optional).items()
            run = self._plan({name: None if x is None else unowned(x) for name, x in those}, *how)
        capturing = world.backend.capture_of(stream) is not None
        if key not in self._plans:
            self._plans.keep(key, run, capturing)
        if capturing:
            self._of_graphs.add(run)  # the graph uses what it has
        self._order.before(stream, who, *(arrays[name] for name in self.alike))
        run(stream)
        if waits:
            world.stream.synchronize()

    def output(self, shape: Shape, dtype: DType) -> Array:
        """-> a symmetric array, of this shape and dtype on all ranks. ``free`` frees it. Collective."""
        self._check_alive()
        name = f"{type(self).__name__}.output[{len(self._outputs)}]"
        self._outputs.append(self.world.empty(shape, dtype, name))
        return self._outputs[-1]

    def free(self) -> None:
        """Free the symmetric memory, also that of the outputs. Afterwards neither the object nor graphs that
        captured its calls can be used. Collective.
        """
        self._plans.clear()
        self._of_graphs.clear()
        self._free_parts()
        self._parts = None
        while self._outputs:
            output = self._outputs.pop(0)
            if self.world.is_symmetric(output):  # not freed already
                self.world.free(output)

    def _free_parts(self):
        while self._parts:
            self._parts.pop().free()

    def _check_alive(self):
        if self._parts is None:
            raise RuntimeError(f"{type(self).__name__}: it was freed; make a new one")
        check_world(type(self).__name__, self.world)


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
