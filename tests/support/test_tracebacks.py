"""Errors as users see them: which frames are shown, and that they reach the descriptor."""

import io
import os
import sys
import types

import numpy as np
import pytest
from numba import cuda

import shmemkit as sk
from shmemkit.support import tracebacks
from shmemkit.support.command_line import say_at_last

OURS = os.path.dirname(sk.__file__) + os.sep


def function(file, code, **names):
    """`f` of `code`, as if it stood in `file`."""
    exec(compile(code, file, "exec"), names)
    return names["f"]


def shown(f):
    with pytest.raises(Exception) as caught:
        f()
    trace = caught.value.__traceback__
    caught.value.__traceback__ = trace and trace.tb_next  # without this file
    return tracebacks.traceback_of(caught.value)


def test_frames_of_ours_are_left_out_between_the_users():
    inner = function("kernel.py", "def f(): 1 / 0")
    ours = function(f"{OURS}launch.py", "def f(): g()", g=inner)
    text = shown(function("program.py", "def f(): g()", g=ours))
    assert "program.py" in text and "kernel.py" in text and "launch.py" not in text, text


def test_causes_and_groups_are_searched_too():
    ours = function(f"{OURS}cause.py", "def f(): 1 / 0")
    code = "def f():\n try: g()\n except Exception as e: raise ValueError('x') from e"
    text = shown(function("program.py", code, g=ours))
    assert "ZeroDivisionError" in text and "program.py" in text and "cause.py" not in text, text


def test_a_command_of_ours_shows_where_it_failed():
    assert "bench.py" in shown(function(f"{OURS}bench.py", "def f(): 1 / 0"))


@pytest.mark.parametrize("value, whole", [("1", True), ("0", False), ("what", True)])
def test_all_frames_are_shown_on_request(value, whole, monkeypatch):
    monkeypatch.setenv("SHMEMKIT_FULL_TRACEBACK", value)
    ours = function(f"{OURS}launch.py", "def f(): 1 / 0")
    assert ("launch.py" in shown(function("program.py", "def f(): g()", g=ours))) == whole


@cuda.jit
def raises(x):
    x[0] = KINDS[int(x[0])]


KINDS = np.zeros(1)


def test_a_kernels_line_stays():
    def main():
        sk.init()
        raises[1, 1](sk.array([7], "int64"))

    with pytest.raises(Exception) as caught:
        sk.emu.run(main, 1)
    text = tracebacks.traceback_of(caught.value)
    assert "raises" in text and "KINDS[int(x[0])]" in text and OURS not in text, text


@pytest.mark.parametrize("stand_in", [None, io.StringIO(), types.SimpleNamespace(flush=lambda: None)])
def test_last_words_reach_the_descriptor(stand_in, capfd, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stand_in)
    say_at_last("last words \udc80")
    assert capfd.readouterr().err == "last words \\udc80\n"


def test_last_words_are_in_the_log_too(tmp_path, capfd, monkeypatch):
    with open(tmp_path / "log", "w") as log:
        monkeypatch.setattr(sys, "stderr", log)
        log.write("before\n")
        say_at_last("last words")
    assert (tmp_path / "log").read_text() == "before\nlast words\n"
    assert capfd.readouterr().err == "last words\n"


def test_an_exception_that_was_caught_is_not_what_ended_the_program(monkeypatch):
    try:
        raise ValueError
    except ValueError as error:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        assert tracebacks.uncaught() is None
