"""The rule for lines of LL128, read in machine code as nvdisasm and cuobjdump print it.

A line is stored, or loaded, by all threads of a warp in one instruction. So no lane may be left out of it,
and the warp has to be together: between the warp's last barrier and the access nothing may part it
(docs/machine_code.md, whole line). ptxas makes ``NOP`` or ``WARPSYNC`` of ``bar.warp.sync``. Where it cannot
know that the warp is together, a branch leads a divided warp aside first (``BRA.DIV``), to a barrier there
(``WARPSYNC.COLLECTIVE`` ... ``ENDCOLLECTIVE``), and from there back, or to a copy of what follows.
"""

import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
from typing import NamedTuple

_ACCESSES = {"stores": r"STG?\.E\.128\.STRONG\.SYS\b", "loads": r"LDG?\.E\.128\.STRONG\.SYS\b"}
_BARRIER, _ASIDE = r"NOP$|WARPSYNC(\.ALL$| R| 0x)", r"ENDCOLLECTIVE$"
_BRANCH = r"(@!?U?P\d+ )?(BRA|BRX|BRXU|JMP|JMX|CALL|RET|EXIT|BREAK|KILL)\b"
_INSTRUCTION = re.compile(r"(?:/\*([0-9a-f]+)\*/)?\s*((?:@!?U?P\w+\s+)?[A-Z][A-Z0-9]*\b[^;]*?)\s*(;|$)")
_TARGET = re.compile(r"(\.L\w+|0x[0-9a-f]+)\)?$")


def disassembler():
    """-> the command of nvdisasm or cuobjdump, on PATH, in CUDA_HOME or from PyPI, or None"""
    folders = os.environ.get("PATH", "").split(os.pathsep)
    folders += [
        os.path.join(os.environ[name], "bin") for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ
    ]
    folders += [found for path in sys.path for found in glob.glob(os.path.join(path, "nvidia", "*", "bin"))]
    for name, option in (("nvdisasm", "-c"), ("cuobjdump", "-sass")):
        if found := shutil.which(name, path=os.pathsep.join(folders)):
            return [found, option]
    return None


def disassembled(command, cubin):
    """-> the machine code of a cubin, as text"""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([*command, file.name], capture_output=True, text=True, check=True).stdout


class Lines(NamedTuple):
    """How many lines are stored, and loaded, after each barrier of a warp, sorted, without the copies for
    warps that were divided; and the accesses that are not of a whole warp, each with the reason."""

    stores: list[int]
    loads: list[int]
    torn: list[str]


def lines_of(sass, lines=(), packets=()):
    """-> Lines of the machine code of a kernel of LL128. It must have whole `lines` of these, ("stores",
    "loads") or one. Of `packets` its threads access some of 16 bytes, too: what is not of a whole warp is
    taken for one of them there."""
    code, counts, torn = _Steps(sass), [], []
    for kind, pattern in _ACCESSES.items():
        together, aside, parted = {}, {}, []
        for i in code.all(pattern):
            barrier, reason = code.barrier_before(i)
            if code.steps[i].startswith("@"):
                reason = "not by all threads of a warp"
            if reason or barrier is None:
                parted.append(f"{code.steps[i]}: {reason}")
                continue
            of_all = aside if re.match(_ASIDE, code.steps[barrier]) else together
            of_all[barrier] = of_all.get(barrier, 0) + 1
        if not set(aside.values()) <= set(together.values()):
            parted.append(
                f"{sorted(aside.values())} lines for divided warps, {sorted(together.values())} else"
            )
        if kind in lines and not together:
            torn += parted or [f"it {kind} no line"]
        elif kind not in packets:
            torn += parted
        counts.append(sorted(together.values()))
    stores, loads = counts
    return Lines(stores, loads, torn)


class _Steps:
    """The steps of a kernel and its functions, in their order: instructions, labels and "function:"."""

    def __init__(self, sass):
        self.steps = _steps(sass)
        self.branches = {}  # label: steps that branch to it
        for i, step in enumerate(self.steps):
            if re.match(_BRANCH, step) and (target := _TARGET.search(step)):
                self.branches.setdefault(target[1], []).append(i)

    def all(self, pattern):
        """The steps with such an instruction, whatever its predicate."""
        return [i for i, step in enumerate(self.steps) if re.match(rf"(@!?U?P\w+ )?(?:{pattern})", step)]

    def barrier_before(self, i):
        """-> (the warp's last barrier before step i, None), or (None, what may part the warp since)."""
        for k in range(i - 1, -1, -1):
            step = self.steps[k]
            if re.match(f"{_BARRIER}|{_ASIDE}", step):
                return k, None
            if step == "function:":
                break
            if re.match(_BRANCH, step):
                return None, f"the warp may part at {step}"
            if step.endswith(":"):
                for branch in self.branches.get(step[:-1], ()):
                    if not self._comes_aside(branch):
                        return None, f"others join the warp by {self.steps[branch]}"
        return None, "no barrier of the warp before it"

    def _comes_aside(self, branch):
        """Whether it leads a warp that was divided back from the barrier aside."""
        if not self.steps[branch].startswith("BRA "):
            return False
        barrier, _ = self.barrier_before(branch)
        return barrier is not None and re.match(_ASIDE, self.steps[barrier]) is not None


def _steps(sass):
    """Without addresses, encodings and "@PT". Of cuobjdump, which has no labels, addresses are labels."""
    found = []
    for line in sass.splitlines():
        line = line.strip()
        if re.match(r"\.text\.|Function :|function:", line):
            found.append("function:")
        elif re.match(r"\.L\w+:", line):
            found.append(line.partition(":")[0] + ":")
        elif step := _INSTRUCTION.match(line):
            if step[1]:
                found.append(f"{hex(int(step[1], 16))}:")
            found.append(re.sub(r"\s+", " ", step[2].replace("@PT ", "").replace("@UPT ", "")))
    return found
