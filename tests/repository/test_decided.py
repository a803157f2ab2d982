"""Numbers by which "auto" chooses: docs/tuning.md names the results that decided each, and they do."""

import importlib
import json
import re

import pytest
from pages import ROOT

from shmemkit.collectives.all_reduce.rms_norm import ONE_SHOT
from shmemkit.gemm.all_gather import PUSHED, SMALL
from shmemkit.gemm.reduce_scatter import copy_engine, ll128, methods

RESULTS = ROOT / "benchmarks" / "results"
ROWS = re.findall(
    r"^\| `(shmemkit[\w.]+)` \| (\d*) ?\| (.+) \|$", (ROOT / "docs" / "tuning.md").read_text(), re.M
)
NEAR = 1.03  # of the time of the faster one: less was not decided


def times(name):
    """-> {shape: {method: microseconds}} of what is right, and how many ranks"""
    data, found = json.loads((RESULTS / name).read_text()), {}
    for row in data["rows"]:
        if row.get("us") and not row.get("note") and not row.get("alone"):
            shape = tuple(map(int, row["shape"].split("x")))
            found.setdefault(shape, {})[row["method"]] = row["us"]
    return found, data["n_ranks"]


def of(*names):
    """-> (shape, times, ranks) of each shape of these files"""
    return [(shape, of_shape, n) for found, n in map(times, names) for shape, of_shape in found.items()]


def both(prefix):
    return of(f"{prefix}_h200x2.json", f"{prefix}_h200x4.json")


@pytest.mark.parametrize(("name", "value", "by"), ROWS, ids=[row[0] for row in ROWS])
def test_the_page_has_the_value_and_results_that_there_are(name, value, by):
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError:
        module, _, kind = module.rpartition(".")
        found = getattr(getattr(importlib.import_module(module), kind), attribute)
    assert found == int(value) if value else isinstance(found, str)
    files = re.findall(r"`([\w/]+\.json)`", by)
    assert all((RESULTS / file).is_file() for file in files)
    assert bool(files) != by.startswith("not measured yet")


def test_no_other_number_is_called_a_guess():
    assert len(ROWS) == 8
    for path in (ROOT / "shmemkit").rglob("*.py"):
        assert not re.search(r"#.*\ba guess\b|nobody has measured it", path.read_text()), path


def test_one_shot_of_the_norm():
    for (tokens, hidden), us, n in of("model/all_reduce_rms_norm_h100x4.json"):
        if "one_shot" in us:
            taken, other = ("one_shot", "two_shot")[:: 1 if tokens * hidden * 2 * (n - 1) <= ONE_SHOT else -1]
            assert us[taken] <= NEAR * us[other], (tokens, hidden)


def test_push_of_all_gather_gemm_is_not_taken_beyond_what_was_measured():
    assert max(m * k * 2 for (m, _, k), *_ in both("ag_gemm")) == PUSHED
    assert min(m * k * 2 for (m, _, k), *_ in both("ag_gemm")) == 2 * SMALL


def test_copy_engine_of_gemm_reduce_scatter():
    """A part: M by the layer's K, of bfloat16."""
    cases = [(m * k * 2 // n, us) for (m, _, k), us, n in both("gemm_rs")]
    small = [us for part, us in cases if part < copy_engine.LEAST]
    large = [us for part, us in cases if part >= copy_engine.LEAST]
    assert small and all(us["fused"] < us["copy_engine"] for us in small)
    assert sum(us["copy_engine"] < us["fused"] for us in large) >= 3
    assert all(us["auto"] <= NEAR * min(us["fused"], us["copy_engine"]) for us in large)


def test_fused_of_gemm_reduce_scatter():
    for (m, _, k), us, _ in both("gemm_rs"):
        assert m * k >= methods.LEAST and us["fused"] <= NEAR * us["sequential"]


def test_ll128_overlap_of_gemm_all_reduce():
    """Smaller results are faster by one_shot or two_shot."""
    for (m, _, k), us, _ in both("gemm_ar"):
        if "two_shot_overlap" in us:
            others = min(us[name] for name in ("one_shot", "two_shot", "fused") if name in us)
            assert (us["two_shot_overlap"] < others) == (m * k >= ll128.LEAST), (m, k)


@pytest.mark.parametrize(
    ("layer", "first"), [("ag_grouped_gemm", "overlap"), ("grouped_gemm_rs", "gathered")]
)
def test_layers_of_experts(layer, first):
    """`auto` takes the first method wherever it can compute a call: it is the faster."""
    cases = both(layer)
    assert len(cases) == 10
    assert all(us[first] < us["sequential"] for _, us, _ in cases)
