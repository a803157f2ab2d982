"""Rules for machine code, as nvdisasm and cuobjdump print it.

A line of LL128 has to be stored, and loaded, by one instruction of all threads of a warp: it is not
predicated, and a barrier of the warp stands before it, with no branch, label or other way in between
(docs/machine_code.md, whole lines).
"""

import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile

LINE = re.compile(r"(ST|LD)G?\.E\.128\.STRONG\.SYS\b")
# BRA.DIV goes on if the warp is together. NOP is a barrier where ptxas knows that it is.
_TOGETHER = re.compile(r"WARPSYNC\b|BRA\.DIV\b|NOP\b")
_BRANCH = re.compile(r"(BRA|BRX|JMP|JMX|CALL|RET|EXIT|BREAK|KILL)\b(?!\.DIV)")
_UNIFORM = re.compile(r"\bUP\d")  # a predicate of the whole warp
_TARGET = re.compile(r"\(?(\.L_\w+|0x[0-9a-f]+)\)?\s*;?\s*$")
_STEP = re.compile(r"(?:/\*([0-9a-f]+)\*/)?\s*(@!?U?P\w+\s+)?([A-Z][A-Z0-9]*[^;]*;)")


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


def torn_lines(sass):
    """-> the accesses to lines, in the machine code of a kernel of LL128, that are not one of all threads of
    a warp, each with the reason"""
    return lines_of(sass)[1]


def lines_of(sass):
    """-> (how many accesses to lines a kernel of LL128 has, those that ``torn_lines`` returns)"""
    steps, places = _parsed(sass)
    sources = {}
    for i, (_, text) in enumerate(steps):
        if _BRANCH.match(text) and (target := _TARGET.search(text)):
            sources.setdefault(places.get(target[1]), []).append(i)
    found = [i for i, (_, text) in enumerate(steps) if LINE.match(text)]
    torn = []
    for i in found:
        predicate, text = steps[i]
        reason = f"it is predicated by {predicate}" if predicate else _apart(steps, sources, i)
        if reason:
            torn.append(f"{text} {reason}")
    return len(found), torn


def _parsed(sass):
    """-> [(predicate, instruction), ..] and {label or address: number of the instruction there}"""
    steps, places = [], {}
    for line in sass.splitlines():
        line = line.strip()
        if label := re.match(r"(\.L_\w+):", line):
            places[label[1]] = len(steps)
        elif step := _STEP.match(line):
            if step[1]:
                places[hex(int(step[1], 16))] = len(steps)
            predicate = (step[2] or "").strip()
            steps.append(("" if predicate in ("@PT", "@UPT") else predicate, step[3].strip()))
    return steps, places


def _apart(steps, sources, access):
    """Why threads of a warp may come apart to `access`, or None: on all ways back there is a barrier of the
    warp, and no branch of some threads before it."""
    ways, seen = [access], set()
    while ways:
        i = ways.pop()
        for source in sources.get(i, ()):
            predicate, text = steps[source]
            if predicate and not _is_uniform(steps, source):
                return f"may be reached by a branch of some threads: {predicate} {text}"
            ways.append(source)
        if i == 0:
            return "is behind no barrier of the warp"
        i -= 1
        predicate, text = steps[i]
        if i in seen or _TOGETHER.match(text):
            continue
        seen.add(i)
        if _BRANCH.match(text) and not _is_uniform(steps, i):
            if predicate or text.startswith("CALL"):
                return f"is behind a branch of some threads: {predicate} {text}"
            continue  # nothing comes from there
        ways.append(i)
    return None


def _is_uniform(steps, i):
    """Whether all threads of a warp take the branch `i`, or none: a uniform predicate, or that of a vote."""
    predicate, text = steps[i]
    if _UNIFORM.search(f"{predicate} {text}"):
        return True
    name = predicate.lstrip("@!")
    made = re.compile(rf"\S+ (P\d, )?{name}\b")
    return bool(name) and next(
        (step.startswith("VOTE") for _, step in reversed(steps[:i]) if made.match(step)), False
    )
