"""Sizes on the command line: ``8K:256M`` is 8K, 64K, 512K, 4M, 32M, 256M."""

import re

from shmemkit.support.sizes import UNITS, size_text

__all__ = ["parse_size", "parse_sizes", "size_text"]

FACTOR = 8
ALLOWED = "a size (8192, 8K, 256M, 1G), a range FROM:TO or FROM:TO:FACTOR, or a list of those with commas"


def parse_size(text):
    """ "8K" -> 8192: bytes; K, M and G are powers of 1024. ValueError for anything else, and for 0."""
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None or int(match[1]) == 0:
        raise ValueError(f"it has {text.strip()!r}; it must be {ALLOWED}")
    return int(match[1]) * UNITS[match[2].upper()]


def parse_sizes(text):
    """ "8K:256M", "8K:1M:2", "8K,1M" -> a list of bytes, as given, without repetitions.

    A range goes from its first size up in steps of its factor (an integer of 2 or more, 8 unless given) and
    does not exceed its last. ValueError says what is allowed.
    """
    sizes = []
    for part in text.split(","):
        first, *rest = part.split(":")
        if not rest:
            sizes.append(parse_size(first))
            continue
        factor = rest[1].strip() if len(rest) == 2 else str(FACTOR)
        if len(rest) > 2 or not factor.isdecimal() or int(factor) < 2:
            raise ValueError(f"it has {part.strip()!r}; it must be {ALLOWED}, with a FACTOR of 2 or more")
        size, last = parse_size(first), parse_size(rest[0])
        if size > last:
            raise ValueError(f"it has {part.strip()!r}; a range must go from the smaller size to the larger")
        while size <= last:
            sizes.append(size)
            size *= int(factor)
    return list(dict.fromkeys(sizes))
