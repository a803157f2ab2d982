"""Write the tables and plots of the docs from benchmarks/results/*.json, and what the commands shown in them
print.

python docs/tables.py           rewrite them
python docs/tables.py --check   exit status 1 if one is out of date
"""

import json
import math
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
RESULTS = ROOT / "benchmarks" / "results"
PLOTS = DOCS / "plots"
ALL_REDUCE = RESULTS / "all_reduce_h200x2.json"  # which README's plot shows

sys.path.insert(0, str(ROOT))  # this shmemkit, installed or not

import bench_page  # noqa: E402
from bench_page import table  # noqa: E402
from checked import checked, checked_line  # noqa: E402, F401  (pages ask for them)
from matplotlib.figure import Figure  # noqa: E402

import shmemkit as sk  # noqa: E402
from shmemkit.bench import report  # noqa: E402
from shmemkit.bench.results import (  # noqa: E402
    CUBLAS,
    DRIVER,
    NCCL,
    NCCL_CUBLAS,
    NCCL_CUBLAS_WAYS,
    NCCL_WAYS,
    TORCH_AG_GEMM,
    TORCH_SYMMETRIC,
    Results,
)
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


def benchmarks(op=None):
    return bench_page.text(RESULTS, op)


def plots():
    return bench_page.overview(RESULTS)


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
    return table(["one launch, CPU s", "without", "with races", "ratio"], rows) + "\n\n" + where


def race_cases():
    data = json.loads((RESULTS / "race_cases.json").read_text())
    header = ["class", *data["all"]]
    rows = [[f"`{name}`" if name != "all" else name, *map(str, row.values())] for name, row in data.items()]
    return table(header, rows)


def numba_features():
    done = subprocess.run(
        [sys.executable, "tests/emu/numba_features.py"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.rstrip("\n")


def hello_without_wait():
    """What the emulator says about examples/00_hello.py without its wait."""
    program = (ROOT / "examples" / "00_hello.py").read_text().split('"""', 2)[2].lstrip()
    lines = program.splitlines(keepends=True)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "hello.py").write_text("".join(x for x in lines if not x.strip().startswith("wait(")))
        return output("shmemkit emu -n 2 --races hello.py", Path(folder))


# README's table: title, file, size or shape in it, {contender: its methods in the file}, the command.
HEADLINES = (
    (
        "all-reduce of 8 KB, 2 H200",
        "all_reduce_h200x2",
        8 << 10,
        {"NCCL": NCCL_WAYS, "PyTorch symmetric memory": TORCH_SYMMETRIC},
        "shmemkit run -n 2 -m shmemkit bench all_reduce --sizes 8K --vs nccl,torch_one_shot,torch_two_shot",
    ),
    (
        "all-gather and bf16 product, 8192 x 8192 x 8192 over 2 H200",
        "ag_gemm_h200x2",
        "8192x8192x8192",
        {"NCCL, then cuBLAS": NCCL_CUBLAS_WAYS, "PyTorch, without a graph": (TORCH_AG_GEMM,)},
        "shmemkit run -n 2 -m shmemkit bench ag_gemm",
    ),
    (
        "bf16 product, 8192 x 8192 x 8192, one H200",
        "gemm_h200",
        "8192x8192x8192",
        {"cuBLAS": (CUBLAS,)},
        "shmemkit bench gemm",
    ),
)


def headline():
    """README's table."""
    lines = []
    for title, file, case, contenders, command in HEADLINES:
        rows = [r for r in Results.read(RESULTS / f"{file}.json").rows if case in (r.bytes, r.shape)]
        times = {r.method: r.us for r in reversed(rows) if r.us and not r.note and not r.alone and not r.out}
        times |= {r.method: r.us for r in rows if r.method == CUBLAS}
        beside = []
        for name, methods in contenders.items():
            found = {method: times[method] for method in methods if method in times}
            plain = " with plain buffers" if set(found) <= {NCCL, NCCL_CUBLAS} else ""
            beside.append(f"{name}{plain} {bench_page.us_text(min(found.values()))} us")
        ours = f"**{bench_page.us_text(times['auto'])} us**"
        lines.append([title, ours, ", ".join(beside), f"`{command}`"])
    return table(["", "shmemkit", "others, in the same run", "measured by"], lines)


def draw_headline(path):
    """README's plot: the time of an all-reduce against its size, ours, NCCL's and PyTorch's best."""
    results = Results.read(ALL_REDUCE)
    torch = f"PyTorch {results.versions['torch']}, symmetric memory, its best"
    lines = {
        report.nccl_text(results): (report.best(results, NCCL_WAYS), "0.45"),
        torch: (report.best(results, TORCH_SYMMETRIC), "tab:orange"),
        "shmemkit": (report.best(results, ("auto",)), "tab:green"),
    }
    sizes = sorted(lines["shmemkit"][0])
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log")
    for label, (line, colour) in lines.items():
        axes.plot(sizes, [line[size] for size in sizes], "-o", ms=4, lw=2, color=colour, label=label)
    axes.set_xticks(sizes, map(size_text, sizes), minor=False)
    axes.set_xticks([], minor=True)
    axes.set(xlabel=f"{results.dtype} data of each rank", ylabel="time, us")
    axes.set_title(f"All-reduce, {results.heading()}", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend()
    report.save(figure, path, bench_page.mark_of(ALL_REDUCE))


BUDGETS = {  # what is within budgets of multiprocessors: its file, size or shape in it, the command
    "AllReduce of 32 MB": (
        "all_reduce_sms_h200x2",
        32 << 20,
        "shmemkit run -n 2 -m shmemkit.bench all_reduce --sizes 32M --methods auto --vs '' --sms 8,16,32,64",
    ),
    "AG+GEMM, 8192 x 8192 x 8192": (
        "ag_gemm_sms_h200x2",
        "8192x8192x8192",
        "shmemkit run -n 2 -m shmemkit.bench ag_gemm --shapes 8192x8192x8192 --methods auto --vs '' "
        "--sms 8,16,32,64",
    ),
}


def budgets():
    """What ``sms=`` costs, of files that these commands have written; they are no others' (bench_page.py)."""
    parts = []
    for title, (file, case, command) in BUDGETS.items():
        path = RESULTS / "sms" / f"{file}.json"
        measured = f"`{command} --json {file}.json`"
        if not path.exists():
            parts.append(
                f"{title}: not measured yet. {measured} does it on 2 H200; the file belongs into "
                "`benchmarks/results/sms/`."
            )
            continue
        results = Results.read(path)
        ours = [r for r in results.rows if case in (r.bytes, r.shape) and r.method.startswith("auto")]
        rows = [
            [r.method.partition("sms=")[2] or "as tuned", r.took or "", f"{r.us:.1f}"] for r in ours if r.us
        ]
        parts += [f"{title}:", table(["`sms`", "method", "us"], rows), f"{machine(results)} {measured}"]
    return "\n\n".join(parts)


def machine(results):
    about = results.machine
    return f"{about['gpu']}, CUDA {about['cuda']}, {results.date[:10]}."


def output(command, folder=ROOT):
    """`command`, of Python or shmemkit, and what it prints when it runs in `folder`."""
    program, *arguments = shlex.split(command)
    if program == "shmemkit":
        arguments = ["-m", "shmemkit", *arguments]
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return f"```console\n$ {command}\n{done.stdout.replace(f'{ROOT}/', '')}```"


def with_tables(text):
    """`text` with what its comments ask for: ``<!-- table: FUNCTION [ARGUMENT] -->`` or
    ``<!-- output: COMMAND -->``."""

    def written(found):
        kind, what = found[2], found[3]
        if kind == "output":
            return output(what)
        function, *arguments = what.split()
        return globals()[function](*arguments)

    return re.sub(
        r"(<!-- (table|output): (.*?) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}{written(found)}\n{found[4]}",
        text,
        flags=re.S,
    )


def main():
    stale = []
    for page in (*ROOT.glob("README.md"), *sorted(DOCS.rglob("*.md"))):
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
    picture = DOCS / "all_reduce.svg"
    shown = picture.read_text() if picture.exists() else ""
    if ALL_REDUCE.exists() and bench_page.mark_of(ALL_REDUCE) not in shown:
        stale.append(picture.name)
        if "--check" not in sys.argv:
            draw_headline(picture)
    if stale:
        print(("out of date: " if "--check" in sys.argv else "written: ") + ", ".join(stale))
    return bool(stale) and "--check" in sys.argv


if __name__ == "__main__":
    sys.exit(main())
