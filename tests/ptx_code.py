"""The steps of a kernel in PTX, and the ways between them."""

import re

STORE, LOAD = (rf"{access}\.relaxed\.sys\.global\.v2\.b64 " for access in ("st", "ld"))
MEET = r"bar\.warp\.sync|vote\.sync"


class Code:
    """The steps of a kernel, instructions and labels, in their order."""

    def __init__(self, ptx):
        body = ptx[ptx.index("{", ptx.index(".entry")) :]
        lines = (re.sub(r"//.*", "", line).strip() for line in body.splitlines()[1:])
        parts = (part for line in lines for part in (_accesses(line) if "bar.warp.sync" in line else [line]))
        self.steps = [part for part in parts if part and part[0] not in ".}"]
        self.votes = set()  # predicates that are the same for the whole warp
        for step in self.steps:
            made = re.match(r"(vote\.sync)\.\w+\.pred\s+(%p\d+)|not\.pred\s+(%p\d+), (%p\d+)", step)
            if made and (made[1] or made[4] in self.votes):
                self.votes.add(made[2] or made[3])

    def all(self, pattern):
        return [i for i, step in enumerate(self.steps) if re.search(pattern, step)]

    def branches(self, label):
        return [self.steps[i] for i in self.all(rf"\bbra\S*\s+{re.escape(label)};")]

    def is_uniform(self, step):
        """Whether it does not part the threads of a warp, nor is it where others may join them."""
        if step.endswith(":"):
            return all(self.is_uniform(branch) for branch in self.branches(step[:-1]))
        predicate = re.match(r"@!?(%p\d+)", step)
        return predicate is None or predicate[1] in self.votes

    def are_together(self, i):
        """Whether the threads of a warp come to step i together, from where they last met."""
        meetings = [k for k in self.all(MEET) if k < i]
        return bool(meetings) and all(map(self.is_uniform, self.steps[meetings[-1] : i + 1]))

    def are_neighbours(self, i, k):
        """Whether step k follows step i: no branch, no label and no other meeting between them."""
        return not any(re.match(r"@|bra|.*:$|" + MEET, step) for step in self.steps[i:k])

    def reaches(self, i, goal, avoiding):
        """Whether there is a way from step i to a step like `goal`, around those like `avoiding`."""
        seen, ways = set(), [i + 1]
        while ways:
            i = ways.pop()
            if i in seen or re.search(avoiding, self.steps[i]):
                continue
            if re.search(goal, self.steps[i]):
                return True
            seen.add(i)
            if branch := re.search(r"\bbra\S*\s+(\S+);", self.steps[i]):
                ways.append(self.steps.index(branch[1] + ":"))
            if not re.match(r"bra|ret", self.steps[i]):
                ways.append(i + 1)
        return False


def _accesses(line):
    """The instructions of an inline assembly that brings a warp together and has it access lines."""
    return [part.strip(" ") + ";" for part in line.strip("{} ").split(";") if part.strip()]


def is_lean(ptx):
    """No call, no division, no detour through floating point, no reference counting."""
    slow = re.search(r"^\s*(@\S+ )?(call|div|rem|cvt\.rn\.f64)\b", ptx, re.M)
    return slow is None and "NRT_" not in ptx and ".local" not in ptx
