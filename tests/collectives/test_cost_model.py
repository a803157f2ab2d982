"""The model that "auto" goes by where no table was measured: whence its parameters, how well it does."""

import importlib
import json

import numpy as np
import pytest
from pages import ROOT

from shmemkit.collectives import cost_model, tuning
from shmemkit.collectives.registry import collectives


@pytest.fixture(scope="module")
def fitting():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("fit_model")


@pytest.fixture(scope="module")
def samples(fitting):
    return fitting.samples(cost_model.fitted()["files"])


def test_the_parameters_are_those_that_the_named_results_give(fitting):
    shipped = cost_model.fitted()
    found = fitting.model_of(shipped["files"])
    assert found["parameters"] == pytest.approx(shipped["parameters"], rel=1e-2, abs=1e-3)
    assert {**found, "parameters": None} == {**shipped, "parameters": None}


def test_sizes_that_were_held_out(fitting, samples):
    train, others = fitting.halves(samples)
    parameters = fitting.fit(train)
    errors = np.abs(fitting.errors(parameters, others))
    assert np.median(errors) <= 0.05 and errors.max() <= 0.3
    losses = np.array([*fitting.losses(parameters, others).values()])
    assert len(losses) > 50 and np.mean(losses <= 0.05) >= 0.9 and losses.max() < 0.22


def test_what_auto_would_lose_where_all_methods_were_measured(samples):
    """By the choices that a World gets, with their margins."""
    cases = {}
    for each in samples:
        cases.setdefault(each.case, {})[each.method] = each.us
    lost = []
    for (gpu, op, n_ranks, nbytes, symmetric), of_case in cases.items():
        choices = tuning._by_model(op, tuning.Place(gpu, n_ranks, 1, 132), [], "").choices[symmetric]
        taken = tuning.method_at(choices, nbytes)
        if taken in of_case and len(of_case) > 1:
            lost.append(of_case[taken] / min(of_case.values()) - 1)
    assert len(lost) > 80 and np.mean(np.array(lost) < 0.05) > 0.9 and max(lost) < 0.22


def test_every_method_that_it_may_take_has_parameters():
    parameters = cost_model.fitted()["parameters"]
    for op in collectives():
        for method in cost_model.methods(op):
            for symmetric in (False, True):
                found = cost_model.terms(op, method, 4, 1 << 20, symmetric)
                assert found is not None and found.keys() <= parameters.keys(), (op, method)


def test_rows_that_are_wrong_are_not_fitted(fitting, tmp_path, monkeypatch):
    name = "model/all_reduce_h100x4.json"
    data = json.loads((fitting.RESULTS / name).read_text())
    wrong = {(row["op"], row["bytes"]) for row in data["rows"] if row.get("note", "").startswith("wrong")}
    assert wrong
    assert not any((s.case[1], s.nbytes) in wrong and "two_shot" in s.method for s in fitting.samples([name]))
