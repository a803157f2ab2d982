"""What the host objects of products that are reduced over the ranks share: their arguments and methods."""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

import numpy as np

from shmemkit.runtime.symmetric_memory import as_dtype
from shmemkit.runtime.world import World
from shmemkit.support.renamed import renamed
from shmemkit.support.settings import integer, one_of
from shmemkit.typing import AnyArray, AnyStream, Array, ArrayT, DType, Shape

from ..distributed import Products
from ..problem import HALVES

MethodT = TypeVar("MethodT", bound=str)


class GemmCollective(Products, Generic[MethodT]):
    """A subclass has

    METHODS       {name: class}. A method is made with the World, max_tokens, max_n, dtype, part_dtype,
                  options and sms, and has
                    options           {name: default}: its numbers. Each method gets those of all
                    refuses(m, k, n)  -> the reason why it cannot compute that product, the same on all
                                      ranks, or None
                    is_for(m, k, n)   whether it is faster for it than the methods after it
                    bind(x, w, out)   -> run(stream)
                    several_nodes     optional: True if it is for several nodes, False if it is for one
    ARRAYS        x, w, and out
    """

    METHODS: dict[str, Any]

    def __init_subclass__(cls):
        super().__init_subclass__()
        cls.options = {name: value for kind in cls.METHODS.values() for name, value in kind.options.items()}

    LIMITS = {"m": ("max_tokens", "tokens"), "n": ("max_n", "columns")}
    ALIKE = "x", "w", "out"
    dtype: np.dtype
    part_dtype: np.dtype
    max_tokens: int
    max_n: int

    @renamed(max_m="max_tokens")
    def __init__(
        self,
        world: World,
        max_tokens: int,
        max_n: int,
        dtype: DType = "bfloat16",
        part_dtype: DType | None = None,
        method: MethodT | Literal["auto"] = "auto",
        *,
        options: dict[str, Any] | None = None,
        sms: int | None = None,
    ):
        name = type(self).__name__

        def check():
            self.dtype = as_dtype(dtype, f"{name}: ")
            self.part_dtype = self.dtype if part_dtype is None else as_dtype(part_dtype, f"{name}: part_")
            one_of(name, "dtype", self.dtype.name, (*HALVES, "float32", "float64"))
            parts = [self.dtype.name] + ["float32"] * (self.dtype.name in HALVES)
            one_of(name, "part_dtype", self.part_dtype.name, parts)
            self.max_tokens, self.max_n = (
                integer(name, "max_tokens", max_tokens, 1),
                integer(name, "max_n", max_n, 1),
            )
            dtypes = {"dtype": self.dtype.name, "part_dtype": self.part_dtype.name}
            return {"max_tokens": self.max_tokens, "max_n": self.max_n, **dtypes}

        super().__init__(world, method, options, check, sms)
        self.refused = {}
        sizes = self.max_tokens, self.max_n, self.dtype.name, self.part_dtype.name
        for each in self.methods_for(world.n_nodes) if method == "auto" else [method]:
            try:
                self._methods[each] = self._part(self.METHODS[each], world, *sizes, self.options)
            except (ValueError, MemoryError) as error:  # on all ranks
                self.refused[each] = str(error)
                if method != "auto":
                    raise
        if not self._methods:
            reasons = "; ".join(f"{each!r}: {reason}" for each, reason in self.refused.items())
            raise ValueError(f"{name}: no method can be used here. {reasons}")

    @classmethod
    def methods_for(cls, n_nodes: int) -> tuple[str, ...]:
        """The names of the methods for this number of nodes. "auto" uses one of them."""
        several = n_nodes > 1
        kinds = cls.METHODS.items()
        return tuple(name for name, kind in kinds if getattr(kind, "several_nodes", several) == several)

    def __call__(
        self, x: ArrayT, w: AnyArray, out: ArrayT | None = None, *, stream: AnyStream | None = None
    ) -> ArrayT:
        return self._enqueue({"x": x, "w": w, "out": out}, stream)["out"]

    def _bind(self, x, w, out):
        (m, k), n = x.shape, w.shape[1]
        if k == 0:
            raise ValueError(f"{self._who}: K is 0; it must be 1 or more")
        return self._methods[self.method_for(m, k, n)].bind(x, w, out)

    def method_for(self, m: int, k: int, n: int) -> str:
        """-> the name of the method for an x (m, k) and a w (k, n), the same on all ranks. ValueError if
        there is none. It does not check whether max_tokens, max_n and the number of ranks allow a call of
        these sizes.
        """
        for name, size in (("m", m), ("k", k), ("n", n)):
            integer(type(self).__name__, name, size, 0)
        reasons = {name: method.refuses(m, k, n) for name, method in self._methods.items()}
        able = [name for name, reason in reasons.items() if reason is None]
        if not able:
            reasons |= self.refused
            if len(reasons) == 1:
                ((method, reason),) = reasons.items()
                said = f"method {method!r} does not compute {m} by {k} by {n}: {reason}"
                said += ". Use method='auto'"
            else:
                said = "; ".join(f"{method!r}: {reason}" for method, reason in reasons.items())
                said = f"no method computes {m} by {k} by {n}. {said}"
            raise ValueError(f"{type(self).__name__}: {said}")
        return next((name for name in able if self._methods[name].is_for(m, k, n)), able[-1])

    def output(self, shape: Shape) -> Array:
        """-> a symmetric array for a result, of this shape on all ranks, and of this object's dtype.
        ``free`` frees it. Collective.
        """
        return super().output(shape, self.dtype)
