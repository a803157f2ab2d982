"""The results: docs/benchmarks.md has the plots and what "auto" takes, docs/results the tables of each file
that the bench wrote.

Files of other programs, and those of ``bench launch``, whose tables are in docs/launching.md, are left out.
So are rows of methods that shmemkit no longer has.
"""

import hashlib
from typing import Any

import earlier

from shmemkit.bench import report
from shmemkit.bench.cases import CASES, methods
from shmemkit.bench.results import COMPETITORS, NCCL, NCCL_WAYS, TORCH_NCCL, TORCH_SYMMETRIC, Results
from shmemkit.bench.sizes import size_text

TITLES = {op: op.replace("_", "-").capitalize() for op in CASES} | {
    "all_reduce_rms_norm": "All-reduce and RMSNorm",
    "barrier": "Barrier",
    "expert_parallel": "Expert parallelism",
    "gemm": "GEMM",
    "grouped_gemm": "Grouped GEMM",
    "ag_gemm": "All-gather + GEMM",
    "gemm_rs": "GEMM + reduce-scatter",
    "gemm_ar": "GEMM + all-reduce",
    "ag_grouped_gemm": "All-gather + grouped GEMM",
    "grouped_gemm_rs": "Grouped GEMM + reduce-scatter",
    "flash_decode": "Flash decoding",
    "attention_combine": "Attention combine",
    "p2p": "One rank to another",
}
OVER = "in brackets: NCCL's time over it; NCCL in its fastest way that ran"
LAYERS = ("ag_gemm", "gemm_rs", "gemm_ar", "ag_grouped_gemm", "grouped_gemm_rs")
SHAPED = ("all_reduce_rms_norm", "flash_decode", "attention_combine")
EXPERTS = {"expert_dispatch": "dispatch", "expert_combine": "combine", "expert_parallel": "both"}
# Which versions of a file the page shows. Older files name NVSHMEM by a package, whatever was loaded; their
# "nccl" is of the loaded library, which CuPy had asked.
VERSIONS = ("shmemkit", "NVSHMEM library", "NCCL library", "nvshmem4py-", "numba-cuda", "cupy-", "torch")


def table(header, rows):
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]
    return "\n".join(lines)


def without_empty_columns(header, rows):
    kept = [i for i in range(len(header)) if any(row[i] for row in rows)]
    return table([header[i] for i in kept], [[row[i] for i in kept] for row in rows])


def us_text(us):
    return "" if us is None else f"{us:.2f}" if us < 10 else f"{us:.1f}" if us < 100 else f"{us:.0f}"


def time_text(row):
    return us_text(row.us) + row.dagger


def ratio_text(ratio):
    return "" if ratio is None else f"{ratio:.2f}"


def percent_text(part, digits=0):
    return "" if part is None else f"{100 * part:.{digits}f} %"


def right(rows):
    return [row for row in rows if row.us is not None and not row.note]


def fastest(results, op):
    """Tables by size, one for each place of the result: the fastest of our methods, and what auto takes."""
    tables = []
    for out in (None, "symmetric"):
        rows = []
        for size in dict.fromkeys(row.bytes for row in results.rows if row.op == op):
            at = right(row for row in results.rows if row.op == op and row.bytes == size)
            time = {row.method: row.us for row in at if row.method in COMPETITORS}
            ours = [row for row in at if row.method not in COMPETITORS and row.out == out]
            best = min((row for row in ours if not row.took), key=lambda row: row.us, default=None)
            auto = next((row for row in ours if row.took), None)
            if best or auto:
                cells = [size_text(size), _best(time, NCCL_WAYS), us_text(time.get(NCCL))]
                cells += [us_text(time.get(TORCH_NCCL)), _best(time, TORCH_SYMMETRIC)]
                cells += _compared(best) + [f"{auto.took}: {time_text(auto)}" if auto else ""]
                ratios = (auto.vs_nccl, auto.vs_plain, auto.vs_torch) if auto else (None,) * 3
                rows.append(cells + list(map(ratio_text, ratios)))
        if rows:
            size = "gathered" if "gather" in op else "full array"
            header = (
                f"{size}|NCCL at its best, us|NCCL plain, us|NCCL of torch, us|symm_mem of torch, us|fastest|"
                "us|x NCCL|x plain|x NCCL of torch|bus GB/s|of p2p|auto, us|x NCCL|x plain|x symm_mem"
            )
            where = f"Into {'symmetric' if out else 'private'} memory:\n\n"
            tables.append(where + without_empty_columns(header.split("|"), rows))
    return tables


def _best(time, methods):
    """The shortest time of `methods`, and whose it is; nothing of NCCL's plain buffers alone"""
    found = {method: us for method, us in time.items() if method in methods}
    if set(found) <= {NCCL}:
        return ""
    method = min(found, key=found.__getitem__)
    return f"`{method}`: {us_text(found[method])}"


def _compared(row):
    if row is None:
        return [""] * 7
    return [
        f"`{row.method}`",
        time_text(row),
        ratio_text(row.vs_nccl),
        ratio_text(row.vs_plain),
        ratio_text(row.vs_torch_nccl),
        f"{row.bus_GBps:.1f}" if row.bus_GBps is not None else "",
        percent_text(row.of_p2p),
    ]


def by_method(results, op, cell):
    """A table with a line for each method, a column for each size, and what ``cell(row)`` says."""
    rows = [row for row in results.rows if row.op == op]
    sizes = list(dict.fromkeys(row.bytes for row in rows))
    lines = {}
    for row in right(rows):
        lines.setdefault(row.label, {})[row.bytes] = cell(row) + row.dagger
    cells = [[f"`{name}`", *(line.get(size, "") for size in sizes)] for name, line in lines.items()]
    return table(["", *map(size_text, sizes)], cells)


def of_experts(results):
    """A table with a line for each method, a column for each of EXPERTS."""
    lines = {}
    for row in right(results.rows):
        lines.setdefault(row.method, {})[row.op] = time_and_ratio(row) + row.dagger
    cells = [[f"`{name}`", *(line.get(op, "") for op in EXPERTS)] for name, line in lines.items()]
    return table(["", *EXPERTS.values()], cells)


def of_products(results):
    """A table with a line for each shape, a column for each method."""
    lines, methods = {}, {}
    for row in right(row for row in results.rows if row.op == "gemm"):
        ratio = f" ({ratio_text(row.vs_cublas)})" if row.vs_cublas is not None else ""
        lines.setdefault(row.shape, {})[row.method] = f"{row.tflops:.0f}{ratio}{row.dagger}"
        methods[row.method] = f"`{row.method}`"
    cells = [[shape, *(line.get(method, "") for method in methods)] for shape, line in lines.items()]
    return table(["M x N x K", *methods.values()], cells)


def of_grouped_products(rows):
    """A table with a line for each row of grouped products."""
    header = "E x rows x N x K|method|us|TFLOP/s|weights GB/s|x dense|x loop|x PyTorch".split("|")
    cells = []
    for row in rows:
        weights = f"{row.weights_GBps:.0f}" if row.weights_GBps is not None else ""
        ratios = map(ratio_text, (row.vs_cublas, row.vs_loop, row.vs_torch))
        cells.append([row.shape, f"`{row.method}`", time_text(row), f"{row.tflops:.0f}", weights, *ratios])
    return without_empty_columns(header, cells)


def of_layers(results, op):
    """Tables: a line for each shape and method; and of the parts alone, a line for each shape."""
    whole, alone, parts = [], {}, {}
    for row in right(row for row in results.rows if row.op == op):
        method = f"`{row.method}`" + (f": {row.took}" if row.took else "")
        if row.alone:
            parts[row.method, row.alone] = f"`{row.method}`, {row.alone}"
            alone.setdefault(row.shape, {})[row.method, row.alone] = time_text(row)
        else:
            ratios = map(ratio_text, (row.vs_nccl, row.vs_plain, row.vs_torch))
            overlap = percent_text(row.overlap, 1)
            tflops = f"{row.tflops:.0f}" if row.tflops else ""
            whole.append([row.shape, method, time_text(row), tflops, *ratios, overlap])
    header = "M x N x K|method|us|TFLOP/s|x NCCL|x plain|x PyTorch|overlap".split("|")
    cells = [[shape, *(line.get(part, "") for part in parts)] for shape, line in alone.items()]
    tables = [without_empty_columns(header, whole)] if whole else []
    return tables + (["Alone, us:\n\n" + table(["M x N x K", *parts.values()], cells)] if cells else [])


def of_shapes(rows):
    """A table with a line for each shape, a column for each method."""
    lines, names, shares = {}, {}, False
    for row in rows:
        key = row.method, row.alone
        took = f"{row.took}: " if row.took else ""
        more = [ratio_text(row.vs_torch)] if row.method not in COMPETITORS and row.vs_torch else []
        if row.of_memory is not None and row.us:
            more, shares = [*more, percent_text(row.of_memory)], True
        names[key] = f"`{row.method}`" + (f", {row.alone} alone" if row.alone else "")
        lines.setdefault(row.shape, {})[key] = (
            took + time_text(row) + (f" ({', '.join(more)})" if more else "")
        )
    cells = [[shape, *(line.get(key, "") for key in names)] for shape, line in lines.items()]
    share = ", and the share of one GPU's memory bandwidth" if shares else ""
    about = f"us; in brackets: x PyTorch of ours{share}:"
    return f"{about}\n\n{table(['shape', *names.values()], cells)}"


def notes(results):
    """What did not run, or was wrong, and why."""
    found = {}
    for row in results.rows:
        if row.note:
            size = row.shape or (row.bytes and size_text(row.bytes))
            size = f", {size}" if size else ""
            found.setdefault((row.label, row.note), []).append(size)
    lines = [f"- `{label}`{''.join(sizes)}: {note}" for (label, note), sizes in found.items()]
    answers = {case: entry["answer"] for case, entry in results.measured.items()}
    shown = {case: size_text(int(case)) if case.isdecimal() else case or "all" for case in answers}
    return lines + [f"- {shown[case]}: {text}" for case, text in answers.items() if text != "done"]


def time_and_ratio(row):
    ratio = row.vs_nccl or row.vs_plain
    return us_text(row.us) + (f" ({ratio_text(ratio)})" if ratio else "")


def body(results):
    """The tables of a file."""
    ops = dict.fromkeys(row.op for row in results.rows)
    parts = []
    if results.p2p_GBps and not results.emulated:
        parts.append(f"One rank sends to another {results.p2p_GBps:.0f} GB/s at most: 100 % of p2p.")
    for op in ops:
        if op == "latency":
            rows = [[f"`{row.method}`", time_text(row)] for row in right(results.rows) if row.op == op]
            parts.append("A signal, one way:\n\n" + table(["", "us"], rows))
        elif op == "barrier":
            rows = [[f"`{row.method}`", time_and_ratio(row) + row.dagger] for row in right(results.rows)]
            parts.append(table(["", f"us ({OVER})"], rows))
        elif op == "expert_parallel":
            parts.append(f"us ({OVER}):\n\n" + of_experts(results))
        elif op == "gemm":
            parts.append("TFLOP/s (and cuBLAS's time over it, where cuBLAS ran):\n\n" + of_products(results))
        elif op == "grouped_gemm":
            parts.append(of_grouped_products(right(results.rows)))
        elif op in LAYERS:
            parts += of_layers(results, op)
        elif op in SHAPED:
            parts.append(of_shapes(right(row for row in results.rows if row.op == op)))
        elif op == "p2p":
            speed = by_method(results, op, lambda row: f"{row.bus_GBps:.1f}")
            parts.append("GB/s, every rank to the next at once:\n\n" + speed)
        elif op not in EXPERTS:
            parts += fastest(results, op)
            every = by_method(results, op, time_and_ratio)
            parts.append(f"All methods, us ({OVER}):\n\n" + every)
    if missing := notes(results):
        parts.append("Without a figure:\n\n" + "\n".join(missing))
    return parts


def section(path, results):
    op = op_of(results)
    named = [("NCCL library" if name == "nccl" else name, text) for name, text in results.versions.items()]
    versions = [f"{name} {text}" for name, text in named if name.startswith(VERSIONS)]
    about = (
        f"Python {results.machine['python']}, {', '.join(versions)}; {results.date[:10]}. "
        f"Timing: {results.method}."
    )
    title = f"## {TITLES[op]}: {results.heading()}"
    command = f"mpirun -n {results.n_ranks} {results.command}" if results.n_ranks > 1 else results.command
    picture = picture_of(path, results, "../")
    of_earlier = [text] if (text := earlier.sentence(results)) else []
    return "\n\n".join([title, *of_earlier, *picture, f"```bash\n{command}\n```", about, *body(results)])


def picture_of(path, results, folder=""):
    """The plot, for a page that finds docs/ in `folder`; a list of one, or none."""
    if not has_plot(results):
        return []
    return [f"![{TITLES[op_of(results)]}: time against size]({folder}plots/{path.stem}.svg)"]


def op_of(results):
    return next(row.op for row in results.rows if row.op in TITLES)


def products_by_auto(results):
    """A table of products: what "auto" takes, and how it compares."""
    ours = [row for row in right(results.rows) if row.method == "auto"]
    header = "M x N x K|method|us|TFLOP/s|x NCCL|x plain|x PyTorch|x cuBLAS|overlap".split("|")
    rows = []
    for row in ours:
        ratios = map(ratio_text, (row.vs_nccl, row.vs_plain, row.vs_torch, row.vs_cublas))
        cells = [row.shape, f"`{row.took}`", time_text(row), f"{row.tflops:.0f}", *ratios]
        rows.append([*cells, percent_text(row.overlap, 1)])
    return without_empty_columns(header, rows)


def has_plot(results):
    """Whether it has times of several sizes."""
    without = *EXPERTS, *LAYERS, *SHAPED, "barrier", "gemm", "grouped_gemm"
    return not any(row.op in without for row in results.rows)


def read(path) -> Any:
    """-> the Results in `path`, of those methods that shmemkit still has; None for another JSON file."""
    results = Results.read(path)
    if results is not None:
        results.path = path
        results.rows = [
            row
            for row in results.rows
            if row.op not in CASES or row.method in COMPETITORS or row.method in methods(row.op)
        ]
        earlier.mark(results)
    return results


def files(folder):
    """-> {path: Results} of the files in `folder` that the page shows."""
    found = {path: read(path) for path in sorted(folder.glob("*.json"))}
    return {
        path: results
        for path, results in found.items()
        if results is not None and any(row.op in TITLES for row in results.rows)
    }


def text(folder, op=None):
    """All tables of `op`, or of all."""
    shown = [(path, results) for path, results in files(folder).items() if op in (None, op_of(results))]
    return "\n\n".join(section(path, results) for path, results in shown) or "There are none yet."


def overview(folder):
    """A section for each operation: its plots, or else what "auto" takes, and the page of its tables."""
    shown, parts = files(folder), []
    for op, title in TITLES.items():
        of_op = [(path, results) for path, results in shown.items() if op_of(results) == op]
        if not of_op:
            continue
        parts.append(f"## {title}")
        for path, results in of_op:
            parts += [f"{results.heading()}:", *filter(None, [earlier.sentence(results)])]
            parts += picture_of(path, results)
            if op == "gemm" or op in LAYERS:
                parts.append(products_by_auto(results))
            elif op == "grouped_gemm":
                parts.append(of_grouped_products(row for row in right(results.rows) if row.method == "auto"))
            elif not has_plot(results):
                parts += body(results)
        parts.append(f"[All rows](results/{op}.md)")
    return "\n\n".join(parts) or "There are none yet."


def mark_of(path):
    """What a plot says that it shows."""
    texts = earlier.texts(read(path)) or ["of the present kernels"]
    return f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()} of {path.name}, {', '.join(texts)}"


def stale_plots(folder, plots):
    """-> [(plot, the results that it shows or None)]: those to draw, and those to remove."""
    shown = files(folder).items()
    wanted = {plots / f"{path.stem}.svg": path for path, results in shown if has_plot(results)}
    stale = [
        (plot, path)
        for plot, path in wanted.items()
        if not plot.exists() or mark_of(path) not in plot.read_text()
    ]
    return stale + [(plot, None) for plot in sorted(plots.glob("*.svg")) if plot not in wanted]


def draw(plot, path):
    """Draw the plot of the results in `path`; without any, remove it."""
    if path is None:
        plot.unlink()
        return
    plot.parent.mkdir(exist_ok=True)
    report.plot(read(path), plot, mark_of(path))
