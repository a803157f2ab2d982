"""What the emulator says when something is wrong: places, deadlocks, accesses out of bounds."""

import ast
import functools
import linecache
import os
import re
import sys
import sysconfig
from collections import defaultdict
from typing import Any

import numpy as np

from shmemkit.support.call_site import shown_place

from .device_arrays import address
from .errors import UseAfterFreeError
from .rendezvous import CARRIED_OUT

MAX_LINES = 40  # kinds of waits in a deadlock report, per rank
MOST_ALIKE = 8  # waits of a kind; in a kernel of shmemkit, 1
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_HIDDEN = (
    *(
        os.path.join(_PACKAGE, folder, "")
        for folder in ("backends", "compat", "compiler", "device", "emu", "emulated_scripts")
    ),
    os.path.join(_PACKAGE, "__init__.py"),
)
_LIBRARIES = (_PACKAGE + os.sep, os.path.dirname(np.__file__) + os.sep)
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep


def is_kernel_code(frame):
    return _is_kernel_file(frame.f_code.co_filename)


@functools.cache
def _is_kernel_file(file):
    return not file.startswith(_HIDDEN) and (not file.startswith(_STANDARD_LIBRARY) or "-packages" in file)


def is_user_code(frame):
    """Whether it is neither shmemkit's nor NumPy's."""
    return is_kernel_code(frame) and not frame.f_code.co_filename.startswith(_LIBRARIES)


def _line(frame, lineno=None):
    return shown_line(frame.f_code.co_filename, lineno or frame.f_lineno)


def shown_line(file, lineno):
    """ "file:line: source", or "Cell In[4], line 6: source" """
    return f"{shown_place(file, lineno)}: {linecache.getline(file, lineno).strip()}"


def kernel_frame(frame, is_it=is_kernel_code):
    """The innermost frame of a kernel at or above `frame`; None if there is none, as in copies of streams."""
    while frame is not None and not is_it(frame):
        frame = frame.f_back
    return frame


def kernel_line(frame):
    """Likewise, its "file:line: source"."""
    frame = kernel_frame(frame)
    return None if frame is None else _line(frame)


def user_frame(frame):
    """The innermost frame of the user's code at or above `frame`, or None."""
    return kernel_frame(frame, is_user_code)


def user_line():
    """(file, line number) of the innermost line that runs outside of shmemkit; ("", 0) where there is none,
    as at the end of a program."""
    frame = user_frame(sys._getframe(1))
    return ("", 0) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def user_text(line):
    """What ``user_line`` gave, for reports."""
    return shown_line(*line) if line[0] else "the end of the program"


def use_after_free(allocation, use):
    """-> the error of `use`, as "kernel k is launched with", of memory that was given back"""
    what = allocation.name if allocation.dtype is None else f"{allocation.name} ({allocation.dtype})"
    return UseAfterFreeError(
        f"{use} {what}, which was freed\n  used at {user_text(user_line())}\n"
        f"  freed at {user_text(allocation.freed)}\n"
        "  Free it after its last use; capture a graph again for what replaces freed arrays or objects"
    )


def _kernel_traceback(traceback):
    """The innermost entry of `traceback` that is the user's code."""
    found = None
    while traceback is not None:
        if is_kernel_code(traceback.tb_frame):
            found = traceback
        traceback = traceback.tb_next
    return found


def who(thread, split=False, alone=True) -> Any:
    """ "rank 0 block 1 thread 2", or with `split` the three; if not `alone`, its block."""
    block = thread.block
    index = numbered(block.blockIdx, block.gridDim)
    number = numbered(thread.threadIdx, block.blockDim)
    if not alone:
        return f"rank {thread.pe} block {index}"
    return (thread.pe, index, number) if split else f"rank {thread.pe} block {index} thread {number}"


def numbered(index, size):
    """A block's or thread's number: one in a one-dimensional grid or block, else three."""
    return str(index.x) if size.y == size.z == 1 else f"({index.x}, {index.y}, {index.z})"


def where(thread, traceback):
    """Who raised, and on which line."""
    entry = _kernel_traceback(traceback)
    return who(thread) + (f" at {_line(entry.tb_frame, entry.tb_lineno)}" if entry else "")


def place(machine, thread, at, frame=None, arrays=None):
    """The name of the memory at address `at`, as `thread` knows it: "signals[3] on rank 2". `frame`: where it
    is, if it runs; `arrays`: those of its kernel, if that has ended."""
    launch = thread.block.launch
    pe, offset = machine.located(at)
    local, pe = (at, launch.pe) if pe is None else (at + (launch.pe - pe) * machine.heap_size, pe)
    for name, array in [*(arrays or launch.arrays).items(), *_local_arrays(frame or thread.gr_frame)]:
        first = address(array)
        if array.flags.c_contiguous and first <= local < first + array.nbytes:
            return f"{_element(name, array, (local - first) // array.itemsize)} on rank {pe}"
    if offset is not None:
        heap = machine.heaps[launch.pe]
        a = heap.at(offset) or heap.freed_at(offset)
        if a is not None and a.dtype is not None:
            return f"{a.name}[{(offset - a.offset) // a.dtype.itemsize}] on rank {pe}"
    return f"memory at {at:#x} on rank {pe}"


def other_name(machine, pe, at):
    """ " (rank 0 calls this array inbox)", if `pe` knows the symmetric memory at address `at` by another name
    than the rank whose it is; else "" """
    owner, offset = machine.located(at)
    if not {pe, owner} <= set(machine.heaps):
        return ""
    mine, theirs = (getattr(machine.heaps[r].at(offset), "name", None) for r in (pe, owner))
    return "" if mine == theirs or theirs is None else f" (rank {owner} calls this array {theirs})"


def _local_arrays(frame):
    """(name, array) of the shared and local arrays that the kernel, at `frame`, has in variables."""
    while frame is not None:
        if is_kernel_code(frame):
            for name, value in frame.f_locals.items():
                if isinstance(value, np.ndarray):
                    yield name, value
        frame = frame.f_back


def _element(name, array, flat):
    if array.ndim == 1:
        return f"{name}[{flat}]"
    return f"{name}[{', '.join(str(i) for i in np.unravel_index(flat, array.shape))}]"


def deadlock(machine):
    """Every thread that cannot go on: where it is and what it waits for. Blocks that are stuck alike share a
    line; of those that differ in numbers alone, a few are shown."""
    lines = []
    keys = {w[0]: key for key, waiting in machine.scheduler.waiters.items() for w in waiting}
    for pe in machine.local_pes:
        stuck = defaultdict(list)
        for t in machine.scheduler.live_threads():
            if t.pe == pe:
                why = t.why() if t.why else "the other threads of its block in syncthreads"
                line = kernel_line(t.gr_frame) or "" if t.gr_frame else "its first line (it never ran)"
                if written := machine.writers.text(keys.get(t)):
                    line = f"{line}\n      written so far: {written}"
                stuck[t.block].append((why, line, t))
        groups, kinds, left = defaultdict(list), defaultdict(int), 0
        for block, threads in stuck.items():
            for (why, line), together in _by_reason(threads).items():
                ours = str(block.launch.function.__module__).startswith("shmemkit.")
                most = 1 if ours else MOST_ALIKE
                launch = block.launch
                kernel = launch.name + launch.members.of
                groups[kernel, threads_shown(together), why, line, most].append(
                    numbered(block.blockIdx, block.gridDim)
                )
        for (kernel, threads, why, line, most), blocks in groups.items():
            kind = kernel, re.sub(r"\d+", "", why), line
            kinds[kind] += 1
            if kinds[kind] > most or len(kinds) > MAX_LINES:
                left += 1
                continue
            lines.append(f"  rank {pe} {_blocks(blocks)} {threads} in {kernel}: waits for {why}")
            lines += [f"      {line}"] * bool(line)
        if left:
            lines.append(f"  rank {pe}: and {left} more like {'these' if len(kinds) > 1 else 'this'}")
        for launch in machine.scheduler.launches:
            if launch.pe == pe and launch.to_start:
                waiting = (
                    f"{len(launch.to_start)} of {launch.n_blocks} have not started: {launch.not_resident()}"
                )
                first = numbered(launch.to_start[0][1], launch.grid)
                lines.append(f"  rank {pe} blocks from {first} on, {waiting}")
        host = machine.host_waits.get(pe)
        if host:
            lines.append(f"  rank {pe}: its host program waits for {host()}")
        elif pe in machine.ended:
            lines.append(f"  rank {pe}: its host program has ended")
    return "\n".join(lines)


def _by_reason(stuck):
    """-> {(why, line): threads} of a block; `stuck`: (why, line, thread), ... Threads that wait for the one
    that carries out their operation wait for what it waits for."""
    of_line = defaultdict(set)
    for why, line, _ in stuck:
        if not why.startswith(CARRIED_OUT):
            of_line[line.partition("\n")[0]].add((why, line))
    found = defaultdict(list)
    for why, line, thread in stuck:
        carrier = of_line[line.partition("\n")[0]]
        if why.startswith(CARRIED_OUT) and len(carrier) == 1:
            ((why, line),) = carrier
        found[why, line].append(thread)
    return found


def threads_shown(threads):
    """ "thread 3", "threads 0 to 31", "threads 0 to 15 and 32 to 47" """
    ids = sorted(t.thread_id for t in threads)
    if len(ids) == 1:
        return f"thread {numbered(threads[0].threadIdx, threads[0].block.blockDim)}"
    runs = []
    for i in ids:
        if runs and runs[-1][1] == i - 1:
            runs[-1][1] = i
        else:
            runs.append([i, i])
    if len(runs) > 3:
        return f"{len(ids)} threads ({ids[0]} ... {ids[-1]})"
    return "threads " + " and ".join(str(a) if a == b else f"{a} to {b}" for a, b in runs)


def _blocks(indices):
    if len(indices) < 3:
        return f"block{'s' * (len(indices) > 1)} {' and '.join(indices)}"
    return f"{len(indices)} blocks ({indices[0]} ... {indices[-1]})"


def out_of_bounds(launch, error):
    """Which array, index, rank and bound made `error`, an IndexError of a kernel; None when it cannot be
    told.

    The accesses of the line that raised are evaluated again, and the first one that is outside of its array
    is the culprit: in-bounds accesses pay nothing for this.
    """
    entry = _kernel_traceback(error.__traceback__)
    if entry is None:
        return None
    frame, lineno = entry.tb_frame, entry.tb_lineno

    def value_of(node):
        code = compile(ast.fix_missing_locations(ast.Expression(node)), "<access>", "eval")
        return eval(code, frame.f_globals, frame.f_locals)

    for array_node, index_node, wraps, hint in _accesses(frame.f_code.co_filename, lineno):
        try:
            array, index = value_of(array_node), value_of(index_node)
        except Exception:  # a name that is gone by now: not this one, then
            continue
        indices = index if isinstance(index, tuple) else (index,)
        if not isinstance(array, np.ndarray) or len(indices) > array.ndim:
            continue
        for i, n in zip(indices, array.shape, strict=False):
            if isinstance(i, (int, np.integer)) and not (-n if wraps else 0) <= i < n:
                name, shown = ast.unparse(array_node), ", ".join(str(i) for i in indices)
                on = _rank_of(launch, array)
                where = f"{name} is {array.dtype} {array.shape} on rank {on}"
                return f"{name}[{shown}] is out of bounds: {where}{hint}"
    return None


def _rank_of(launch, array):
    pe, _ = launch.machine.located(address(array))
    return launch.pe if pe is None else pe


# Calls that may be evaluated again: they change nothing.
_PURE = (
    "symm_at get_peer_array consume_token rank num_ranks my_pe n_pes grid gridsize min max len int".split()
)
# Called with (array, index, ...), and with (array, n, ...).
_INDEXED = "ld_acquire st_release red_release load_vec16 store_vec16".split()
_WAITS = "wait wait_warp wait_block".split()


def _accesses(file, lineno):
    """(array, index, whether it may be negative, a hint for reports) of the accesses of a line: ``a[i]``, the
    start of ``a[i:]``, and ``ld_acquire(a, i, ...)`` and the like, the innermost first."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return
    found: Any = ast.walk(tree)
    nodes = [n for n in found if hasattr(n, "lineno") and n.lineno <= lineno <= n.end_lineno]
    for node in reversed(nodes):  # ast.walk goes from the outside to the inside
        wraps, hint = True, ""
        if isinstance(node, ast.Subscript):
            array, index = node.value, _start(node.slice)
        elif isinstance(node, ast.Call) and len(node.args) >= 2:
            array, index = node.args[:2]
            owner = getattr(node.func, "value", None)
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            if name in _WAITS:
                index = ast.BinOp(index, ast.Sub(), ast.Constant(1))
                hint = f". The second argument of {name}() is how many signals; the fifth is the value"
            elif name in _INDEXED:
                wraps = False
            elif "atomic" not in (getattr(owner, "attr", None), getattr(owner, "id", None)):
                continue
        else:
            continue
        if _is_pure(array) and _is_pure(index):
            yield array, index, wraps, hint


def _start(index):
    """The first element that ``a[index]`` names: slices by where they begin."""
    if isinstance(index, ast.Tuple):
        return ast.Tuple([_start(i) for i in index.elts], ast.Load())
    if isinstance(index, ast.Slice):
        return index.lower or ast.Constant(None)
    return index


def _is_pure(expression):
    for node in ast.walk(expression):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", None))
            if name not in _PURE:
                return False
    return True
