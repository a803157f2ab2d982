"""What notebooks are told: lines by their cells, errors without our own frames, cells that
fail, and tables."""

import html
import re
import sys

from .tracebacks import is_ours, is_shown_whole

_OLD_NAME = re.compile(r"<ipython-input-(\d+)-")


def shell():
    """IPython's, or None where there is none."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def cell_of(file):
    """ "Cell In[4]" if `file` is the code of that cell, else None."""
    running = shell()
    name = getattr(getattr(running, "compile", None), "format_code_name", lambda file: None)(file)
    if name is not None:
        return " ".join(name)
    old = _OLD_NAME.match(file)
    return old and f"Cell In[{old[1]}]"


def hide_our_frames():
    """From now on, IPython shows tracebacks without the frames of shmemkit. (It leaves out functions with
    this local variable.) Whoever has a handler of their own keeps it."""
    running = shell()
    if running is not None and not running.custom_exceptions:
        running.set_custom_exc((Exception, KeyboardInterrupt), _show)


def _show(running, kind, error, trace, tb_offset=None):
    from .host_program import (
        current_world,
    )  # not above: mpi_launch.sh reads options where greenlet is missing

    world, reported_by = current_world(), getattr(error, "reported_by", None)
    if world is not None and reported_by not in (None, world.rank):  # all ranks raise it, one shows it whole
        text = f"{kind.__name__}: {error}".partition("\n")[0]
        error._render_traceback_ = lambda: [f"{text} (rank {reported_by} shows more)"]
    if not is_shown_whole():
        _hide(error, set())
    running.showtraceback((kind, error, trace), tb_offset=tb_offset)


def _hide(error, seen):
    if error is None or error in seen:
        return
    seen.add(error)
    entry, theirs = error.__traceback__, None
    while entry is not None:
        if is_ours(entry.tb_frame.f_code.co_filename):
            entry.tb_frame.f_locals["__tracebackhide__"] = True
        else:
            theirs = entry
        entry = entry.tb_next
    if theirs is not None:
        theirs.tb_next = None  # the innermost frame is shown in any case
    _hide(error.__cause__, seen)
    _hide(error.__context__, seen)


def watch_cells(ended):
    """Call ``ended(error)`` when a cell has failed, ``ended(None)`` when one begins. -> what ends that"""
    running = shell()
    if running is None:
        return lambda: None

    def before():
        ended(None)

    def after():
        result = running.last_execution_result
        error = getattr(result, "error_in_exec", None)
        if error is not None:
            ended(error)

    running.events.register("pre_execute", before)
    running.events.register("post_execute", after)

    def end():
        running.events.unregister("pre_execute", before)
        running.events.unregister("post_execute", after)

    return end


def html_table(head, rows):
    """A table of texts for ``_repr_html_``, in the notebook's style. The last column is code."""
    left = "style='text-align: left'"
    titles = "".join(f"<th {left}>{html.escape(title)}</th>" for title in head)
    lines = ""
    for row in rows:
        *cells, code = (html.escape(str(cell)) for cell in row)
        lines += "<tr>" + "".join(f"<td {left}>{cell}</td>" for cell in cells)
        lines += f"<td {left}><code>{code}</code></td></tr>"
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table>"


def html_text(head, text="", more=""):
    """A line in bold, and behind it a text as it is; `more` is HTML between them."""
    text = f"<pre style='white-space: pre-wrap'>{html.escape(text)}</pre>" if text else ""
    return f"<div style='margin-top: 1em'><b>{html.escape(head)}</b></div>{more}{text}"
