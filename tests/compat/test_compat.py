"""Kernels with Triton-distributed's names: on the emulator, and as PTX."""

import inspect

import numpy as np
import pytest
from emulated import deadlock_of, line_of, spmd, untyped
from numba import cuda
from numba.core.errors import TypingError
from numba.cuda import types
from pages import programs
from ptx import compile_ptx, instructions, position

import shmemkit as sk
from shmemkit import device
from shmemkit.compat import libshmem_device
from shmemkit.compat import triton_distributed as dl

SIGNALS, BYTES = types.Array(types.uint64, 1, "C"), types.Array(types.uint8, 1, "C")


def shown(function):
    """Its signature without types."""
    signature = inspect.signature(function)
    parameters = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=signature.empty))


def test_signatures():
    expected = {
        dl.wait: "(barrierPtrs, numBarriers, scope, semantic, waitValue=1)",
        dl.consume_token: "(value, token)",
        dl.rank: "(axis=-1)",
        dl.num_ranks: "(axis=-1)",
        dl.notify: "(ptr, rank, signal=1, sig_op='set', comm_scope='intra_node')",
        libshmem_device.getmem_nbi_warp: "(dest, source, bytes, pe)",
        libshmem_device.putmem_signal_block: "(dest, source, bytes, sig_addr, signal, sig_op, pe)",
    }
    assert {f: shown(f) for f in expected} == expected


def test_public_names():
    theirs = set(filter(str.isidentifier, libshmem_device.__all__)) - set(device.__all__)  # pytest adds some
    known = "putmem", "getmem", "NVSHMEM", "int_p", "remote_ptr"
    assert theirs and [name for name in theirs if not name.startswith(known)] == []


# ---- the queue of the first tutorial, from docs/triton_distributed.md


def queue_kernel():
    (program,) = programs("docs/triton_distributed.md", "import shmemkit")
    names = {}
    exec(program[: program.index("INPUT_SIZE")], names)
    return names["producer_consumer_kernel"]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_the_queue_passes_everything_on(n):
    kernel, size, slots, block = queue_kernel(), 13, 4, 8

    def inputs(rank, repeat):
        return np.random.default_rng([rank, repeat]).random(size * block, "float32")

    def main(world):
        queue, signal = sk.full(slots * block, -1, "float32"), sk.signals(slots)
        for repeat in range(2):
            signal[:] = 0
            world.barrier()
            out = np.zeros(size * block, "float32")
            arguments = inputs(world.rank, repeat), out, size, queue, signal, slots, block, 4, 2
            kernel[6, block, world.stream](*arguments)
            np.testing.assert_array_equal(out, inputs((world.rank - 1) % n, repeat))

    spmd(n, main, races=True)


def test_the_queue_compiles_to_what_its_primitives_are():
    numbers = types.Array(types.float32, 1, "C")
    ptx = compile_ptx(queue_kernel(), (numbers, numbers, types.int64, numbers, SIGNALS, *[types.int64] * 4))
    waits = [line for line in instructions(ptx) if line.startswith("ld.acquire.sys.global.u64")]
    sets = [line for line in instructions(ptx) if line.startswith("st.release.sys.global.u64")]
    assert len(waits) >= 2 and len(sets) == 2
    assert position(ptx, r"^ld\.acquire") < position(ptx, r"^bar\.sync") < position(ptx, r"^st\.release")
    assert not any(line.startswith("call") for line in instructions(ptx)) and "NRT_" not in ptx


# ---- wait and notify


def test_wait_takes_no_later_value_for_the_one_it_waits_for():
    @cuda.jit
    def kernel(signal):
        device.wait(signal, 1, "sys", "acquire")  # at least 1: it is over
        dl.wait(signal, 1, "sys", "acquire")

    text = deadlock_of(1, lambda world: kernel[1, 32](sk.full(1, 2, "uint64")))
    assert (
        "waits for signal[0] on rank 0 == 1, now 2" in text and 'dl.wait(signal, 1, "sys", "acquire")' in text
    )


def test_one_thread_of_a_block_notifies():
    @cuda.jit
    def kernel(signals, out):
        peer = (dl.rank() + 1) % dl.num_ranks()
        dl.notify(signals, peer)
        dl.notify(signals[1:], peer, signal=3, sig_op="add")
        dl.notify(signals[2:], dl.rank(-1), 5, comm_scope="gpu")
        if cuda.threadIdx.x == 1:
            dl.notify(signals, peer, 9)  # nothing: it is not thread 0
        dl.wait(signals, 1, "sys", "acquire")
        dl.wait(signals[1:], 1, "sys", "acquire", waitValue=3)
        dl.wait(signals[2:], 1, "gpu", "acquire", 5)
        out[cuda.threadIdx.x] = 1

    def main(world):
        signals, out = sk.signals(3), np.zeros(40)
        kernel[1, 40, world.stream](signals, out)
        world.barrier()
        assert out.all()
        assert signals.tolist() == [1, 3, 5]

    spmd(3, main, races=True)


def notify_other_nodes(signal):
    dl.notify(signal, 0, comm_scope="inter_node")


def rank_of_an_axis(signal):
    signal[0] = dl.rank(0)


def wait_that_releases(signal):
    dl.wait(signal, 1, "sys", "release")


def put_of_words(signal):
    libshmem_device.putmem(signal, signal, 8, 0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (notify_other_nodes, r"notify\(\): comm_scope.*'inter_node'.*put_signal\(\) and signal_op\(\)"),
        (rank_of_an_axis, r"rank\(\): axis.*0.* -1"),
        (wait_that_releases, r"wait\(\): semantic.*'release'.*'acquire' or 'relaxed'"),
        (put_of_words, r"putmem\(\): dest.*1-D array of uint8 or int8. Pass a view of it"),
    ],
)
def test_what_is_refused_when_compiling_and_on_the_emulator(function, message):
    with pytest.raises(TypingError, match=message):
        compile_ptx(function, (SIGNALS,), refused=True)
    with pytest.raises(sk.emu.EmulatorError, match=message):
        untyped(spmd)(1, lambda world: cuda.jit(function)[1, 1](sk.signals(1)))


# ---- libshmem_device: the all-gather of its third tutorial


def all_gather_push_1d(symm_ptr, bytes_per_rank, symm_flag, WORLD_SIZE, rank, signal_value):
    pid, thread_idx = cuda.blockIdx.x, cuda.threadIdx.x
    if pid == rank:
        peer = thread_idx
        if peer < WORLD_SIZE and peer != rank:
            libshmem_device.signal_wait_until(
                symm_flag[peer:],
                libshmem_device.NVSHMEM_CMP_EQ,
                signal_value,
            )
        cuda.syncthreads()
    else:
        peer = pid
        segment = rank
        libshmem_device.putmem_signal_block(
            symm_ptr[segment * bytes_per_rank :],
            symm_ptr[segment * bytes_per_rank :],
            bytes_per_rank,
            symm_flag[segment:],
            signal_value,
            libshmem_device.NVSHMEM_SIGNAL_SET,
            peer,
        )


def all_gather_push_2d(symm_ptr, bytes_per_rank, symm_flag, NNODES, WORLD_SIZE, rank, signal_value):
    pid, thread_idx = cuda.blockIdx.x, cuda.threadIdx.x
    LOCAL_WORLD_SIZE = WORLD_SIZE // NNODES
    node_id = rank // LOCAL_WORLD_SIZE
    local_rank = rank % LOCAL_WORLD_SIZE

    peer_rank = pid
    peer_node_id = peer_rank // LOCAL_WORLD_SIZE
    peer_local_rank = peer_rank % LOCAL_WORLD_SIZE

    if peer_local_rank == local_rank:
        if peer_rank != rank:
            peer = peer_node_id * LOCAL_WORLD_SIZE + local_rank
            segment = rank
            libshmem_device.putmem_signal_nbi_block(
                symm_ptr[segment * bytes_per_rank :],
                symm_ptr[segment * bytes_per_rank :],
                bytes_per_rank,
                symm_flag[segment:],
                signal_value,
                libshmem_device.NVSHMEM_SIGNAL_SET,
                peer,
            )
        else:
            if thread_idx < WORLD_SIZE and thread_idx != rank:
                libshmem_device.signal_wait_until(
                    symm_flag[thread_idx:],
                    libshmem_device.NVSHMEM_CMP_EQ,
                    signal_value,
                )
            cuda.syncthreads()
    else:
        peer = node_id * LOCAL_WORLD_SIZE + peer_local_rank
        segment = peer_node_id * LOCAL_WORLD_SIZE + local_rank
        if peer_node_id != node_id:
            if thread_idx == 0:
                libshmem_device.signal_wait_until(
                    symm_flag[segment:],
                    libshmem_device.NVSHMEM_CMP_EQ,
                    signal_value,
                )
            cuda.syncthreads()
        libshmem_device.putmem_signal_block(
            symm_ptr[segment * bytes_per_rank :],
            symm_ptr[segment * bytes_per_rank :],
            bytes_per_rank,
            symm_flag[segment:],
            signal_value,
            libshmem_device.NVSHMEM_SIGNAL_SET,
            peer,
        )


@pytest.mark.parametrize("delivery", ["eager", "unordered"])
@pytest.mark.parametrize(("n", "local"), [(1, 1), (3, 3), (5, 5), (2, 1), (4, 2), (6, 3)])
def test_the_all_gathers_of_the_third_tutorial(n, local, delivery):
    def main(world):
        nodes = n // local
        kernel = cuda.jit(all_gather_push_2d if nodes > 1 else all_gather_push_1d)
        shape = (nodes, n) if nodes > 1 else (n,)
        data, flags = sk.zeros(n * 24, "uint8"), sk.signals(n)
        data[24 * world.rank :][:24] = world.rank + 1
        world.barrier()
        kernel[n, 32, world.stream](data, 24, flags, *shape, world.rank, 15)
        world.barrier()
        np.testing.assert_array_equal(data, np.repeat(np.arange(1, n + 1), 24))

    spmd(n, main, races=True, local_size=local, delivery=delivery)


@pytest.mark.parametrize("verb", ["get", "put"])
@pytest.mark.parametrize("form", ["", "_nbi", "_warp", "_nbi_warp", "_block", "_nbi_block"])
def test_so_many_bytes(verb, form):
    transfer = getattr(libshmem_device, f"{verb}mem{form}")

    @cuda.jit
    def kernel(there, here, n):
        if verb == "put":
            transfer(there, here, n, 1 - dl.rank())
        else:
            transfer(here, there, n, 1 - dl.rank())
        libshmem_device.quiet()

    def main(world):
        there, here = sk.full(8, 1, "uint8"), np.full(8, 2, "uint8")
        kernel[1, 32 if form.endswith(("_warp", "_block")) else 1](there, here, 5)
        world.host_barrier()
        changed = there if verb == "put" else here
        assert changed.tolist() == [3 - changed[-1]] * 5 + [changed[-1]] * 3

    spmd(2, main)


def test_a_call_that_some_threads_leave_out_is_shown_where_the_kernel_makes_it():
    @cuda.jit
    def kernel(data):
        if cuda.threadIdx.x < 16:
            libshmem_device.putmem_block(data, data, 8, 0)

    with pytest.raises(sk.emu.EmulatorError) as caught:
        spmd(1, lambda world: kernel[1, 32](sk.zeros(8, "uint8")))
    assert line_of(kernel, "putmem_block") in str(caught.value)


def test_more_bytes_than_there_are():
    @cuda.jit
    def kernel(data):
        libshmem_device.putmem(data, data, 9, 0)

    with pytest.raises(sk.emu.EmulatorError, match="putmem.*bytes is 9"):
        spmd(1, lambda world: kernel[1, 1](sk.zeros(8, "uint8")))


def test_libshmem_device_compiles():
    pytest.importorskip("nvshmem.core.device.numba")
    for kernel, numbers in (all_gather_push_1d, 3), (all_gather_push_2d, 4):
        ptx = compile_ptx(kernel, (BYTES, types.int64, SIGNALS, *[types.int64] * numbers))
        assert "nvshmem" in ptx and "NRT_" not in ptx
