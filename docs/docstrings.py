"""Docstrings as reStructuredText, for the reference.

A docstring's line of a name, two spaces or more, and text describes an argument, and the lines below it that
are indented belong to it. Other indented lines are code. Single backticks are around names. An arrow says
what a function returns.
"""

import importlib
import inspect
import re
from textwrap import dedent

ARGUMENT = re.compile(r"(\S+(?: \S+)*?)  +(\S.*)")
ITEM = re.compile(r"(?:[-*]|\d+\.) ")
MARKED = re.compile(r"(``.+?``|`[^`]+`|\bdocs/\w+\.md\b)", re.S)
PACKAGES = ("shmemkit.device", "shmemkit.emu", "shmemkit.notebook", "shmemkit")


def prose(lines, linked):
    """-> the lines of a paragraph or list, with links for the names in `linked`"""
    parts = MARKED.split("\n".join(lines))
    for i, part in enumerate(parts):
        if part.startswith("``"):
            parts[i] = part
        elif part.startswith("docs/"):
            parts[i] = f":doc:`/{part[5:-3]}`"
        elif i % 2:
            parts[i] = f":py:obj:`{part[1:-1]}`" if part[1:-1] in linked else f"`{part}`"
        else:
            part = re.sub(r"(^|[.:]\s)-> ", r"\1Returns ", part, flags=re.M)
            parts[i] = re.sub(r"([\\*_|`])", r"\\\1", part)
        if i % 2 and re.match(r"[\w(\[]", parts[i + 1]):
            parts[i] += "\\ "  # markup ends before a blank or a punctuation mark
    return "".join(parts).splitlines()


def blocks(lines):
    """-> (kind, lines) of the paragraphs, pieces of code and arguments, one after another."""
    i = 0
    while i < len(lines):
        end = i + 1
        if not lines[i].strip():
            i = end
            continue
        argument = ARGUMENT.fullmatch(lines[i]) if not ITEM.match(lines[i]) else None
        code = lines[i].startswith(" ")
        if code:
            kind, inside = "code", 1  # indentation of what belongs to it
        elif argument:
            kind, inside = "argument", argument.start(2)
        else:
            kind, inside = "prose", 0
        while end < len(lines):
            following = next((line for line in lines[end:] if line.strip()), "")
            indent = len(following) - len(following.lstrip())
            if lines[end].strip():
                belongs = kind == "prose" or indent > 0
            else:
                belongs = kind != "prose" and indent >= inside
            if not belongs:
                break
            end += 1
        yield kind, lines[i:end]
        i = end


def converted(lines, linked):
    """-> the lines of a docstring as reStructuredText"""
    done = []
    for kind, block in blocks(lines):
        if kind == "code":
            done += ["::", "", *(f"    {line}".rstrip() for line in block), ""]
        elif kind == "prose":
            done += [*prose(block, linked), ""]
        else:
            name, text = re.split("  +", block[0], maxsplit=1)
            rest = dedent("\n".join(block[1:])).splitlines()
            nested = next((i for i, line in enumerate(rest) if ARGUMENT.fullmatch(line.strip())), len(rest))
            body = [text, *(line.strip() for line in rest[:nested])]
            inner = dedent("\n".join(rest[nested:])).splitlines()
            body = converted(body, linked) + converted(inner, linked)
            done += [
                "returns" if name == "->" else f"``{name}``",
                *(f"    {line}".rstrip() for line in body),
                "",
            ]
    return done


def process(app, kind, name, of, options, lines):
    package = next(package for package in PACKAGES if name.startswith(package))
    linked = set(importlib.import_module(package).__all__)
    if callable(of):
        linked -= {*getattr(inspect.unwrap(of), "__annotations__", ())}
    lines[:] = converted(lines, linked)


def signature(app, kind, name, of, options, arguments, result):
    """An alias beside others is its name, too, also NumPy's."""

    def named(text):
        text = text and re.sub(r"TypeAliasForwardRef\('(\w+)'\)", r"\1", text)
        return text and re.sub(r"_Buffer \| .*?_NestedSequence\[complex .*?\]", "ArrayLike", text)

    return named(arguments), named(result)


def setup(app):
    app.connect("autodoc-process-docstring", process)
    app.connect("autodoc-process-signature", signature)
    return {"parallel_read_safe": True}
