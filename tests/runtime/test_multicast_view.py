"""Multicast views of symmetric arrays: what they are on the emulator, and where a GPU, which is faked, has
none."""

import types

import numpy as np
import pytest
from emulated import untyped
from gpu import world as gpu_world
from numba import cuda

import shmemkit as sk
from shmemkit.backends import multicast
from shmemkit.collectives import tuning
from shmemkit.collectives.registry import collectives
from shmemkit.device import (
    Teams,
    copy_block,
    get_multicast_array,
    multimem_red,
    multimem_reduce,
    multimem_store,
    multimem_store_vec16,
    notify,
    rank,
)

REFUSED = ["multimem", "ll_2d_multimem"]


# ---- what a view is, and is not


def test_a_view_has_the_form_of_its_array(pes):
    def main():
        world = sk.init()
        x = sk.zeros((4, 6), "float32")
        view = world.multicast_view(x)
        assert (view.shape, view.dtype, view.ndim, view.size, view.nbytes) == ((4, 6), x.dtype, 2, 24, 96)
        assert (view.itemsize, view.strides, len(view)) == (4, x.strides, 4)
        assert view[1:3, 2].shape == (2,) and view.reshape(-1).shape == (24,)
        assert view[0].view("uint8").shape == (24,) and "multicast float32 (4, 6)" in repr(view)
        assert world.multicast_view(x[2]).shape == (6,)

    pes(2).run(main)


def reads(view, x):
    x[0] = view[0]


def writes(view, x):
    view[0] = x[0]


def copies_to(view, x):
    copy_block(view, x)


def copies_from(view, x):
    copy_block(x, view)


def notifies(view, x):
    notify(view, 0, 1)


@pytest.mark.parametrize("use", [reads, writes, copies_to, copies_from, notifies], ids=lambda u: u.__name__)
def test_ordinary_use_of_a_view_is_an_error(pes, use):
    def main():
        view = sk.init().multicast_view(sk.zeros(8, "uint64"))
        cuda.jit(use)[1, 1](view, np.zeros(8, "uint64"))

    with pytest.raises(sk.emu.EmulatorError, match="a multicast view: it is for|Multicast"):
        pes(1).run(main)


def test_a_view_is_no_array_for_the_host(pes):
    def main():
        view = sk.init().multicast_view(sk.zeros(8))
        for use in (lambda: np.asarray(view), lambda: view[0], lambda: view.__setitem__(0, 1)):
            with pytest.raises(TypeError, match="for the multimem_ functions of kernels only"):
                use()
        with pytest.raises(AttributeError, match="'sum' is asked of a multicast view"):
            view.sum()

    pes(1).run(main)


def test_multimem_functions_want_a_view(pes):
    @cuda.jit
    def kernel(x):
        multimem_store(x, 0, 1)

    with pytest.raises(
        sk.emu.EmulatorError, match="multimem_store.*: the array is of type .*; it must be a multicast view"
    ):
        pes(1).run(lambda: (sk.init(), kernel[1, 1](sk.zeros(8))))


def on_a_view(kernel):
    view = sk.init().multicast_view(sk.zeros(8))
    kernel[1, 1](view)


@untyped
@pytest.mark.parametrize(
    "use, message",
    [
        (lambda view: multimem_store(view, 8, 1), "index is 8; it must be 0 to 7"),
        (lambda view: multimem_store(view, 0, 1, "acquire"), "semantic is 'acquire'; it must"),
        (lambda view: multimem_red(view, 0, 1, "weak"), "semantic is 'weak'; it must"),
        (
            lambda view: multimem_reduce(view, 0, "min"),
            "is a 1-D array of float32; it must be a 1-D array of int32",
        ),
        (lambda view: multimem_reduce(view, 0, "mul"), "op is 'mul'; it must be "),
        (
            lambda view: multimem_store(view.view("int16"), 0, 1),
            "is a 1-D array of int16; it must be a 1-D array of int32",
        ),
        (
            lambda view: multimem_store_vec16(view, 2, (0, 0, 0, 0)),
            r"array\[2\] begins at .*; it must begin at a multiple of 16",
        ),
        (lambda view: multimem_store_vec16(view, 8, (0, 0, 0, 0)), "index is 8; it must be 0 to 4"),
        (
            lambda view: multimem_store_vec16(view[::2], 0, (0, 0, 0, 0)),
            "array is a non-contiguous 1-D array",
        ),
    ],
)
def test_wrong_arguments(pes, use, message):
    @cuda.jit
    def kernel(view):
        use(view)

    with pytest.raises(sk.emu.EmulatorError, match=message):
        pes(1).run(on_a_view, kernel)


def test_a_view_made_in_the_kernel(pes):
    @cuda.jit
    def kernel(x, team):
        if rank() == 1:
            multimem_store(get_multicast_array(team, x), 0, 4)

    def main(team):
        world = sk.init(local_size=2)
        x = sk.zeros(2, "int32")
        kernel[1, 1, world.stream](x, team)
        world.barrier()
        return int(world.asnumpy(x)[0])

    assert pes(4).run(main, int(Teams.TEAM_NODE)) == [4, 4, 0, 0]
    with pytest.raises(
        sk.emu.EmulatorError, match=r"team 0 has ranks \[0, 1, 2, 3\]; it must have those of a node"
    ):
        pes(4).run(main, int(Teams.TEAM_WORLD))


# ---- where there is none


def test_refused_on_all_ranks_with_the_reason_of_each(pes):
    def main():
        world = sk.init()
        if world.rank:

            def refuse(array, ranks):
                raise ValueError("no NVSwitch")

            world.backend.multicast_view = refuse
        with pytest.raises(ValueError, match="no multicast address. ranks 1 and 2: no NVSwitch$"):
            world.multicast_view(sk.zeros(4))

    pes(3).run(main)


def test_a_view_of_what_is_not_symmetric(pes):
    def main():
        world = sk.init()
        x = sk.zeros(4)
        given = x if world.rank else np.zeros(4)
        with pytest.raises(ValueError, match="no multicast address. rank 0: array is not symmetric. Make it"):
            world.multicast_view(given)

    pes(2).run(main)


@pytest.mark.parametrize("method", REFUSED)
def test_all_gather_is_refused_and_leaves_nothing(pes, monkeypatch, capfd, method):
    monkeypatch.setenv("SHMEMKIT_EMULATED_GPU", "A100")

    def main():
        with sk.init() as world:
            with pytest.raises(ValueError, match="ranks 0 and 1: the GPU has compute capability 8.0"):
                sk.AllGather(world, 1 << 10, method)

    pes(2).run(main)
    assert "without free" not in capfd.readouterr().err


def test_multimem_ends_at_the_node(pes):
    def main():
        with pytest.raises(ValueError, match="multicast ends; there are 2. Use 'll_2d_multimem'"):
            sk.AllGather(sk.init(local_size=2), 64, "multimem")

    pes(4).run(main)


def test_auto_takes_them_only_if_a_table_says_so():
    defaults = [name for op in collectives() for both in (0, 1) for _, name in tuning.defaults(op, both)]
    assert not set(REFUSED) & {*defaults}
    assert not any(name in tuning.PACKAGED.read_text() for name in REFUSED)


class FakeDriver:
    """As much of CUDA's driver as is asked: of a GPU with this compute capability."""

    def __init__(self, real, capability=(9, 0), multicast=1):
        self.CUdevice_attribute = attribute = real.CUdevice_attribute
        self.attributes = {
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: capability[0],
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: capability[1],
            attribute.CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED: multicast,
        }

    def cuDeviceGet(self, number):
        return 0, number

    def cuDeviceGetAttribute(self, which, device):
        return 0, self.attributes[which]


class FakeBindings:
    """As much of nvshmem.bindings: a node of PEs 4 to 7."""

    Team_id = types.SimpleNamespace(TEAM_WORLD=0, TEAM_NODE=2)

    def __init__(self, address=0x1000, members=(4, 5, 6, 7)):
        self.address, self.members, self.asked = address, members, []

    def team_n_pes(self, team):
        return len(self.members)

    def team_translate_pe(self, team, pe, to):
        assert (team, to) == (2, 0)
        return self.members[pe]

    def mc_ptr(self, team, address):
        self.asked.append((team, address))
        return self.address and self.address + address


@pytest.fixture
def gpu(monkeypatch):
    """``gpu(bindings, **driver)`` is where multicast finds the address 0x20 of PEs 4 to 7."""
    package = pytest.importorskip("cuda.bindings")
    import cuda.bindings.driver as real

    monkeypatch.delenv("NVSHMEM_DISABLE_NVLS", raising=False)

    def address(bindings, **driver):
        monkeypatch.setattr(package, "driver", FakeDriver(real, **driver))
        return multicast.address(bindings, 1, range(4, 8), 0x20)

    return address


def test_the_address_is_nvshmems(gpu):
    bindings = FakeBindings()
    assert gpu(bindings) == 0x1020
    assert bindings.asked == [(2, 0x20)]


@pytest.mark.parametrize("setting", ["1", "true", "yes", "ON", "off", ""])
def test_the_environment_turns_it_off(gpu, monkeypatch, setting):
    """NVSHMEM is not even asked. What it takes for false is: 0, no, false."""
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", setting)
    bindings = FakeBindings()
    with pytest.raises(ValueError, match=f"NVSHMEM_DISABLE_NVLS={setting} turns NVLink multicast off"):
        gpu(bindings)
    assert bindings.asked == []


@pytest.mark.parametrize("setting", ["0", "no", "N", "false", "F"])
def test_the_environment_leaves_it_on(gpu, monkeypatch, setting):
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", setting)
    assert gpu(FakeBindings()) == 0x1020


@pytest.mark.parametrize(
    "bindings, driver, message",
    [
        ({}, {"capability": (8, 0)}, "compute capability 8.0; NVLink multicast needs 9.0"),
        ({}, {"multicast": 0}, "no multicast; that needs NVLink through an NVSwitch"),
        (
            {"members": (0, 1, 2, 3, 4, 5, 6, 7)},
            {},
            "but the node is declared as ranks 4",
        ),
        ({"members": (4,)}, {}, "NVSHMEM's multicast reaches rank 4 of the host"),
        ({"address": 0}, {}, "nvshmemx_mc_ptr is null"),
    ],
)
def test_no_address(gpu, bindings, driver, message):
    fake = FakeBindings(**bindings)
    with pytest.raises(ValueError, match=message):
        gpu(fake, **driver)
    assert fake.asked == ([(2, 0x20)] if bindings == {"address": 0} else [])


def test_the_gpu_backends_view_is_at_that_address(gpu, monkeypatch):
    from shmemkit.backends.nvshmem import NvshmemBackend

    memory = types.SimpleNamespace(ptr=0x20, size=256)
    array = types.SimpleNamespace(
        data=types.SimpleNamespace(ptr=0x60, mem=memory), shape=(3,), dtype="float32", strides=(4,)
    )
    made = []
    backend = types.SimpleNamespace(
        slab=None, _bindings=FakeBindings(), device=1, _view=lambda *args: made.append(args)
    )
    gpu(FakeBindings())  # the driver is a fake from here on
    NvshmemBackend.multicast_view(backend, array, range(4, 8))
    assert made == [(0x1020, 256, array, (3,), "float32", (4,), 0x40)]


@pytest.mark.gpu
@pytest.mark.parametrize("method", REFUSED)
def test_refused_on_gpus_whose_environment_turns_it_off(method):
    if not multicast.disabled():
        pytest.skip("multicast is not turned off here (NVSHMEM_DISABLE_NVLS=1)")
    with pytest.raises(ValueError, match="NVSHMEM_DISABLE_NVLS=.* turns NVLink multicast off"):
        sk.AllGather(gpu_world(), 1 << 20, method)
