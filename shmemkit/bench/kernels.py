"""The kernels that ``bench p2p`` times. One-dimensional grids and blocks; block b works on the bytes from
``b * chunk`` to ``(b + 1) * chunk``, or the end of the array."""

from numba import cuda, types

from shmemkit.device import (
    SignalOp,
    copy_block,
    notify,
    put_signal,
    put_signal_nbi_block,
    quiet,
    signal_wait_until,
    symm_at,
    wait,
)
from shmemkit.device.enums import ComparisonType

SET, GE = SignalOp.SIGNAL_SET, ComparisonType.CMP_GE


@cuda.jit
def push_kernel(dst, src, peer, chunk):
    """Store `src` into `dst` of rank `peer`: 16 bytes per store."""
    start = types.int64(cuda.blockIdx.x) * chunk
    copy_block(symm_at(dst, peer)[start : start + chunk], src[start : start + chunk])


@cuda.jit
def pull_kernel(dst, src, peer, chunk):
    """Load `src` of rank `peer` into `dst`: 16 bytes per load."""
    start = types.int64(cuda.blockIdx.x) * chunk
    copy_block(dst[start : start + chunk], symm_at(src, peer)[start : start + chunk])


@cuda.jit
def put_signal_kernel(dst, src, signals, peer, chunk):
    """The same by NVSHMEM's put_signal_nbi_block, a signal per block, until all of it has arrived."""
    block = cuda.blockIdx.x
    start = types.int64(block) * chunk
    put_signal_nbi_block(
        dst[start : start + chunk], src[start : start + chunk], signals[block:], 1, SET, peer
    )
    if cuda.threadIdx.x == 0:
        quiet()


@cuda.jit
def notify_kernel(signal, state, peer, first, rounds):
    """`rounds` times to and fro: notify, and wait for the answer. One thread; state[0] counts on."""
    done = types.int64(state[0])
    for i in range(1, rounds + 1):
        if first:
            notify(signal, peer, done + i)
        wait(signal, 1, "sys", "acquire", done + i)
        if not first:
            notify(signal, peer, done + i)
    state[0] = done + rounds


@cuda.jit
def put_signal_latency_kernel(dst, src, signal, state, peer, first, rounds):
    """The same by NVSHMEM's put_signal of `src` and signal_wait_until."""
    done = types.int64(state[0])
    for i in range(1, rounds + 1):
        if first:
            put_signal(dst, src, signal, done + i, SET, peer)
        signal_wait_until(signal, GE, done + i)
        if not first:
            put_signal(dst, src, signal, done + i, SET, peer)
    state[0] = done + rounds


_bytes, _words = types.Array(types.uint8, 1, "C"), types.Array(types.uint64, 1, "C")
_int = types.int64

# What the kernels are compiled for where there is no GPU, to check registers and spills.
GPU_KERNELS = {
    "push": (push_kernel, (_bytes, _bytes, _int, _int)),
    "pull": (pull_kernel, (_bytes, _bytes, _int, _int)),
    "put_signal": (put_signal_kernel, (_bytes, _bytes, _words, _int, _int)),
    "notify": (notify_kernel, (_words, _words, _int, _int, _int)),
    "put_signal_latency": (put_signal_latency_kernel, (_bytes, _bytes, _words, _words, _int, _int, _int)),
}
