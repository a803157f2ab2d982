"""docs/bench.md shows the options that exist; docs/benchmarks.md and docs/results show the results."""

import contextlib
import importlib.util
import io
import json
import re
import shutil
import sys
from pathlib import Path

import pytest

import shmemkit as sk
from shmemkit.bench import report, results
from shmemkit.bench.__main__ import main
from shmemkit.bench.collectives import PEERS

pytest.importorskip("rich")
pytest.importorskip("matplotlib")

DOCS = Path(__file__).parents[2] / "docs"
OF_OLD_FILES = {"numpy": "2", "nvidia-nvshmem-cu13": "3.4", "nccl": "2.28", "nccl through torch": "2.27"}
OVER = "in brackets: NCCL's time over it; NCCL in its fastest way that ran"
MACHINE = {"gpu": "G", "gpus": {"G": 4}, "driver": "1.2", "cuda": "13.0", "python": "3.12.3"}


@pytest.fixture
def pages(monkeypatch):
    """-> the modules (bench_page, tables) of docs/"""
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("bench_page"), importlib.import_module("tables")


def measure(path, *arguments):
    with contextlib.redirect_stdout(io.StringIO()):
        assert sk.emu.run(lambda: main([*arguments, "--json", str(path)]), 2) == [0, 0]


def write(path, *rows, p2p=400.0):
    data = {"machine": MACHINE, "versions": OF_OLD_FILES, "environment": {}}
    data |= {
        "command": "python3 -m shmemkit.bench x",
        "date": "2026-11-21T00:00:00+00:00",
        "method": "A clock",
    }
    data |= {
        "measured": {"": {"sources": "s", "date": data["date"], "answer": "done"}}
    }  # of the present kernels
    path.write_text(json.dumps(data | {"n_ranks": 4, "p2p_GBps": p2p, "rows": rows}))


def row(method, size, us=None, **more):
    return {"op": "all_gather", "method": method, "bytes": size} | ({"us": us} if us else {}) | more


GATHERED = (
    row("nccl", 8192, 8.0),
    row("nccl_window", 8192, 5.0, version="2.32.3"),
    row("nccl through torch", 8192, 11.0),
    row("torch symm_mem", 8192, 6.0),
    row("ll", 8192, 2.0, bus_GBps=3.07),
    row("push_1d", 8192, 1.0, note="wrong: all of it"),
    row("auto", 8192, 2.5, took="ll", bus_GBps=2.9),
    row("ll", 8192, 1.9, out="symmetric"),
    row("nccl", 1 << 20, 40.25),
    row("nccl through torch", 1 << 20, note="refused: no"),
    row("ll", 1 << 20, 20.0, bus_GBps=39.3),
    row("push_1d", 1 << 20, 115.0),
    row("auto", 1 << 20, 20.0, took="ll"),
    row("ll", 1 << 20, note="refused: no", out="symmetric"),
)


def test_all_gather(pages, tmp_path):
    write(tmp_path / "gathered_x4.json", *GATHERED)
    assert pages[0].text(tmp_path).split("\n\n") == [
        "## All-gather: 4 ranks on 4 x G; driver 1.2, CUDA 13.0",
        "![All-gather: time against size](../plots/gathered_x4.svg)",
        "```bash\nmpirun -n 4 python3 -m shmemkit.bench x\n```",
        "Python 3.12.3, NCCL library 2.28; 2026-11-21. Timing: A clock.",
        "One rank sends to another 400 GB/s at most: 100 % of p2p.",
        "Into private memory:",
        "| gathered | NCCL at its best, us | NCCL plain, us | NCCL of torch, us | symm_mem of torch, us "
        "| fastest | us | x NCCL | x plain | x NCCL of torch | bus GB/s | of p2p | auto, us | x NCCL "
        "| x plain | x symm_mem |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| 8K | `nccl_window`: 5.00 | 8.00 | 11.0 | `torch symm_mem`: 6.00 | `ll` | 2.00 | 2.50 | 4.00 "
        "| 5.50 | 3.1 | 1 % | ll: 2.50 | 2.00 | 3.20 | 2.40 |\n"
        "| 1M |  | 40.2 |  |  | `ll` | 20.0 |  | 2.01 |  | 39.3 | 10 % | ll: 20.0 |  | 2.01 |  |",
        "Into symmetric memory:",
        "| gathered | NCCL at its best, us | NCCL plain, us | NCCL of torch, us | symm_mem of torch, us "
        "| fastest | us | x NCCL | x plain | x NCCL of torch |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
        "| 8K | `nccl_window`: 5.00 | 8.00 | 11.0 | `torch symm_mem`: 6.00 | `ll` | 1.90 | 2.63 | 4.21 "
        "| 5.79 |",
        f"All methods, us ({OVER}):",
        "|  | 8K | 1M |\n| --- | --- | --- |\n"
        "| `nccl` | 8.00 (0.62) | 40.2 (1.00) |\n"
        "| `nccl_window` | 5.00 (1.00) |  |\n"
        "| `nccl through torch` | 11.0 (0.45) |  |\n"
        "| `torch symm_mem` | 6.00 (0.83) |  |\n"
        "| `ll` | 2.00 (2.50) | 20.0 (2.01) |\n"
        "| `auto` | 2.50 (2.00) | 20.0 (2.01) |\n"
        "| `ll, symmetric out` | 1.90 (2.63) |  |\n"
        "| `push_1d` |  | 115 (0.35) |",
        "Without a figure:",
        "- `push_1d`, 8K: wrong: all of it\n"
        "- `nccl through torch`, 1M: refused: no\n"
        "- `ll, symmetric out`, 1M: refused: no",
    ]


def test_the_overview_has_plots_or_what_auto_takes(pages, tmp_path):
    assert pages[0].overview(tmp_path) == "There are none yet."
    write(tmp_path / "gathered_x4.json", *GATHERED)
    product = {"op": "gemm", "bytes": 8, "shape": "4x5x6", "tflops": 450}
    write(
        tmp_path / "gemm.json",
        product | {"method": "cuBLAS", "us": 1.0},
        product | {"method": "auto", "us": 2.0, "took": "sm90", "vs_cublas": 0.5},
    )
    assert pages[0].overview(tmp_path).split("\n\n") == [
        "## All-gather",
        "4 ranks on 4 x G; driver 1.2, CUDA 13.0:",
        "![All-gather: time against size](plots/gathered_x4.svg)",
        "[All rows](results/all_gather.md)",
        "## GEMM",
        "4 ranks on 4 x G; driver 1.2, CUDA 13.0:",
        "| M x N x K | method | us | TFLOP/s | x cuBLAS |\n| --- | --- | --- | --- | --- |\n"
        "| 4x5x6 | `sm90` | 2.00 | 450 | 0.50 |",
        "[All rows](results/gemm.md)",
    ]


def test_grouped_products(pages, tmp_path):
    about = {"op": "grouped_gemm", "bytes": 8, "shape": "2x3x4x5", "tflops": 450}
    write(
        tmp_path / "grouped.json",
        about | {"method": "cuBLAS", "us": 1.0},
        about | {"method": "cuBLAS, a loop", "note": "refused: no"},
        about | {"method": "torch._grouped_mm", "us": 3.0, "weights_GBps": 2800},
        about | {"method": "auto", "us": 2.0, "weights_GBps": 4200.2},
    )
    header = (
        "| E x rows x N x K | method | us | TFLOP/s | weights GB/s | x dense | x PyTorch |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
    )
    dense = "| 2x3x4x5 | `cuBLAS` | 1.00 | 450 |  | 1.00 | 3.00 |\n"
    torch = "| 2x3x4x5 | `torch._grouped_mm` | 3.00 | 450 | 2800 | 0.33 | 1.00 |\n"
    auto = "| 2x3x4x5 | `auto` | 2.00 | 450 | 4200 | 0.50 | 1.50 |"
    assert pages[0].overview(tmp_path).split("\n\n")[2] == header + auto
    assert pages[0].text(tmp_path).split("\n\n")[-3:] == [
        header + dense + torch + auto,
        "Without a figure:",
        "- `cuBLAS, a loop`, 2x3x4x5: refused: no",
    ]


def test_each_result_has_a_page(pages):
    shown = {pages[0].op_of(results) for results in pages[0].files(pages[1].RESULTS).values()}
    assert shown <= set(pages[0].TITLES) == {page.stem for page in (DOCS / "results").glob("*.md")}
    for op in pages[0].TITLES:
        assert f"<!-- table: benchmarks {op} -->" in (DOCS / "results" / f"{op}.md").read_text()


def test_the_console_says_how_auto_compares_with_nccl(tmp_path, capsys):
    more = row("nccl_ce", 1 << 20, 15.0), row("auto", 8192, 4.0, out="symmetric", took="ll")
    write(tmp_path / "f.json", *GATHERED, *more)
    report.show(results.Results.read(tmp_path / "f.json"))
    lines = capsys.readouterr().out.splitlines()
    assert "auto: 0.75 to 2.00 times as fast as NCCL in its fastest way; slower at 1M" in lines
    assert "auto, symmetric out: 1.25 to 1.25 times as fast as NCCL in its fastest way" in lines


def test_p2p(pages, tmp_path):
    rows = [{"op": "latency", "method": "notify", "bytes": 8, "us": 1.3}]
    for blocks, size, rate in ((4, 8, 0.5), (4, 64, 1.0), (8, 64, 2.25)):
        rows.append(
            {"op": "p2p", "method": "push", "bytes": size, "us": 1.0, "bus_GBps": rate, "blocks": blocks}
        )
    write(tmp_path / "p2p.json", *rows)
    parts = pages[0].text(tmp_path).split("\n\n")
    assert parts[0].startswith("## One rank to another: 4 ranks")
    assert parts[5:9] == [
        "A signal, one way:",
        "|  | us |\n| --- | --- |\n| `notify` | 1.30 |",
        "GB/s, every rank to the next at once:",
        "|  | 8 | 64 |\n| --- | --- | --- |\n| `push, 4 blocks` | 0.5 | 1.0 |\n| `push, 8 blocks` |  | 2.2 |",
    ]


def test_expert_parallel(pages, tmp_path):
    rows = [
        {"op": op, "method": method, "bytes": 8, "us": us, "vs_nccl": 90 / us}
        for op in ("expert_dispatch", "expert_combine", "expert_parallel")
        for method, us in (("nccl", 90.0), ("ExpertParallel", 20.0))
    ]
    rows.append({"op": "expert_parallel", "method": "nccl, once per rank", "bytes": 8, "note": "refused: no"})
    write(tmp_path / "experts.json", *rows)
    parts = pages[0].text(tmp_path).split("\n\n")
    assert parts[0].startswith("## Expert parallelism: 4 ranks")
    assert parts[4:] == [
        f"us ({OVER}):",
        "|  | dispatch | combine | both |\n| --- | --- | --- | --- |\n"
        "| `nccl` | 90.0 (1.00) | 90.0 (1.00) | 90.0 (1.00) |\n"
        "| `ExpertParallel` | 20.0 (4.50) | 20.0 (4.50) | 20.0 (4.50) |",
        "Without a figure:",
        "- `nccl, once per rank`, 8: refused: no",
    ]
    assert pages[0].stale_plots(tmp_path, tmp_path) == []


def test_gemm(pages, tmp_path):
    rows = [
        {
            "op": "gemm",
            "method": method,
            "bytes": 8,
            "us": us,
            "shape": shape,
            "tflops": 9e3 / us,
            "vs_cublas": 9 / us,
        }
        for shape in ("4x5x6", "64x64x64")
        for method, us in (("cuBLAS", 9.0), ("auto", 10.0))
    ]
    rows.append({"op": "gemm", "method": "sm80", "bytes": 8, "shape": "4x5x6", "note": "refused: no"})
    write(tmp_path / "gemm.json", *rows, p2p=None)
    parts = pages[0].text(tmp_path).split("\n\n")
    assert parts[0].startswith("## GEMM: 4 ranks")
    assert parts[3:] == [
        "TFLOP/s (and cuBLAS's time over it, where cuBLAS ran):",
        "| M x N x K | `cuBLAS` | `auto` |\n| --- | --- | --- |\n"
        "| 4x5x6 | 1000 (1.00) | 900 (0.90) |\n| 64x64x64 | 1000 (1.00) | 900 (0.90) |",
        "Without a figure:",
        "- `sm80`, 4x5x6: refused: no",
    ]
    assert pages[0].stale_plots(tmp_path, tmp_path) == []


@pytest.mark.parametrize("op, part", [("ag_gemm", "gathering"), ("gemm_rs", "reduction")])
def test_layers(pages, tmp_path, op, part):
    def of(method, us, **more):
        return {"op": op, "method": method, "bytes": 8, "shape": "4x5x6", "us": us, "tflops": 900 / us} | more

    rows = [
        of("Gemm", 9.0, alone="product"),
        of("cuBLAS", 8.0, alone="product", vs_cublas=1.0),
        of("nccl", 6.0, alone=part),
        of("NCCL and cuBLAS", 20.0),
        of("NCCL and cuBLAS (nccl_window)", 15.0),
        of("auto", 10.0, took="sequential"),
        {"op": op, "method": "overlap", "bytes": 8, "shape": "4x5x6", "note": "refused: no"},
    ]
    write(tmp_path / f"{op}_h200x4.json", *rows, p2p=None)
    parts = pages[0].text(tmp_path).split("\n\n")
    assert parts[0] == f"## {pages[0].TITLES[op]}: 4 ranks on 4 x G; driver 1.2, CUDA 13.0"
    assert parts[3:] == [
        "| M x N x K | method | us | TFLOP/s | x NCCL | x plain | overlap |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        "| 4x5x6 | `NCCL and cuBLAS` | 20.0 | 45 | 0.75 | 1.00 | 40.0 % |\n"
        "| 4x5x6 | `NCCL and cuBLAS (nccl_window)` | 15.0 | 60 | 1.00 | 1.33 | 53.3 % |\n"
        "| 4x5x6 | `auto`: sequential | 10.0 | 90 | 1.50 | 2.00 | 80.0 % |",
        "Alone, us:",
        f"| M x N x K | `Gemm`, product | `cuBLAS`, product | `nccl`, {part} |\n"
        "| --- | --- | --- | --- |\n"
        "| 4x5x6 | 9.00 | 8.00 | 6.00 |",
        "Without a figure:",
        "- `overlap`, 4x5x6: refused: no",
    ]
    assert pages[0].stale_plots(tmp_path, tmp_path) == []


@pytest.mark.slow
def test_pages_of_products_are_those_of_their_files(pages, tmp_path):
    assert pages[0].text(tmp_path) == "There are none yet."
    shapes = {"gemm": "8x8x8", "ag_gemm": "8x16x8", "gemm_rs": "8x16x8", "gemm_ar": "8x16x8"}
    for op, shape in shapes.items():
        methods = ["--methods", "simt" if op == "gemm" else "sequential"]
        measure(tmp_path / f"{op}_h200x2.json", op, "--shapes", shape, *methods)
    text = pages[0].text(tmp_path)
    for op in shapes:
        assert f"## {pages[0].TITLES[op]}: 2 ranks, emulator: times mean nothing" in text
    assert text.count("| 8x16x8 | `sequential` |") == text.count("`Gemm`, product") == 3
    assert text.count("- `NCCL and cuBLAS (nccl_ce)`, 8x16x8: refused: ") == 3
    assert pages[0].stale_plots(tmp_path, tmp_path) == []


def test_barrier(pages, tmp_path):
    rows = [
        {"op": "barrier", "method": method, "us": us, "vs_nccl": 9 / us}
        for method, us in (("sk.Barrier", 3.0), ("nccl", 9.0))
    ]
    rows.append({"op": "barrier", "method": "nvshmem", "note": "refused: no"})
    write(tmp_path / "barrier.json", *rows)
    parts = pages[0].text(tmp_path).split("\n\n")
    assert parts[0].startswith("## Barrier: 4 ranks")
    assert parts[4:] == [
        f"|  | us ({OVER}) |\n| --- | --- |\n| `sk.Barrier` | 3.00 (3.00) |\n| `nccl` | 9.00 (1.00) |",
        "Without a figure:",
        "- `nvshmem`: refused: no",
    ]
    assert pages[0].stale_plots(tmp_path, tmp_path) == []


@pytest.mark.slow
def test_of_the_emulator(pages, tmp_path):
    arguments = ["--sizes", "64,1K", "--out", "private,symmetric"]
    measure(tmp_path / "a.json", "all_gather", *arguments)
    measure(tmp_path / "b.json", "p2p", "--sizes", "64", "--blocks", "1,2")
    text = pages[0].text(tmp_path)
    assert text.count("## ") == text.count("2 ranks, emulator: times mean nothing\n") == 2
    assert "GB/s at most" not in text
    for way in results.NCCL_WAYS:
        assert f"- `{way}`, 64, 1K: refused: NCCL needs GPUs" in text
    for method in sk.AllGather.methods:
        assert f"`{method}`" in text


def test_without_results_and_with_those_of_others(pages, tmp_path):
    assert pages[0].text(tmp_path) == "There are none yet."
    (tmp_path / "other.json").write_text('{"races_s": {}}')
    write(tmp_path / "launch.json", {"op": "launch", "method": "b()", "us": 4.0})
    assert pages[0].text(tmp_path) == "There are none yet."
    assert pages[0].stale_plots(tmp_path, tmp_path) == []


def test_a_page_or_plot_that_is_stale_is_named(pages, tmp_path, monkeypatch, capsys):
    """Of the tables.py in another folder."""
    docs, results = tmp_path / "docs", tmp_path / "benchmarks" / "results"
    (docs / "results").mkdir(parents=True), results.mkdir(parents=True)
    monkeypatch.setattr(pages[0], "TITLES", {"all_gather": "All-gather"})
    shutil.copy(DOCS / "tables.py", docs)
    spec = importlib.util.spec_from_file_location("tables_elsewhere", docs / "tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    page, plot = docs / "page.md", docs / "plots" / "x4.svg"
    page.write_text("Before\n<!-- table: benchmarks -->\n<!-- end -->\nafter\n")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["tables.py", *arguments])
        failed = tables.main()
        return failed, capsys.readouterr().out

    def is_up_to_date():
        assert run("--check") == (False, "")
        assert run() == (False, "")

    assert run("--check") == (True, "out of date: all_gather.md, page.md\n")
    run()
    assert (docs / "results" / "all_gather.md").read_text().startswith("# All-gather: all rows\n")
    is_up_to_date()
    write(results / "x4.json", *GATHERED)
    assert run("--check") == (True, "out of date: page.md, all_gather.md, plots/x4.svg\n")
    assert not plot.exists()
    assert run() == (False, "written: page.md, all_gather.md, plots/x4.svg\n")
    text = page.read_text()
    assert text.startswith("Before\n") and text.endswith("after\n") and "`push_1d`" in text
    assert "<svg" in plot.read_text() and "ll, symmetric out" in plot.read_text()
    is_up_to_date()
    write(results / "x4.json", *GATHERED, p2p=399.9)  # the page's text is the same
    assert run("--check") == (True, "out of date: plots/x4.svg\n")
    run()
    is_up_to_date()
    (results / "x4.json").unlink()
    assert run("--check") == (True, "out of date: page.md, all_gather.md, plots/x4.svg\n") and plot.exists()
    run()
    is_up_to_date()
    assert not plot.exists()


def test_the_page_has_all_options_and_competitors(capsys):
    def help_of(*arguments):
        with pytest.raises(SystemExit):
            main([*arguments, "--help"])
        return capsys.readouterr().out

    text = (DOCS / "bench.md").read_text()
    commands = re.findall(r"^    (\w+)(?: |$)", help_of(), re.M)
    assert len(commands) >= 14
    usages = (help_of(command).partition("\n\n")[0] for command in commands)
    options = {option for usage in usages for option in re.findall(r"\[(-[\w-]+)", usage)}
    shown = set(re.findall(r"`(--[a-z-]+)", text))
    assert shown == options - {"-h"}
    assert set(re.findall(r"^\| `([a-z_]+)` \| .* \| .*(?:pip|NCCL 2|PyTorch)", text, re.M)) == set(PEERS)
    for name in commands:
        assert f"`{name}`" in text
