"""What the host objects of collective operations share: their methods, calls on any stream and in graphs, and
symmetric outputs."""

from shmemkit import tuning
from shmemkit.device import reduction
from shmemkit.kernels.method import agree
from shmemkit.settings import integer
from shmemkit.stream_order import shared_order
from shmemkit.world import OutOfReach, World

PLANS = 64  # bound calls that are kept


class Collective:
    """A subclass has

    table     its name in the tuning table, as "all_gather"
    METHODS   {name: a class like ``Method``}, called with the World, the bytes of the largest full array, and
              what ``_options`` gives; and `methods`, their names
    _shape    (x) -> the shape of a new output
    _sizes    (x, out): ValueError, with what is allowed, unless their sizes fit
    _in_place (x, out): by how many bytes x lies behind out where they may overlap, None where they may not;
              `_overlap` says it

    and may have ``_checked_options()``: what else its methods are made with; TypeError or ValueError for what
    is not allowed.

    The full array is the larger one of a call's two.
    """

    _one_place = True  # whether what ``_shared`` gives is the same part of symmetric memory on all ranks

    def __init__(self, world, max_nbytes, method):
        name = type(self).__name__
        if not isinstance(world, World):
            raise TypeError(f"{name}: the first argument is the World, of shmemkit.init(), not {world!r}")
        self.world, self.method = world, method

        def check():
            if method not in ("auto", *self.METHODS):
                raise ValueError(
                    f"{name}: method={method!r}: {', '.join(map(repr, self.METHODS))} or 'auto' are allowed"
                )
            self.max_nbytes = integer(name, "max_nbytes", max_nbytes)
            if self.max_nbytes < 0:
                raise ValueError(f"{name}: max_nbytes={max_nbytes}: 0 or more are allowed")
            self._options = self._checked_options()

        agree(world, check, lambda: None)
        given = world.host_allgather((name, self.max_nbytes, method, *self._options))
        if len(set(given)) > 1:
            raise ValueError(
                f"{name}: {given} were given over the ranks (the object, max_nbytes, method, and what else "
                "it takes): the same are allowed"
            )
        self._methods, self._plans, self._outputs, self.refused = {}, {}, [], {}
        self._order = shared_order(world)
        try:
            if method != "auto":
                self._methods[method] = self._make(method, self.max_nbytes)
            else:
                built = tuning.build(world, self.table, self.max_nbytes, self._make)
                self._methods, self._choices, self.refused = built
        except (ValueError, MemoryError) as error:
            self.free()
            if isinstance(error, OutOfReach) and method != "auto":
                error.args = (f"{error}. method='auto' takes one that can be used, if there is one",)
            raise

    def _checked_options(self):
        return ()

    def _make(self, name, max_nbytes):
        if name not in self.METHODS:
            raise ValueError("there is no such method")
        return self.METHODS[name](self.world, max_nbytes, *self._options)

    def _call(self, x, out, stream):
        if stream is self.world.stream:
            stream = None
        if self.world.finalized:
            raise RuntimeError(f"{type(self).__name__}: its World is finalized; call shmemkit.init() again")
        backend = self.world.backend
        address = backend.address
        if out is None and hasattr(x, "dtype"):
            out = self.world.xp.empty(self._shape(x), x.dtype)
            if stream is not None:  # what used the memory before may be under way on the World's stream
                backend.follow(stream, None)
        try:
            key = address(x), address(out), x.shape, out.shape, x.strides, out.strides, x.dtype, out.dtype
        except AttributeError:
            array = self.world.xp.ndarray
            given = {"x": x} if out is x or out is None else {"x": x, "out": out}
            wrong = {name: type(v).__name__ for name, v in given.items() if not isinstance(v, array)}
            raise TypeError(
                f"{type(self).__name__}: {' and '.join(wrong)} must be of {array.__module__}."
                f"{array.__name__}, on each rank, given {' and '.join(wrong.values())}"
            ) from None
        run = self._plans.get(key)
        if run is None:
            run = self._plan(key, x, out)
        shared = self._shared(x, out) if self._one_place else None
        self._order.before(stream, type(self).__name__, x, shared=shared)
        run(stream)
        return out

    def _plan(self, key, x, out):
        """Bind the method for these arrays; bound calls are kept by address."""
        name = type(self).__name__
        self._check_alive()
        for argument, array in (("x", x), ("out", out)):
            if array.dtype.hasobject:
                raise TypeError(f"{name}: {argument} is of Python objects: numbers, as float32, are allowed")
            if not array.flags.c_contiguous:
                raise ValueError(
                    f"{name}: {argument} {array.shape} has strides {array.strides}: C-contiguous arrays are "
                    "allowed; copy it"
                )
        if not getattr(out.flags, "writeable", True):  # NumPy's
            raise ValueError(f"{name}: the result would go to a read-only array: give another `out`")
        self._sizes(x, out)
        full = self._full(x, out)
        if full > self.max_nbytes:
            raise ValueError(f"{name}: {full} bytes, max_nbytes={self.max_nbytes}: make a larger one")
        at, to = key[:2]
        offset = self._in_place(x, out)
        in_place = offset is not None and at == to + offset
        if at < to + out.nbytes and to < at + x.nbytes and not in_place:
            raise ValueError(f"{name}: x and out overlap: {self._overlap}")
        run = _nothing
        if x.size:
            method = self.method_for(full, self.world.is_symmetric(self._shared(x, out)))
            run = self._bind(self._methods[method], x.reshape(-1), out.reshape(-1), in_place)
        if len(self._plans) == PLANS:
            self._plans.clear()
        self._plans[key] = run
        return run

    def _full(self, x, out):
        """Bytes of the full array."""
        return max(x.nbytes, out.nbytes)

    def _shared(self, x, out):
        """Which of the two the peers use themselves, where it is symmetric."""
        return out

    def _bind(self, method, x, out, in_place):
        return method.bind(*self._words(x, out), in_place)

    def _words(self, x, out):
        """Both as uint64 where their addresses and sizes allow, else as uint8."""
        address = self.world.backend.address
        unit = "uint8" if (address(x) | address(out) | x.nbytes | out.nbytes) % 8 else "uint64"
        return x.view(unit), out.view(unit)

    def _check_alive(self):
        if self._methods is None:
            raise RuntimeError(f"{type(self).__name__}: it was freed; make a new one")

    def output(self, shape, dtype):
        """-> a symmetric array for a result, of this shape and dtype on all ranks. It lives as long as this
        object, which frees it. Collective."""
        self._check_alive()
        self._outputs.append(self.world.empty(shape, dtype, f"{self.table}.output[{len(self._outputs)}]"))
        return self._outputs[-1]

    def method_for(self, nbytes, symmetric=False):
        """The method for a full array of `nbytes` bytes, max_nbytes or fewer; with `symmetric`, for a result
        in symmetric memory. TypeError or ValueError for any other `nbytes`."""
        name = type(self).__name__
        if not 0 <= integer(name, "nbytes", nbytes) <= self.max_nbytes:
            raise ValueError(f"{name}: nbytes={nbytes}: 0 to max_nbytes, {self.max_nbytes}, are allowed")
        if self.method != "auto":
            return self.method
        return tuning.method_at(self._choices[symmetric], nbytes)

    def free(self):
        """Give the symmetric memory back, that of the outputs too; the object cannot be used any more.
        Collective."""
        methods, self._methods = self._methods, None
        self._plans.clear()
        for method in (methods or {}).values():
            method.free()
        while self._outputs:
            output = self._outputs.pop(0)
            if self.world.is_symmetric(output):  # not freed already
                self.world.free(output)


def checked_root(name, world, root):
    """`root` as a rank; TypeError or ValueError for what is none."""
    rank = integer(name, "root", root)
    if not 0 <= rank < world.n_ranks:
        raise ValueError(f"{name}: root={root}: 0 to {world.n_ranks - 1} are allowed")
    return rank


def check_reducible(name, op, dtype):
    """ValueError for what `op` cannot combine."""
    if not dtype.isnative:
        raise ValueError(f"{name}: {dtype} is of another byte order than this machine's; convert it")
    reduction(op, dtype.name)


def _nothing(stream):
    pass
