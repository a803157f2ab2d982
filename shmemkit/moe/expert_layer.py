"""What the two layers of a tensor-parallel mixture of experts have in common on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shmemkit.gemm.distributed import Products
from shmemkit.operations.operation import nothing
from shmemkit.runtime.world import World

from .expert_index import ExpertIndex, index_of
from .gathered_rows import refused

SLOW = ("emulator",)  # backends on which "auto" avoids the Hopper kernel


class ExpertLayer(Products):
    """A subclass has

    methods                       two: one for one node of Hopper GPUs, and "sequential"
    _prepare(name)                makes what a method needs; ValueError, on all ranks, where it cannot be used
    _steps(arrays, index, steps)  -> the steps of a call, each run(stream); `steps` are those that make the
                                  index

    `used` is the method's name. With "auto", a call that it cannot compute is computed by "sequential".
    """

    _prepare: Callable[[str], None]
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
        self.refused, first = {}, self.methods[0]
        if method == "auto" and world.backend.name in SLOW:
            self.refused[first] = f"the {world.backend.name} takes long to compute it"
        for name in self.methods if method == "auto" else (method,):
            if name in self.refused:
                continue
            self.used = name
            try:
                return self._prepare(name)
            except ValueError as error:
                if method != "auto" or name != first:
                    raise
                self.refused[name] = str(error)

    def _is_sequential(self, k, n, w, **arrays):
        """Whether a call of these arrays is computed so. ValueError if the kernels of a method that was asked
        for do not take them."""
        if self.used == "sequential":
            return True
        reason = refused(k, n, w, **arrays)
        if reason and self.method != "auto":
            raise ValueError(f"{self._who}: {reason}. Use method='auto', on all ranks")
        return bool(reason)

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
