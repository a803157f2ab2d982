"""Shapes on the command line."""

from collections.abc import Callable
from typing import NamedTuple


class Shapes(NamedTuple):
    """Of an option --shapes: the default, and that on the emulator; what a shape is; its letters; and what
    makes shapes of the option's text, in place of ``parse_shapes``."""

    default: str
    emulated: str
    what: str
    unit: str = "MxNxK"
    parse: Callable | None = None


def parse_shapes(text, names="MxNxK", rule=", of integers of 1 or more", allowed=lambda *sizes: all(sizes)):
    """ "MxNxK,MxNxK" -> [(m, n, k), ...]; likewise with other `names`. ValueError, with the `rule`, unless
    ``allowed(m, n, k)``"""
    shapes = []
    for part in text.split(","):
        sizes = [size.strip() for size in part.lower().split("x")]
        known = len(sizes) == len(names.split("x")) and all(map(str.isdecimal, sizes))
        if not known or not allowed(*map(int, sizes)):
            raise ValueError(f"it has {part!r}; it must be {names}{rule}")
        shapes.append(tuple(map(int, sizes)))
    return shapes


def text_of(shape):
    return "x".join(map(str, shape))


def parse_tiles(text):
    """ "MxN,MxN" -> [(m, n), ...]"""
    rule = ", 64 or 128 rows by a multiple of 16 up to 256"
    tiles = {(m, n) for m in (64, 128) for n in range(16, 257, 16)}
    return parse_shapes(text, "MxN", rule, lambda *tile: tile in tiles) if text else []
