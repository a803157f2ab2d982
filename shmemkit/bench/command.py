"""The description of a command of the bench."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import shmemkit as sk

from .measure import Contender
from .shapes import Shapes


class Entry(NamedTuple):
    """A contender, the part that it does alone (None: all), its name, if not that of its method, and its
    case, if not that of its part."""

    contender: Contender
    alone: str | None = None
    name: str | None = None
    case: str | None = None

    @property
    def method(self):
        return self.name or self.contender.method


@dataclass(frozen=True)
class Command:
    """A command of ``shmemkit bench``: what it measures, and its options.

    name, text  of the command
    plan        (world, options) -> ([Entry, ...], [{part, or None for all: its case}, ...]): what is
                compared, and for each shape or size the cases, whose data are made in this order. That of
                all says what rows have
    together    whether all of a case are timed in the same rounds
    limited     whether rates are compared with what one rank can send to another
    run         (world, results, options, progress): measures, in place of ``loop.run``

    shapes      of --shapes; None without the option
    sizes       of --sizes: of what they are the bytes; None without the option. `usual`: the default
    dtypes      of --dtype
    host        the name of the class whose methods, and auto, --methods takes; `methods`: in place of these.
                `default`: as a text, else `without` says what it is
    peers       of --vs: {word: what it is}; `vs`: the default, else all
    sms         whether it has --sms
    iters       of --iters: the default, in words; None without the option
    options     [(name, keywords of argparse), ...]: others
    defaults    {option: its default}, of those above
    emulated    {option: its default on the emulator}, where a kernel takes some 100,000 times as long
    """

    name: str
    text: str
    plan: Callable | None = None
    together: bool = True
    limited: bool = False
    run: Callable | None = None
    shapes: Shapes | None = None
    sizes: str | None = None
    usual: str = "8K:256M"
    dtypes: Sequence[str] = ()
    host: str | None = None
    methods: Sequence[str] = ()
    default: str | None = None
    without: str = "auto, and all for so many nodes"
    peers: dict[str, str] = field(default_factory=dict)
    vs: str | None = None
    sms: bool = False
    iters: str | None = None
    options: Sequence[tuple[str, dict[str, Any]]] = ()
    defaults: dict[str, Any] = field(default_factory=dict)
    emulated: dict[str, Any] = field(default_factory=dict)

    @property
    def known(self):
        """What --methods takes."""
        return self.methods or (self.host and ("auto", *getattr(sk, self.host).methods))
