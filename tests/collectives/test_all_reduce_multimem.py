"""AllReduce by multimem on the emulator: rounding, NaN and infinities; what is refused, and where;
the order of fences in the PTX."""

import gpu
import numpy as np
import pytest
from kernel_types import listed
from ptx import compile_ptx

import shmemkit as sk
from shmemkit.backends import multicast
from shmemkit.collectives.all_reduce import multimem
from shmemkit.runtime.symmetric_memory import as_dtype

METHODS = "multimem_one_shot", "multimem_two_shot"
methods = pytest.mark.parametrize("method", METHODS)
ORDERED = "int32", "uint32", "int64", "uint64", "float16", "bfloat16"
ADDED = *ORDERED, "float32", "float64"


@methods
def test_sums_of_16_bits_are_rounded_once(pes, method):
    """If each of them is, 256 + 1 + 1 + 1 stays 256 in bfloat16."""

    def main():
        world = sk.init()
        x = np.full(40, 256 if world.rank == 0 else 1, as_dtype("bfloat16"))
        out = sk.AllReduce(world, x.nbytes, "sum", method)(x)
        world.synchronize()
        assert (out.astype("float32") == 260).all()  # 259, to nearest even

    pes(4).run(main)


@methods
def test_nan_and_inf_pass_through_sums(pes, method):
    def main(dtype):
        world = sk.init()
        x = np.array([[np.nan, np.inf, -np.inf, 1, 6e4], [1, 2, np.inf, np.nan, 6e4]][world.rank], dtype)
        out = sk.AllReduce(world, x.nbytes, "sum", method)(x)
        world.synchronize()
        last = np.inf if dtype == "float16" else 1.2e5
        np.testing.assert_array_equal(out, np.array([np.nan, np.inf, np.nan, np.nan, last], dtype))

    pes(2).run(main, "float16")
    pes(2).run(main, "float64")


# ---- what is refused


@pytest.mark.each_value
@methods
@pytest.mark.parametrize("op", ["avg", "prod"])
def test_other_ops(pes, op, method):
    def main():
        message = f"op is '{op}'; with method '{method}' it must be 'sum', 'max' or 'min', which"
        with pytest.raises(ValueError, match=message):
            sk.AllReduce(sk.init(), 80, op, method)

    pes(2).run(main)


@pytest.mark.each_value
@methods
@pytest.mark.parametrize("op, dtype, allowed", [("sum", "int8", ADDED), ("max", "float32", ORDERED)])
def test_other_dtypes(pes, op, dtype, allowed, method):
    def main():
        reduce = sk.AllReduce(sk.init(), 80, op, method)
        with pytest.raises(ValueError) as caught:
            reduce(np.zeros(8, dtype))
        begin, _, rest = str(caught.value).partition(" it must be ")
        assert begin == f"AllReduce: x is {dtype}; with method '{method}' and op='{op}'"
        assert sorted(rest.split(", which")[0].replace(" or ", ", ").split(", ")) == sorted(allowed)

    pes(2).run(main)


@methods
def test_ends_at_the_node(pes, method):
    def main():
        with pytest.raises(ValueError, match=f"method '{method}' is for one node, .*; there are 2"):
            sk.AllReduce(sk.init(local_size=2), 64, "sum", method)

    pes(4).run(main)


@methods
def test_without_multicast_it_is_refused_and_leaves_nothing(pes, monkeypatch, capfd, method):
    def refuse(backend, array, ranks):
        raise ValueError("NVSHMEM_DISABLE_NVLS=1 turns NVLink multicast off")

    monkeypatch.setattr("shmemkit.backends.emulator.EmulatorBackend.multicast_view", refuse)

    def main():
        with sk.init() as world:
            with pytest.raises(ValueError, match="ranks 0 and 1: NVSHMEM_DISABLE_NVLS=1 turns"):
                sk.AllReduce(world, 1 << 10, "sum", method)

    pes(2).run(main)
    assert "without free" not in capfd.readouterr().err


@pytest.mark.gpu
@methods
def test_refused_on_gpus_whose_environment_turns_it_off(method):
    if not multicast.disabled():
        pytest.skip("multicast is not turned off here (NVSHMEM_DISABLE_NVLS=1)")
    with pytest.raises(ValueError, match="NVSHMEM_DISABLE_NVLS=.* turns NVLink multicast off"):
        sk.AllReduce(gpu.world(), 1 << 20, "sum", method)


# ---- PTX


@pytest.mark.parametrize("name", [name for name in listed(multimem) if "float16" in name])
def test_fences_between_the_addresses(name):
    """One before the inputs are announced, one before results are read; the loads that combine between them,
    vectors where there are."""
    kernel, types, _ = listed(multimem)[name]
    ptx = compile_ptx(kernel, types)
    announced = ptx.index("multimem.st.release.sys.global.b64")
    combined = ptx.index("multimem.ld_reduce.weak.global.")
    assert ptx.index("fence.proxy.alias") < announced < combined
    assert ptx.count("fence.proxy.alias") == 1 + name.startswith("multimem_two_shot")
    for dtype, kind in {"bfloat16": "add.acc::f32.v4.bf16x2", "float16": "add.acc::f32.v4.f16x2"}.items():
        assert (f",{dtype}" in name) == (kind in ptx)
    if name.startswith("multimem_two_shot"):
        assert combined < ptx.index("multimem.st.weak.global.v4.f32") < ptx.rindex("fence.proxy.alias")
