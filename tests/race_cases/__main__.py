"""python tests/race_cases [--json FILE] [WORDS]: prints how many cases are judged rightly, and which are not.

WORDS select the cases whose class or name contains one of them. FILE gets the table:

    python tests/race_cases --json benchmarks/results/race_cases.json
"""

import argparse
import json
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from race_cases import CASES, RIGHT  # noqa: E402

COLUMNS = "cases", "right", "found", "lines right", "missed", "out of reach", "false alarms"


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
            row["out of reach" if case.out_of_reach else "missed"] += 1
            if not case.out_of_reach:
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


def main():
    parser = argparse.ArgumentParser(prog="python tests/race_cases")
    parser.add_argument("words", nargs="*", help="parts of names of classes or cases; default: all cases")
    parser.add_argument("--json", help="write the table to this file")
    options = parser.parse_args()
    words = options.words
    selected = [c for c in CASES if not words or any(w in f"{c.group}.{c.name}" for w in words)]
    table, disagreements = score(selected)
    for text in disagreements:
        print(text, end="\n\n")
    table["all"] = {c: sum(row[c] for row in table.values()) for c in COLUMNS}
    print(f"| {'class':18} | " + " | ".join(COLUMNS) + " |")
    print("| --- |" + " --- |" * len(COLUMNS))
    for name, row in table.items():
        print(f"| {name:18} | " + " | ".join(f"{row[c]:{len(c)}}" for c in COLUMNS) + " |")
    if options.json:
        Path(options.json).write_text(json.dumps(table, indent=2) + "\n")
    return 1 if disagreements else 0


if __name__ == "__main__":
    sys.exit(main())
