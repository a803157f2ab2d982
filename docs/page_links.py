"""Links of pages to files beside docs/, as ``../examples/00_hello.py``, lead to GitHub on the site."""

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/shmemkit/shmemkit"


def to_github(app, docname, source):
    folder = Path(app.env.doc2path(docname)).parent

    def link(found):
        target, _, anchor = found[1].partition("#")
        path = os.path.relpath(folder / target, ROOT)
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"]({REPOSITORY}/{kind}/main/{path}{'#' if anchor else ''}{anchor})"

    outside = "../" * (1 + docname.count("/"))
    source[0] = re.sub(rf"\]\(({re.escape(outside)}[^)]*)\)", link, source[0])


def setup(app):
    app.connect("source-read", to_github)
    return {"parallel_read_safe": True}
