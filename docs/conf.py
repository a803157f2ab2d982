"""The site: ``python -m sphinx -W docs build/site``. The pages are Markdown, and are read on GitHub, too."""

import sys
import typing
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path[:0] = [str(DOCS), str(DOCS.parent)]  # docstrings.py, and this shmemkit, installed or not

import shmemkit  # noqa: E402
import shmemkit.typing  # noqa: E402

project = "shmemkit"
author = "shmemkit developers"
release = version = shmemkit.__version__
html_title = f"shmemkit {release}"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "docstrings", "page_links"]
exclude_patterns = ["_build"]
myst_heading_anchors = 4  # as GitHub makes them
myst_enable_extensions = ["attrs_inline", "colon_fence"]

html_theme = "furo"
html_theme_options = {
    "source_repository": "https://github.com/shmemkit/shmemkit/",
    "source_branch": "main",
    "source_directory": "docs/",
}
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
pygments_style, pygments_dark_style = "default", "github-dark"

copybutton_selector = "div:not(.highlight-output) > div.highlight > pre"
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = False

smartquotes = False  # "auto" is an argument

own_types = vars(shmemkit.typing).keys() - vars(typing).keys()
autodoc_type_aliases = {name: name for name in own_types if name[0].isupper()}
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
maximum_signature_line_length = 80
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
