"""Kernels without one of their steps: to prove that each step is needed.

    def test_each_wait_is_needed(mutate):
        mutate(push, omit("notify_at", inside="tell"))      # until the test ends
        assert goes_wrong(sk.emu.run, few_calls, 2, races=True, each=seeds(3))

``mutate(module, *changes)`` runs the module again, changed, and puts its functions and classes in the place
of those that were there, in all modules of the library. Tests that use it are slow.

A change says what it takes away, by the names of functions in the syntax tree, not by text. It fails with
LookupError where that is not there.

    omit(call, k)                  the k-th call of a function, with its statement
    argument(call, which, by, k)   that call, with another argument: `which` is its number or keyword
    callee(call, by, k)            that call, of another function
    delay(call, k)                 that call's statement comes after the next one
    omit_store(target, k)          the k-th assignment to a variable, or to elements, such as "epochs[]"
    store(target, by, k)           that assignment, of another value
    condition(of, by, k)           the k-th ``if`` or ``while`` whose condition uses the variable or function
                                   `of`, with another condition
    single_buffer()                every ``x & 1`` of an epoch is 0: a double buffer is a single one

`inside` is the innermost function, or the class and method, such as "Push._launch", that it stands in;
without it the whole module. `k` counts from 1, in the order of the source.
"""

import ast
import functools
import inspect
import sys
from types import SimpleNamespace

import pytest

from shmemkit.emu import EmulatorError


def pytest_itemcollected(item):
    if "mutate" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.slow)


@pytest.fixture
def mutate():
    """-> mutate(module, *changes), as above, until the test ends."""
    undo = []

    def apply(module, *changes):
        tree = ast.parse(inspect.getsource(module))
        for change in changes:
            change(tree)
        before, names = dict(vars(module)), {}
        exec(compile(ast.fix_missing_locations(tree), module.__file__, "exec"), vars(module))
        for name, old in before.items():
            new = vars(module)[name]
            if new is not old and callable(old):
                names[id(old)] = old, new
        undo.append((module, before, {id(new): (new, old) for old, new in names.values()}))
        _replace(names)

    yield apply
    for module, before, names in reversed(undo):
        vars(module).clear()
        vars(module).update(before)
        _replace(names)


def _replace(names):
    """Put others in the place of objects, {id: (old, new)}, everywhere in the library; and forget the kernels
    that were made of them."""
    for module in [m for name, m in sys.modules.items() if name.split(".")[0] == "shmemkit"]:
        for where in [vars(module), *_tables(module)]:
            for name, value in list(where.items()):
                if id(value) in names and names[id(value)][0] is value:
                    where[name] = names[id(value)][1]
                elif hasattr(value, "cache_clear"):
                    value.cache_clear()
                # The emulator keeps functions with the globals that they had when they first ran.
                vars(getattr(value, "py_func", SimpleNamespace())).pop("__emulated__", None)


def _tables(module):
    """The dicts of a module and of its classes, as METHODS."""
    for value in [*vars(module).values()]:
        if isinstance(value, dict):
            yield value
        elif isinstance(value, type) and value.__module__ == module.__name__:
            yield from (table for table in vars(value).values() if isinstance(table, dict))


def goes_wrong(run, *args, each=({},), **options):
    """Whether ``run(*args, **options, **more)``, with `more` of `each`, is seen to be wrong: by a False in
    what it returns, by an assertion, or by a report of the emulator."""
    for more in each:
        try:
            if not _all(run(*args, **options, **more)):
                return True
        except (EmulatorError, AssertionError) as report:
            print(report)
            return True
    return False


def _all(found):
    return all(map(_all, found)) if isinstance(found, (list, tuple)) else found is None or bool(found)


def seeds(n):
    """Options of `sk.emu.run`: n random schedules, after the one without a seed."""
    return [{"seed": seed} for seed in (None, *range(n))]


# ---- changes


def _change(kind):
    """Decorator: ``kind(tree, ...)`` becomes ``kind(...)`` -> change(tree), with a name for pytest's ids."""

    @functools.wraps(kind)
    def given(*args, **names):
        change = functools.partial(kind, *args, **names)
        applied = functools.wraps(kind)(lambda tree: change(tree=tree))
        words = [kind.__name__, *args, *names.values()]
        applied.__name__ = " ".join(str(word) for word in words if word is not None)
        return applied

    return given


@_change
def omit(call, k=1, inside=None, *, tree):
    _set_statement(tree, _statement_of(tree, _call(tree, call, k, inside)), ast.Pass())


@_change
def delay(call, k=1, inside=None, *, tree):
    statement = _statement_of(tree, _call(tree, call, k, inside))
    body = next(body for body in _bodies(tree) if statement in body)
    i = body.index(statement)
    if i + 1 == len(body):
        raise LookupError(f"no statement follows the call of {call}")
    body[i : i + 2] = body[i + 1], statement


@_change
def argument(call, which, by, k=1, inside=None, *, tree):
    node, value = _call(tree, call, k, inside), _expression(by)
    if isinstance(which, str):
        _the(1, [word for word in node.keywords if word.arg == which], f"{which} of {call}").value = value
    elif which < len(node.args):
        node.args[which] = value
    else:
        raise LookupError(f"{call} is called with {len(node.args)} arguments; there is no {which}")


@_change
def callee(call, by, k=1, inside=None, *, tree):
    _call(tree, call, k, inside).func = _expression(by)


@_change
def omit_store(target, k=1, inside=None, *, tree):
    _set_statement(tree, _store(tree, target, k, inside)[0], ast.Pass())


@_change
def store(target, by, k=1, inside=None, *, tree):
    statement, i = _store(tree, target, k, inside)
    if i is None:
        statement.value = _expression(by)
    else:
        statement.value.elts[i] = _expression(by)


@_change
def condition(of, by, k=1, inside=None, *, tree):
    found = [
        node
        for node in _nodes(tree, inside)
        if isinstance(node, (ast.If, ast.IfExp, ast.While))
        and any(ast.unparse(x) == of for x in ast.walk(node.test) if isinstance(x, ast.expr))
    ]
    _the(k, found, f"conditions of {of}").test = _expression(by)


@_change
def single_buffer(*, tree):
    found = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
            if ast.unparse(node.right) == "1" and "epoch" in ast.unparse(node.left):
                node.left, found = ast.Constant(0), found + 1
    if not found:
        raise LookupError("no buffer is selected by an epoch")


# ---- in the tree


def _expression(text):
    return ast.parse(text, mode="eval").body


def _nodes(tree, inside):
    """Those of a function, or of all, in the order of the source."""
    nodes = [tree]
    for name in inside.split(".") if inside else ():
        kinds = ast.FunctionDef, ast.ClassDef
        nodes = [x for node in nodes for child in ast.iter_child_nodes(node) for x in ast.walk(child)]
        nodes = [x for x in nodes if isinstance(x, kinds) and x.name == name]
    if len(nodes) != 1:
        raise LookupError(f"{len(nodes)} functions are {inside}; it must be one")
    found = [x for x in ast.walk(nodes[0]) if hasattr(x, "lineno")]
    return sorted(found, key=lambda x: (x.lineno, x.col_offset))


def _the(k, found, what):
    if not 1 <= k <= len(found):
        raise LookupError(f"{what}: there are {len(found)}; none is number {k}")
    return found[k - 1]


def _call(tree, name, k, inside):
    calls = [x for x in _nodes(tree, inside) if isinstance(x, ast.Call)]
    return _the(k, [x for x in calls if ast.unparse(x.func) == name], f"calls of {name} in {inside}")


def _store(tree, target, k, inside):
    """-> (statement, which of several targets it is, or None)"""
    found = []
    for node in _nodes(tree, inside):
        if isinstance(node, (ast.Assign, ast.AugAssign)):
            to = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name = f"{ast.unparse(to.value)}[]" if isinstance(to, ast.Subscript) else ast.unparse(to)
            if name == target:
                found.append((node, None))
            elif isinstance(to, ast.Tuple) and isinstance(node.value, ast.Tuple):
                found += [(node, i) for i, x in enumerate(to.elts) if ast.unparse(x) == target]
    return _the(k, found, f"assignments to {target} in {inside}")


def _bodies(tree):
    for node in ast.walk(tree):
        for field in ("body", "orelse"):
            if isinstance(body := getattr(node, field, None), list):
                yield body


def _statement_of(tree, call):
    """The statement that is a call, or that assigns what it returns."""
    for body in _bodies(tree):
        for statement in body:
            if getattr(statement, "value", None) is call:
                return statement
    raise LookupError(f"{ast.unparse(call)} is part of a larger expression")


def _set_statement(tree, old, new):
    for body in _bodies(tree):
        body[:] = [ast.copy_location(new, old) if statement is old else statement for statement in body]
