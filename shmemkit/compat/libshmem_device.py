"""The names of Triton-distributed's ``libshmem_device``, for kernels in Numba.

    from shmemkit.compat import libshmem_device

The arguments are in that project's order; some parameters have other names. ``putmem...`` and ``getmem...``
take 1-D arrays of uint8 or int8 (``array.view("uint8")`` on the host) and a number of bytes; a pointer plus
an offset is a slice. Otherwise they are the functions of ``shmemkit.device`` without ``mem``, whose
docstrings have the rest.
docs/triton_distributed.md has the names side by side.
"""

from shmemkit import device
from shmemkit.compiler.ptx import gpu, types
from shmemkit.device import (  # noqa: F401
    ComparisonType,
    SignalOp,
    Teams,
    argument_checks,
    barrier,
    barrier_all,
    barrier_all_block,
    barrier_all_warp,
    fence,
    my_pe,
    n_pes,
    p,
    quiet,
    signal_op,
    signal_wait_until,
    symm_at,
    sync_all,
    sync_all_block,
    sync_all_warp,
    team_my_pe,
    team_n_pes,
)

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

    def transfer(dest, source, bytes, pe):
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

    def transfer(dest, source, bytes, sig_addr, signal, sig_op, pe):
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


for _group in ("", "_warp", "_block"):
    for _nbi in ("", "_nbi"):
        for _verb in ("get", "put"):
            globals()[f"{_verb}mem{_nbi}{_group}"] = _transfer(f"{_verb}mem{_nbi}{_group}")
        globals()[f"putmem_signal{_nbi}{_group}"] = _transfer_and_signal(f"putmem_signal{_nbi}{_group}")

_OURS = "argument_checks", "device", "gpu", "types"
__all__ = [name for name in dir() if not name.startswith("_") and name not in _OURS]
