"""python tests/race_cases [WORDS]: prints how many of the cases are judged rightly, and which are not.

WORDS select the cases whose class or name contains one of them.
"""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from race_cases import CASES, RIGHT  # noqa: E402

COLUMNS = "cases", "right", "found", "missed", "false alarms", "lines right"


def score(selected):
    """-> {class: the numbers of COLUMNS}, and a sentence for each disagreement"""
    table, disagreements = {}, []
    for case in selected:
        row = table.setdefault(case.group, dict.fromkeys(COLUMNS, 0))
        row["cases"] += 1
        where = f"{case.group}.{case.name} ({case.label})"
        if case.label == RIGHT:
            row["right"] += 1
            alarm = case.alarm()
            if alarm is not None:
                row["false alarms"] += 1
                disagreements.append(f"FALSE ALARM {where}\n{alarm}\n  why it is right: {case.reason}")
            continue
        error = case.report()
        if not case.found(error):
            row["missed"] += 1
            seen = "" if error is None else f", but {type(error).__name__}: {error}"
            disagreements.append(f"MISSED {where}{seen}\n  why it is wrong: {case.reason}")
            continue
        row["found"] += 1
        if case.lines_right(error):
            row["lines right"] += 1
        else:
            marks = {mark: sorted(case.marked(mark)) for mark in ("first", "second")}
            disagreements.append(f"OTHER LINES {where}: marked are {marks}\n{error}")
    return table, disagreements


def main(words):
    selected = [c for c in CASES if not words or any(w in f"{c.group}.{c.name}" for w in words)]
    table, disagreements = score(selected)
    for text in disagreements:
        print(text, end="\n\n")
    rows = [*table.items(), ("all", {c: sum(row[c] for row in table.values()) for c in COLUMNS})]
    print(f"| {'class':18} | " + " | ".join(COLUMNS) + " |")
    print("| --- |" + " --- |" * len(COLUMNS))
    for name, row in rows:
        print(f"| {name:18} | " + " | ".join(f"{row[c]:{len(c)}}" for c in COLUMNS) + " |")
    return 1 if disagreements else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
