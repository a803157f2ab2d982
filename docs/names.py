"""Write what follows from the folders of the collectives: their names in shmemkit/__init__.pyi, their
methods' in shmemkit/typing.py, and their entries in README, docs/reference and docs/bench.md.

python docs/names.py           rewrite them
python docs/names.py --check   exit status 1 if one is out of date
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
METHODS_OF_OBJECTS = "__call__", "free", "output", "method_for"
BEFORE, AFTER = "# Of collectives: docs/names.py writes them.\n", "# Of others.\n"


def declared():
    """-> {"all_gather": the names of its methods}, of the folders that have METHODS. They are read and not
    imported, since they import what is written here."""
    found = {}
    for path in sorted(ROOT.glob("shmemkit/collectives/*/__init__.py")):
        for statement in ast.parse(path.read_text()).body:
            match statement:
                case ast.Assign([ast.Name("METHODS")], ast.Dict(keys)):
                    found[path.parent.name] = [ast.literal_eval(key) for key in keys if key]
    return found


def kind(op):
    return op.title().replace("_", "")


def between(text, before, after, new):
    """`text` with `new` between the first `before` and the first `after` that follows."""
    head, found, rest = text.partition(before)
    _, end, tail = rest.partition(after)
    if not (found and end):
        raise ValueError(f"there is no {after!r} behind {before!r}")
    return head + before + new + after + tail


def stub(text):
    lines = re.findall(r"^from \.collectives\..*\n", text, re.M)
    mine = {f".collectives.{op} import {name} as {name}\n" for op in declared() for name in (kind(op), op)}
    wanted = {*lines, *(f"from {line}" for line in mine)}
    return text.replace("".join(lines), "".join(sorted(wanted, key=lambda line: line.split()[1::2])))


def aliases(text):
    return between(text, BEFORE, AFTER, "".join(alias(op, names) for op, names in declared().items()))


def alias(op, names):
    """As ruff formats it."""
    begin, words = f"{kind(op)}Method: TypeAlias = Literal[", [f'"{name}"' for name in ("auto", *names)]
    line = ", ".join(words)
    if len(begin + line) < 110:
        return f"{begin}{line}]\n"
    return f"{begin}\n    " + (line if len(line) < 107 else ",\n    ".join(words) + ",") + "\n]\n"


def reference(text):
    objects, functions = "", ""
    for op in declared():
        of = "".join(f"   .. automethod:: {name}\n" for name in METHODS_OF_OBJECTS)
        objects += f".. autoclass:: {kind(op)}\n\n{of}\n"
        functions += f".. autofunction:: {op}\n"
    text = between(text, ".. currentmodule:: shmemkit\n\n", ".. autoclass:: AllReduceRMSNorm", objects)
    head, title, tail = text.partition("## Functions")
    return head + title + between(tail, "shmemkit\n\n", ".. autofunction:: attention_combine", functions)


def types(text):
    new = "".join(f".. autodata:: {kind(op)}Method\n" for op in declared())
    return between(text, ".. autodata:: AttentionForm\n", ".. autodata:: AllReduceRMSNormMethod\n", new)


def commands(text):
    *others, last = (f"`{op}`" for op in declared())
    return between(text, "## Collectives\n\n", " measure every method", f"{', '.join(others)} and {last}")


def readme(text):
    new = ", ".join(op.replace("_", "-") for op in declared())
    return between(text, "CuPy arrays and PyTorch tensors: ", "; in CUDA graphs", new)


FILES = {
    "README.md": readme,
    "shmemkit/__init__.pyi": stub,
    "shmemkit/typing.py": aliases,
    "docs/reference/collectives.md": reference,
    "docs/reference/types.md": types,
    "docs/bench.md": commands,
}


def main(check):
    stale = []
    for name, written in FILES.items():
        path = ROOT / name
        text = path.read_text()
        if (new := written(text)) != text:
            stale.append(name)
            if not check:
                path.write_text(new)
    if stale:
        print(f"{'out of date' if check else 'written'}: {', '.join(stale)}")
    return check and bool(stale)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] == ["--check"]))
