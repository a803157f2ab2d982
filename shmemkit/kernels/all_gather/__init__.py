"""All-gather: each rank gives an array, and gets those of all ranks, by rank.

The methods, a file each, which says how it works:

  ll        words that say themselves that they have arrived: small messages
  ll128     lines of 128 bytes likewise, 94 % of them data: up to a few MB, where NVLink connects all ranks
  push_1d   stores into the peers' memory and a signal for each part: larger ones
  pull      loads from the peers' memory
  ll_2d, push_2d
            likewise, for several nodes: once across nodes, through NVSHMEM, and then inside the node
  copy_push, copy_pull
            copies by copy engines, which leave the multiprocessors to others: large ones
  multimem, ll_2d_multimem
            one store for all ranks of a node, which the NVSwitch multiplies (NVLink SHARP): only where that
            is offered and not turned off
"""

import operator

from shmemkit import tuning
from shmemkit.stream_order import StreamOrder
from shmemkit.world import World

from .copy_engine import CopyPull, CopyPush
from .ll import LL, LL128
from .ll_2d import LL2D
from .ll_2d_multimem import LL2DMultimem
from .multimem import Multimem
from .pull import Pull
from .push_1d import Push1D
from .push_2d import Push2D

METHODS = {
    "ll": LL,
    "ll128": LL128,
    "pull": Pull,
    "push_1d": Push1D,
    "ll_2d": LL2D,
    "push_2d": Push2D,
    "copy_push": CopyPush,
    "copy_pull": CopyPull,
    "multimem": Multimem,
    "ll_2d_multimem": LL2DMultimem,
}
PLANS = 64  # bound calls that are kept


class AllGather:
    """Gather the arrays of all ranks on each of them. Collective.

    world       the World
    max_nbytes  bytes of the largest gathered array: n_ranks times an input
    method      one of ``AllGather.methods``, or "auto": what was measured as the fastest for the size, on
                these GPUs (``shmemkit.tuning``); only those are made that sizes up to max_nbytes need

    ``gather(x)`` enqueues one; any number may follow each other, on any streams, also in CUDA graphs. The
    ranks make the calls of one object in the same order, with inputs of the same size. Calls on another
    stream wait for those before; graphs are launched in that order by whoever launches them (on one stream,
    or with events). ValueError for what is not allowed.

    `refused`, {method: why}: what "auto" would have taken, but cannot run here.
    """

    methods = tuple(METHODS)

    def __init__(self, world, max_nbytes, method="auto"):
        if not isinstance(world, World):
            raise TypeError(f"AllGather: the first argument is the World, of shmemkit.init(), not {world!r}")
        if method != "auto" and method not in METHODS:
            raise ValueError(
                f"AllGather: method={method!r}: {', '.join(map(repr, METHODS))} or 'auto' are allowed"
            )
        self.world, self.max_nbytes, self.method = world, operator.index(max_nbytes), method
        if self.max_nbytes < 0:
            raise ValueError(f"AllGather: max_nbytes={max_nbytes}: 0 or more are allowed")
        self._methods, self._plans, self._outputs, self.refused = {}, {}, [], {}
        self._order = StreamOrder(world)
        try:
            if method != "auto":
                self._methods[method] = self._make(method, self.max_nbytes)
            else:
                built = tuning.build(world, "all_gather", self.max_nbytes, self._make)
                self._methods, self._choices, self.refused = built
        except (ValueError, MemoryError):
            self.free()
            raise

    def _make(self, name, max_nbytes):
        if name not in METHODS:
            raise ValueError("there is no such method")
        return METHODS[name](self.world, max_nbytes)

    def __call__(self, x, out=None, stream=None):
        """Gather `x`. -> out

        x        C-contiguous, any dtype and shape, of the same size on all ranks. May be the part of `out`
                 that it belongs to
        out      C-contiguous, of x's dtype and n_ranks times as many elements. Default: a new array of shape
                 (n_ranks, *x.shape). If it lies in symmetric memory, of ``output()`` or other, then on all
                 ranks, as the same part of the same array: the peers write it themselves, or read from it,
                 where the method can do without a copy between
        stream   default: the World's

        Enqueued: when the stream has run it, out.reshape(n_ranks, -1)[k] is rank k's x.
        """
        if stream is self.world.stream:
            stream = None
        address = self.world.backend.address
        try:
            if out is None:
                out = self.world.xp.empty((self.world.n_ranks, *x.shape), x.dtype)
                if stream is not None:  # what used the memory before may be under way on the World's stream
                    self.world.backend.follow(stream, None)
            key = address(x), address(out), x.shape, out.shape, x.strides, out.strides, x.dtype, out.dtype
        except AttributeError:
            array = self.world.xp.ndarray
            raise TypeError(
                f"AllGather: x and out must be of {array.__module__}.{array.__name__}, given "
                f"{type(x).__name__} and {type(out).__name__}"
            ) from None
        run = self._plans.get(key)
        if run is None:
            run = self._plan(key, x, out)
        self._order.before(stream)
        run(stream)
        return out

    def _plan(self, key, x, out):
        """Bind the method for these arrays; bound calls are kept by address."""
        if self._methods is None:
            raise RuntimeError("AllGather: it was freed; make a new one")
        n = self.world.n_ranks
        for name, array in (("x", x), ("out", out)):
            if not array.flags.c_contiguous:
                raise ValueError(
                    f"AllGather: {name} {array.shape} has strides {array.strides}: C-contiguous arrays are "
                    "allowed; copy it"
                )
        if x.dtype != out.dtype or out.size != n * x.size:
            raise ValueError(
                f"AllGather: x is {x.dtype} {x.shape}, out {out.dtype} {out.shape}: one dtype is allowed, "
                f"and out {n} times as large, of one x for each rank"
            )
        if out.nbytes > self.max_nbytes:
            raise ValueError(
                f"AllGather: {out.nbytes} bytes gathered, max_nbytes={self.max_nbytes}: make a larger one"
            )
        at, to = key[:2]
        if at < to + out.nbytes and to < at + x.nbytes and at != to + self.world.rank * x.nbytes:
            raise ValueError("AllGather: x lies in out, but not where its part is: rank k's is out[k]")
        run = _nothing
        if x.size:
            unit = "uint8" if (at | to | x.nbytes) % 8 else "uint64"
            x, words = x.reshape(-1).view(unit), out.reshape(-1).view(unit)
            in_place = at == to + self.world.rank * x.nbytes
            method = self.method_for(out.nbytes, self.world.is_symmetric(out))
            run = self._methods[method].bind(x, words, in_place)
        if len(self._plans) == PLANS:
            self._plans.clear()
        self._plans[key] = run
        return run

    def output(self, shape, dtype):
        """-> a symmetric array to gather into, of this shape and dtype on all ranks: ``(n_ranks, *x.shape)``.
        It lives as long as this object, which frees it. Collective."""
        if self._methods is None:
            raise RuntimeError("AllGather: it was freed; make a new one")
        self._outputs.append(self.world.empty(shape, dtype, f"all_gather.output[{len(self._outputs)}]"))
        return self._outputs[-1]

    def method_for(self, nbytes, symmetric=False):
        """The method that gathers `nbytes` bytes, max_nbytes or fewer; with `symmetric`, into symmetric
        memory."""
        if self.method != "auto":
            return self.method
        return tuning.method_at(self._choices[symmetric], nbytes)

    def free(self):
        """Give the symmetric memory back, that of the outputs too; the AllGather cannot be used any more.
        Collective."""
        methods, self._methods = self._methods, None
        self._plans.clear()
        for method in (methods or {}).values():
            method.free()
        while self._outputs:
            output = self._outputs.pop(0)
            if self.world.is_symmetric(output):  # not freed already
                self.world.free(output)


def _nothing(stream):
    pass
