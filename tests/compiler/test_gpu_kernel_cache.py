"""The disk cache of this package's kernels on a GPU: a new process computes the same by kernels that it has
not compiled, with the table of peers and without."""

import pytest
import test_jit_cache as scripts
from gpu import world

pytestmark = pytest.mark.gpu

SCRIPT = """
    from numba.cuda.dispatcher import _Kernel
    import shmemkit as sk
    compiled, original = [], _Kernel.__init__
    def counting(self, function, *args, **options):
        compiled.append(function.__module__)
        original(self, function, *args, **options)
    _Kernel.__init__ = counting
    with sk.init() as world:
        x = world.xp.arange(4096, dtype="float32")
        total = world.xp.zeros(4096, "float32")
        reduce = sk.AllReduce(world, x.nbytes, method="one_shot_ll128")
        reduce(x, total)
        y = sk.matmul(x.reshape(64, 64).astype("float16"), x.reshape(64, 64).astype("float16").T)
        world.synchronize()
        assert (total == x).all() and y.shape == (64, 64)
        print(float(y.astype("float64").sum()), sum(name.startswith("shmemkit.") for name in compiled))
"""


def test_a_new_process_compiles_nothing(tmp_path):
    if world().n_ranks > 1:
        pytest.skip("starts processes of one rank")
    cache = {"SHMEMKIT_CACHE_DIR": str(tmp_path / "cache")}
    (first, n), (second, none) = (scripts.finish(scripts.start(SCRIPT, **cache)).split() for _ in range(2))
    assert first == second and int(n) > 0 and int(none) == 0
