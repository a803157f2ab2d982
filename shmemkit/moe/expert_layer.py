"""What the two layers of a tensor-parallel mixture of experts have in common on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shmemkit.gemm.distributed import Products
from shmemkit.operations.operation import nothing
from shmemkit.runtime.world import World

from .expert_index import ExpertIndex, index_of


class ExpertLayer(Products):
    """A subclass has

    methods                       two: one for one node, and "sequential"
    unused                        why "auto" does not take the first one
    _steps(arrays, index, steps)  -> the steps of a call, each run(stream); `steps` are those that make the
                                  index
    """

    unused: str
    _steps: Callable[..., list[Callable]]

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
            operands = {**operands, "topk_ids": index.topk_ids}
        else:
            index = None
        return self._enqueue({**operands, "out": out}, stream, index=index)["out"]

    def _bind(self, index, **arrays):
        who, world, x, out = self._who, self.world, arrays["x"], arrays["out"]
        if not out.size:
            return nothing
        if not x.shape[1]:
            raise ValueError(f"{who}: x is {x.shape}; K must be 1 or more")
        index, steps = index_of(who, world, index or arrays["topk_ids"], arrays["w"].shape[0])
        return Steps(self._steps(arrays, index, steps), index)


class Steps:
    """A bound call, of steps that run one after another."""

    def __init__(self, steps, index):
        self._steps, self._kept = steps, index

    def __call__(self, stream):
        for step in self._steps:
            step(stream)
