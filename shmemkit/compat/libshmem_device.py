"""The names of Triton-distributed's ``libshmem_device``, for kernels in Numba.

    from shmemkit.compat import libshmem_device

The arguments are in that project's order; some parameters have other names. ``putmem...`` and ``getmem...``
take 1-D arrays of uint8 or int8 (``array.view("uint8")`` on the host) and a number of bytes; a pointer plus
an offset is a slice. Otherwise they are the functions of ``shmemkit.device`` without ``mem``, whose
docstrings have the rest.
docs/triton_distributed.md has the names side by side.
"""

from shmemkit import device  # noqa: I001 - it would take a statement for each name that is passed on
from shmemkit.compiler.ptx import gpu, types
from shmemkit.device import (
    ComparisonType as ComparisonType,
    SignalOp as SignalOp,
    Teams as Teams,
    argument_checks,
    barrier as barrier,
    barrier_all as barrier_all,
    barrier_all_block as barrier_all_block,
    barrier_all_warp as barrier_all_warp,
    fence as fence,
    my_pe as my_pe,
    n_pes as n_pes,
    p as p,
    quiet as quiet,
    signal_op as signal_op,
    signal_wait_until as signal_wait_until,
    symm_at as symm_at,
    sync_all as sync_all,
    sync_all_block as sync_all_block,
    sync_all_warp as sync_all_warp,
    team_my_pe as team_my_pe,
    team_n_pes as team_n_pes,
)
from shmemkit.typing import Array

int_p, remote_ptr = p, symm_at

NVSHMEM_CMP_EQ, NVSHMEM_CMP_NE = ComparisonType.CMP_EQ, ComparisonType.CMP_NE
NVSHMEM_CMP_GT, NVSHMEM_CMP_GE = ComparisonType.CMP_GT, ComparisonType.CMP_GE
NVSHMEM_CMP_LT, NVSHMEM_CMP_LE = ComparisonType.CMP_LT, ComparisonType.CMP_LE
NVSHMEM_SIGNAL_SET, NVSHMEM_SIGNAL_ADD = SignalOp.SIGNAL_SET, SignalOp.SIGNAL_ADD
NVSHMEM_TEAM_WORLD, NVSHMEMX_TEAM_NODE = Teams.TEAM_WORLD, Teams.TEAM_NODE

_BYTES = (types.uint8, types.int8)


def _transfer(name):
    """``name(dest, source, bytes, pe)``, as ``getmem_block``: ours, of slices."""
    ours = getattr(device, name.replace("mem", ""))

    def transfer(dest: Array, source: Array, bytes: int, pe: int) -> None:
        _check_emulated(name, dest, source, bytes)
        ours(dest[:bytes], source[:bytes], pe)

    transfer.__name__ = name

    @gpu(transfer)
    def _(dest, source, bytes, pe):
        _check(name, dest, source)

        def impl(dest, source, bytes, pe):
            ours(dest[:bytes], source[:bytes], pe)

        return impl

    return transfer


def _transfer_and_signal(name):
    """``name(dest, source, bytes, sig_addr, signal, sig_op, pe)``, likewise."""
    ours = getattr(device, name.replace("mem", ""))

    def transfer(
        dest: Array, source: Array, bytes: int, sig_addr: Array, signal: int, sig_op: int, pe: int
    ) -> None:
        _check_emulated(name, dest, source, bytes)
        ours(dest[:bytes], source[:bytes], sig_addr, signal, sig_op, pe)

    transfer.__name__ = name

    @gpu(transfer)
    def _(dest, source, bytes, sig_addr, signal, sig_op, pe):
        _check(name, dest, source)

        def impl(dest, source, bytes, sig_addr, signal, sig_op, pe):
            ours(dest[:bytes], source[:bytes], sig_addr, signal, sig_op, pe)

        return impl

    return transfer


def _check(name, dest, source):
    argument_checks.check_words(name, "dest", dest, _BYTES)
    argument_checks.check_words(name, "source", source, _BYTES)


def _check_emulated(name, dest, source, n_bytes):
    argument_checks.check_emulated_words(name, "dest", dest, _BYTES)
    argument_checks.check_emulated_words(name, "source", source, _BYTES)
    if not 0 <= n_bytes <= min(dest.size, source.size):
        raise IndexError(f"{name}(): bytes is {n_bytes}; dest has {dest.size}, source {source.size}")


getmem = _transfer("getmem")
putmem = _transfer("putmem")
putmem_signal = _transfer_and_signal("putmem_signal")
getmem_nbi = _transfer("getmem_nbi")
putmem_nbi = _transfer("putmem_nbi")
putmem_signal_nbi = _transfer_and_signal("putmem_signal_nbi")
getmem_warp = _transfer("getmem_warp")
putmem_warp = _transfer("putmem_warp")
putmem_signal_warp = _transfer_and_signal("putmem_signal_warp")
getmem_nbi_warp = _transfer("getmem_nbi_warp")
putmem_nbi_warp = _transfer("putmem_nbi_warp")
putmem_signal_nbi_warp = _transfer_and_signal("putmem_signal_nbi_warp")
getmem_block = _transfer("getmem_block")
putmem_block = _transfer("putmem_block")
putmem_signal_block = _transfer_and_signal("putmem_signal_block")
getmem_nbi_block = _transfer("getmem_nbi_block")
putmem_nbi_block = _transfer("putmem_nbi_block")
putmem_signal_nbi_block = _transfer_and_signal("putmem_signal_nbi_block")

_OURS = "Array", "argument_checks", "device", "gpu", "types"
__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    name for name in dir() if not name.startswith("_") and name not in _OURS
]
