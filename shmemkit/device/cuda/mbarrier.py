"""Barriers in shared memory on which threads wait for asynchronous copies and for each other (mbarriers).
Hopper and later.

An mbarrier goes from phase to phase: one ends when the arrivals that it expects have come, and all bytes that
were announced; then it expects as many arrivals again. A wait names the parity of the phase: the first is 0,
the next 1, then 0 again. That is enough as long as no thread can be two phases ahead, so a ring of buffers
has two mbarriers for each buffer, "full" and "empty".

PTX ISA: mbarrier, "Parallel Synchronization and Communication Instructions".
"""

from __future__ import annotations

from shmemkit.compiler.ptx import asm, gpu, shared_address, types
from shmemkit.typing import Array

from ..argument_checks import check_integer, check_words
from ..emulator import current_thread, mbarriers

__all__ = [
    "fence_mbarrier_init",
    "mbarrier_arrive",
    "mbarrier_arrive_expect_tx",
    "mbarrier_arrive_on",
    "mbarrier_init",
    "mbarrier_wait",
]


def mbarrier_init(barriers: Array, i: int, count: int) -> None:
    """Make barriers[i] an mbarrier of `count` arrivals per phase, in its first phase.

    barriers  uint64, in shared memory

    One thread calls it. The same thread then calls `fence_mbarrier_init`, for the asynchronous copies and the
    cluster. All threads call ``syncthreads`` (or `cluster_sync`) before others use the mbarrier.
    """
    mbarriers.init(current_thread("mbarrier_init"), barriers, i, count)


def fence_mbarrier_init() -> None:
    """Let asynchronous copies see the mbarriers that this thread has made.

    After `cluster_sync` the other blocks of the cluster see them, too.
    """
    mbarriers.fence_init(current_thread("fence_mbarrier_init"))


def mbarrier_arrive(barriers: Array, i: int) -> None:
    """Arrive at barriers[i], as a release: threads that wait for the end of the phase see what this thread
    did before."""
    mbarriers.arrive(current_thread("mbarrier_arrive"), barriers, i)


def mbarrier_arrive_on(barriers: Array, i: int, block: int) -> None:
    """`mbarrier_arrive` at barriers[i] of block `block` of the cluster; this thread's own block is one,
    too."""
    mbarriers.arrive(current_thread("mbarrier_arrive_on"), barriers, i, block)


def mbarrier_arrive_expect_tx(barriers: Array, i: int, n_bytes: int) -> None:
    """Arrive at barriers[i], and let its phase last until asynchronous copies have written `n_bytes` more."""
    mbarriers.arrive(current_thread("mbarrier_arrive_expect_tx"), barriers, i, n_bytes=n_bytes)


def mbarrier_wait(barriers: Array, i: int, parity: int) -> None:
    """Wait until the phase of `parity` (0 or 1) of barriers[i] has ended.

    Before any arrival, the phase of parity 1 counts as ended. It is an acquire: this thread sees what was
    done before the arrivals, and what the copies have written.
    """
    mbarriers.wait(current_thread("mbarrier_wait"), barriers, i, parity)


_U32 = types.uint32
_init = asm("mbarrier.init.shared::cta.b64 [$0], $1;", types.void, (_U32, _U32))
_fence_init = asm("fence.mbarrier_init.release.cluster;")
# Unqualified: an explicit .release.cluster costs a MEMBAR.
_arrive = asm("mbarrier.arrive.shared::cta.b64 _, [$0];", types.void, (_U32,))
_arrive_on = asm(
    "{ .reg .b32 there; mapa.shared::cluster.u32 there, $0, $1; "
    "mbarrier.arrive.shared::cluster.b64 _, [there]; }",
    types.void,
    (_U32, _U32),
)
_arrive_expect_tx = asm("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", types.void, (_U32, _U32))
_wait = asm(
    "{ .reg .pred ended; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 ended, [$0], $1; "
    "@!ended bra AGAIN; }",
    types.void,
    (_U32, _U32),
)


def _check(primitive, barriers, **integers):
    check_words(primitive, "barriers", barriers, (types.uint64,))
    check_integer(primitive, **integers)


@gpu(mbarrier_init)
def _(barriers, i, count):
    _check("mbarrier_init", barriers, i=i, count=count)
    return lambda barriers, i, count: _init(shared_address(barriers) + _U32(8 * i), count)


@gpu(fence_mbarrier_init)
def _():
    return lambda: _fence_init()


@gpu(mbarrier_arrive)
def _(barriers, i):
    _check("mbarrier_arrive", barriers, i=i)
    return lambda barriers, i: _arrive(shared_address(barriers) + _U32(8 * i))


@gpu(mbarrier_arrive_on)
def _(barriers, i, block):
    _check("mbarrier_arrive_on", barriers, i=i, block=block)
    return lambda barriers, i, block: _arrive_on(shared_address(barriers) + _U32(8 * i), block)


@gpu(mbarrier_arrive_expect_tx)
def _(barriers, i, n_bytes):
    _check("mbarrier_arrive_expect_tx", barriers, i=i, n_bytes=n_bytes)
    return lambda barriers, i, n_bytes: _arrive_expect_tx(shared_address(barriers) + _U32(8 * i), n_bytes)


@gpu(mbarrier_wait)
def _(barriers, i, parity):
    _check("mbarrier_wait", barriers, i=i, parity=parity)
    return lambda barriers, i, parity: _wait(shared_address(barriers) + _U32(8 * i), parity)
