"""The table of peers reaches every module, whether it is loaded before or after the world is known."""

import struct
import threading
from types import SimpleNamespace

import pytest

from shmemkit.device.shmem import peers


@pytest.fixture
def filled():
    """The modules that were filled, and what with."""
    return []


@pytest.fixture
def tables(filled):
    return peers.Tables(lambda library, values: filled.append((library, values)))


def test_modules_loaded_before_and_after(tables, filled):
    early, late = SimpleNamespace(handle=1), SimpleNamespace(handle=2)
    tables.loaded(early)
    assert filled == []  # no world yet: rank 0 of 0
    tables.publish(b"one")
    tables.loaded(late)
    tables.loaded(late)  # numba calls once per function that reads the table
    assert filled == [(1, b"one"), (2, b"one")]
    tables.publish(b"two")
    assert sorted(filled[2:]) == [(1, b"two"), (2, b"two")]


def test_unloaded_modules_are_forgotten(tables, filled):
    module = SimpleNamespace(handle=1)
    tables.publish(b"one")
    tables.loaded(module)
    tables.unloaded(module)
    tables.unloaded(module)
    tables.publish(b"two")
    assert filled == [(1, b"one")]
    tables.loaded(module)  # another one with the handle of the first
    assert filled[1:] == [(1, b"two")]


def test_layout():
    words = struct.unpack("<11Q", peers.packed(1, 3, [-4096, 0, peers.UNREACHABLE]))
    assert words[:2] == (1, 3)
    assert words[8:] == (2**64 - 4096, 0, 1 << 63)


def test_refuses_what_does_not_fit():
    for rank, n_ranks, offsets in ((0, 2, [0]), (2, 2, [0, 0]), (0, 2000, [0] * 2000)):
        with pytest.raises(ValueError, match="there must be one offset for each rank"):
            peers.publish(rank, n_ranks, offsets)


def test_a_module_may_be_unloaded_in_the_middle_of_a_fill():
    """The garbage collector runs numba's finalizers anywhere, in the same thread."""
    one, two = SimpleNamespace(handle=1), SimpleNamespace(handle=2)
    filled = []

    def fill(library, values):
        filled.append(library)
        tables.unloaded(one)

    tables = peers.Tables(fill)
    tables.loaded(one)
    tables.loaded(two)
    worker = threading.Thread(target=tables.publish, args=[b"values"], daemon=True)  # it hung
    worker.start()
    worker.join(10)
    assert not worker.is_alive() and set(filled) == {1, 2} and tables.libraries == {2}


def test_a_module_may_be_unloaded_in_the_middle_of_publish():
    """The garbage collector runs numba's finalizers anywhere, also in the thread that holds the lock."""
    filled, modules = [], [SimpleNamespace(handle=1), SimpleNamespace(handle=2)]

    def fill(library, values):
        filled.append(library)
        tables.unloaded(modules[2 - library])  # the other one

    tables = peers.Tables(fill)
    for module in modules:
        tables.loaded(module)
    publisher = threading.Thread(target=tables.publish, args=[b"values"], daemon=True)
    publisher.start()
    publisher.join(10)
    assert not publisher.is_alive()
    assert len(filled) == 1 and tables.libraries == set(filled)
