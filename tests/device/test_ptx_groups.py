"""The second form of kernels that call NVSHMEM, for groups: ranks and teams are looked up in a table; the
World's form has no such table."""

import re

import numpy as np
import pytest
from kernel_types import listed
from numba.cuda import types
from ptx import compile_ptx, resources

from shmemkit import device
from shmemkit.backends import nvshmem
from shmemkit.collectives import barrier
from shmemkit.collectives.all_gather import push_2d as all_gather
from shmemkit.collectives.all_to_all import push_2d as all_to_all
from shmemkit.collectives.reduce_scatter import push_2d as reduce_scatter
from shmemkit.collectives.schedules import exchange
from shmemkit.compiler.bounded_compile import Form, compiling
from shmemkit.device.shmem import peers
from shmemkit.gemm.all_gather import multi_node

FLOATS, SIGNALS = types.Array(types.float32, 1, "C"), types.Array(types.uint64, 1, "C")
TYPES = FLOATS, SIGNALS, types.int64
TABLE = "shmemkit_group"


def put(x, signals, n):
    device.put(x, x, n)


def get(x, signals, n):
    device.get_block(x, x, n)


def put_signal(x, signals, n):
    device.put_signal_nbi_block(x, x, signals, n, device.SignalOp.SIGNAL_SET, n)


def word(x, signals, n):
    device.p(x, device.g(x, n), n)


def signal(x, signals, n):
    device.signal_op(signals, n, device.SignalOp.SIGNAL_SET, n)


def atomic(x, signals, n):
    device.atomic_add(signals, device.atomic_fetch(signals, n), n)


def barrier_all(x, signals, n):
    device.barrier_all()


def barrier_all_block(x, signals, n):
    device.barrier_all_block()


def sync_all_warp(x, signals, n):
    device.sync_all_warp()


def team(x, signals, n):
    device.barrier(0)
    x[0] = device.team_my_pe(1)


def gather(x, signals, n):
    device.fcollect(0, x, x)


def world_rank(x, signals, n):
    x[0] = device.world_rank(n)


def near(x, signals, n):
    device.symm_at(x, n)[0] = device.rank()
    device.notify(signals, device.num_ranks() - 1, 1, "add", "sys")
    device.barrier_all_block(signals, signals[n:])


CALLS = [
    put,
    get,
    put_signal,
    word,
    signal,
    atomic,
    barrier_all,
    barrier_all_block,
    sync_all_warp,
    team,
    gather,
]

TAKE_A_TEAM = [barrier_all, barrier_all_block, sync_all_warp, team, gather]


def forms(kernel, argument_types=TYPES):
    """-> its PTX for the World and for groups"""
    world = compile_ptx(kernel, argument_types)
    with compiling(Form(grouped=True)):
        return world, compile_ptx(kernel, argument_types)


@pytest.mark.parametrize("kernel", CALLS, ids=lambda kernel: kernel.__name__)
def test_what_calls_nvshmem_has_a_second_form(kernel):
    world, group = forms(kernel)
    assert "nvshmem" in world and "nvshmem" in group
    assert TABLE not in world and TABLE in group
    assert not re.search("nvshmemx?_(barrier|sync)_all", group)
    assert bool(nvshmem.OF_TEAMS.search(group)) == (kernel in TAKE_A_TEAM)


def test_what_does_not_has_one():
    world, group = forms(near)
    assert "nvshmem" not in world and TABLE not in world
    assert TABLE not in group


def test_world_rank_is_looked_up_in_either_form():
    assert all(TABLE in ptx and "nvshmem" not in ptx for ptx in forms(world_rank))


def test_numba_forgets_the_second_form():
    """What is compiled afterwards is the World's."""
    for _ in range(2):
        assert TABLE not in forms(put)[0]


KERNELS = {
    **{f"barrier {name}": kernel for name, kernel in listed(barrier).items()},
    **{f"all_gather {name}": kernel for name, kernel in listed(all_gather).items()},
    **{f"all_to_all {name}": kernel for name, kernel in listed(all_to_all).items()},
    **{f"ag_gemm {name}": kernel for name, kernel in listed(multi_node).items()},
    **dict(list(listed(reduce_scatter).items())[:2]),
    **dict(list(listed(exchange).items())[:2]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
def test_registers_of_the_second_form(name):
    kernel, argument_types = KERNELS[name][:2]
    for ptx in forms(kernel, argument_types):
        assert resources(ptx).spills == 0


def test_tables():
    values = np.frombuffer(peers.packed_group([5, -1, 6, 6], [3, 1]), "int64")
    assert values.tolist() == [5, -1, 6, 6, -1, -1, -1, -1, 3, 1]


def test_a_module_that_is_loaded_for_a_group_has_its_tables():
    """Later values of the World do not replace them."""
    filled = {}
    tables = peers.Tables(filled.__setitem__)
    tables.publish(b"world")
    module, again = (type("Module", (), {"handle": handle}) for handle in (1, 2))
    tables.loaded(module)
    tables.instead = b"group"
    tables.loaded(again)
    tables.instead = None
    tables.publish(b"later")
    assert filled == {1: b"later", 2: b"group"}
