"""Streams as users give them."""

import operator

from shmemkit.support.settings import shown


def address_of_stream(stream):
    """The address of a CuPy, Numba, cuda.core or PyTorch stream; an address is itself, None is 0."""
    if stream is None:
        return 0
    if hasattr(stream, "__cuda_stream__"):
        return int(stream.__cuda_stream__()[1])
    for attribute in ("ptr", "cuda_stream", "handle"):
        if hasattr(stream, attribute):
            return int(getattr(stream, attribute))
    try:
        return operator.index(stream)
    except TypeError:
        raise TypeError(
            f"stream is {shown(stream)}; it must be a CuPy, Numba, cuda.core or PyTorch stream, or an address"
        ) from None
