"""Write the tables and plots of the docs from benchmarks/results/*.json, and what the commands shown in them
print.

python docs/tables.py           rewrite them
python docs/tables.py --check   exit status 1 if one is out of date
"""

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
RESULTS = ROOT / "benchmarks" / "results"
PLOTS = DOCS / "plots"

sys.path.insert(0, str(ROOT))  # this shmemkit, installed or not

import bench_page  # noqa: E402
from bench_page import table  # noqa: E402

import shmemkit as sk  # noqa: E402
from shmemkit.bench.results import DRIVER, Results  # noqa: E402
from shmemkit.bench.sizes import size_text  # noqa: E402


def launch_host():
    results = Results.read(RESULTS / "launch.json")
    costs = {row.method: row.us for row in results.rows if row.op == "launch" and row.us is not None}
    rows = [[f"`{name}`", f"{cost:.1f}", f"{cost / costs[DRIVER]:.2f}"] for name, cost in costs.items()]
    return table(["three array arguments", "us", "ratio"], rows) + "\n\n" + machine(results)


def launch_first():
    results = Results.read(RESULTS / "launch.json")
    rows = [[row.method, f"{row.us / 1e6:.2f}"] for row in results.rows if row.op == "first_launch"]
    return table(["", "s"], rows) + "\n\n" + machine(results)


def benchmarks():
    return bench_page.text(RESULTS)


def all_gather_memory():
    """What each method allocates for AllGather's max_nbytes: on 4 ranks of one node, or else of two."""
    sizes = (64 << 10, 4 << 20)

    def allocated(method, max_nbytes):
        world = sk.init()
        gather = sk.AllGather(world, max_nbytes, method)
        held = sum(math.prod(a.shape) * a.dtype.itemsize for a in world._allocations.values())
        gather.free()
        return held

    def row(method, local_size):
        runs = [sk.emu.run(allocated, 4, (method, size), local_size=local_size) for size in sizes]
        return [f"`{method}`", *(size_text(held[0]) for held in runs)]

    rows = []
    for method in sk.AllGather.methods:
        try:
            rows.append(row(method, 4))
        except ValueError:
            rows.append(row(method, 2))
    header = ["", *(f"max_nbytes = {size_text(size)}" for size in sizes)]
    return table(header, rows)


def races():
    data = json.loads((RESULTS / "emulator.json").read_text())
    rows = [
        [name, f"{t['without']:.2f}", f"{t['with']:.2f}", f"{t['with'] / t['without']:.1f}"]
        for name, t in data["races_s"].items()
    ]
    about = data["machine"]
    where = f"4 ranks, one core ({about['cpu']}), Python {about['python']}, {about['date'][:10]}."
    return table(["one launch, s", "without", "with races", "ratio"], rows) + "\n\n" + where


def race_cases():
    data = json.loads((RESULTS / "race_cases.json").read_text())
    header = ["class", *data["all"]]
    rows = [[f"`{name}`" if name != "all" else name, *map(str, row.values())] for name, row in data.items()]
    return table(header, rows)


def machine(results):
    about = results.machine
    return f"{about['gpu']}, CUDA {about['cuda']}, {results.date[:10]}."


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
    for plot, results in bench_page.stale_plots(RESULTS, PLOTS):
        stale.append(f"plots/{plot.name}")
        if "--check" not in sys.argv:
            bench_page.draw(plot, results)
    if stale:
        print(("out of date: " if "--check" in sys.argv else "written: ") + ", ".join(stale))
    return bool(stale) and "--check" in sys.argv


if __name__ == "__main__":
    sys.exit(main())
