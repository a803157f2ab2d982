"""In notebooks: lines are those of cells, our own frames are hidden."""

import html
import subprocess
import sys
import textwrap
import types

import pytest
from numba import cuda

import shmemkit as sk
from shmemkit.emu.report import shown_line


@pytest.mark.parametrize(
    "file, shown",
    [("/tmp/ipykernel_7/123.py", "Cell In[4], line 6"), ("<ipython-input-12-0a1b>", "Cell In[12], line 6")],
)
def test_lines_of_cells(file, shown, monkeypatch):
    names = {"/tmp/ipykernel_7/123.py": ("Cell", "In[4]")}
    shell = types.SimpleNamespace(compile=types.SimpleNamespace(format_code_name=names.get))
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    assert shown_line(file, 6) == f"{shown}: "
    assert shown_line("other.py", 6) == "other.py:6: "


def test_an_exploration_is_shown_as_its_report():
    found = sk.emu.explore(lambda: sk.init().rank, 2, seeds=range(1), deliveries="eager")
    assert repr(found) == str(found) and repr(found).startswith("explored 1 schedule: no deadlock")


@pytest.mark.processes(1)
def test_in_ipython():
    """A kernel that fails and a wrong argument: cells are shown, frames of shmemkit are not."""
    pytest.importorskip("IPython")
    cells = """
    from IPython.core.interactiveshell import InteractiveShell
    shell = InteractiveShell.instance()
    shell.colors = "nocolor"
    for cell in (
        "import shmemkit as sk\\nfrom numba import cuda",
        "@cuda.jit\\ndef kernel(x):\\n    x[cuda.threadIdx.x] = 1",
        "def main():\\n    sk.init()\\n    kernel[1, 4](sk.zeros(2))",
        "sk.emu.run(main, 2)",
        "world = sk.init('emulator')\\nsk.zeros(-1)",
    ):
        shell.run_cell(cell, store_history=True)
    """
    command = [sys.executable, "-c", textwrap.dedent(cells)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    shown = result.stdout + result.stderr
    assert "rank 0 block 0 thread 2 at Cell In[2], line 3: x[cuda.threadIdx.x] = 1 in kernel kernel" in shown
    assert "shape is -1; it must be an integer of 0 or more" in shown
    assert "scheduler.py" not in shown and "memory.py" not in shown, shown


@cuda.jit
def stores_unordered(x):
    if sk.device.rank() < 1:
        sk.device.symm_at(x, 1)[0] = 3 << 1
    else:
        x[0] = 2 << 1


def test_an_exploration_shows_its_race_as_tables():
    def main():
        world = sk.init()
        stores_unordered[1, 1, world.stream](sk.zeros(1, "int64", name="x"))
        world.synchronize()

    found = sk.emu.explore(main, 2, seeds=[7], deliveries="eager")
    shown = found._repr_html_()
    for cell in ("RaceError in the last one", "7", "stores_unordered"):
        assert f">{cell}</td>" in shown
    for source in ("symm_at(x, 1)[0] = 3 &lt;&lt; 1", "x[0] = 2 &lt;&lt; 1"):
        assert f"{source}</code>" in shown
    (race,) = found.failure.races
    assert race._repr_html_() in shown
    assert html.escape(race.missing) in race._repr_html_() and "race on x[0] on rank 1" in race._repr_html_()
    assert "the same again: delivery=&#x27;eager&#x27;, seed=7" in shown


@cuda.jit
def waits(flags):
    sk.device.wait(flags, 1, "sys", "acquire", 1)


def test_an_exploration_shows_its_deadlock_and_that_there_is_none():
    def main():
        world = sk.init()
        waits[1, 1, world.stream](sk.signals(1))
        world.synchronize()

    found = sk.emu.explore(main, 2, seeds=range(1), deliveries="eager")
    assert "<b>DeadlockError: deadlock: no rank can go on</b>" in found._repr_html_()
    assert "sk.device.wait(flags, 1, " in found._repr_html_()
    clean = sk.emu.explore(lambda: sk.init().rank, 2, seeds=range(1), deliveries="eager")
    assert f"<b>{clean}</b>" in clean._repr_html_()
