"""What an installed shmemkit has beside its modules. ``.ci/run`` tries a wheel where there is no checkout."""

import sys
from importlib.metadata import entry_points

import pytest


@pytest.mark.parametrize("name", ["bench", "emu"])
def test_a_console_script_shows_the_name_it_was_started_by(name, monkeypatch, capsys):
    (script,) = entry_points(group="console_scripts", name=f"shmemkit-{name}")
    main = script.load()
    by_module = f"/shmemkit/{name}/__main__.py", f"python -m shmemkit.{name}"
    for started, expected in ((f"/bin/shmemkit-{name}", f"shmemkit-{name}"), by_module):
        monkeypatch.setattr(sys, "argv", [started])
        with pytest.raises(SystemExit) as ended:
            main(["--help"])
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith(f"usage: {expected} ")
