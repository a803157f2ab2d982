"""python tests/planted [--json FILE] [WORDS]: how many planted bugs are found, and right programs accused.

WORDS select the programs whose paragraph or name contains one of them. FILE gets the table:

    python tests/planted --json benchmarks/results/planted.json
"""

import argparse
import json
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[1])

from planted import PLANTED  # noqa: E402

COLUMNS = "programs", "found", "reports right", "missed", "out of reach", "false alarms"
SEEDS = 5  # of each delivery, for the right program


def score(selected):
    """-> {paragraph: the numbers of COLUMNS}, and a text for each disagreement"""
    table, disagreements = {}, []
    for case in sorted(selected, key=lambda case: case.paragraph):
        row = table.setdefault(case.paragraph, dict.fromkeys(COLUMNS, 0))
        row["programs"] += 1
        outcome = case.outcome()
        if case.is_found(outcome):
            row["found"] += 1
            differs = case.differs(outcome)
            row["reports right"] += not differs
            if differs:
                disagreements.append(f"OTHER REPORT {case.name}: {differs}\n{outcome}")
        else:
            row["out of reach" if case.out_of_reach else "missed"] += 1
            if not case.out_of_reach:
                disagreements.append(f"MISSED {case.name}: {outcome!r}\n  why it is wrong: {case.reason}")
        if alarm := case.alarm(SEEDS):
            row["false alarms"] += 1
            disagreements.append(f"FALSE ALARM {case.name}: {alarm}")
    table["all"] = {column: sum(row[column] for row in table.values()) for column in COLUMNS}
    return table, disagreements


def main():
    parser = argparse.ArgumentParser(prog="python tests/planted")
    parser.add_argument("words", nargs="*", help="parts of paragraphs or names; default: all programs")
    parser.add_argument("--json", help="write the table to this file")
    options = parser.parse_args()
    words = options.words
    table, disagreements = score(
        case for case in PLANTED if not words or any(w in f"{case.paragraph} {case.name}" for w in words)
    )
    for text in disagreements:
        print(text, end="\n\n")
    for name, row in [("", dict(zip(COLUMNS, COLUMNS, strict=True))), *table.items()]:
        print(f"{name[:48]:48} ", *(f"{row[column]:>{len(column)}}" for column in COLUMNS))
    if options.json:
        Path(options.json).write_text(json.dumps(table, indent=2) + "\n")
    return 1 if disagreements else 0


if __name__ == "__main__":
    sys.exit(main())
