"""Modules that stand in for others, in sys.modules, while a script runs."""

import contextlib
import importlib.abc
import sys
import types


class NoModule(NotImplementedError, ModuleNotFoundError):
    """Of an import: scripts that can do without the module do so here, too."""

    __module__, __qualname__ = "builtins", "NotImplementedError"  # so tracebacks call it


class NoAttribute(NotImplementedError, AttributeError):
    """Of an object: hasattr is false."""

    __module__, __qualname__ = "builtins", "NotImplementedError"


def not_served(name, instead="docs/scripts.md lists what is; the rest needs GPUs", error=NotImplementedError):
    return error(f"{name} is not emulated. {instead}")


def refuse(name, *instead):
    """-> a function that is not served, under `name`"""

    def refuse(*_, **__):
        raise not_served(name, *instead)

    return refuse


def named(*those):
    """-> classes and functions, by name"""
    return {each.__name__: each for each in those}


class StandIn(types.ModuleType):
    """A module with `members`; whatever else is asked for raises NotImplementedError."""

    def __init__(self, name, members, **more):
        super().__init__(name)
        public = {**members, **more}
        self.__dict__.update(public)
        self.__all__ = [n for n in public if not n.startswith("_")]
        self.__path__ = []  # a package: its modules are asked for, and refused by the finder

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        raise not_served(f"{self.__name__}.{name}")


class Whole(StandIn):
    """A stand-in with all that the real module has: other names it lacks, as that does."""

    def why(self, name):
        """What the error about `name` says at its end."""
        return ""

    def lacks(self, name, error):
        return error(f"module {self.__name__!r} has no attribute {name!r}{self.why(name)}")

    def __getattr__(self, name):
        raise self.lacks(name, AttributeError)


def _no_attribute(owner, name):
    if name.startswith("_"):
        return AttributeError(f"{owner.__name__!r} has no attribute {name!r}")
    return not_served(f"{owner.__name__}.{name}", error=NoAttribute)


class _Served(type):
    def __getattr__(cls, name):
        raise _no_attribute(cls, name)


class Served(metaclass=_Served):
    """Objects of stand-ins: an attribute that is missing, of them or of their class, raises
    NotImplementedError."""

    __slots__ = ()

    def __getattr__(self, name):
        raise _no_attribute(type(self), name)


class Refusal(importlib.abc.MetaPathFinder):
    """Other modules of the packages that are served."""

    def __init__(self, packages):
        self.packages = packages

    def find_spec(self, name, path=None, target=None):
        if any(name == package or name.startswith(package + ".") for package in self.packages):
            parent, _, last = name.rpartition(".")
            if isinstance(sys.modules.get(parent), Whole):  # from parent import last
                raise sys.modules[parent].lacks(last, ImportError)
            raise not_served(f"the module {name}", error=NoModule)
        return None


@contextlib.contextmanager
def installed(stand_ins, refused=()):
    """`stand_ins`, by name, are what ``import`` finds; `refused`: packages that are not served at all."""
    packages = {name for name in stand_ins if name != "cuda"} | set(refused)
    hidden = {
        name: module
        for name, module in sys.modules.items()
        if any(name == p or name.startswith(p + ".") for p in packages)
    }
    attributes = []  # of parents that exist, such as the namespace package cuda
    for name in [*hidden, *refused]:
        parent, _, last = name.rpartition(".")
        sys.modules.pop(name, None)
        if parent in sys.modules and last in sys.modules[parent].__dict__:
            attributes.append((sys.modules[parent], last, sys.modules[parent].__dict__.pop(last)))
    added = []
    for name, module in stand_ins.items():
        if name == "cuda" and name in sys.modules:
            continue
        sys.modules[name] = module
        added.append(name)
        parent, _, last = name.rpartition(".")
        if parent:
            owner = sys.modules[parent]
            attributes.append((owner, last, owner.__dict__.get(last)))
            setattr(owner, last, module)
    refusal = Refusal(packages)
    sys.meta_path.insert(0, refusal)
    try:
        yield
    finally:
        sys.meta_path.remove(refusal)
        for owner, last, before in reversed(attributes):
            if before is None:
                owner.__dict__.pop(last, None)
            else:
                setattr(owner, last, before)
        for name in added:
            sys.modules.pop(name, None)
        sys.modules.update(hidden)
