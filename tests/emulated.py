"""What the tests of the emulator share."""

import inspect
import os
from unittest import mock

import pytest
import touched

import shmemkit as sk
from shmemkit.emu import DeadlockError
from shmemkit.emu.__main__ import main as shmemkit_emu

untyped = mock.patch.dict(os.environ, SHMEMKIT_TYPING="0")
"""Decorator: the kernels that it launches are more than Numba compiles."""


def spmd(n, main, **options):
    return sk.emu.run(lambda: main(sk.init()), n, **options)


def deadlock_of(n, main, **options):
    with pytest.raises(DeadlockError) as caught:
        spmd(n, main, **options)
    return str(caught.value)


def emulate(arguments):
    """``shmemkit emu`` with these `arguments`, in this process. -> its exit status"""
    touched.examples(arguments)
    return shmemkit_emu(arguments)


def line_of(function, text):
    """ "file:line: " of the line of `function` that contains `text`."""
    lines, first = inspect.getsourcelines(function.py_func)
    (offset,) = [i for i, line in enumerate(lines) if text in line]
    file = os.path.basename(function.py_func.__code__.co_filename)
    return f"{file}:{first + offset}: {lines[offset].strip()}"
