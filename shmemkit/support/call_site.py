"""Which call of the user's program is under way, and on which line."""

import os
import sys
import sysconfig

from .notebook import cell_of
from .renamed import renamed

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_WRAPPER = renamed.__code__.co_filename  # its functions have the names of those that they wrap
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep


class Call(str):
    """The name of a collective function; `site` is where the user's program calls it: "file:line", or ""."""

    site = ""

    def __new__(cls, name):
        return name if isinstance(name, Call) else super().__new__(cls, name)

    def __format__(self, _):
        """ "all_reduce() (train.py:12)" """
        return str(self) + "()" + (f" ({self.site})" if self.site else "")


def users_call(default):
    """-> the Call by which the user's program came here. `default`: its name where nothing else says it, as
    at the end of a ``with`` block or of the program."""
    inner, frame = None, sys._getframe(1)
    while frame is not None and _is_passed_over(frame.f_code.co_filename):
        file = frame.f_code.co_filename
        if file.startswith(_PACKAGE) and not file.startswith(_WRAPPER):
            inner = frame
        frame = frame.f_back
    if frame is None or inner is None:
        return Call(default)
    call = Call(_name(inner) or default)
    call.site = shown_place(frame.f_code.co_filename, frame.f_lineno)
    return call


def shown_place(file, lineno):
    """ "file:line", or "Cell In[4], line 6" of a notebook"""
    if cell := cell_of(file):
        return f"{cell}, line {lineno}"
    shown = os.path.relpath(file) if not file.startswith("<") else file
    return f"{shown if not shown.startswith('..') else file}:{lineno}"


def _is_passed_over(file):
    if file.startswith(_STANDARD_LIBRARY):
        return "-packages" not in file
    return file.startswith((_PACKAGE, "<frozen"))


def _name(frame):
    """What the user calls the function of `frame`; None where it has another name."""
    name, owner = frame.f_code.co_name, frame.f_locals.get("self")
    if name == "__init__":
        return type(owner).__name__
    if name == "__call__":
        return f"{type(owner).__name__}.__call__"
    return None if name.startswith(("_", "<")) else name
