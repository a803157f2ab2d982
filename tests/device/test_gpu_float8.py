"""Reductions of float8 on a GPU: every pair of values, to the bits of the emulator's reference."""

import gpu
import numpy as np
import pytest
from reduced import combined
from test_float8 import OPS, dtypes, every_pair, reduced

pytestmark = pytest.mark.gpu


@dtypes
@pytest.mark.parametrize("op", OPS)
def test_every_pair(op, dtype):
    world = gpu.world()
    pair = every_pair(dtype)
    for arrays in (pair, [*pair, pair[0][::-1].copy(), pair[1][:32768].repeat(2)]):
        out = world.asnumpy(reduced(op, arrays, world.xp, world.stream))
        np.testing.assert_array_equal(out.view("uint8"), combined(op, arrays).view("uint8"))
