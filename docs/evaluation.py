"""docs/evaluation.md: each operator beside its best peer, of the files in benchmarks/results."""

import math
import re
from typing import Any

import bench_page
import earlier
from bench_page import TITLES, percent_text, ratio_text, table, time_text, us_text

from shmemkit.bench.cases import CASES
from shmemkit.bench.results import COMPETITORS, COPY, CUBLAS, NCCL, NCCL_CUBLAS, SDPA
from shmemkit.bench.sizes import size_text

RANKS = 4, 2
OF_ONE = "gemm", "grouped_gemm"
OPS = [op for op in TITLES if op != "p2p"]
LINK = "what one rank can send to another, or one signal's way where that is longer"
LIMITS = {op: f"the link: {LINK}" for op in CASES}
LIMITS |= {
    "all_reduce_rms_norm": "our all-reduce alone, in the same rounds",
    "barrier": "one signal's way",
    "expert_parallel": "the link",
    "gemm": "the tensor cores' peak",
    "grouped_gemm": "the tensor cores' peak, or the memory's where reading the weights takes longer",
    "flash_decode": "the memory of one GPU",
    "attention_combine": "the exchange of as many bytes alone, in the same rounds",
} | dict.fromkeys(bench_page.LAYERS, "the longer part alone, by what was the fastest at it")
# TFLOP/s of bfloat16 without sparsity, and GB/s of the memory, as NVIDIA's data sheets say.
PEAKS = {"H100": (989, 3350), "H200": (989, 4800)}
# Why a row is slower than its peer, where that is known.
REASONS = {
    ("all_reduce", "private"): "the sums go through symmetric memory, and a copy of the whole result follows",
    (
        "broadcast",
        "private",
    ): "multiprocessors store 330 GB/s of packets to peers; copy engines move 390",
    (
        "reduce",
        "private",
    ): "the root receives 1.5 arrays, in two launches one after the other",
    ("reduce", "symmetric"): "as in private memory",
}
SPECIAL = "sms=", "index made before"  # methods that are given more than a call gives them
NOISE = 0.99  # ratios above it are no loss
UNKNOWN = "the cause is not known yet"
NOT_YET = "Not measured yet."
DECIDED = "tuning.md#numbers-that-decide"


def chosen(folder, op, ranks):
    """-> the Results of `op` on `ranks` ranks, or None. Those of the present kernels come first, then the
    newest."""
    found = [
        results
        for results in bench_page.files(folder).values()
        if bench_page.op_of(results) == op and results.n_ranks == ranks and not results.emulated
        if results.dtype == "bfloat16" and "--max-rows" not in results.command
    ]
    return max(found, key=lambda results: (earlier.is_current(results), results.date), default=None)


def comparisons(results, op):
    """-> [(our row, the best peer's row or None, share of the limit or None), ...], at each case and place of
    the result; ours is "auto" or, where there is none, the fastest"""
    rows = [row for row in bench_page.right(results.rows) if row.op == op]
    found, cases = [], {}
    for row in rows:
        cases.setdefault(row.case, []).append(row)
    for case, of_case in cases.items():
        if case[3]:  # a part alone
            continue
        peers = [row for row in of_case if row.method in COMPETITORS - _no_peers(op)]
        peer = min(peers, key=lambda row: row.us, default=None)
        for out in (None, "symmetric"):
            ours = [row for row in of_case if row.method not in COMPETITORS and row.out == out]
            ours = [row for row in ours if row.method == "auto"] or ours
            ours = [row for row in ours if not any(name in row.method for name in SPECIAL)]
            if ours:
                row = min(ours, key=lambda row: row.us)
                found.append((row, peer, share(results, row)))
    return found


def _no_peers(op):
    """What shows a limit."""
    return {COPY, SDPA} | ({CUBLAS} if op == "grouped_gemm" else set())


def share(results, row):
    """The time that the limit (LIMITS) allows, over the row's; None where nobody measured it."""
    if row.op in CASES or row.op == "barrier":
        times = [row.of_p2p and row.of_p2p * row.us, _latency(results)]
        return max(filter(None, times), default=math.nan) / row.us if any(times) else None
    if row.op == "expert_parallel":
        return row.of_p2p
    if row.op in bench_page.LAYERS:
        return row.overlap
    if row.op == "flash_decode":
        return row.of_memory
    if row.op in ("all_reduce_rms_norm", "attention_combine"):
        parts = [r.us for r in bench_page.right(results.rows) if r.shape == row.shape and r.alone]
        return min(parts) / row.us if parts else None
    tflops, memory = PEAKS.get(model(results), (None, None))
    shares = [row.tflops and tflops and row.tflops / tflops]
    shares.append(row.weights_GBps and memory and row.weights_GBps / memory)
    return max(filter(None, shares), default=None)


_latencies: dict = {}  # GPU: microseconds of a signal


def _latency(results):
    return _latencies.get(model(results))


def model(results):
    found = re.search(r"\b[A-Z]+\d+\b", results.machine["gpu"])
    return found[0] if found else results.machine["gpu"]


def _read_latencies(folder):
    _latencies.clear()
    for results in bench_page.files(folder).values():
        times = [row.us for row in bench_page.right(results.rows) if row.op == "latency"]
        if times:
            _latencies[model(results)] = min([*times, _latencies.get(model(results), math.inf)])


def text(folder):
    """The generated part of the page."""
    _read_latencies(folder)
    shown = {(op, n): chosen(folder, op, n) for op in OPS for n in ((1,) if op in OF_ONE else RANKS)}
    found = {key: results and comparisons(results, key[0]) for key, results in shown.items()}
    for op in OPS:
        keys = [key for key in found if key[0] == op and found[key]]
        found |= zip(keys, _without_alike([found[key] for key in keys]), strict=True)
    parts = ["## In short", _short(shown, found), "## Not measured with the present kernels"]
    parts += [_missing(shown, folder), "## Slower than a peer", _slower(shown, found), "## Each operator"]
    for op in OPS:
        parts += _operator(op, shown, found, folder)
    return "\n\n".join(parts)


def _name(results):
    """As "4 H200", with a dagger where rows are of earlier kernels."""
    return f"{results.n_ranks} {model(results)}{'' if earlier.is_current(results) else earlier.DAGGER}"


def _case(row):
    return row.shape or (size_text(row.bytes) if row.bytes else "")


def _ratio(row, peer) -> Any:
    return peer.us / row.us if peer else None


def _short(shown, found):
    """A line for each operator and number of ranks: the worst and the best ratio."""
    rows = []
    for (op, _), results in shown.items():
        ratios = [(_ratio(row, peer), row) for row, peer, _ in found[op, _] or () if peer]
        if ratios:
            least, most = (of(ratios, key=lambda pair: pair[0]) for of in (min, max))
            middle = math.exp(sum(math.log(ratio) for ratio, _ in ratios) / len(ratios))
            ends = [f"{ratio_text(ratio)} ({_case(row) or 'the only case'})" for ratio, row in (least, most)]
            rows.append([TITLES[op], _name(results), ends[0], ratio_text(middle), ends[1]])
    about = f"{earlier.DAGGER} of earlier kernels, all rows or some: the tables below say which and of when."
    return table(["operator", "on", "lowest ratio", "mean", "highest"], rows) + f"\n\n{about}"


def _elsewhere(folder, op):
    """On what the operator was measured to decide something, and not for this page: "4 H100", or "" """
    found = bench_page.files(folder / "model").values()
    of_op = (results for results in found if bench_page.op_of(results) == op)
    return " and ".join(sorted({f"{results.n_ranks} {model(results)}" for results in of_op}))


def _missing(shown, folder):
    """What nobody measured for this page, and what is of earlier kernels."""
    never, old = {}, {}
    for (op, n), results in shown.items():
        if results is None:
            never.setdefault(op, []).append(n)
        else:
            for said in earlier.texts(results):
                old.setdefault(said, []).append(f"{TITLES[op]} ({n})")
    lines = []
    for op, n in never.items():
        other = _elsewhere(folder, op)
        only = f"; on {other} only [to decide what `auto` takes]({DECIDED})" if other else ""
        said = "to decide something only" if other else "never"
        lines.append(f"- {said}: {TITLES[op]}, on {' and '.join(map(str, n))} GPUs{only}")
    lines += [f"- {said}: {', '.join(ops)}" for said, ops in old.items()]
    return "\n".join(lines) or "Nothing: all figures are of the present kernels."


def _slower(shown, found):
    lines = []
    for (op, n), results in shown.items():
        for out in (None, "symmetric"):
            slow = [(r, p) for r, p, _ in found[op, n] or () if p and r.out == out]
            slow = [(r, p) for r, p in slow if p.us / r.us < NOISE]
            if not slow:
                continue
            where = out or "private"
            shapes = ", ".join(f"{_case(r)} {ratio_text(_ratio(r, p))} (`{p.method}`)" for r, p in slow)
            place = f", {where} memory" if op in CASES else ""
            reason = REASONS.get((op, where), UNKNOWN)
            lines.append(f"- {TITLES[op]}, {_name(results)}{place}: {shapes}. Why: {reason}.")
    return "\n".join(lines) or "Nothing."


def _operator(op, shown, found, folder):
    """A table: a line for each case, columns for each number of ranks."""
    mine = [(results, found[key]) for key, results in shown.items() if key[0] == op and found[key]]
    if not mine:
        other = _elsewhere(folder, op)
        said = f"Measured on {other} only, [to decide what `auto` takes]({DECIDED})." if other else NOT_YET
        return [f"### {TITLES[op]}", f"{said} [All rows](results/{op}.md)"]
    header, lines = ["size" if op in CASES else "shape"], {}
    for i, (results, rows) in enumerate(mine):
        name = f"{results.n_ranks} {model(results)}"
        header += [f"{name}: ours, us", "best peer, us", "ratio", "of the limit"]
        for row, peer, part in rows:
            line = lines.setdefault(_key(row), [""] * 4 * len(mine))
            beside = f"`{peer.method}`: {us_text(peer.us)}" if peer else ""
            cells = _ours(row), beside, ratio_text(_ratio(row, peer)), percent_text(part)
            line[4 * i : 4 * i + 4] = cells
    by_size = op in CASES
    ordered = sorted(lines.items(), key=lambda pair: pair[0][0]) if by_size else lines.items()
    cells = [[f"{case}, symmetric" if out else case, *line] for (_, case, out), line in ordered]
    said = [f"{results.n_ranks} ranks: {text}" for results, _ in mine if (text := earlier.sentence(results))]
    plain = [n for n in dict.fromkeys(r.n_ranks for r, rows in mine if _plain_only(rows))]
    notes = [f"The limit is {LIMITS[op]}."]
    if plain:
        notes.append(f"On {' and '.join(map(str, plain))} GPUs, NCCL ran with plain buffers only.")
    notes.append(f"[All rows](results/{op}.md)")
    return [f"### {TITLES[op]}", *said, " ".join(notes), bench_page.without_empty_columns(header, cells)]


def _without_alike(of_ranks):
    """`of_ranks`, the comparisons of each number of ranks, without those in symmetric memory that all are as
    the ones in private memory."""
    ours = {}
    for i, rows in enumerate(of_ranks):
        for row, *_ in rows:
            ours.setdefault(_key(row), [""] * len(of_ranks))[i] = _ours(row)
    same = {
        key
        for key, cells in ours.items()
        if key[2] and (beside := ours.get((*key[:2], None))) and all(map(_alike, beside, cells))
    }
    return [[each for each in rows if _key(each[0]) not in same] for rows in of_ranks]


def _key(row):
    """What has a line of its own in a table."""
    return row.bytes or 0, _case(row), row.out


def _ours(row):
    took = f"{row.took}: " if row.took else "" if row.method == "auto" else f"{row.method}: "
    return f"{took}{time_text(row)}"


def _alike(*cells):
    """Whether two figures of ours, as "ll128: 2.11", are by one method and differ by less than 3 %."""
    names, times = zip(*(cell.rpartition(" ")[::2] for cell in cells), strict=True)
    if names[0] != names[1] or "" in times:
        return times[0] == times[1]
    one, other = (float(time.rstrip(earlier.DAGGER)) for time in times)
    return max(one, other) < 1.03 * min(one, other)


def _plain_only(rows):
    return {peer.method for _, peer, _ in rows if peer} <= {NCCL, NCCL_CUBLAS} and any(p for _, p, _ in rows)
