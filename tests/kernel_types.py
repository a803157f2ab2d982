"""The types of kernels' arguments, as operations bind them.

    python tests/kernel_types.py      records them anew, in tests/kernel_types.json

It binds what ``shmemkit check`` runs, on 2 ranks of the emulator and on 2 nodes of 2 ranks, and launches
nothing. So a module only names its kernels, and how arrays differ from what was recorded:

    GPU_KERNELS = {
        "barrier": barrier_kernel,
        "ring[uint8]": (ring_kernel("sum", "float16"), {"x out": "uint8"}),  # dtypes of arrays, or types
        "float32": (kernel_of("float32"), {"operands.3": "float32"}),        # of element 3 of a tuple
        "multimem": (multimem_kernel, {}, (9, 0)),                           # the oldest GPU that has it
        "read_clock": (read_clock, (types.uint64[::1],)),                    # no operation binds it
    }
"""

import contextlib
import functools
import inspect
import json
import sys
from pathlib import Path
from unittest import mock

from numba.cuda import types
from numba.cuda.core.sigutils import normalize_signature

FILE = Path(__file__).resolve().with_suffix(".json")


# ---- of a table


def listed(module):
    """-> {name: (kernel, types of its arguments, the oldest GPU)} of a module's GPU_KERNELS"""
    least, found = getattr(module, "MINIMUM_CC", (8, 0)), {}
    for name, entry in getattr(module, "GPU_KERNELS", {}).items():
        kernel, given, cc, *_ = (*(entry if isinstance(entry, tuple) else (entry, {})), least)
        found[name] = kernel, types_of(kernel, given), cc
    return found


def types_of(kernel, given):
    """-> the types of a kernel's arguments: `given` is what a table has of it"""
    if not isinstance(given, dict):
        return normalize_signature(given)[0]
    name, replaced = name_of(kernel), set()
    for line in _read().get(name, ()):
        kinds = dict(zip(_parameters(kernel), _parsed(line), strict=True))
        for names, kind in given.items():
            for each in names.split():
                each, _, at = each.partition(".")
                if isinstance(kind, str):
                    kinds[each] = _of_dtype(kinds[each], getattr(types, kind), at)
                else:
                    kinds[each] = kind
        replaced.add(tuple(kinds.values()))
    if len(replaced) != 1:
        raise ValueError(
            f"{name} is recorded with {len(replaced)} kinds of arguments besides {given}; say which arrays "
            f"differ, or record it again by python tests/{Path(__file__).name}: {sorted(map(str, replaced))}"
        )
    return replaced.pop()


def _of_dtype(kind, dtype, at):
    """An array's type with another dtype; of a tuple, that of element number `at`."""
    if not at:
        return kind.copy(dtype=dtype)
    return types.Tuple([k.copy(dtype=dtype) if i == int(at) else k for i, k in enumerate(kind)])


def name_of(kernel):
    return f"{kernel.py_func.__module__}.{kernel.py_func.__qualname__}".replace(".<locals>", "")


def _parameters(kernel):
    return inspect.signature(kernel.py_func).parameters


@functools.cache
def _read():
    return json.loads(FILE.read_text())


@functools.cache
def _parsed(line):
    return eval(f"({line},)", {**vars(types), "bool": types.boolean, "__nv_bfloat16": types.bfloat16})


# ---- recording


def recorded():
    """-> {kernel: [types of its arguments, as text]}, as the file has them"""
    import shmemkit as sk
    from shmemkit.emu.stream import Stream
    from shmemkit.runtime.launch import Launch

    found, init = {}, Launch.__init__

    def noting(launch, *given):
        init(launch, *given)
        kinds = ", ".join(map(_written, launch._types))
        if launch.kernel.py_func.__module__.startswith("shmemkit."):
            found.setdefault(name_of(launch.kernel), set()).add(kinds)

    nothing = mock.patch.object(Stream, "enqueue", lambda *_: None)
    with mock.patch.object(Launch, "__init__", noting), nothing:
        for n_ranks in (2, 4):
            sk.emu.run(_bind_all, n_ranks, local_size=2, races=False)
    return {name: sorted(found[name]) for name in sorted(found)}


def _bind_all():
    """The cases of a check, of each method one, and one of float8."""
    import shmemkit as sk
    from shmemkit.tools.check import plan
    from shmemkit.tools.check.subjects import Arrays

    world, done = sk.init(), set()
    for case in plan.cases(world):
        if (key := (case.of, case.method, case.variant, "float8" in case.dtype)) not in done:
            done.add(key)
            with contextlib.suppress(ValueError):  # what several nodes, or one, cannot do
                made = case.make(world, Arrays(world))
                for subject in made.subjects:
                    subject.enqueue(subject.inputs(0), subject.outputs())
                made.free()


def _written(kind):
    if isinstance(kind, types.BaseTuple):
        return f"Tuple(({''.join(f'{_written(each)}, ' for each in kind)}))"
    if not isinstance(kind, types.Array):
        return str(kind)
    steps = [":"] * kind.ndim
    if kind.layout != "A":
        steps[0 if kind.layout == "F" else -1] = "::1"
    return f"{kind.dtype}[{', '.join(steps)}]"


if __name__ == "__main__":
    sys.path.insert(0, str(FILE.parents[1]))
    FILE.write_text(json.dumps(recorded(), indent=1) + "\n")
