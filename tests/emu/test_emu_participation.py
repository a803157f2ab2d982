"""Calls for a whole warp or block: who may still come, and which report comes first."""

import pytest
from numba import cuda
from planted.plant import result

import shmemkit as sk
from shmemkit.device import barrier_all, copy_block, wait
from shmemkit.emu import EmulatorError


@pytest.mark.parametrize("races", [False, True])
def test_a_lane_that_may_still_come_is_waited_for(races):
    """It is no error that others are at the barrier already."""

    @cuda.jit
    def kernel(signal, out):
        t = cuda.threadIdx.x
        if t == 1:
            wait_warp_alone(signal)
        elif t == 2:
            cuda.nanosleep(10)
        cuda.syncthreads()
        out[t] = 1

    @cuda.jit(device=True)
    def wait_warp_alone(signal):
        while signal[1] != 0:
            cuda.nanosleep(10)

    def main():
        return result(sk.init(), kernel[1, 4], sk.signals(2), out=4)

    assert sk.emu.run(main, 1, races=races) == [[1] * 4]


@pytest.mark.parametrize("races", [False, True])
def test_several_threads_in_a_barrier_of_ranks(races):
    @cuda.jit
    def kernel(out):
        barrier_all()
        out[0] = 1

    with pytest.raises(EmulatorError, match="only one thread, warp or block of a rank may call it"):
        sk.emu.run(lambda: result(sk.init(), kernel[1, 2]), 2, races=races)


@pytest.mark.parametrize("races", [False, True])
def test_a_deadlock_after_a_call_that_was_missed_names_the_call(races):
    @cuda.jit
    def kernel(x, signal):
        if cuda.threadIdx.x == 0:
            copy_block(x[:4], x[4:8])
            wait_warp_until_one(signal)
        cuda.syncthreads()

    @cuda.jit(device=True)
    def wait_warp_until_one(signal):
        wait(signal, 1, "gpu", "acquire", 1)

    with pytest.raises(EmulatorError, match=r"copy_block\(\): all threads"):
        sk.emu.run(lambda: (sk.init(), kernel[1, 4](sk.zeros(64, "int32"), sk.signals(1))), 1, races=races)
