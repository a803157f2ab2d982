"""Run the pages of the tutorial, and make notebooks of them.

python docs/notebooks.py            run all pages; write what their cells print, and the notebooks
python docs/notebooks.py 1_hello    that page alone

A page is Markdown. Its blocks ```python are cells. A block ```output has what the cell above it has
printed. It is written here and never by hand. The notebook beside the page has the same text, cells and
outputs. Its links lead to GitHub, so that it can be copied anywhere. Needs the extra `notebook`.
"""

import re
import sys
import tempfile
from pathlib import Path

from page_links import links_to_github

TUTORIAL = Path(__file__).resolve().parent / "tutorial"
PAGES = sorted(TUTORIAL.glob("[0-9]*.md"))
CELL = re.compile(r"```python\n(.*?)\n```\n(?:\n```output\n(.*?)\n```\n)?", re.S)


def cells(text):
    """[(code, what it printed)] of a page."""
    return [(code, printed) for code, printed in CELL.findall(text)]


def run(page):
    """-> (text of the page, text of its notebook), with what the cells print now. A cell that fails raises
    nbclient.exceptions.CellExecutionError."""
    import nbformat
    from nbclient import NotebookClient

    new, prose = nbformat.v4, CELL.sub("\0", page.read_text()).split("\0")
    notebook = new.new_notebook(metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}})
    for i, (text, (code, _)) in enumerate(zip(prose, [*cells(page.read_text()), ("", "")], strict=True)):
        if text.strip():
            text = links_to_github(text.strip(), page)
            notebook.cells.append(new.new_markdown_cell(text, id=f"text-{i}"))
        if code:
            notebook.cells.append(new.new_code_cell(code, id=f"code-{i}"))
    with tempfile.TemporaryDirectory() as empty:
        NotebookClient(notebook, timeout=120, record_timing=False, coalesce_streams=True).execute(cwd=empty)
    del notebook.metadata["language_info"]  # which Python it was

    ran = iter([cell for cell in notebook.cells if cell.cell_type == "code"])

    def with_output(found):
        printed = "".join(output.text for output in next(ran).outputs)
        shown = f"\n```output\n{printed.rstrip()}\n```\n" if printed else ""
        return f"```python\n{found[1]}\n```\n{shown}"

    return CELL.sub(with_output, page.read_text()), nbformat.writes(notebook) + "\n"


if __name__ == "__main__":
    for page in [TUTORIAL / f"{name}.md" for name in sys.argv[1:]] or PAGES:
        for path, text in zip((page, page.with_suffix(".ipynb")), run(page), strict=True):
            path.write_text(text)
