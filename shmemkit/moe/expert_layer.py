"""What the two layers of a tensor-parallel mixture of experts have in common on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shmemkit.gemm import check_memory
from shmemkit.gemm.distributed import Products
from shmemkit.runtime.world import World
from shmemkit.support.settings import array_text

from .expert_index import ExpertIndex, index_of


class ExpertLayer(Products):
    """A subclass has

    methods                       two: one for one node, and "sequential"
    unused                        why "auto" does not take the first one
    _shape(x, w, topk_ids, ..)    -> the shape of out; ValueError for shapes that do not fit each other
    _check(x, w, topk_ids, .., out)    ValueError for what else it does not take
    _bind(arrays, index, steps)   -> the steps of a call, each run(stream); `steps` are those that make the
                                  index
    """

    unused: str
    _shape: Callable[..., tuple[int, int]]
    _check: Callable[..., None]
    _bind: Callable[..., list[Callable]]

    def __init__(
        self,
        world: World,
        method: str,
        options: dict[str, Any] | None,
        check: Callable[[], dict],
        sms: int | None = None,
    ):
        super().__init__(world, method, options, check, sms)
        self.used = "sequential" if method == "auto" else method
        self.refused = {self.methods[0]: self.unused} if method == "auto" else {}

    @classmethod
    def methods_for(cls, n_nodes: int) -> tuple[str, ...]:
        """The names of the methods that are for so many nodes: what "auto" takes one of."""
        return cls.methods if n_nodes == 1 else cls.methods[1:]

    def _multiply(self, operands, out, stream):
        """Enqueue the call of these `operands`, by name, of which topk_ids may be an ExpertIndex. -> out"""
        index = operands["topk_ids"]
        if isinstance(index, ExpertIndex):
            return self._call({**operands, "topk_ids": index.topk_ids}, out, stream, index)
        return self._call(operands, out, stream, None)

    def _plan(self, arrays, index):
        world, who, out = self.world, type(self).__name__, arrays["out"]
        operands = {name: array for name, array in arrays.items() if name != "out"}
        shape = self._shape(**operands)
        self._check(**arrays)
        if out.shape != shape:
            raise ValueError(f"{who}: out is {array_text(out)}; it must be {shape}")
        for name, array in arrays.items():
            if name not in ("w", "topk_ids") and not array.flags.c_contiguous:
                raise ValueError(f"{who}: {name} is {array_text(array)}; it must be C-contiguous")
        check_memory(who, out, **operands)
        if not out.size:
            return lambda stream: None
        x, w = arrays["x"], arrays["w"]
        if not x.shape[1]:
            raise ValueError(f"{who}: x is {x.shape}; K must be 1 or more")
        index, steps = index_of(who, world, index or arrays["topk_ids"], w.shape[0])
        return Steps(self._bind(arrays, index, steps), index)


class Steps:
    """A bound call, of steps that run one after another."""

    def __init__(self, steps, index):
        self._steps, self._kept = steps, index

    def __call__(self, stream):
        for step in self._steps:
            step(stream)
