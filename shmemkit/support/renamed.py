"""Names of arguments that have changed: the old one works for one version, and warns."""

import functools
import warnings
from typing import Any, TypeVar

F = TypeVar("F")


def renamed(**names):
    """``@renamed(old="new")``: the function also takes a keyword argument by its old name, with a
    DeprecationWarning. TypeError where both are given."""

    def decorate(function: F) -> F:
        wrapped: Any = function

        @functools.wraps(wrapped)
        def call(*args, **kwargs):
            for old, new in names.items():
                if old not in kwargs:
                    continue
                who = wrapped.__qualname__
                if wrapped.__name__ in ("__init__", "__call__"):
                    who = type(args[0]).__name__  # which may be a subclass
                if new in kwargs:
                    raise TypeError(f"{who}: {old} is the old name of {new}, and both are given. Give {new}")
                warnings.warn(
                    f"{who}: {old} is now {new}, and works in this version alone", DeprecationWarning, 2
                )
                kwargs[new] = kwargs.pop(old)
            return wrapped(*args, **kwargs)

        wrapper: Any = call
        return wrapper

    return decorate
