"""The notebook of several ranks runs, and its cells show what is stored in it."""

import re

import pytest
from launched import ROOT, needs_mpi

NOTEBOOK = ROOT / "examples" / "several_ranks.ipynb"


def shown(cell):
    """The lines that a cell shows, in no order: that of ranks that print is not certain. Without those of
    ipyparallel, and without colours."""
    text = ""
    for output in cell.outputs:
        for kind in output.get("data", {}).get("text/plain", ""), output.get("text", ""):
            text += f"{kind}\n"
        text += "\n".join(output.get("traceback", ()))
    text = re.sub(r"\x1b\[[\d;]*m", "", text)
    return sorted(line for line in text.splitlines() if line.strip())


@needs_mpi
@pytest.mark.slow
def test_cells_show_what_is_stored(tmp_path):
    pytest.importorskip("ipyparallel")
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    stored, run = nbformat.read(NOTEBOOK, 4), nbformat.read(NOTEBOOK, 4)
    client = nbclient.NotebookClient(run, timeout=100, kernel_name="python3")
    client.execute(cwd=tmp_path)  # raises what a cell raises that is not marked as such
    cells = [(old, new) for old, new in zip(stored.cells, run.cells, strict=True) if old.cell_type == "code"]
    for old, new in cells:
        if "interrupt()" in old.source:  # which rank hears of which first is not certain
            assert "KeyboardInterrupt: " in shown(new)
        else:
            assert shown(new) == shown(old), old.source
    (deadlock,) = [new for _, new in cells if "wait_first" in new.source]
    lines = shown(deadlock)
    assert sum(line.startswith("DeadlockError: deadlock: no rank can go on") for line in lines) == 4
    assert sum("waits for arrived[0]" in line for line in lines) == 4  # one report
