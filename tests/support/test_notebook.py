"""In notebooks: lines are those of cells, our own frames are hidden."""

import subprocess
import sys
import textwrap
import types

import pytest

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
