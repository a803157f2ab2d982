"""All-gather: each rank gives an array, and gets those of all ranks, by rank.

The methods, a file each, which says how it works:

  ll        words that say themselves that they have arrived: small messages
  push_1d   stores into the peers' memory and a signal for each part: larger ones
"""

import operator

from shmemkit.world import World

from .ll import LL
from .push_1d import Push1D

METHODS = {"ll": LL, "push_1d": Push1D}
LL_LIMIT = 1 << 20  # bytes gathered, beyond which "auto" pushes
PLANS = 64  # bound calls that are kept


class AllGather:
    """Gather the arrays of all ranks on each of them. Collective.

    world       the World
    max_nbytes  bytes of the largest gathered array: n_ranks times an input
    method      one of ``AllGather.methods``, or "auto": by size

    ``gather(x)`` enqueues one; any number may follow each other, on any streams, also in CUDA graphs. The
    ranks make the calls of one object in the same order, with inputs of the same size. Calls on another
    stream wait for those before; graphs are launched in that order by whoever launches them (on one stream,
    or with events). ValueError for what is not allowed.
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
        self._methods, self._plans, self._outputs = {}, {}, []
        self._stream = None  # of the last call; None is the World's
        try:
            if method in ("ll", "auto"):
                largest = self.max_nbytes if method == "ll" else min(self.max_nbytes, LL_LIMIT)
                self._methods["ll"] = LL(world, largest)
            if method == "push_1d" or method == "auto" and self.max_nbytes > LL_LIMIT:
                self._methods["push_1d"] = Push1D(world, self.max_nbytes)
        except ValueError:
            self.free()
            raise

    def __call__(self, x, out=None, stream=None):
        """Gather `x`. -> out

        x        C-contiguous, any dtype and shape, of the same size on all ranks. May be the part of `out`
                 that it belongs to
        out      C-contiguous, of x's dtype and n_ranks times as many elements. Default: a new array of shape
                 (n_ranks, *x.shape). Of ``output()`` it is written by the peers themselves, without a copy;
                 then on all ranks
        stream   default: the World's

        Enqueued: when the stream has run it, out.reshape(n_ranks, -1)[k] is rank k's x.
        """
        if out is None:
            out = self.world.xp.empty((self.world.n_ranks, *x.shape), x.dtype)
        address = self.world.backend.address
        key = address(x), address(out), x.shape, out.shape, x.strides, out.strides, x.dtype, out.dtype
        run = self._plans.get(key)
        if run is None:
            run = self._plan(key, x, out)
        if stream is self.world.stream:
            stream = None
        if stream is not self._stream:
            self.world.backend.follow(stream, self._stream)
            self._stream = stream
        run(stream)
        return out

    def _plan(self, key, x, out):
        """Bind the method for these arrays; bound calls are kept by address."""
        if self._methods is None:
            raise RuntimeError("AllGather: it was freed; make a new one")
        n = self.world.n_ranks
        if (
            not (x.flags.c_contiguous and out.flags.c_contiguous)
            or x.dtype != out.dtype
            or out.size != n * x.size
        ):
            raise ValueError(
                f"AllGather: x is {x.dtype} {x.shape}, out {out.dtype} {out.shape}: C-contiguous arrays of "
                f"one dtype are allowed, out {n} times as large"
            )
        if out.nbytes > self.max_nbytes:
            raise ValueError(
                f"AllGather: {out.nbytes} bytes gathered, max_nbytes={self.max_nbytes}: make a larger one"
            )
        run = _nothing
        if x.size:
            at, to = key[:2]
            unit = "uint8" if (at | to | x.nbytes) % 8 else "uint64"
            x, words = x.reshape(-1).view(unit), out.reshape(-1).view(unit)
            in_place = at == to + self.world.rank * x.nbytes
            run = self._methods[self.method_for(out.nbytes)].bind(x, words, in_place)
        if len(self._plans) == PLANS:
            self._plans.clear()
        self._plans[key] = run
        return run

    def output(self, shape, dtype):
        """-> a symmetric array to gather into, of this shape and dtype on all ranks; it lives as long as this
        object. Collective."""
        self._outputs.append(self.world.empty(shape, dtype, f"all_gather.output[{len(self._outputs)}]"))
        return self._outputs[-1]

    def method_for(self, nbytes):
        """The method that gathers `nbytes` bytes."""
        if self.method != "auto":
            return self.method
        return "ll" if nbytes <= LL_LIMIT else "push_1d"

    def free(self):
        """Give the symmetric memory back, that of the outputs too; the AllGather cannot be used any more.
        Collective."""
        methods, self._methods = self._methods, None
        self._plans.clear()
        for method in (methods or {}).values():
            method.free()
        while self._outputs:
            self.world.free(self._outputs.pop(0))


def _nothing(stream):
    pass
