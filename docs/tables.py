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
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
RESULTS = ROOT / "benchmarks" / "results"
PLOTS = DOCS / "plots"

sys.path.insert(0, str(ROOT))  # this shmemkit, installed or not

import bench_page  # noqa: E402
import earlier  # noqa: E402
import evaluation  # noqa: E402
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
)
from shmemkit.bench.sizes import size_text  # noqa: E402


def launch_host():
    results = bench_page.read(RESULTS / "launch.json")
    costs = {row.method: row.us for row in results.rows if row.op == "launch" and row.us is not None}
    rows = [[f"`{name}`", f"{cost:.1f}", f"{cost / costs[DRIVER]:.2f}"] for name, cost in costs.items()]
    return table(["three array arguments", "us", "ratio"], rows) + "\n\n" + machine(results)


def launch_first():
    results = bench_page.read(RESULTS / "launch.json")
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


def planted():
    """A row for each paragraph that planted bugs break, as "memory_ordering: Puts"."""
    data = json.loads((RESULTS / "planted.json").read_text())
    paragraphs = [name.partition(": ") for name in data]
    links = [f"[{words}]({page}.md)" if words else page for page, _, words in paragraphs]
    rows = [[link, *map(str, row.values())] for link, row in zip(links, data.values(), strict=True)]
    return table(["paragraph", *data["all"]], rows)


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


# README's table: title, operator, ranks, size or shape, the command.
ALL_REDUCE = "all_reduce --sizes {} --vs nccl,nccl_graph,nccl_window,nccl_ce,torch_one_shot,torch_two_shot"
SQUARE = "8192 x 8192 x 8192"
HEADLINES = (
    *(("all-reduce of 8 KB", "all_reduce", n, 8 << 10, ALL_REDUCE.format("8K")) for n in (4, 2)),
    *(("all-reduce of 256 MB", "all_reduce", n, 256 << 20, ALL_REDUCE.format("256M")) for n in (4, 2)),
    *((f"all-gather + bf16 GEMM, {SQUARE}", "ag_gemm", n, "8192x8192x8192", "ag_gemm") for n in (4, 2)),
    (f"bf16 GEMM, {SQUARE}", "gemm", 1, "8192x8192x8192", "gemm"),
)


def headline():
    """README's table."""
    lines = []
    for title, op, ranks, case, command in HEADLINES:
        results: Any = evaluation.chosen(RESULTS, op, ranks)
        found = evaluation.comparisons(results, op) if results else []
        found = [(row, peer) for row, peer, _ in found if case in (row.bytes, row.shape) and not row.out]
        for row, _ in found:
            peers = {}  # whose: the fastest
            for peer in bench_page.right(results.rows):
                if peer.case == row.case and peer.method in PEERS:
                    name = PEERS[peer.method]
                    peers[name] = min(peer, peers.get(name, peer), key=lambda each: each.us)
            beside = [
                f"{name}{_plainly(peer)} {bench_page.us_text(peer.us)} us" for name, peer in peers.items()
            ]
            ours = f"**{bench_page.us_text(row.us)} us**" + (f", {row.earlier}" if row.earlier else "")
            on = f"{ranks} {evaluation.model(results)}"
            run = f"shmemkit run -n {ranks} -m shmemkit bench" if ranks > 1 else "shmemkit bench"
            lines.append([f"{title}, {on}", ours, ", ".join(beside), f"`{run} {command}`"])
    return table(["", "shmemkit", "others, in the same run", "measured by"], lines)


PEERS = dict.fromkeys(NCCL_WAYS, "NCCL") | dict.fromkeys(TORCH_SYMMETRIC, "PyTorch symmetric memory")
PEERS |= dict.fromkeys(NCCL_CUBLAS_WAYS, "NCCL, then cuBLAS") | {CUBLAS: "cuBLAS"}
PEERS |= {TORCH_AG_GEMM: "PyTorch, without a graph"}


def _plainly(peer):
    """What is said of NCCL where plain buffers were the fastest, or alone."""
    return " (plain buffers)" if peer.method in (NCCL, NCCL_CUBLAS) else ""


def _shown_all_reduces():
    """-> the Results of README's plot"""
    return [found for n in (2, 4) if (found := evaluation.chosen(RESULTS, "all_reduce", n))]


def mark_of_headline():
    return ", ".join(bench_page.mark_of(results.path) for results in _shown_all_reduces())


def draw_headline(path):
    """README's plot: the time of an all-reduce against its size, ours, NCCL's and PyTorch's best."""
    shown = _shown_all_reduces()
    figure = Figure(figsize=(5.5 * len(shown), 4.2), layout="constrained")
    for axes, results in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        axes.set(xscale="log", yscale="log")
        said = "".join(f",\n{text}" for text in earlier.texts(results))
        torch = f"PyTorch {results.versions.get('torch', '')}, symmetric memory, its best"
        at_best, plain = (report.best(results, ways) for ways in (NCCL_WAYS, (NCCL,)))
        lines = [(report.nccl_text(results), at_best, "0.45", 2)]
        lines += [("NCCL, plain buffers", plain, "0.45", 0.8)] if plain != at_best else []
        lines += [(torch, report.best(results, TORCH_SYMMETRIC), "tab:orange", 2)]
        lines += [(f"shmemkit{said}", report.best(results, ("auto",)), "tab:green", 2)]
        for label, line, colour, width in lines:
            if line:
                sizes = sorted(line)
                times = [line[size] for size in sizes]
                axes.plot(sizes, times, "-o", ms=2 * width, lw=width, color=colour, label=label)
        sizes = sorted(report.best(results, ("auto",)))
        axes.set_xticks(sizes, map(size_text, sizes), minor=False, fontsize="x-small")
        axes.set_xticks([], minor=True)
        axes.set(xlabel=f"{results.dtype} data of each rank", ylabel="time, us")
        axes.set_title(f"All-reduce, {results.n_ranks} x {results.machine['gpu']}", fontsize="medium")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    report.save(figure, path, mark_of_headline())


def evaluated():
    """docs/evaluation.md."""
    return evaluation.text(RESULTS)


BUDGETS = {  # what is within budgets of multiprocessors: its file, size or shape in it, the command
    "AllReduce of 32 MB": (
        "all_reduce_sms_h200x2",
        32 << 20,
        "shmemkit run -n 2 -m shmemkit bench all_reduce --sizes 32M --methods auto --vs '' --sms 8,16,32,64",
    ),
    "AG+GEMM, 8192 x 8192 x 8192": (
        "ag_gemm_sms_h200x2",
        "8192x8192x8192",
        "shmemkit run -n 2 -m shmemkit bench ag_gemm --shapes 8192x8192x8192 --methods auto --vs '' "
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
        results = bench_page.read(path)
        ours = [r for r in results.rows if case in (r.bytes, r.shape) and r.method.startswith("auto")]
        rows = [
            [r.method.partition("sms=")[2] or "as tuned", r.took or "", f"{r.us:.1f}"] for r in ours if r.us
        ]
        parts += [f"{title}:", table(["`sms`", "method", "us"], rows), f"{machine(results)} {measured}"]
    return "\n\n".join(parts)


def machine(results):
    about = results.machine
    said = earlier.sentence(results)
    return f"{about['gpu']}, CUDA {about['cuda']}, {results.date[:10]}." + (f" {said}" if said else "")


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


ALL_ROWS = """# {title}: all rows

[Benchmarks](../benchmarks.md) says what the figures are. Whole rows are in `benchmarks/results`.

<!-- table: benchmarks {op} -->
<!-- end -->
"""


def main():
    if unknown := [argument for argument in sys.argv[1:] if argument != "--check"]:
        sys.exit(
            f"docs/tables.py: {unknown[0]} is no option. Without one it writes the pages; --check compares"
        )
    stale = []
    for op, title in bench_page.TITLES.items():
        page = DOCS / "results" / f"{op}.md"
        if not page.exists():
            stale.append(page.name)
            if "--check" not in sys.argv:
                page.write_text(with_tables(ALL_ROWS.format(op=op, title=title)))
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
    if _shown_all_reduces() and mark_of_headline() not in shown:
        stale.append(picture.name)
        if "--check" not in sys.argv:
            draw_headline(picture)
    if stale:
        print(("out of date: " if "--check" in sys.argv else "written: ") + ", ".join(stale))
    return bool(stale) and "--check" in sys.argv


if __name__ == "__main__":
    sys.exit(main())
