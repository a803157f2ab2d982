"""Tests marked gpu are skipped where init() does not pick NVSHMEM; a rank whose tests fail ends all ranks."""

import sys

import pytest

import shmemkit as sk
from shmemkit.world import choose_backend

_failed = []


def pytest_collection_modifyitems(items):
    backend, reason = choose_backend()
    if backend != "nvshmem":
        skip = pytest.mark.skip(reason=f"{backend} backend: {reason}")
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(skip)


def pytest_sessionfinish(session, exitstatus):
    if exitstatus:
        _failed.append(exitstatus)


def pytest_unconfigure(config):
    """After the last line of the report: the others may wait for this rank in a test that it has left."""
    world = sk.current()
    if _failed and world is not None and world.n_ranks > 1:
        sys.stdout.flush()
        world.comm.Abort(int(_failed[0]))
