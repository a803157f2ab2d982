"""What docs/machine_code.md says that the machine code must keep, as rules for SASS: functions of the steps
of a kernel, which return those that break the rule. Packets and lines have rules of their own.

    broken(sass) -> {"whole warp": ["@P0 SHFL.IDX ..."]}, {} where nothing is
"""

import re
from typing import NamedTuple

WARP = r"(SHFL|VOTE|MATCH|REDUX|HMMA|IMMA|LDSM|STSM|WARPSYNC|BAR)\b"
WARPGROUP = r"(HGMMA|QGMMA|IGMMA|WARPGROUP|USETMAXREG)\b"
PRODUCT = r"[HQI]GMMA\b"
LOAD, STORE, COMMIT = r"UTMALDG\b|UBLKCP\.S\.G", r"UTMASTG\b|UTMAREDG\b|UBLKCP\.G\.S", r"UTMACMDFLUSH\b"


class Step(NamedTuple):
    """An instruction, or a label: then op is ":"."""

    op: str
    predicate: str  # "" without; "P0", "!P0"; "UP0" is the same for all threads of the warp
    text: str


def steps(sass):
    """-> the Steps of SASS, as nvdisasm prints it, or an instruction a line; labels to which something
    goes"""
    found, goals = [], set(re.findall(r"`\((\.\w+)\)", sass))
    for line in sass.splitlines():
        if label := re.match(r"(\.L\w*|function):", line):
            if label[1] in (*goals, "function"):
                found.append(Step(":", "", label[1]))
        elif step := re.match(r"(?:\s+/\*[0-9a-f]{4,}\*/\s+)?(?:@(!?\w+) +)?(([A-Z][\w.]*).*?) *;?$", line):
            found.append(Step(step[3], step[1] or "", step[2]))
    return found


def _are(step, pattern):
    return re.match(pattern, step.op) is not None


def parts_a_warp(step):
    """Whether a thread's own predicate decides that it takes part."""
    return re.fullmatch(r"!?P\d", step.predicate) is not None


def whole_warp(code):
    """What all threads of a warp do together is predicated by none of them."""
    return [step for step in code if _are(step, WARP) and parts_a_warp(step)]


def whole_warpgroup(code):
    """Nor is what a warpgroup does together; and products follow the fence that opens them, with no way in or
    out between."""
    wrong, is_open = [], False
    for step in code:
        if _are(step, WARPGROUP) and parts_a_warp(step):
            wrong.append(step)
        if _are(step, r"WARPGROUP\.ARRIVE"):
            is_open = True
        elif _are(step, r":|BRA|BRX|EXIT|CALL|RET|WARPGROUP\.DEPBAR"):
            is_open = False
        elif _are(step, PRODUCT) and not is_open:
            wrong.append(step)
    return wrong


def one_thread(code):
    """Asynchronous loads run once for each thread that is there (ptxas makes a loop of it), on an mbarrier
    that was told of their bytes before; stores are committed by the thread that began them."""
    wrong, told, uncommitted = [], False, None
    for i, step in enumerate(code):
        if _are(step, r"SYNCS\.ARRIVE\.TRANS64$"):
            told = True
        elif _are(step, r"SYNCS\.(PHASECHK|EXCH)"):
            told = False
        elif _are(step, LOAD):
            repeated = next((s for s in code[i + 1 :] if s.op == ":" or _are(s, "BRA")), step)
            if not told or not _are(repeated, r"BRA\.U\.ANY"):
                wrong.append(step)
        if _are(step, STORE):
            uncommitted = step
        elif _are(step, COMMIT):
            uncommitted = None
        elif uncommitted and _are(step, r"DEPBAR\.LE|EXIT|BAR"):
            wrong.append(uncommitted)
            uncommitted = None
    return wrong


RULES = {"whole warp": whole_warp, "whole warpgroup": whole_warpgroup, "one elected thread": one_thread}
"""Lemma of docs/machine_code.md -> its rule."""


def broken(sass):
    """-> {lemma: what breaks it}"""
    code = steps(sass)
    found = {name: rule(code) for name, rule in RULES.items()}
    return {name: [_shown(step) for step in wrong] for name, wrong in found.items() if wrong}


def _shown(step):
    return f"@{step.predicate} {step.text}" if step.predicate else step.text
