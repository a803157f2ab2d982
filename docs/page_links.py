"""Links of pages to files beside docs/, as ``../examples/00_hello.py``, lead to GitHub on the site."""

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPOSITORY = "https://github.com/shmemkit/shmemkit"


def links_to_github(text, page, beginning=""):
    """`text` of `page`, whose relative links that begin with `beginning` lead to GitHub."""

    def link(found):
        target, _, anchor = found[1].partition("#")
        path = os.path.relpath(page.parent / target, ROOT)
        kind = "tree" if (ROOT / path).is_dir() else "blob"
        return f"]({REPOSITORY}/{kind}/main/{path}{'#' if anchor else ''}{anchor})"

    return re.sub(rf"\]\((?!https?:)({re.escape(beginning)}[^)]*)\)", link, text)


def to_github(app, docname, source):
    outside = "../" * (1 + docname.count("/"))
    source[0] = links_to_github(source[0], Path(app.env.doc2path(docname)), outside)


def setup(app):
    app.connect("source-read", to_github)
    return {"parallel_read_safe": True}
