"""Programmatic dependent launch: what the emulator finds, and what is compiled."""

import ptx
import pytest
from emulated import line_of
from numba import cuda, int64, types

import shmemkit as sk
from shmemkit.device import griddepcontrol_launch_dependents, griddepcontrol_wait


@cuda.jit
def add_one(total):
    griddepcontrol_wait()
    griddepcontrol_launch_dependents()
    cuda.atomic.add(total, 0, 1)


@cuda.jit
def waits(total):
    griddepcontrol_wait()
    griddepcontrol_launch_dependents()
    total[0] += 1


@cuda.jit
def too_early(total):
    before = total[0]
    griddepcontrol_wait()
    total[0] = before + 1


@cuda.jit
def never(total):
    total[0] += 1


def add(kernel, pdl=True, grid=1, n=3, event=False):
    with sk.init() as world:
        total = world.zeros(1, "int64")
        step = sk.bind(kernel, grid, 1, (total,), pdl=pdl)
        for _ in range(n):
            step()
            if event:
                world.stream.wait_event(world.stream.record())
        world.synchronize()
        return int(total[0])


@pytest.mark.parametrize("grid", [1, 4])
def test_what_is_after_the_wait_is_ordered(grid):
    assert sk.emu.run(add, 1, (add_one, True, grid), races=True) == [3 * grid]


@pytest.mark.parametrize("kernel, line", [(too_early, "before = total[0]"), (never, "total[0] += 1")])
def test_what_is_before_the_wait_is_a_race(kernel, line):
    with pytest.raises(sk.emu.RaceError) as caught:
        sk.emu.run(add, 1, (kernel,), races=True)
    assert line_of(kernel, line) in str(caught.value)
    assert "griddepcontrol_wait() before line" in str(caught.value)


@pytest.mark.parametrize("kernel", [too_early, never])
def test_what_orders_kernels_otherwise(kernel):
    assert sk.emu.run(add, 1, (kernel, False), races=True) == [3]  # a launch without pdl
    assert sk.emu.run(add, 1, (kernel, True, 1, 3, True), races=True) == [3]  # an event between
    assert sk.emu.run(add, 1, (kernel, True, 1, 1), races=True) == [1]  # no kernel before


def test_a_kernel_that_does_not_wait_hides_those_before_it():
    """It may end first, and the next one waits for it alone."""

    def main(between, pdl):
        with sk.init() as world:
            total, other = world.zeros(1, "int64"), world.zeros(1, "int64")
            add_to_total = sk.bind(waits, 1, 1, (total,), pdl=True)
            add_to_total()
            sk.bind(between, 1, 1, (other,), pdl=pdl)()
            add_to_total()
            sk.bind(waits, 1, 1, (other,), pdl=True)()  # that it waits for

    sk.emu.run(main, 1, (waits, True), races=True)
    sk.emu.run(main, 1, (never, False), races=True)
    with pytest.raises(sk.emu.RaceError, match=r"race on total\[0\]"):
        sk.emu.run(main, 1, (never, True), races=True)


def test_cooperative_launches_are_refused():
    with sk.init("emulator") as world, pytest.raises(ValueError, match="pdl and cooperative are both True"):
        sk.bind(add_one, 1, 1, (world.zeros(1, "int64"),), pdl=True, cooperative=True)


@pytest.mark.parametrize("cc, n", [(ptx.HOPPER, 1), (ptx.AMPERE, 0)])
def test_compiled_since_hopper(cc, n):
    code = ptx.compile_ptx(add_one, (types.Array(int64, 1, "C"),), cc)
    assert code.count("griddepcontrol.wait;") == code.count("griddepcontrol.launch_dependents;") == n
    if n:
        wait, dependents = (code.index(f"griddepcontrol.{what}") for what in ("wait", "launch_dependents"))
        assert wait < dependents < code.index("atom.") if "atom." in code else code.index("red.")
    ptx.resources(code, cc)
