"""Fit the parameters of shmemkit/collectives/cost_model.py to results, and write model.json.

    python benchmarks/fit_model.py                 by the files that model.json names
    python benchmarks/fit_model.py FILE.json ...   by others, as `shmemkit bench tune --json` writes them
    python benchmarks/fit_model.py show [GPU]      print what "auto" takes by the model, at 2, 3, 4, 8 ranks

It prints how well it does: fitted to every second size and compared with the others, fitted to two ranks and
compared with more, and what is lost where it does not choose the fastest method that was measured.
"""

import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from shmemkit.collectives import cost_model, tuning  # noqa: E402
from shmemkit.collectives.registry import collectives  # noqa: E402
from shmemkit.support.sizes import size_text  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"


class Sample(NamedTuple):
    """A row of results, what `terms` says of it, and the case that it belongs to."""

    us: float
    terms: dict
    nbytes: int
    n_ranks: int
    method: str
    case: tuple


def samples(names):
    """Those of the rows that are right, in these files of RESULTS. Of a method that was measured twice in a
    case, the later one."""
    found = {}
    for name in sorted(names, key=lambda name: json.loads((RESULTS / name).read_text())["date"]):
        data = json.loads((RESULTS / name).read_text())
        n, (gpu, _) = data["n_ranks"], cost_model.gpu_of(data["machine"]["gpu"])
        for row in data["rows"]:
            method = row.get("took") or row["method"]
            if row.get("note") or not row.get("us") or obsolete(name, method, row["bytes"]):
                continue
            symmetric = row.get("out") == "symmetric"
            terms = cost_model.terms(row["op"], method, n, row["bytes"], symmetric)
            if terms is not None:
                case = data["machine"]["gpu"], row["op"], n, row["bytes"], symmetric
                terms = cost_model.scaled(terms, gpu)
                found[case, method] = Sample(row["us"], terms, row["bytes"], n, method, case)
    return list(found.values())


def obsolete(name, method, nbytes):
    """Whether a row is of code that is gone: LL128 on H100, which took twice as long from 16 MB on."""
    return "ll128" in method and name.endswith("_h100x4.json") and nbytes >= 1 << 24


def fit(some):
    """-> {parameter: value}, none negative: the least sum of squares of relative errors."""
    names = sorted({name for sample in some for name, amount in sample.terms.items() if amount})
    a = np.array([[sample.terms.get(name, 0) / sample.us for name in names] for sample in some])
    scale = np.linalg.norm(a, axis=0)
    x = _non_negative(a / scale, np.ones(len(some))) / scale
    return {name: float(f"{value:.4g}") for name, value in zip(names, x, strict=True)}


def _non_negative(a, b):
    """Least squares by the method of active sets of Lawson and Hanson."""
    x, free = np.zeros(a.shape[1]), np.zeros(a.shape[1], bool)
    for _ in range(10 * a.shape[1]):
        gradient = np.where(free, -np.inf, a.T @ (b - a @ x))
        if gradient.max() < 1e-9:
            break
        free[gradient.argmax()] = True
        while free.any():
            new = np.zeros_like(x)
            new[free] = np.linalg.lstsq(a[:, free], b, rcond=1e-9)[0]
            below = free & (new <= 0)
            if not below.any():
                x = new
                break
            step = np.min(x[below] / (x[below] - new[below]), initial=1)
            x += step * (new - x)
            free &= x > 1e-12
    return x


def predicted(parameters, sample):
    return sum(parameters.get(name, 0) * amount for name, amount in sample.terms.items())


def errors(parameters, some):
    """Relative ones."""
    return np.array([predicted(parameters, each) / each.us - 1 for each in some])


def losses(parameters, some):
    """-> {case: by how much what the model would take is slower than the fastest}, of several methods."""
    cases = {}
    for each in some:
        cases.setdefault(each.case, []).append(each)
    return {
        case: min(each, key=lambda s: predicted(parameters, s)).us / min(s.us for s in each) - 1
        for case, each in cases.items()
        if len(each) > 1
    }


def halves(some):
    """-> (every second size, the others)"""
    even = set(sorted({each.nbytes for each in some})[::2])
    return [s for s in some if s.nbytes in even], [s for s in some if s.nbytes not in even]


def model_of(names):
    """What model.json has."""
    some = samples(names)
    dates = sorted(json.loads((RESULTS / name).read_text())["date"][:10] for name in names)
    return {
        "files": sorted(names),
        "dates": [dates[0], dates[-1]],
        "ranks": sorted({each.n_ranks for each in some}),
        "parameters": fit(some),
    }


def report(some):
    def show(what, parameters, others):
        found, lost = np.abs(errors(parameters, others)), np.array([*losses(parameters, others).values()])
        near = f"{np.mean(lost < 0.05):.0%} of {len(lost)} choices within 5 %, worst loss {lost.max():.0%}"
        print(f"{what}: {len(found)} rows, median {np.median(found):.1%}, worst {found.max():.0%}; {near}")

    show("fitted to all", fit(some), some)
    train, others = halves(some)
    show("every second size held out", fit(train), others)
    two = [each for each in some if each.n_ranks == 2]
    if two and len(two) < len(some):
        show("more than 2 ranks held out", fit(two), [each for each in some if each.n_ranks > 2])


def show_choices(gpu):
    """What is taken without a table: the microseconds that it is predicted to take, and how much longer that
    is than the shortest prediction."""
    place = cost_model.gpu_of(gpu)[0]
    for op in filter(cost_model.methods, collectives()):
        for n in (2, 3, 4, 8):
            found = tuning._by_model(op, tuning.Place(gpu, n, 1, place.sms), [], "")
            for symmetric, choices in found.choices.items():
                cells, last = [], None
                for size, times in found.times[symmetric].items():
                    method = tuning.method_at(choices, size)
                    loss = times[method] / min(times.values()) - 1
                    if method != last or loss > 0.01:
                        cells.append(f"{size_text(size)} {method} {times[method]:.1f} us (+{loss:.0%})")
                    last = method
                print(f"{op}, {n} ranks, {'symmetric' if symmetric else 'private'}: {'; '.join(cells)}")


def main(arguments):
    if arguments[:1] == ["show"]:
        show_choices(" ".join(arguments[1:]) or "NVIDIA H100 80GB HBM3")
        return
    names = [str(Path(name).resolve().relative_to(RESULTS)) for name in arguments]
    names = names or cost_model.fitted()["files"]
    report(samples(names))
    cost_model.FILE.write_text(json.dumps(model_of(names), indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
