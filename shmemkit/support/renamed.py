"""Names of arguments that have changed: the old one works for one version, and warns."""

import functools
import warnings


def renamed(**names):
    """``@renamed(old="new")``: the function also takes a keyword argument by its old name, with a
    DeprecationWarning. TypeError where both are given."""

    def decorate(function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            for old in names.keys() & kwargs.keys():
                new = names[old]
                who = function.__qualname__.removesuffix(".__init__").removesuffix(".__call__")
                if new in kwargs:
                    raise TypeError(f"{who}: {old} is the old name of {new}, and both are given. Give {new}")
                warnings.warn(
                    f"{who}: {old} is now {new}, and works in this version alone", DeprecationWarning, 2
                )
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call

    return decorate
