"""What the user sees: a table (rich), a plot (matplotlib)."""

import importlib.util
import shutil
import statistics
from typing import Any

from shmemkit.collectives.tuning import OUTPUTS

from .cases import CASES, title_of
from .results import COMPETITORS, NCCL, NCCL_WAYS, TORCH_NCCL, TORCH_SYMMETRIC, ranks_of
from .sizes import size_text

HINT = "pip install rich matplotlib"
PLAIN_WIDTH = 150  # columns where the output is no terminal, or has no width


def _ratio(value):
    return "" if value is None else f"{value:.2f}"


def _percent(value, digits=0):
    return "" if value is None else f"{100 * value:.{digits}f} %"


# Title, what a row has there, right-aligned. A column where no row has anything is left out.
COLUMNS = (
    ("shape", lambda row: row.shape or "", True),
    ("size", lambda row: size_text(row.bytes) if row.bytes else "", True),
    ("method", lambda row: _method(row), False),
    ("alone", lambda row: row.alone or "", False),
    ("out", lambda row: row.out or "", False),
    ("blocks", lambda row: str(row.blocks) if row.blocks else "", True),
    ("us", lambda row: f"{row.us:.{2 if row.us < 1e5 else 0}f}" if row.us is not None else "", True),
    ("bus GB/s", lambda row: f"{row.bus_GBps:.1f}" if row.bus_GBps is not None else "", True),
    ("x NCCL", lambda row: _ratio(row.vs_nccl), True),
    ("x plain", lambda row: _ratio(row.vs_plain), True),
    ("x NCCL of torch", lambda row: _ratio(row.vs_torch_nccl), True),
    ("TFLOP/s", lambda row: f"{row.tflops:.1f}" if row.tflops is not None else "", True),
    ("weights GB/s", lambda row: f"{row.weights_GBps:.0f}" if row.weights_GBps is not None else "", True),
    ("x cuBLAS", lambda row: f"{row.vs_cublas:.3f}" if row.vs_cublas is not None else "", True),
    ("x loop", lambda row: _ratio(row.vs_loop), True),
    ("x PyTorch", lambda row: _ratio(row.vs_torch), True),
    ("overlap", lambda row: _percent(row.overlap, 1), True),
    ("of memory", lambda row: _percent(row.of_memory), True),
    ("of p2p", lambda row: _percent(row.of_p2p), True),
    ("x cuLaunchKernel", lambda row: _ratio(row.vs_driver), True),
)
TITLES = {op: title_of(case) for op, case in CASES.items()} | {
    "all_reduce_rms_norm": "all_reduce_rms_norm, with the residual (shape: tokens x hidden; size: of x)",
    "barrier": "barrier, on the stream",
    "expert_dispatch": "expert_parallel: dispatch (size: a row for each expert of a rank's tokens)",
    "expert_combine": "expert_parallel: combine",
    "expert_parallel": "expert_parallel: dispatch and combine",
    "gemm": "gemm, matrix products (shape: MxNxK; size: of both operands and the result)",
    "grouped_gemm": "grouped_gemm (shape: ExROWSxNxK, rows of a mean expert; x cuBLAS: one dense product)",
    "ag_gemm": "ag_gemm, all-gather and matrix product (shape: MxNxK of the layer; size: gathered)",
    "gemm_rs": "gemm_rs, matrix product and reduce-scatter (shape: MxNxK of the layer; size: of M by K)",
    "gemm_ar": "gemm_ar, matrix product and all-reduce (shape: MxNxK of the layer; size: of M by K)",
    "attention_combine": "attention_combine (shape: batch, heads, head_dim; size: a rank's rows and lse)",
    "flash_decode": "flash_decode (shape: tokens, heads of k, heads of q for each; size: a rank's k and v)",
    "ag_grouped_gemm": "ag_grouped_gemm (shape: MxNxKxExTOPK of the layer; size: gathered)",
    "grouped_gemm_rs": "grouped_gemm_rs (shape: MxNxKxExTOPK of the layer; size: of M by N)",
    "latency": "latency, one way, to a signal that another rank waits for",
    "p2p": "p2p, every rank to the next",
    "launch": "launch, time on the host",
    "graph": "in a CUDA graph, time on the GPU",
    "first_launch": "first launch of a kernel that calls put_signal, in a new process",
}


def missing(plot):
    """-> what to install, or None."""
    for package, what, needed in (("rich", "the table", True), ("matplotlib", "--plot", plot)):
        if needed and importlib.util.find_spec(package) is None:
            return f"{what} needs {package}, which is not installed: {HINT}"
    return None


def _rich():
    """-> (a console, rich's Table, rich's Text)"""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    # Launchers such as mpirun give a terminal that has no width. With TERM=dumb, rich takes 80 columns unless
    # it has a height, too.
    width = shutil.get_terminal_size((PLAIN_WIDTH, 0)).columns
    return Console(width=width, height=25, highlight=False), Table, Text


def show(results):
    """Print the table of each operation."""
    console, Table, Text = _rich()
    console.print(results.heading(), markup=False)
    if results.p2p_GBps and not results.emulated:
        console.print(f"one rank to another: {results.p2p_GBps:.0f} GB/s", markup=False)
    for op in dict.fromkeys(row.op for row in results.rows):
        rows = [row for row in results.rows if row.op == op]
        notes = dict.fromkeys(row.note for row in rows if row.note)
        notes = {note: f"({i})" for i, note in enumerate(notes, 1)}  # they stand below the table
        columns = [column for column in COLUMNS if any(column[1](row) for row in rows)]
        if notes:
            columns.append(("note", lambda row, notes=notes: notes.get(row.note, ""), False))
        table = Table(title=TITLES[op], title_justify="left")
        for title, _, right in columns:
            table.add_column(title, justify="right" if right else "left", overflow="fold", no_wrap=right)
        before = None
        for row in rows:
            if before is not None and (before.bytes, before.shape) != (row.bytes, row.shape):
                table.add_section()
            style = "bold red" if row.wrong else "dim" if row.note else ""
            table.add_row(*(Text(cell(row)) for _, cell, _ in columns), style=style)
            before = row
        console.print(table)
        for note, number in notes.items():
            console.print(f"{number} {note}", markup=False)
        for line in _verdict(rows):
            console.print(line, markup=False)


def _verdict(rows):
    """How "auto" compares with NCCL's fastest way, a line for each place of the result."""
    for out in (None, "symmetric"):
        found = [row for row in rows if row.method == "auto" and row.out == out and row.vs_nccl]
        if not found:
            continue
        ratios = sorted(row.vs_nccl for row in found)
        slower = ", ".join(_size(row) for row in found if row.vs_nccl < 1)
        yield (
            f"{found[0].method}{', symmetric out' * bool(out)}: {ratios[0]:.2f} to {ratios[-1]:.2f} times as "
            f"fast as NCCL in its fastest way{f'; slower at {slower}' * bool(slower)}"
        )


def show_choices(entry, path):
    """Print an entry of the tuning table, which is now in the file `path`."""
    console, Table, Text = _rich()
    nodes = entry["n_nodes"]
    place = f"{entry['gpu']}, {ranks_of(entry['n_ranks'])}, {nodes} node{'s' * (nodes > 1)}"
    console.print(f"auto on {place}, from now on (in {path}):", markup=False, soft_wrap=True)
    table = Table("out", "up to", "method")
    for out in OUTPUTS:
        for limit, method in entry[out]:
            table.add_row(out, size_text(limit) if limit else "", Text(method))
        table.add_section()
    console.print(table)


def show_comparison(comparison):
    """Print what has become slower, and how the others' times changed."""
    console, Table, Text = _rich()
    slower, pairs = comparison.slower, comparison.pairs
    if slower:
        titles = "", "method", "out", "us then", "us now", "now / then"
        table = Table(*titles, title="slower than before", title_justify="left")
        for old, new in slower:
            methods = dict.fromkeys(_method(row) for row in (old, new))
            cells = [_size(new), ", now ".join(methods), new.out or ""]
            cells += [_span(old), _span(new), _ratio(new.us / old.us)]
            table.add_row(*map(Text, cells))
        console.print(table)
    texts = [f"{len(slower)} of {len(pairs)} rows became slower"]
    if not pairs:
        texts = ["nothing was compared: no row has a time both then and now"]
    else:
        ratios = sorted(new.us / old.us for old, new in pairs)
        middle = statistics.median(ratios)
        texts.append(f"now / then, of all rows: {ratios[0]:.3f} to {ratios[-1]:.3f}, median {middle:.3f}")
    if comparison.drift:
        ratio = f"{comparison.drift:.3f} (geometric mean). Far from 1, the machine is not as it was"
        texts.append(f"now / then, of NCCL, cuBLAS and PyTorch: {ratio}")
    without = {"had a time and have none now": comparison.failed, "not measured now": comparison.others}
    for what, rows in without.items():
        if rows:
            texts.append(f"{what}: {'; '.join(f'{row.label} {_size(row)}'.strip() for row in rows)}")
    for text in texts:
        console.print(text, markup=False)


def _size(row):
    return row.shape or (size_text(row.bytes) if row.bytes else "")


def _method(row):
    return f"{row.method}: {row.took}" if row.took else row.method


def _span(row):
    """The median, and the shortest and the longest time."""
    text = f"{row.us:.2f}"
    return f"{text} ({min(row.runs):.2f} to {max(row.runs):.2f})" if row.runs else text


def best(results, methods, out=None):
    """-> {bytes: us}, the shortest time at each size of rows of `methods` that are right"""
    times = {}
    for row in results.rows:
        if row.method in methods and row.us is not None and not row.note and row.out == out:
            times[row.bytes] = min(row.us, times.get(row.bytes, row.us))
    return times


def nccl_text(results):
    """What `best` of NCCL_WAYS is, for a legend."""
    ran = {row.method: row.version for row in results.rows if row.method in NCCL_WAYS and row.us}
    version = next(filter(None, ran.values()), getattr(results, "versions", {}).get(NCCL, ""))
    way = f"best of {len(ran)} ways" if len(ran) > 1 else "plain buffers" if NCCL in ran else "".join(ran)
    return f"NCCL {version}, {way}{', no multicast' * (results.environment.get('NCCL_NVLS_ENABLE') == '0')}"


def plot(results, path, mark=None):
    """Time against size, both logarithmic: "auto", and thinner our other methods, the best of NCCL and of
    PyTorch's symmetric memory; below, the time of these over that of "auto". Dashed: into symmetric memory.
    The format is that of the file's suffix. `mark`: text that an SVG file then contains."""
    import matplotlib
    from matplotlib.figure import Figure

    lines = {}  # (label, method, blocks, out): {bytes: us}
    for row in results.rows:
        known = row.method in COMPETITORS and row.method != TORCH_NCCL
        if row.op != "latency" and row.us is not None and not row.wrong and not known:
            lines.setdefault((row.label, row.method, row.blocks, row.out), {})[row.bytes] = row.us
    colours: dict[tuple, Any] = {("auto", None): "tab:green"}
    drawn = []
    for (label, method, blocks, out), times in lines.items():
        colour = colours.setdefault((method, blocks), matplotlib.colormaps["tab20b"](len(colours) % 20))
        drawn.append((label, times, colour, "--" if out else "-", 2.5 if method == "auto" else 0.8))
    peers = {nccl_text(results): (best(results, NCCL_WAYS), "black")}
    peers["PyTorch symmetric memory, its best"] = best(results, TORCH_SYMMETRIC), "tab:orange"
    peers = {label: peer for label, peer in peers.items() if peer[0]}
    ways = {row.method for row in results.rows if row.method in NCCL_WAYS and row.us and not row.note}
    if NCCL in ways and len(ways) > 1:
        drawn.append(("NCCL, plain buffers", best(results, (NCCL,)), "black", "-", 0.8))
    drawn += [(label, times, colour, "-", 2.5) for label, (times, colour) in peers.items()]

    figure = Figure(figsize=(10, 8 if peers else 5.5), layout="constrained")
    rows = figure.subplots(
        2 if peers else 1, sharex=True, squeeze=False, height_ratios=[2, 1][: 1 + bool(peers)]
    )
    axes = rows[0, 0]
    for label, times, colour, style, width in drawn:
        axes.plot(*zip(*times.items(), strict=True), style, c=colour, lw=width, marker="o", ms=3, label=label)
    sizes = sorted({size for _, times, *_ in drawn for size in times})
    axes.set(xscale="log", yscale="log", ylabel="us")
    what = ", ".join(dict.fromkeys(row.op for row in results.rows if row.op != "latency"))
    earlier = "; ".join(dict.fromkeys(row.earlier for row in results.rows if row.earlier))
    earlier = f"\nshmemkit's times: {earlier}" if earlier else ""
    axes.set_title(f"{what}, {results.dtype}: {results.heading()}{earlier}", fontsize="small")
    if drawn:
        axes.legend(fontsize="x-small", loc="center left", bbox_to_anchor=(1, 0.5))
    for times, colour in peers.values():
        for out, style in ((None, "-"), ("symmetric", "--")):
            auto = best(results, ("auto",), out)
            points = [(size, us / auto[size]) for size, us in times.items() if size in auto]
            if points:
                rows[1, 0].plot(*zip(*points, strict=True), style, c=colour, lw=2.5, marker="o", ms=3)
    if peers:
        rows[1, 0].axhline(1, color="tab:green", lw=1)
        rows[1, 0].set(ylabel="time over that of auto\n(above 1: auto is faster)", ylim=(0, None))
    for below in rows.flat:
        below.grid(alpha=0.3)
    bottom = rows[-1, 0]
    bottom.set_xticks(sizes, [size_text(size) for size in sizes], minor=False)
    bottom.set_xticks([], minor=True)
    bottom.set(xlabel="bytes")
    save(figure, path, mark)


def save(figure, path, mark=None):
    """Write a figure; the same figure gives the same SVG file, in which `mark` stands."""
    import matplotlib

    about = {"Description": mark, "Date": None} if mark else None
    with matplotlib.rc_context({"svg.hashsalt": "shmemkit", "svg.fonttype": "none"}):
        figure.savefig(path, metadata=about)
