"""Names of arguments that have changed: the old one works for one version, and warns."""

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar, cast

FunctionT = TypeVar("FunctionT", bound=Callable)


def renamed(**names: str) -> Callable[[FunctionT], FunctionT]:
    """``@renamed(old="new")``: the function also takes a keyword argument by its old name, with a
    DeprecationWarning. TypeError where both are given."""

    def decorate(function: Any):
        @functools.wraps(function)
        def call(*args, **kwargs):
            for old, new in names.items():
                if old not in kwargs:
                    continue
                who = function.__qualname__
                if function.__name__ in ("__init__", "__call__"):
                    who = type(args[0]).__name__  # which may be a subclass
                if new in kwargs:
                    raise TypeError(f"{who}: {old} is the old name of {new}, and both are given. Give {new}")
                warnings.warn(
                    f"{who}: {old} is now {new}, and works in this version alone", DeprecationWarning, 2
                )
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return cast(FunctionT, call)

    return decorate
