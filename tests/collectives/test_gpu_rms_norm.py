"""All-reduce with residual and RMSNorm on GPUs; on any number of ranks. On the emulator:
test_all_reduce_rms_norm.py."""

import ml_dtypes
import numpy as np
import pytest
from gpu import on_gpus
from test_all_reduce_rms_norm import F8, expected, inputs, quantized

import shmemkit as sk

pytestmark = pytest.mark.ranks
MOST = on_gpus(300, 9)
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("method", ["one_shot", "two_shot"])
@pytest.mark.parametrize("hidden", on_gpus([8, 4096, 8192, 16384], [8, 264]))
def test_rows(world, hidden, method, dtype):
    """Eagerly, and in a graph that is launched again, with the residual in place."""
    rng, xp, stream = np.random.default_rng(0), world.xp, world.stream
    op = sk.AllReduceRMSNorm(world, MOST, hidden, dtype, method)
    for tokens in (1, 7, MOST) if hidden < 16384 else (3,):
        x, residual, weight = inputs(rng, world.n_ranks, tokens, hidden, DTYPES[dtype])
        given = [xp.asarray(array) for array in (x[world.rank], residual, weight)]
        wanted, new = expected(x, residual, weight, 1e-5)
        out, found = op(*given, 1e-5)
        check(world, out, found, wanted, new)
        stream.begin_capture()
        for _ in range(3):
            op(*given, 1e-5, out=out, new_residual=given[1])
        graph = stream.end_capture()
        graph.launch(stream)
        for _ in range(3):
            wanted, new = expected(x, residual, weight, 1e-5)
            residual = new
        check(world, out, given[1], wanted, new)
    op.free()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", on_gpus([8, 4104, 8192, 16384], [8, 136]))
def test_rows_to_float8(world, hidden, dtype):
    """The same bits as rounded on the host."""
    rng, xp = np.random.default_rng(0), world.xp
    op = sk.AllReduceRMSNorm(world, 40, hidden, dtype)
    for tokens in (1, on_gpus(40, 6)):
        x, residual, weight = inputs(rng, world.n_ranks, tokens, hidden, DTYPES[dtype])
        residual[0, 5] = 3e4
        given = [xp.asarray(array) for array in (x[world.rank], residual, weight)]
        scale, scales = xp.full(1, 0.03, "float32"), xp.empty((tokens, -(-hidden // 128)), "float32")
        plain, _ = op(*given)
        one, _ = op(*given, scale=scale)
        several, _ = op(*given, scales=scales)
        plain, one, several, scales = map(world.asnumpy, (plain, one, several, scales))
        wanted, of_blocks = quantized(plain)
        assert (scales == of_blocks).all() and several.dtype == F8
        assert (several.view("uint8") == wanted.view("uint8")).all()
        assert (one.view("uint8") == quantized(plain, 0.03)[0].view("uint8")).all()
    op.free()


def check(world, out, found, wanted, new):
    assert (world.asnumpy(found).view("uint16") == new.view("uint16")).all()
    out = world.asnumpy(out)
    eps = 2.0**-8 if out.dtype != np.float16 else 2.0**-11
    assert (np.abs(out.astype("float64") - wanted) <= 1.01 * eps * np.abs(wanted) + 1e-6).all()
    assert len({out.tobytes() for out in world.host_allgather(out)}) == 1
