"""Names of arguments that have changed: the old one works for one version, and warns."""

import functools
import inspect
import warnings
from typing import Any, TypeVar

F = TypeVar("F")
LEFT_OUT: Any = object()


def renamed(**names):
    """``@renamed(old="new")``: the function also takes a keyword argument by its old name, with a
    DeprecationWarning. TypeError where both are given."""

    def decorate(function: F) -> F:
        wrapped: Any = function

        def by_new_names(given):
            of = inspect.signature(wrapped).parameters
            defaults = {name: of[name].default if name in of else LEFT_OUT for name in given}
            given = {k: x for k, x in given.items() if x is not LEFT_OUT and x is not defaults[k]}
            who = wrapped.__qualname__
            if wrapped.__name__ in ("__init__", "__call__") and "self" in given:
                who = type(given["self"]).__name__  # which may be a subclass
            for old in filter(given.__contains__, names):
                new = names[old]
                if new in given:
                    raise TypeError(f"{who}: {old} is the old name of {new}, and both are given. Give {new}")
                warnings.warn(
                    f"{who}: {old} is now {new}, and works in this version alone", DeprecationWarning, 3
                )
                given[new] = given.pop(old)
            return wrapped(**given)

        taking: Any = functools.wraps(wrapped)(_taking(wrapped, names, by_new_names))
        return taking

    return decorate


def _taking(function, old, otherwise):
    """-> a function like `function`, which takes the `old` names, too: then, or if an argument is missing, it
    calls ``otherwise(arguments)``. Its signature is written out: ``*args, **kwargs`` cost twice as much."""
    given = [*inspect.signature(function).parameters.values()]
    by_name = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=LEFT_OUT) for name in old]
    plain = [p.replace(default=p.empty, annotation=p.empty) for p in [*given, *by_name]]
    usual = [f"{name} is LEFT_OUT" for name in old]
    usual += [f"{p.name} is not LEFT_OUT" for p in given if p.default is p.empty]
    passed = [f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else p.name for p in given]
    source = f"""def taking{inspect.Signature(plain)}:
        if {" and ".join(usual)}:
            return function({", ".join(passed)})
        return otherwise(locals())"""
    made: dict[str, Any] = {"function": function, "otherwise": otherwise, "LEFT_OUT": LEFT_OUT}
    exec(compile(source, f"{__file__}: {function.__qualname__}", "exec"), made)
    defaults = {p.name: LEFT_OUT if p.default is p.empty else p.default for p in [*given, *by_name]}
    made["taking"].__kwdefaults__ = {p.name: defaults.pop(p.name) for p in plain if p.kind is p.KEYWORD_ONLY}
    made["taking"].__defaults__ = tuple(defaults.values())
    return made["taking"]
