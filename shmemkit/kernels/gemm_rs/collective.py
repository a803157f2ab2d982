"""What the host objects of products that are reduced over the ranks share: their arguments, methods, calls on
any stream and in graphs."""

from shmemkit.kernels.collective import integer
from shmemkit.kernels.gemm.problem import HALVES
from shmemkit.kernels.method import agree
from shmemkit.memory import as_dtype
from shmemkit.stream_order import StreamOrder
from shmemkit.world import World

PLANS = 256  # bound calls that are kept


class GemmCollective:
    """A subclass has

    METHODS       {name: class}; a method is made with the World, max_m, max_n, dtype and part_dtype. "auto"
                  takes those with `several_nodes`, if a class has that, only on several (True) or one (False)
    _rows(m)      -> rows of the result that a rank gets, of m; ValueError for what is not allowed
    """

    def __init__(self, world, max_m, max_n, dtype="bfloat16", part_dtype=None, method="auto"):
        name = type(self).__name__
        if not isinstance(world, World):
            raise TypeError(f"{name}: the first argument is the World, of shmemkit.init(), not {world!r}")
        self.world, self.method = world, method
        self._methods, self._plans, self._captured, self._outputs = {}, {}, [], []
        self._order, self.refused = StreamOrder(world), {}

        def check():
            if method not in ("auto", *self.METHODS):
                raise ValueError(
                    f"{name}: method={method!r}: {', '.join(map(repr, self.METHODS))} or 'auto' are allowed"
                )
            self.dtype = as_dtype(dtype)
            self.part_dtype = self.dtype if part_dtype is None else as_dtype(part_dtype)
            if self.dtype.name not in (*HALVES, "float32", "float64"):
                raise ValueError(f"{name}: dtype={dtype}: bfloat16, float16, float32 or float64 is allowed")
            if self.part_dtype.name not in (self.dtype.name, "float32"):
                raise ValueError(
                    f"{name}: part_dtype={part_dtype}: {self.dtype.name}, the dtype, or float32 is allowed"
                )
            self.max_m, self.max_n = integer(name, "max_m", max_m), integer(name, "max_n", max_n)
            if min(self.max_m, self.max_n) < 1:
                raise ValueError(f"{name}: max_m={max_m}, max_n={max_n}: 1 or more are allowed")

        agree(world, check, lambda: None)
        mine = self.max_m, self.max_n, self.dtype.name, self.part_dtype.name, method
        given = world.host_allgather(mine)
        if len(set(given)) > 1:
            raise ValueError(
                f"{name}: {given} were given over the ranks (max_m, max_n, dtype, part_dtype, method): the "
                "same are allowed"
            )
        for each in self._candidates() if method == "auto" else [method]:
            try:
                self._methods[each] = self._make(each)
            except (ValueError, MemoryError) as error:  # on all ranks
                self.refused[each] = str(error)
                if method != "auto":
                    raise
        if not self._methods:
            raise ValueError(f"{name}: no method can be used here: {self.refused}")

    def _candidates(self):
        """The methods for as many nodes."""
        several = self.world.n_nodes > 1
        return [
            each for each, kind in self.METHODS.items() if getattr(kind, "several_nodes", several) == several
        ]

    def _make(self, each):
        sizes = self.max_m, self.max_n, self.dtype.name, self.part_dtype.name
        return self.METHODS[each](self.world, *sizes)

    def __call__(self, a, b, out=None, stream=None):
        self._check_alive()
        world = self.world
        if stream is world.stream:
            stream = None
        if out is None:
            m, _, n = self._sizes(a, b)
            out = world.xp.empty((self._rows(m), n), self.dtype)
            if stream is not None:  # what used the memory before may be under way on the World's stream
                world.backend.follow(stream, None)
        address = world.backend.address
        try:
            key = tuple((address(x), x.shape, x.strides, x.dtype) for x in (a, b, out))
        except AttributeError:
            array = world.xp.ndarray
            given = ", ".join(type(x).__name__ for x in (a, b, out))
            raise TypeError(
                f"{type(self).__name__}: a, b and out must be of {array.__module__}.{array.__name__}, given "
                f"{given}"
            ) from None
        run = self._plans.get(key)
        if run is None:
            run = self._plan(a, b, out)
            if len(self._plans) == PLANS:
                world.synchronize()  # what they hold may be in use
                self._plans.clear()
            self._plans[key] = run
        self._order.before(stream)
        if world.backend.capture_of(stream) is not None:
            self._captured.append(run)  # the graph uses what it holds
        run(stream)
        return out

    def _sizes(self, a, b):
        """-> M, K, N"""
        shapes = getattr(a, "shape", ()), getattr(b, "shape", ())
        if not (len(shapes[0]) == len(shapes[1]) == 2) or shapes[0][1] != shapes[1][0]:
            raise ValueError(
                f"{type(self).__name__}: a is {shapes[0]}, b {shapes[1]}: (M, K) and (K, N) are allowed"
            )
        return *shapes[0], shapes[1][1]

    def _plan(self, a, b, out):
        name = type(self).__name__
        m, k, n = self._sizes(a, b)
        rows = self._rows(m)
        if out.shape != (rows, n):
            raise ValueError(f"{name}: out is {out.shape}: {(rows, n)} is allowed")
        for argument, array in (("a", a), ("b", b), ("out", out)):
            if array.dtype != self.dtype:
                raise ValueError(f"{name}: {argument} is {array.dtype}: {self.dtype}, the dtype, is allowed")
        if m > self.max_m or n > self.max_n:
            raise ValueError(f"{name}: {m} by {n}, max_m={self.max_m}, max_n={self.max_n}: make a larger one")
        if not out.flags.c_contiguous:
            raise ValueError(f"{name}: out {out.shape} has strides {out.strides}: contiguous is allowed")
        if 0 in (m, n):
            return lambda stream: None
        if k == 0:
            raise ValueError(f"{name}: K is 0: 1 or more are allowed")
        return self._methods[self.method_for(m, k, n)].bind(a, b, out)

    def method_for(self, m, k, n):
        """The method for A (m, k) and B (k, n), the same on all ranks."""
        if self.method != "auto":
            return self.method
        for name, method in self._methods.items():
            if method.is_for(m, k, n):
                return name
        raise ValueError(
            f"{type(self).__name__}: {m} by {k} by {n}: no method computes it; refused: {self.refused}"
        )

    def _check_alive(self):
        if self._methods is None:
            raise RuntimeError(f"{type(self).__name__}: it was freed; make a new one")
        if self.world.finalized:
            raise RuntimeError(f"{type(self).__name__}: its World is finalized; call shmemkit.init() again")

    def output(self, shape):
        """-> a symmetric array for a result, of this shape on all ranks and of the dtype. It lives as long as
        this object, which frees it. Collective."""
        self._check_alive()
        self._outputs.append(self.world.empty(shape, self.dtype, f"{type(self).__name__}.output"))
        return self._outputs[-1]

    def free(self):
        """Give the symmetric memory back, that of the outputs too; the object cannot be used any more, nor
        graphs that have captured calls. Collective."""
        methods, self._methods = self._methods, None
        self._plans.clear()
        for method in (methods or {}).values():
            method.free()
        self._captured.clear()
        while self._outputs:
            output = self._outputs.pop(0)
            if self.world.is_symmetric(output):
                self.world.free(output)
