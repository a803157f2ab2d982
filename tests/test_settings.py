"""Switches in the environment."""

import pytest

import shmemkit as sk
from shmemkit import jit_cache
from shmemkit.settings import switch


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
    with pytest.raises(ValueError, match=f"SHMEMKIT_RACES='{text}': 1, true, yes, on, 0, false, no, off are"):
        sk.emu.run(lambda: None, 1)
    with pytest.raises(ValueError, match="SHMEMKIT_RACES"):
        sk.init("emulator")
    sk.emu.run(lambda: None, 1, races=False)
    monkeypatch.setenv("SHMEMKIT_CACHE", text)
    with pytest.raises(ValueError, match="SHMEMKIT_CACHE"):
        jit_cache.folder()


@pytest.mark.parametrize("races", ["yes", "0", [], 2])
def test_the_argument(races):
    with pytest.raises(TypeError, match="races=.*: True, False or None is allowed"):
        sk.emu.run(lambda: None, 1, races=races)
