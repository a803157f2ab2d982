"""What tests read in machine code, as ``machine_code.plain_sass`` writes it."""

import re

from shmemkit.tools.machine_code import lines_of


def whole_lines(sass, lines=(), packets=()):
    """-> how many lines of LL128 a warp stores, and loads, after each barrier: two sorted lists.
    AssertionError where a line is not whole; `lines` and `packets` as of ``lines_of``."""
    stores, loads, torn = lines_of(sass, lines, packets)
    assert not torn, "\n".join(torn)
    return [stores, loads]


OF_PTX = r"\b(ld|st)\.(?:relaxed|acquire|release|volatile)(?:\.sys)?(?:\.global)?(?:\.v([24]))?\.[bu](\d+)\b"
OF_SASS = r"\b(LD|ST)G?\.E()(?:\.(\d+))?\.STRONG\.SYS\b"


def accesses(code):
    """-> {(whether it stores, bits): how often}, of the strong accesses of scope sys in SASS or PTX: packets,
    flags and signals."""
    found = {}
    for access, several, bits in re.findall(OF_PTX, code) + re.findall(OF_SASS, code):
        kind = access.lower() == "st", int(several or 1) * int(bits or 32)
        found[kind] = found.get(kind, 0) + 1
    return found
