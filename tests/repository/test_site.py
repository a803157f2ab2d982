"""The site: its reference has all public names, three clicks away, and pages are short."""

import importlib
import inspect
import re
import typing

from pages import ROOT

import shmemkit as sk
import shmemkit.typing
from shmemkit.device import swizzle

DOCS = ROOT / "docs"
PACKAGES = (sk, sk.comm, sk.device, sk.kernels, sk.emu, sk.notebook, swizzle)


def pages_from(page):
    """The pages that a page links to."""
    links = re.findall(r"\]\(([\w/.]+\.md)", page.read_text())
    return {(page.parent / link).resolve() for link in links}


def documented(page):
    """{module.name} of the names that a page of the reference describes."""
    found, module = set(), None
    for what, name in re.findall(r"^\.\. ([\w:]+):: ([\w.]+)$", page.read_text(), re.M):
        if what == "currentmodule":
            module = name
        elif what.startswith(("auto", "py:")):
            found.add(name if what == "automodule" else f"{module}.{name}")
    return found


def test_reference_has_every_public_name_three_clicks_from_the_first_page():
    (index,) = (page for page in pages_from(DOCS / "index.md") if page == DOCS / "reference" / "index.md")
    found = set().union(*map(documented, pages_from(index)))
    public = {f"{package.__name__}.{name}" for package in PACKAGES for name in package.__all__}
    types = [name for name in vars(shmemkit.typing).keys() - vars(typing).keys() if name[0].isupper()]
    public |= {f"shmemkit.typing.{name}" for name in types}
    parts = {name for name in found if name.startswith("shmemkit.collectives.")}
    assert found - parts == public | {"shmemkit.device.swizzle", "shmemkit.typing"}


def test_pages_are_reached_from_the_first_page():
    seen, new = set(), {DOCS / "index.md"}
    while new:
        seen |= new
        new = {page for of in new if DOCS in of.parents for page in pages_from(of)} - seen
    assert set(DOCS.rglob("*.md")) <= seen


def test_docstrings_become_lists_of_arguments_code_and_links(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    written = importlib.import_module("docstrings").converted
    docstring = """Wait for `n` of ``x[*]``, as `notify` says. -> a token

    n      how many
           of them
             deep   a name inside
    ->     the value

        wait(n)

    See docs/timeouts.md: a * b_ is text.
    """
    assert [line for line in written(inspect.cleandoc(docstring).splitlines(), {"notify"}) if line] == [
        "Wait for ``n`` of ``x[*]``, as :py:obj:`notify` says. Returns a token",
        "``n``",
        "    how many",
        "    of them",
        "    ``deep``",
        "        a name inside",
        "returns",
        "    the value",
        "::",
        "        wait(n)",
        "See :doc:`/timeouts`: a \\* b\\_ is text.",
    ]


def test_pages_are_short():
    """But tables, pages that tables.py writes, and those of autodoc, whose text is elsewhere."""
    by_hand = [page for page in DOCS.rglob("*.md") if page.parent.name not in ("results", "reference")]
    by_hand.remove(DOCS / "evaluation.md")
    texts = {page.name: re.sub(r"^\|.*$", "", page.read_text(), flags=re.M) for page in by_hand}
    words = {name: len(text.split()) for name, text in texts.items()}
    assert {page: n for page, n in words.items() if n > 2500} == {}
