"""Rules on SASS, as ``machine_code.plain_sass`` writes it: what a protocol needs that no PTX promises.

A line of LL128 is stored, or loaded, by all threads of a warp in one instruction. So no lane may be left out
of it, and the warp has to be together: between the warp's last barrier and the access nothing may part it.
ptxas makes ``NOP`` or ``WARPSYNC`` of ``bar.warp.sync``. Where it cannot know that the warp is together, a
branch leads a divided warp aside first (``BRA.DIV``), to a barrier there (``WARPSYNC.COLLECTIVE`` ...
``ENDCOLLECTIVE``), and from there back, or to a copy of what follows.
"""

import re

WIDE_STORE, WIDE_LOAD = r"STG?\.E\.128\.STRONG\.SYS\b", r"LDG?\.E\.128\.STRONG\.SYS\b"
BARRIER, OWN_BARRIER = r"NOP$|WARPSYNC(\.ALL$| R| 0x)", r"ENDCOLLECTIVE$"
BRANCH = r"(@!?U?P\d+ )?(BRA|BRX|BRXU|JMP|JMX|CALL|RET|EXIT|BREAK|KILL)\b"


class Sass:
    """The steps of a kernel and its functions, instructions and labels, in their order."""

    def __init__(self, text):
        self.steps = text.splitlines()
        self.branches = {}  # label: steps that branch to it
        for i, step in enumerate(self.steps):
            if found := re.match(rf"{BRANCH}.*`\((\.L\w+)\)", step):
                self.branches.setdefault(found[3], []).append(i)

    def all(self, pattern):
        """The steps with such an instruction, whatever its predicate."""
        return [i for i, step in enumerate(self.steps) if re.match(rf"(@!?U?P\w+ )?(?:{pattern})", step)]

    def barrier_before(self, i):
        """-> the warp's last barrier before step i, if nothing may part the warp since. AssertionError, with
        the steps, otherwise."""
        for k in range(i - 1, -1, -1):
            step = self.steps[k]
            if re.match(f"{BARRIER}|{OWN_BARRIER}", step):
                return k
            assert step != "function:", f"no barrier of the warp before {self._between(k, i)}"
            assert not re.match(BRANCH, step), f"the warp may part at {self._between(k, i)}"
            if step.endswith(":"):
                others = [b for b in self.branches.get(step[:-1], ()) if not self._comes_aside(b)]
                assert not others, f"others join the warp at {self._between(k, i)}"
        raise AssertionError("no function begins")

    def _comes_aside(self, branch):
        """Whether it leads a warp that was divided back from the barrier aside."""
        return self.steps[branch].startswith("BRA ") and re.match(
            OWN_BARRIER, self.steps[self.barrier_before(branch)]
        )

    def _between(self, first, last):
        return "\n".join(["", *self.steps[first : last + 1], ""])


def whole_lines(sass, beside_packets=False):
    """-> how many lines of a warp are stored, and loaded, after each barrier: two sorted lists, without the
    copies for warps that were divided. AssertionError where a line is not whole; `beside_packets`, which
    threads store and load for themselves, such accesses are taken for packets, and are not counted."""
    code, counts = Sass(sass), []
    for pattern in (WIDE_STORE, WIDE_LOAD):
        together, aside = {}, {}
        for i in code.all(pattern):
            try:
                assert re.match(pattern, code.steps[i]), f"not by all threads of a warp: {code.steps[i]}"
                barrier = code.barrier_before(i)
            except AssertionError:
                if beside_packets:
                    continue
                raise
            of_all = aside if re.match(OWN_BARRIER, code.steps[barrier]) else together
            of_all[barrier] = of_all.get(barrier, 0) + 1
        assert set(aside.values()) <= set(together.values()), f"{aside} for divided warps, {together} else"
        counts.append(sorted(together.values()))
    return counts


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
