"""Write the tables of the docs from benchmarks/results/*.json, and what the commands shown in them print.

python docs/tables.py           rewrite them
python docs/tables.py --check   exit status 1 if one is out of date
"""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
RESULTS = ROOT / "benchmarks" / "results"


def table(header, rows):
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines)


def launch_host():
    data = json.loads((RESULTS / "launch.json").read_text())
    costs = data["host_us"]
    base = next(iter(costs.values()))
    rows = [[f"`{name}`", f"{cost:.1f}", f"{cost / base:.2f}"] for name, cost in costs.items()]
    return table(["three array arguments", "us", "ratio"], rows) + "\n\n" + machine(data)


def launch_first():
    data = json.loads((RESULTS / "launch.json").read_text())
    rows = [[name, f"{seconds:.2f}"] for name, seconds in data["first_launch_s"].items()]
    return table(["cache", "s"], rows) + "\n\n" + machine(data)


def races():
    data = json.loads((RESULTS / "emulator.json").read_text())
    rows = [
        [name, f"{t['without']:.2f}", f"{t['with']:.2f}", f"{t['with'] / t['without']:.1f}"]
        for name, t in data["races_s"].items()
    ]
    about = data["machine"]
    where = f"4 ranks, one core ({about['cpu']}), Python {about['python']}, {about['date'][:10]}."
    return table(["one launch, s", "without", "with races", "ratio"], rows) + "\n\n" + where


def machine(data):
    about = data["machine"]
    return f"{about['gpu']}, CUDA driver {about['driver']}, {about['date'][:10]}."


def output(command):
    """`command`, a Python one, and what it prints."""
    _, *arguments = shlex.split(command)
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return f"```console\n$ {command}\n{done.stdout.replace(f'{ROOT}/', '')}```"


def with_tables(text):
    return re.sub(
        r"(<!-- (table|output): (.*?) -->\n).*?(<!-- end -->)",
        lambda m: m[1] + (globals()[m[3]]() if m[2] == "table" else output(m[3])) + "\n" + m[4],
        text,
        flags=re.S,
    )


def main():
    stale = []
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text()
        new = with_tables(text)
        if new != text:
            stale.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(new)
    if stale:
        print(("out of date: " if "--check" in sys.argv else "written: ") + ", ".join(stale))
    return bool(stale) and "--check" in sys.argv


if __name__ == "__main__":
    sys.exit(main())
