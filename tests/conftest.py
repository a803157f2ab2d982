"""Tests marked gpu are skipped where init() does not pick NVSHMEM, all others under several ranks, and any
test that needs a CUDA library that is not installed (with SHMEMKIT_REQUIRE_PTXAS=1 it fails). A rank whose
tests fail ends them all.
"""

import ctypes
import gc
import importlib.metadata
import os
import sys

import pytest
from cuda.pathfinder import DynamicLibNotFoundError

import shmemkit as sk
from shmemkit.emu.network import Network
from shmemkit.runtime.world import choose_backend

pytest_plugins = ["pytester", "recorded", "fast", "gpu", "mutations", "touched", "cpu_seconds"]
if not importlib.metadata.entry_points(group="pytest11", name="shmemkit"):  # not installed, but on PYTHONPATH
    pytest_plugins.append("shmemkit.pytest_plugin")

FEW = {"threads": 4, "max_blocks": 3}  # of kernels beside copy engines
IN_CHUNKS = {"least": 2, "most": 16}  # words
SMALL = {
    sk.AllGather: {
        "ll": {"blocks": 0},
        "pull": {"part": 128, "max_blocks": 6},
        "push_1d": {"part": 128, "senders": 6},
        "multimem": {"part": 64, "max_parts": 5},
        "ll_2d": {"chunk": 64, "max_blocks": 12},
        "push_2d": {"part": 64, "max_parts": 5},
        "ll_2d_multimem": {"chunk": 64, "max_blocks": 12},
        "copy_push": {"own_part": 64},
        "copy_pull": {"own_part": 64},
        "copy_staged": {"own_part": 64, **FEW},
    },
    sk.AllReduce: {
        "push": {"of_stages": {"part": 128, "senders": 4}},
        "copy_engine": {"of_stages": {"own_part": 64, **FEW}},
        "ring": {**IN_CHUNKS, "blocks": 3},
        "double_tree": {**IN_CHUNKS, "blocks": 2},
        "multimem_one_shot": {"part": 64, "max_blocks": 3},
        "multimem_two_shot": {"part": 64, "max_blocks": 3},
    },
    sk.ReduceScatter: {
        "ll": {"blocks": 0},
        "push": {"part": 128, "chunk": 8192, "senders": 4},
        "ring": {"part": 512, "chunk": 64, "max_blocks": 3, "max_chunks": 8},
        "push_2d": {"part": 256, "chunk": 64, "max_parts": 3, "max_chunks": 4},
        "copy_engine": FEW,
    },
    sk.AllToAll: {
        "push": {"part": 128, "chunk": 8192, "senders": 6},
        "push_2d": {"part": 64, "max_parts": 5},
        "copy_engine": {"own_part": 64, **FEW},
    },
    sk.AllToAllV: {"push": {"part": 64, "max_blocks": 4}},
    sk.Broadcast: {
        "scatter": {"part": 64, "chunk": 32, "senders": 3},
        "push_2d": {"part": 64, "max_parts": 3},
    },
    sk.Gather: {
        "ll": {"blocks": 0},
        "push": {"part": 128, "chunk": 8192, "senders": 6},
        "push_2d": {"part": 128, "max_parts": 3},
        "copy_engine": {"own_part": 64, **FEW},
    },
    sk.Reduce: {"copy_engine": FEW},
    sk.Scatter: {"push": {"part": 128, "chunk": 8192, "senders": 6}},
}

_failed = []


class FakeLibcuda:
    """As much of CUDA's driver library as counts GPUs."""

    def __init__(self, n_gpus):
        self.n_gpus = n_gpus

    def cuInit(self, flags):
        return 0

    def cuDeviceGetCount(self, count):
        count._obj.value = self.n_gpus
        return 0


@pytest.fixture
def gpus(monkeypatch):
    """``gpus(n)``: CUDA's driver library sees so many GPUs from now on; with 0 there is no such library."""
    real = ctypes.CDLL

    def see(n):
        def load(name, *args, **options):
            if name != "libcuda.so.1":
                return real(name, *args, **options)
            if n == 0:
                raise OSError(f"{name}: cannot open shared object file")
            return FakeLibcuda(n)

        monkeypatch.setattr(ctypes, "CDLL", load)

    return see


def pytest_collection_finish():
    """Thousands of tests, and all modules: to look at them for garbage again and again took a seventh of the
    time."""
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items):
    from fast import several_ranks  # by now pytest has imported it

    backend, reason = choose_backend()
    if several_ranks():
        alone = pytest.mark.skip(reason="not marked gpu: run it on one rank")
        for item in items:
            if not item.get_closest_marker("gpu"):
                item.add_marker(alone)
    if backend != "nvshmem":
        for item in items:
            if mark := item.get_closest_marker("gpu"):
                why = ", ".join((f"{backend} backend: {reason}", *mark.args))
                item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture
def small(monkeypatch):
    """``small(sk.AllGather, pull={"part": 64})``: from now on, these methods of a collective have such
    settings, attributes of theirs."""

    def set_up(kind, **methods):
        for name, settings in methods.items():
            entry = kind._METHODS[name]
            made, transport, *given = entry if isinstance(entry, tuple) else (entry, None)
            monkeypatch.setitem(kind._METHODS, name, (made, transport, {**dict(*given), **settings}))

    return set_up


@pytest.fixture
def small_chunks(small):
    """Collectives have several chunks and parts of few bytes; not all have a block of their own."""
    for kind, methods in SMALL.items():
        small(kind, **methods)


@pytest.fixture
def messages(monkeypatch):
    """Messages go to the same local rank of another node. (Loads and stores stay in a node anyway.) -> from
    whom and to whom"""
    puts, sent = Network.put, []

    def put(network, thread, dst, src, pe, *options):
        size = network.machine.local_size
        assert thread.pe % size == int(pe) % size and thread.pe != pe, f"{thread.pe} puts to {pe}"
        sent.append((thread.pe, int(pe)))
        return puts(network, thread, dst, src, pe, *options)

    monkeypatch.setattr(Network, "put", put)
    return sent


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    try:
        return (yield)
    except (DynamicLibNotFoundError, RuntimeError) as error:
        first_line = str(error).partition("\n")[0]
        # numba-cuda has no exception of its own for a missing nvJitLink.
        missing = isinstance(error, DynamicLibNotFoundError) or "LTO requires nvjitlink" in first_line
        if not missing or os.environ.get("SHMEMKIT_REQUIRE_PTXAS") == "1":
            raise
        pytest.skip(f"{first_line} (pip install -e '.[cu13,dev]')")


def pytest_runtest_logreport(report):
    """SHMEMKIT_LIST_SKIPPED: a file, to which the names of skipped tests are added, for ``pytest @FILE``."""
    file = os.environ.get("SHMEMKIT_LIST_SKIPPED")
    if file and report.skipped and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(file, "a") as names:
            print(report.nodeid, file=names)


def pytest_sessionfinish(session, exitstatus):
    if exitstatus:
        _failed.append(exitstatus)


def pytest_unconfigure(config):
    """After the last line of the report: the others may wait for this rank in a test that it has left."""
    world = sk.current()
    if _failed and world is not None and world.n_ranks > 1:
        sys.stdout.flush()
        world.comm.Abort(int(_failed[0]))
