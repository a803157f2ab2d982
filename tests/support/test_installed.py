"""Which packages and which driver are installed."""

import numpy as np
import pytest

from shmemkit.support import installed


def test_versions():
    assert installed.versions(["numpy", "no-such-package"]) == {"numpy": np.__version__}


@pytest.mark.parametrize(
    ("text", "release"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.154.05  Thu Dec 28 15:37:48 UTC 2023",
            "535.154.05",
        ),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build", "580.65.06"),
        ("", None),
    ],
)
def test_the_driver(text, release, tmp_path, monkeypatch):
    (tmp_path / "version").write_text(f"{text}\nGCC version:  gcc version 11.4.0\n" if text else "")
    monkeypatch.setattr(installed, "DRIVER", str(tmp_path / "version"))
    assert installed.driver_release() == release


def test_no_driver(tmp_path, monkeypatch):
    monkeypatch.setattr(installed, "DRIVER", str(tmp_path / "version"))
    assert installed.driver_release() is None
