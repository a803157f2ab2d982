"""How long a collective's methods take on one node: what "auto" goes by where no table was measured.

    time = sum of parameters[name] * terms[name]

`terms` says what the busiest GPU does in a call of a method. Starts, steps that wait for other ranks, and
peers that are sent to count in microseconds: they hardly differ between GPU models. Bytes count as the time
that the links or the memory of the GPU would take by their nominal bandwidth. So a parameter of bytes has no
unit, and one set serves all GPU models.

model.json has the parameters, and names the results that they were fitted to (benchmarks/fit_model.py). A
packet of LL carries half of its bytes, a line of LL128 15/16; all else is as of LL128. Gather, Scatter and
Reduce take the parameters of their packets, or of push: on 2 H200 that is a third off, of LL more.
"""

from __future__ import annotations

import functools
import importlib
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).with_name("model.json")


class Gpu(NamedTuple):
    """GB/s of its links to peers, in one direction, and of its memory, both nominal; multiprocessors."""

    link: float
    memory: float
    sms: int


MODELS = {  # NVIDIA's data sheets
    "A100": Gpu(300, 2039, 108),
    "A800": Gpu(200, 2039, 108),
    "H100": Gpu(450, 3350, 132),
    "H100 NVL": Gpu(300, 3938, 132),
    "H800": Gpu(200, 3350, 132),
    "H20": Gpu(450, 4000, 78),
    "H200": Gpu(450, 4800, 132),
    "GH200": Gpu(450, 4000, 132),
    "B200": Gpu(900, 8000, 148),
    "GB200": Gpu(900, 8000, 148),
    "B300": Gpu(900, 8000, 148),
    "GB300": Gpu(900, 8000, 148),
}
UNKNOWN = "H200"  # in the place of a model that is not listed
PCIE = 25  # GB/s, where there is no NVLink: PCIe 4, 16 lanes


def gpu_of(name: str, sms: int | None = None, nvlink: bool = True) -> tuple[Gpu, str]:
    """-> (the Gpu, which of MODELS it is) of a GPU of this name, with so many multiprocessors (None: those of
    the model)."""
    words = re.findall(r"\w+", name)
    found = [model for model in MODELS if set(model.split()) <= set(words)]
    model = max(found, key=len, default=UNKNOWN)
    gpu = MODELS[model]
    return Gpu(gpu.link if nvlink else PCIE, gpu.memory, sms or gpu.sms), model


@functools.cache
def fitted() -> dict[str, Any]:
    """What model.json has: `parameters`, `ranks` and `files` of the results, and their `dates`."""
    return json.loads(FILE.read_text())


def microseconds(
    op: str, method: str, n_ranks: int, nbytes: float, symmetric: bool, gpu: Gpu
) -> float | None:
    """-> what a call takes, its full array having `nbytes` bytes; None for a method that is not modelled."""
    parameters = fitted()["parameters"]
    found = terms(op, method, n_ranks, nbytes, symmetric)
    if found is None:
        return None
    return sum(parameters.get(name, 0) * amount for name, amount in scaled(found, gpu).items())


def module_of(op):
    """-> the module of a collective, as "all_gather" """
    return importlib.import_module(f".{op}", __package__)


def methods(op: str) -> tuple[str, ...]:
    """-> the methods that "auto" may take by the model: none of a collective that it does not know"""
    return tuple(name for name in module_of(op).METHODS if terms(op, name, 2, 1, False))


def times(op: str, n_ranks: int, nbytes: float, symmetric: bool, gpu: Gpu) -> dict[str, float]:
    """-> {method: microseconds}, of all that are modelled"""
    found = {name: microseconds(op, name, n_ranks, nbytes, symmetric, gpu) for name in module_of(op).METHODS}
    return {name: us for name, us in found.items() if us is not None}


# Packets: whose parameters they have, and how often these carry as many bytes.
PACKETS = {"ll": ("ll128", 15 / 8), "ll128": ("ll128", 1), "lamport": ("lamport", 1)}


def _packets(kind, op, n, steps, peers, sent, local):
    of, times = PACKETS[kind]
    start = f"{of} start {op}" if op in ("all_to_all", "broadcast") else f"{of} start"
    sent *= times
    # To several peers at once, stores share links and the NVSwitch with those of other ranks.
    spread = sent * (1 - 1 / (n - 1))
    bytes_ = {f"{of} link": sent, "packet spread link": spread, f"{of} memory": local}
    return {start: 1, "packet step": steps, "packet peer": peers, **bytes_}


def _push(op, steps, peers, sent, local):
    start = f"push start {op}" if op in ("all_reduce", "broadcast") else "push start"
    return {start: 1, "push step": steps, "push peer": peers, "push link": sent, "push memory": local}


def _copies(way, steps, peers, sent, local):
    starts = {f"copy {way} start": 1, f"copy {way} peer": peers, "copy step": steps}
    return {**starts, "copy link": sent, f"copy {way} memory": local}


def terms(op: str, method: str, n: int, nbytes: float, symmetric: bool) -> dict[str, float] | None:
    """-> {parameter: how often, or bytes}; None for a method that is not modelled. `n` ranks, `nbytes` of the
    full array, a symmetric result or a private one."""
    n = max(2, n)  # one rank is as two
    each = (n - 1) / n * nbytes  # a segment to, or from, each other rank
    whole = (n - 1) * nbytes
    one = (n - 1, each)
    shot, _, packet = method.partition("_shot")
    match op, method:
        case "all_gather" | "all_to_all" | "reduce_scatter", "ll" | "ll128" | "lamport":
            return _packets(method, op, n, 1, *one, nbytes)
        case "gather" | "scatter", "ll" | "ll128":
            return _packets(method, op, n, 1, *one, nbytes)
        case "reduce", "ll" | "ll128":
            return _packets(method, op, n, 1, n - 1, whole, n * nbytes)
        case "all_reduce", "one_shot" | "one_shot_ll128" | "one_shot_lamport":
            return _packets(packet[1:] or "ll", op, n, 1, n - 1, whole, n * nbytes)
        case "all_reduce", "two_shot_ll128" | "two_shot_lamport":
            return _packets(packet[1:], op, n, 2, 2 * (n - 1), 2 * each, 2 * nbytes)
        case "broadcast", "ll" | "ll128":
            return _packets(method, op, n, 1, n - 1, whole, nbytes)
        case "broadcast", "lamport":
            return _packets(method, op, n, 1 if n == 2 else 2, n - 1, nbytes, nbytes)
        case "broadcast", "scatter":
            return _push(op, 1 if n == 2 else 2, 2 * (n - 1), nbytes, nbytes)
        case "all_gather" | "all_to_all", "push_1d" | "push":
            return _push(op, 1, *one, 0 if symmetric else nbytes)
        case "reduce_scatter", "push":
            return _push(op, 1, *one, nbytes)
        case "gather" | "scatter", "push":
            return _push(op, 1, *one, nbytes)
        case "reduce", "push":
            return _push(op, 2, 2 * (n - 1), 2 * each, 2 * nbytes)
        case "all_reduce", "push":
            return _push(op, 2, 2 * (n - 1), 2 * each, nbytes if symmetric else 2 * nbytes)
        case "all_gather", "copy_push" if not symmetric:
            return _copies("pulled", 1, *one, nbytes)
        case ("all_gather", "copy_push") | ("all_to_all", "copy_engine") if symmetric:
            return _copies("direct", 1, *one, nbytes / n)
        case "all_gather" | "all_to_all" | "reduce_scatter" | "gather", "copy_staged" | "copy_engine":
            return _copies("staged", 1, *one, nbytes / n)
        case "reduce", "copy_engine":
            return _copies("staged", 1, n - 1, whole, n * nbytes)
        case "all_reduce", "copy_engine":
            way = "reduced" if symmetric else "reduced private"
            return _copies(way, 2, 2 * (n - 1), 2 * each, nbytes)
    return None


def scaled(found: dict[str, float], gpu: Gpu) -> dict[str, float]:
    """`terms` with microseconds, by the nominal bandwidth, in the place of bytes. Kernels need as many
    multiprocessors as Hopper has for its links: with fewer for a link, packets are the slower."""
    fewer = max(1, 132 / 450 * gpu.link / gpu.sms)
    per_us = {"link": 1e3 * gpu.link, "memory": 1e3 * gpu.memory}
    slower = {name: fewer for name in found if name.endswith(" link") and not name.startswith("copy")}
    return {k: amount * slower.get(k, 1) / per_us.get(k.split()[-1], 1) for k, amount in found.items()}
