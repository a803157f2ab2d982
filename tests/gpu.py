"""Tests of several ranks, which run on GPUs and, smaller, on the emulator, where races are looked for:

    pytestmark = pytest.mark.ranks  # of the emulator: 2

    @pytest.mark.ranks(3, fast=True)
    def test_sums(world):
        x = world.xp.ones(on_gpus(1 << 20, 64))

    @pytest.mark.gpu("measures time")
    def test_bandwidth(world): ...

On GPUs all ranks run the same tests in the same order, with one World: ``mpirun -n 4 python -m pytest -m
gpu``. On the emulator each test has a World of its own, and its body runs on each rank; what is given to it
besides `world` is shared. There it is slow, unless it is `fast`. A test marked gpu runs on GPUs only, and
says why.
"""

import functools

import pytest
import recorded

import shmemkit as sk
from shmemkit.runtime.world import choose_backend


@functools.cache
def refused():
    """Why this process has no World on GPUs, or None."""
    backend, reason = choose_backend()
    return None if backend == "nvshmem" else reason


def on_gpus(real, small):
    """`real` on GPUs, and `small` on the emulator."""
    return small if refused() else real


@functools.cache
def world():
    """The World on GPUs: initialized by the first test that asks, finalized at exit. Skips without a GPU."""
    if reason := refused():
        pytest.skip(f"needs a GPU and NVSHMEM: {reason}")
    made = sk.init("nvshmem")
    recorded.begin(made)
    return made


@pytest.fixture(name="world")
def _world(request):
    return None if _is_emulated(request.node) else world()


def _is_emulated(item):
    return refused() and item.get_closest_marker("ranks") and not item.get_closest_marker("gpu")


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "ranks(n=2, fast=False, **options): runs on GPUs, or on n ranks of the emulator, with these options "
        "of shmemkit.emu.run (tests/gpu.py)",
    )


def pytest_itemcollected(item):
    from fast import several_ranks

    mark = item.get_closest_marker("ranks")
    if mark is None or item.get_closest_marker("gpu"):
        return
    if not refused() or several_ranks():
        item.add_marker(pytest.mark.gpu)
    elif not mark.kwargs.get("fast"):
        item.add_marker(pytest.mark.slow)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    if not _is_emulated(pyfuncitem):
        return None
    __tracebackhide__ = True
    test, request = pyfuncitem.obj, pyfuncitem._request
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    n, options = _emulated_as(*(mark := pyfuncitem.get_closest_marker("ranks")).args, **mark.kwargs)

    def main():
        with sk.init() as world:
            try:
                test(**{**given, "world": world})
            except pytest.skip.Exception as skipped:
                return str(skipped)

    for reason in request.getfixturevalue("pes")(n, **options).run(main):
        if reason is not None:
            pytest.skip(reason)
    return True


def _emulated_as(n=2, fast=False, **options):
    return n, options
