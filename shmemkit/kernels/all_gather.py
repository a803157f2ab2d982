"""All-gather: each rank gives an array, and gets those of all ranks, by rank.

The methods, a file each, which says how it works:

  ll       all_gather_ll.py     words that say themselves that they have arrived: small messages
  push_1d  all_gather_push.py   stores into the peers' memory and a signal for each part: larger ones
"""

import operator

from shmemkit.world import World

from . import all_gather_ll, all_gather_push
from .all_gather_ll import LL
from .all_gather_push import Push1D

METHODS = {"ll": LL, "push_1d": Push1D}
LL_LIMIT = 1 << 20  # bytes gathered, beyond which "auto" pushes


class AllGather:
    """Gather the arrays of all ranks on each of them. Collective.

    world       the World
    max_nbytes  bytes of the largest gathered array: n_ranks times an input
    method      "ll", "push_1d", or "auto": by size

    ``gather(x)`` enqueues one; any number may follow each other, also in CUDA graphs. Calls of one object are
    in the same order on all ranks, with inputs of the same size; they are enqueued on one stream, or ordered
    by events. ValueError for what is not allowed.
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
        self._methods = {}
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
                 (n_ranks, *x.shape)
        stream   default: the World's

        Enqueued: when the stream has run it, out.reshape(n_ranks, -1)[k] is rank k's x.
        """
        if self._methods is None:
            raise RuntimeError("AllGather: it was freed; make a new one")
        n = self.world.n_ranks
        if out is None:
            out = self.world.xp.empty((n, *x.shape), x.dtype)
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
        if x.size:
            address = self.world.backend.address
            at, to = address(x), address(out)
            unit = "uint8" if (at | to | x.nbytes) % 8 else "uint64"
            x, out_words = x.reshape(-1).view(unit), out.reshape(-1).view(unit)
            in_place = at == to + self.world.rank * x.nbytes
            self._methods[self.method_for(out.nbytes)](x, out_words, in_place, stream)
        return out

    def method_for(self, nbytes):
        """The method that gathers `nbytes` bytes."""
        if self.method != "auto":
            return self.method
        return "ll" if nbytes <= LL_LIMIT else "push_1d"

    def free(self):
        """Give the symmetric memory back; the AllGather cannot be used any more. Collective."""
        methods, self._methods = self._methods, None
        for method in (methods or {}).values():
            method.free()


GPU_KERNELS = {**all_gather_ll.GPU_KERNELS, **all_gather_push.GPU_KERNELS}
