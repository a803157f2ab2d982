"""The Process of a script (``process.py``) that calls."""

from shmemkit.emu.run import current_host


def current(call="this"):
    """The Process that calls."""
    host = current_host()
    if host is None or host.process is None:
        raise RuntimeError(
            f"{call}: this is not the script's main thread, or a kernel. Call it in the main thread, "
            "outside of kernels"
        )
    return host.process
