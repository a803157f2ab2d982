"""Switches in the environment, and bad arguments of calls of the host."""

import numpy as np
import pytest
from emulated import untyped
from numba import cuda

import shmemkit as sk
from shmemkit.compiler import jit_cache
from shmemkit.support.settings import switch


@pytest.mark.parametrize("text", ["1", "true", "True", "YES", "on", " on "])
def test_on(monkeypatch, text):
    monkeypatch.setenv("SHMEMKIT_RACES", text)
    assert switch("SHMEMKIT_RACES", False)


@pytest.mark.parametrize("text", ["0", "false", "No", "OFF", "off "])
def test_off(monkeypatch, text):
    monkeypatch.setenv("SHMEMKIT_CACHE", text)
    assert not switch("SHMEMKIT_CACHE", True) and jit_cache.folder() is None


@pytest.mark.parametrize("text", ["", " "])
def test_not_set(monkeypatch, text):
    monkeypatch.setenv("SHMEMKIT_RACES", text)
    assert switch("SHMEMKIT_RACES", True) and not switch("SHMEMKIT_RACES", False)
    monkeypatch.delenv("SHMEMKIT_RACES")
    assert switch("SHMEMKIT_RACES", True) and not switch("SHMEMKIT_RACES", False)


@pytest.mark.parametrize("text", ["2", "-1", "y", "enabled", "1 1", "races"])
def test_the_rest_is_refused(monkeypatch, text):
    monkeypatch.setenv("SHMEMKIT_RACES", text)
    with pytest.raises(
        ValueError, match=f"SHMEMKIT_RACES is '{text}'; it must be 1, true, yes, on, 0, false, no or off"
    ):
        sk.emu.run(lambda: None, 1)
    with pytest.raises(ValueError, match="SHMEMKIT_RACES"):
        sk.init("emulator")
    sk.emu.run(lambda: None, 1, races=False)
    monkeypatch.setenv("SHMEMKIT_CACHE", text)
    with pytest.raises(ValueError, match="SHMEMKIT_CACHE"):
        jit_cache.folder()


@pytest.mark.parametrize("races", ["yes", "0", [], 2])
def test_the_argument(races):
    with pytest.raises(TypeError, match="races is .*; it must be True, False or None"):
        sk.emu.run(lambda: None, 1, races=races)


@cuda.jit
def kernel(x, n):
    x[0] = n


def bound(world, **arguments):
    given = dict(kernel=kernel, grid=1, block=1, args=(world.xp.zeros(4), 1))
    return sk.bind(**{**given, **arguments})


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda w: bound(w, grid="1"), TypeError, "grid is '1'; it must be an integer or a tuple"),
        (lambda w: bound(w, grid=True), TypeError, "grid is True; it must be an integer or a tuple"),
        (lambda w: bound(w, block=(1, True)), TypeError, r"block is \(1, True\); it must be an integer or"),
        (
            lambda w: bound(w, block=float("nan")),
            TypeError,
            "block is nan; it must be an integer or",
        ),
        (lambda w: bound(w, shared="1"), TypeError, r"bind\(\): shared is '1'; it must be an integer"),
        (lambda w: bound(w, shared=True), TypeError, "shared is True; it must be an integer"),
        (lambda w: bound(w, shared=None), TypeError, "shared is None; it must be an integer"),
        (lambda w: bound(w, cooperative="no"), TypeError, "cooperative is 'no'; it must be True or False"),
        (lambda w: bound(w, co_resident=2), TypeError, "co_resident is 2; it must be True or False"),
        (lambda w: bound(w, pdl="0"), TypeError, "pdl is '0'; it must be True or False"),
        (lambda w: bound(w).set(1.0, 3), TypeError, r"set\(\): which is 1.0; it must be an integer"),
        (lambda w: bound(w).set(True, 3), TypeError, r"set\(\): which is True; it must be an integer"),
        (lambda w: kernel.forall("1"), TypeError, "kernel.forall: ntasks is '1'; it must be an integer"),
        (
            lambda w: w.barrier(stream="x"),
            TypeError,
            "stream is 'x'; on the emulator it must be one of Numba's",
        ),
        (lambda w: w.barrier(stream=5), TypeError, "stream is 5; on the emulator"),
        (
            lambda w: w.asnumpy(w.xp.zeros(3), stream="x"),
            TypeError,
            "stream is 'x'; on the emulator it must be one of Numba's",
        ),
        (lambda w: w.asnumpy(None), TypeError, "asnumpy\\(\\): array is None; it must be a NumPy array"),
        (lambda w: w.asnumpy([1, 2]), TypeError, "asnumpy\\(\\): array is a list; it must be a NumPy array"),
        (lambda w: w.check_reach("x", ranks=[5]), ValueError, "check_reach\\(\\): rank is 5; it must be 0"),
        (
            lambda w: w.check_reach("x", ranks="a"),
            TypeError,
            "check_reach.*: rank is 'a'; it must be an integer",
        ),
        (lambda w: w.locate(5), RuntimeError, "locate\\(\\) is for GPUs only"),
        (lambda w: sk.AllReduce(w, True), TypeError, "AllReduce: max_nbytes is True; it must be an integer"),
        (
            lambda w: sk.Broadcast(w, 64, root=True),
            TypeError,
            "Broadcast: root is True; it must be",
        ),
        (lambda w: sk.Gather(w, "8"), TypeError, "Gather: max_nbytes is '8'; it must be an integer"),
        (lambda w: sk.matmul([[1.0]], np.ones((1, 1))), TypeError, "Gemm: x is a list; it must be a NumPy"),
        (lambda w: sk.matmul(np.ones((1, 1)), None), TypeError, "Gemm: w is None; it must be a"),
    ],
)
def test_bad_calls(call, error, message):
    with sk.init("emulator") as world, pytest.raises(error, match=message):
        call(world)


@pytest.mark.parametrize(
    "arguments, error, message",
    [
        ({"args": "ab"}, TypeError, "args is 'ab'; it must be a tuple of main's arguments"),
        ({"args": 5}, TypeError, "args is 5; it must be a tuple of main's arguments"),
        ({"local_size": True}, TypeError, "local_size is True; it must be an integer"),
        ({"local_size": "1"}, TypeError, "local_size is '1'; it must be an integer"),
        ({"seed": True}, TypeError, "seed is True; it must be an integer or None"),
        ({"choice": 5}, TypeError, "choice is 5; it must be an Exploration's"),
    ],
)
def test_bad_calls_of_run(arguments, error, message):
    with pytest.raises(error, match=message):
        sk.emu.run(lambda *_: None, 1, **arguments)


@untyped
def test_what_a_wait_is_given_instead():
    @cuda.jit
    def waits(flags, which):
        if which == 0:
            sk.device.wait(flags, 1, "sys", "release", 0)
        else:
            sk.device.notify(flags, 0, 1, "set", "inter_node")

    with sk.init("emulator") as world:
        flags = sk.signals(1)
        for which, message in enumerate(("release.*notify\\(\\) releases", "put_signal\\(\\) and signal_op")):
            with pytest.raises(sk.emu.EmulatorError, match=message):
                waits[1, 1, world.stream](flags, which)
                world.synchronize()
