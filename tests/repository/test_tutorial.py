"""The tutorial: its cells print what its pages show, its notebooks are its pages, its kernels compile."""

import contextlib
import io
import linecache
import re
import sys

import pytest
from fast import slow
from numba import float32, int64, uint64
from pages import ROOT
from ptx import compile_ptx, resources

sys.path.insert(0, str(ROOT / "docs"))

import notebooks  # noqa: E402

PAGES = {page.stem: page for page in notebooks.PAGES}
HOPPER = (9, 0, "a")
# The kernel that a page ends with, and its arguments.
KERNELS = {
    "1_hello": ("send", (int64[::1],)),
    "2_wait_and_notify": ("greet", (int64[::1], uint64[::1], int64[::1])),
    "3_blocks": ("shift", (int64[::1], int64[::1], uint64[::1], int64[::1])),
    "4_back_pressure": ("pipeline", (int64[::1], uint64[::1], uint64[::1], int64[::1])),
    "5_halo_exchange": ("simulate", (float32[:, :, ::1], uint64[::1], int64)),
    "6_a_collective_of_your_own": (
        "all_reduce",
        (uint64[::1], uint64[::1], uint64[:, :, ::1], int64[::1]),
    ),
    "7_from_emulator_to_gpus": ("all_reduce", (uint64[::1], uint64[::1], uint64[:, ::1], int64[::1])),
}


def ran(page):
    """-> (what each cell of a page prints, the names it has made), in this process and outside of IPython"""
    names, printed = {}, []
    for i, (code, _) in enumerate(notebooks.cells(page.read_text()), 1):
        file = f"Cell In[{i}]"
        linecache.cache[file] = len(code), None, code.splitlines(keepends=True), file
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(code, file, "exec"), names)
        printed.append(re.sub(r"(Cell In\[\d+\]):(\d+)", r"\1, line \2", output.getvalue().rstrip()))
    return printed, names


@pytest.mark.parametrize(
    "name", ["4_back_pressure", *slow(*(name for name in PAGES if name != "4_back_pressure"))]
)
def test_cells_print_what_the_page_shows(name):
    printed, _ = ran(PAGES[name])
    assert printed == [shown for _, shown in notebooks.cells(PAGES[name].read_text())]


@pytest.mark.parametrize("name", PAGES)
def test_text_quotes_what_is_printed(name):
    """`now 0`, `reads it`: words side by side, and no command, are from an output. "..." is anything."""
    text = PAGES[name].read_text()
    printed = [shown for _, shown in notebooks.cells(text)]
    prose = re.sub(r"```.*?```", "", text, flags=re.S)
    words = re.compile(r"(?!pip |shmemkit )[^(]*\w\]? [a-z][^(]*")
    quotes = [quote for quote in re.findall(r"`([^`\n]+)`", prose) if words.fullmatch(quote)]
    assert quotes
    for quote in quotes:
        wanted = re.escape(quote).replace(re.escape("..."), ".*")
        assert any(re.search(wanted, shown) for shown in printed), quote


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_notebook_and_page_are_what_runs(name):
    pytest.importorskip("nbclient")
    page = PAGES[name]
    text, notebook = notebooks.run(page)
    assert text == page.read_text(), "run python docs/notebooks.py"
    assert notebook == page.with_suffix(".ipynb").read_text(), "run python docs/notebooks.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", PAGES)
def test_kernels_compile_for_gpus(name):
    kernel, types = KERNELS[name]
    ptx = compile_ptx(ran(PAGES[name])[1][kernel], types, HOPPER)
    assert ".f64" not in ptx  # Numba's sum of signed and unsigned integers
    assert resources(ptx, HOPPER).spills == 0
