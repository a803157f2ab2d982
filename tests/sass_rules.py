"""What docs/machine_code.md says that the machine code must keep, as rules for SASS: functions of the steps
of a kernel, which return those that break the rule. Of packets and lines, ``sass.py`` has other rules.

    broken(sass) -> {"whole warp": ["@P0 SHFL.IDX ..."]}, {} where nothing is
"""

import re
from typing import NamedTuple

WARP = r"(SHFL|VOTE|MATCH|REDUX|HMMA|IMMA|LDSM|STSM|WARPSYNC|BAR)\b"
WARPGROUP = r"(HGMMA|QGMMA|IGMMA|WARPGROUP|USETMAXREG)\b"
PRODUCT = r"[HQI]GMMA\b"
LINE, FLAG = r"LDG?\.E\.128\.STRONG\.SYS$", r"LDG?\.E(\.64|\.128)?\.STRONG\.SYS$"
TOGETHER = r"(NOP|WARPSYNC|WARPSYNC\.ALL|ENDCOLLECTIVE)$"  # barriers of a warp
AWAY = r"(BRA|BRX|EXIT|RET|JMP)$"
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


def flags_first(code):
    """Lines are loaded after a branch on a vote, on whatever way there. The vote is on the flags of as many
    lines, which were loaded before it. What is loaded with no barrier of the warp before it is no line."""
    lines, wrong = {}, []
    for i, step in enumerate(code):
        if _are(step, LINE) and not parts_a_warp(step):
            barrier = _last(code, i, rf"{TOGETHER}|(BRA|BRX|EXIT|RET|JMP|CALL)\b")
            if barrier is not None and _are(code[barrier], TOGETHER):
                lines.setdefault(barrier, []).append(step)
    for barrier, those in lines.items():
        votes = _votes_before(code, barrier)
        if not votes or any(vote is None or _flags_of(code, vote) != len(those) for vote in votes):
            wrong += those
    return wrong


def _last(code, i, pattern):
    """-> the last step before step i that is such a one, or None"""
    return next((k for k in range(i - 1, -1, -1) if _are(code[k], pattern)), None)


def _votes_before(code, i):
    """-> the votes on which the last branches before step i depend, on all ways to it; with None where a load
    of packets or flags, or the kernel's begin, comes first"""
    sources, found, seen, todo = {}, set(), set(), [i]
    for k, step in enumerate(code):
        if goal := _are(step, "BRA") and re.search(r"`\((\.\w+)\)", step.text):
            sources.setdefault(goal[1], []).append(k)
    while todo:
        if (k := todo.pop()) in seen:
            continue
        seen.add(k)
        step, vote = code[k], None
        if k == 0 or _are(step, FLAG):
            found.add(None)
            continue
        if _are(step, "BRA$") and parts_a_warp(step):
            made = (j for j in range(k - 1, -1, -1) if _written(code[j])[:1] == [step.predicate.lstrip("!")])
            vote = next(made, None)
        if vote is not None and _are(code[vote], r"VOTE\.A"):
            found.add(vote)
            continue
        todo += sources.get(step.text, ()) if step.op == ":" else ()
        if not _are(code[k - 1], AWAY) or code[k - 1].predicate:
            todo.append(k - 1)
    return found


def _flags_of(code, vote):
    """-> how many loads since the barrier before the vote decide it"""
    n = 0
    for k in range(vote - 1, -1, -1):
        if n and _are(code[k], rf"{TOGETHER}|BRA"):
            break
        n += _are(code[k], FLAG) and _reaches(code, k, vote)
    return n


def _reaches(code, load, vote):
    """Whether what is loaded at step `load` is in the vote."""
    found = set(_written(code[load]))
    for step in code[load + 1 : vote]:
        written = _written(step)
        if found & {*_registers(step.text)[len(written) :], step.predicate.lstrip("!")}:
            found.update(written)
        elif not step.predicate:
            found.difference_update(written)
    return bool(found & set(_registers(code[vote].text)[1:]))


def _registers(text):
    return re.findall(r"\b(?:U?P[0-7T]|R\d+)\b", text)


def _written(step):
    """The registers that it writes: the first, and the second of two predicates."""
    if _are(step, r"ST|:|BRA|WARPSYNC"):
        return []
    several = re.match(r"\S+ (P[0-7T]), (P[0-7T])\b", step.text) and not _are(step, "VOTE")
    return _registers(step.text)[: 2 if several else 1]


RULES = {
    "whole line": flags_first,
    "whole warp": whole_warp,
    "whole warpgroup": whole_warpgroup,
    "one elected thread": one_thread,
}
"""Lemma of docs/machine_code.md -> its rule."""


def broken(sass):
    """-> {lemma: what breaks it}"""
    code = steps(sass)
    found = {name: rule(code) for name, rule in RULES.items()}
    return {name: [_shown(step) for step in wrong] for name, wrong in found.items() if wrong}


def _shown(step):
    return f"@{step.predicate} {step.text}" if step.predicate else step.text
