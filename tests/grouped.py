"""Runs the tests of the emulator on groups: ``pytest -p grouped tests/collectives tests/gemm ...``

Each ``sk.emu.run(main, n)`` has another node first, of which no rank takes part, and `main` gets the group of
the others, the last rank first, wherever it asks for its World. Tests fail that speak of the World's ranks:
of the text of a report, of a stream that they make of a rank, of a kernel that is launched without ``bind``.
"""

import functools

import pytest

import shmemkit as sk
from shmemkit.emu import exploration
from shmemkit.runtime import world as world_module
from shmemkit.support.host_program import host_program

run, init = sk.emu.run, world_module.init


def in_group(main, *args):
    host = host_program()
    world = init()
    group = world.split(None if world.node == 0 else 0, -world.rank, "256M")
    if group is None:
        return None
    host.group = group
    result = main(*args)
    group.finalize()
    return group.rank, result


@functools.wraps(run)
def run_in_group(main, n_ranks, args=(), local_size=None, **options):
    local_size = local_size or n_ranks
    found = run(in_group, n_ranks + local_size, (main, *args), local_size, **options)
    return [result for _, result in sorted(filter(None, found), key=lambda pair: pair[0])]


def init_of_group(*_, **__):
    return getattr(host_program(), "group", None) or init()


@pytest.fixture(autouse=True)
def groups_instead_of_worlds(monkeypatch):
    monkeypatch.setattr(sk, "init", init_of_group)
    monkeypatch.setattr(sk.emu, "run", run_in_group)
    monkeypatch.setattr(exploration, "run", run_in_group)
