"""Kernels compute with Numba's arithmetic. A function whose result might differ in Python is rewritten and
compiled again.

- A float of the program is a float64, which with a float32 gives a float64. (For NumPy, a Python float gives
  way.)
- Signed integers have 64 bits: they wrap where an overflow would show, before ``>>``, ``//``, ``%`` and
  comparisons, where a function returns, and in loops that multiply (a hash). Elsewhere Python's integers have
  the same low bits, and are faster.
- ``/`` gives a float64, inf or NaN after a division by zero. ``//`` and ``%`` of integers by zero give 0.

Other functions, and those without source (``exec``), keep their code, but for their floats.
"""

import __future__

import ast
import contextlib
import copy
import dis
import functools
import inspect
import math
import types
from typing import Any

import numpy as np

from shmemkit.support.names_in_code import names_in

from .cuda_integers import wrap

_MOST = (1 << 63) - 1
_INT64 = np.dtype("int64")
_FUTURE = functools.reduce(
    int.__or__, (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
)


# ---- what the new code calls


def _wrapped(value):
    """A signed integer in 64 bits; anything else as it is."""
    if type(value) is int and not -_MOST <= value <= _MOST:
        return wrap(value, _INT64)
    return value


def _divided(a, b):
    if isinstance(b, int):
        b = np.float64(b)
    if isinstance(b, np.ndarray) or b:
        return a / b
    with np.errstate(all="ignore"):
        return np.true_divide(a, b)


def _by_zero(a, operation):
    """``a // 0``, or ``a % 0``"""
    if isinstance(a, (int, np.integer)):
        return 0
    with np.errstate(all="ignore"):
        return getattr(np, operation)(a, np.float64(0))


HELPERS = {"@wrapped": _wrapped, "@divided": _divided, "@by_zero": _by_zero, "@int": int}


# ---- numbers that functions get


def number(value) -> Any:
    """A Python float as a kernel has it; anything else as it is."""
    return np.float64(value) if type(value) is float else value


def _constants(code):
    """`code` whose floats are of 64 bits, also where they meet a float32."""

    def constant(value):
        if isinstance(value, types.CodeType):
            return _constants(value)
        return tuple(map(constant, value)) if type(value) is tuple else number(value)

    new = tuple(map(constant, code.co_consts))
    if all(a is b for a, b in zip(new, code.co_consts, strict=True)):
        return code
    return code.replace(co_consts=new)


# ---- math


_IN_NUMPY = {"ceil": np.ceil, "floor": np.floor, "trunc": np.trunc, "pow": np.power}
_IN_NUMPY |= {f"a{n}": getattr(np, f"arc{n}") for n in "cos cosh sin sinh tan tanh tan2".split()}


def _typed(function):
    """A function of `math` whose result has the type of its arguments; inf or NaN where Python raises."""
    numpy = _IN_NUMPY.get(function.__name__) or getattr(np, function.__name__, None)

    def outside(kind, *arguments):
        """Of its domain."""
        if numpy is None:
            return kind(math.nan)
        with np.errstate(all="ignore"):
            return kind(numpy(*map(np.float64, arguments)))

    @functools.wraps(function)
    def of_one(x):
        kind = type(x)
        if kind is not _F32 and kind is not _F16:
            kind = _F64
        try:
            return kind(function(x))
        except (ValueError, OverflowError):
            return outside(kind, x)

    @functools.wraps(function)
    def of_two(x, y):
        kind = type(x)
        if kind is not type(y) or kind is not _F32 and kind is not _F16:
            kind = _F64 if {kind, type(y)} != {_F16, _F32} else _F32
        try:
            return kind(function(x, y))
        except (ValueError, OverflowError):
            return outside(kind, x, y)

    return of_two if function.__name__ in _OF_TWO else of_one


_F16, _F32, _F64 = np.float16, np.float32, np.float64
_OF_TWO = "atan2 copysign fmod hypot pow remainder".split()
_OF_ONE = (
    "acos acosh asin asinh atan atanh cbrt ceil cos cosh degrees erf erfc exp exp2 expm1 fabs floor log "
    "log10 log1p log2 radians sin sinh sqrt tan tanh trunc"
).split()
_NAMES_OF_MATH = [name for name in _OF_ONE + _OF_TWO if hasattr(math, name)]
MATH = {getattr(math, name): _typed(getattr(math, name)) for name in _NAMES_OF_MATH}
math_module = types.SimpleNamespace(
    **{
        name: MATH.get(value, value) if callable(value) else number(value)
        for name, value in vars(math).items()
    }
)


def to_float(value=0.0):
    """The ``float()`` of kernels, which leaves a float32 one."""
    return value if isinstance(value, np.floating) else np.float64(value)


# ---- the new code


def code_of(function):
    """-> the code that runs in the place of that of `function`"""
    code = function.__code__
    if code.co_name != "<lambda>" and _may_need_it(code):
        code = _rewritten(code, tuple(_integers(function))) or code
    return _constants(code)


def _integers(function):
    """(name, value) of the integers outside of `function` that it names."""
    for name in sorted(names_in(function.__code__)[0]):
        if type(value := function.__globals__.get(name)) is int:
            yield name, value
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # it is empty
            if type(cell.cell_contents) is int:
                yield name, cell.cell_contents


@functools.lru_cache(1000)  # factories make many functions of one code
def _rewritten(code, integers):
    """Code of the same source that calls HELPERS; None where it would not."""
    if (node := _source(code)) is None:
        return None
    rewriter = _Rewriter(node, dict(integers))
    node = rewriter.visit(node)
    if not rewriter.changed:
        return None
    before = _compiled(_source(code), code)
    if before is None or _operations(before) != _operations(code):
        return None  # the source has been changed since, or the code
    return _compiled(node, code)


def _source(code):
    """The function's tree, at its lines and columns; None without a source."""
    try:
        lines, first = inspect.getsourcelines(code)
        is_indented = lines[0][:1].isspace()
        tree: Any = ast.parse("if 1:\n" * is_indented + "".join(lines))
    except (OSError, TypeError, SyntaxError):
        return None
    node = next(
        (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == code.co_name), None
    )
    if node is not None:
        ast.increment_lineno(tree, first - 1 - is_indented)
        node.decorator_list = []
    return node


_SYMBOLS = {"/", "//", "%", ">>", "*", "<<", "**"}
_NAMES = {
    f"{kind}_{name}"
    for kind in ("BINARY", "INPLACE")
    for name in "FLOOR_DIVIDE MODULO TRUE_DIVIDE RSHIFT MULTIPLY LSHIFT POWER".split()
}


def _may_need_it(code):
    """Quickly: whether it has an operation that a rewriter looks for."""
    return any(
        i.opname in _NAMES or i.opname == "BINARY_OP" and i.argrepr.removesuffix("=") in _SYMBOLS
        for i in dis.get_instructions(code)
    )


def _operations(code):
    """What `code` does, but for how methods are called: that depends on the imports of the whole file."""
    kinds = dis.hasjrel + dis.hasjabs
    return [
        (i.opname.replace("METHOD", "ATTR"), type(i.argval) if i.opcode in kinds or _is_code(i) else i.argval)
        for i in dis.get_instructions(code)
        if i.opname not in ("EXTENDED_ARG", "PRECALL", "PUSH_NULL")
    ]


def _is_code(instruction):
    return isinstance(instruction.argval, types.CodeType)


def _compiled(node, code):
    """The code of `node`, with the free variables of `code`."""
    outer: Any = ast.parse(f"def outer({', '.join(code.co_freevars)}): pass").body[0]
    outer.body = [node]
    module = ast.fix_missing_locations(ast.Module([outer], []))
    flags = code.co_flags & _FUTURE
    compiled = compile(module, code.co_filename, "exec", flags, dont_inherit=True)
    (outer_code,) = [c for c in compiled.co_consts if isinstance(c, types.CodeType)]
    found = [c for c in outer_code.co_consts if isinstance(c, types.CodeType) and c.co_name == code.co_name]
    if len(found) != 1 or set(found[0].co_freevars) != set(code.co_freevars):
        return None
    return found[0].replace(co_qualname=code.co_qualname) if hasattr(code, "co_qualname") else found[0]


# Products of these are far from 2**63.
_SMALL_ATTRIBUTES = {"x", "y", "z", "size", "ndim", "laneid", "warpsize", "itemsize", "shape", "strides"}
_SMALL_CALLS = set("grid gridsize len rank num_ranks my_pe n_pes range ffs popc clz".split())
_NOT_ZERO = {"num_ranks", "n_pes", "gridsize"}
_OVERFLOWS = (ast.Mult, ast.LShift, ast.Pow)
_SUMS = (ast.Add, ast.Sub, ast.BitOr, ast.BitXor)
_LOOK_AT_ALL = (ast.RShift, ast.FloorDiv, ast.Mod)


def _called(node):
    """The last name of what a call calls."""
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", None)


def _is_integer(node: Any):
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


class _Rewriter(ast.NodeTransformer):
    def __init__(self, function, integers):
        self.changed, self.n_divisors, self.in_scope, self.integers = False, 0, False, integers
        arguments = function.args
        self.parameters = {
            a.arg
            for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg)
            if a
        }
        self.assigned: dict[str, list] = {}  # name -> what is assigned to it; None: something unknown
        self.looked_at: set[str] = set()  # names that an operation sees as they are
        for node in ast.walk(function):
            self._note(node)

    def _note(self, node):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value)
        elif isinstance(node, ast.AugAssign):
            self._assign(
                node.target,
                ast.BinOp(ast.Name(getattr(node.target, "id", ""), ast.Load()), node.op, node.value),
            )
            if isinstance(node.op, _LOOK_AT_ALL) and isinstance(node.target, ast.Name):
                self.looked_at.add(node.target.id)
        elif isinstance(node, (ast.NamedExpr, ast.AnnAssign)) and node.value is not None:
            self._assign(node.target, node.value)
        elif isinstance(node, ast.For):
            small = isinstance(node.iter, ast.Call) and _called(node.iter) == "range"
            self._assign(node.target, ast.Constant(0) if small else None)
        elif isinstance(node, ast.comprehension):
            self._assign(node.target, None)
        if isinstance(node, ast.Compare) or isinstance(node, ast.BinOp) and isinstance(node.op, _LOOK_AT_ALL):
            self.looked_at |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}

    def _assign(self, target, value):
        if isinstance(target, ast.Name):
            self.assigned.setdefault(target.id, []).append(value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            parts: Any = [None] * len(target.elts)
            if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(parts):
                parts = value.elts
            elif isinstance(value, ast.Call) and _called(value) in _SMALL_CALLS:
                parts = [ast.Constant(0)] * len(parts)
            for part, one in zip(target.elts, parts, strict=True):
                self._assign(part, one)

    # -- what is known of an expression
    def _is_small(self, node: Any, trail=frozenset()):
        """Whether it is an index, a size, or made of few of those."""
        if isinstance(node, ast.Constant):
            return isinstance(node.value, int) and abs(node.value) < 1 << 32
        if isinstance(node, ast.Attribute):
            return node.attr in _SMALL_ATTRIBUTES
        if isinstance(node, ast.Subscript):
            return isinstance(node.value, ast.Attribute) and node.value.attr in ("shape", "strides")
        if isinstance(node, ast.Call):
            if _called(node) in ("min", "max", "abs"):
                return all(self._is_small(a, trail) for a in node.args)
            return _called(node) in _SMALL_CALLS
        if isinstance(node, ast.UnaryOp):
            return self._is_small(node.operand, trail)
        if isinstance(node, ast.IfExp):
            return self._is_small(node.body, trail) and self._is_small(node.orelse, trail)
        if isinstance(node, ast.BinOp) and not isinstance(node.op, (ast.LShift, ast.Pow)):
            return self._is_small(node.left, trail) and self._is_small(node.right, trail)
        if isinstance(node, ast.Name) and self._is_outside(node):
            return abs(self.integers[node.id]) < 1 << 32
        if isinstance(node, ast.Name) and node.id in self.assigned and node.id not in self.parameters:
            if node.id in trail:  # i += stride
                return True
            return all(
                value is not None
                and not self._multiplies(node.id, value)
                and self._is_small(value, trail | {node.id})
                for value in self.assigned[node.id]
            )
        return False

    def _is_outside(self, node: Any) -> bool:
        """Whether it is the name of an integer constant."""
        return (
            isinstance(node, ast.Name)
            and node.id in self.integers
            and node.id not in self.assigned
            and node.id not in self.parameters
        )

    def _is_little(self, node: Any):
        """Whether it is small, and a product with it of what is stored somewhere does not overflow."""
        if self._is_outside(node):
            return abs(self.integers[node.id]) < 1 << 16
        return abs(node.value) < 1 << 16 if _is_integer(node) else self._is_small(node)

    @staticmethod
    def _multiplies(name, value):
        """Whether `value` grows with each turn of a loop."""
        return any(
            isinstance(n, ast.BinOp)
            and isinstance(n.op, _OVERFLOWS)
            and any(isinstance(m, ast.Name) and m.id == name for m in ast.walk(n))
            for n in ast.walk(value)
        )

    def _may_overflow(self, node: Any):
        if isinstance(node, ast.BinOp):
            if self._is_small(node):
                return False
            if isinstance(node.op, ast.Mult) and (self._is_little(node.left) or self._is_little(node.right)):
                return self._may_overflow(node.left) or self._may_overflow(node.right)
            if isinstance(node.op, _OVERFLOWS):
                return True
            if isinstance(node.op, _SUMS):
                if self._may_overflow(node.left) or self._may_overflow(node.right):
                    return True
                return self._is_any_number(node.left) and self._is_any_number(node.right)
            if isinstance(node.op, ast.BitAnd):
                return self._may_overflow(node.left) and self._may_overflow(node.right)
            return False
        if isinstance(node, ast.UnaryOp):
            return self._may_overflow(node.operand)
        if isinstance(node, ast.IfExp):
            return self._may_overflow(node.body) or self._may_overflow(node.orelse)
        return False

    def _is_any_number(self, node: Any):
        """Whether it is an element of an array, or an argument: it may be as large as its type lets it."""
        if isinstance(node, ast.UnaryOp):
            return self._is_any_number(node.operand)
        if isinstance(node, ast.Name):
            values = self.assigned.get(node.id, ())
            return node.id in self.parameters or any(
                isinstance(value, ast.Subscript)
                or isinstance(value, ast.BinOp)
                and isinstance(value.op, _OVERFLOWS)
                and self._may_overflow(value)
                for value in values
            )
        return isinstance(node, ast.Subscript) and not self._is_small(node)

    def _is_not_zero(self, node: Any):
        if isinstance(node, ast.Constant):
            return bool(node.value)
        if self._is_outside(node):
            return bool(self.integers[node.id])
        if isinstance(node, ast.Attribute):
            return node.attr == "warpsize" or (
                isinstance(node.value, (ast.Attribute, ast.Name))
                and getattr(node.value, "attr", getattr(node.value, "id", None)) in ("blockDim", "gridDim")
            )
        if isinstance(node, ast.Call):
            return _called(node) in _NOT_ZERO
        if isinstance(node, ast.Name) and node.id in self.assigned and node.id not in self.parameters:
            values = self.assigned[node.id]
            return all(v is not None and not isinstance(v, ast.Name) and self._is_not_zero(v) for v in values)
        return False

    # -- what is written instead
    def _call(self, helper, *arguments):
        self.changed = True
        return ast.Call(ast.Name(helper, ast.Load()), list(arguments), [])

    def _at(self, node, new):
        return ast.copy_location(new, node)

    def _in_64_bits(self, node, new):
        """`new`, which stands for `node`."""
        return self._at(node, self._call("@wrapped", new)) if self._may_overflow(node) else new

    def visit_BinOp(self, node: Any):
        left, right = self.visit(node.left), self.visit(node.right)
        if isinstance(node.op, ast.Div):
            left = self._in_64_bits(node.left, left)
            if self._is_number(node.right) and node.right.value:
                self.changed |= type(node.right.value) is int
                right = self._at(right, ast.Constant(float(node.right.value)))
                return self._at(node, ast.BinOp(left, node.op, right))
            return self._at(node, self._call("@divided", left, right))
        if isinstance(node.op, _LOOK_AT_ALL):
            left = self._in_64_bits(node.left, left)
            if not isinstance(node.op, ast.RShift):
                right = self._in_64_bits(node.right, right)
                if not self._is_text(node.left) and not self._is_not_zero(node.right):
                    return self._at(node, self._zero_or(left, node.op, right))
        return self._at(node, ast.BinOp(left, node.op, right))

    @staticmethod
    def _is_number(node: Any):
        return isinstance(node, ast.Constant) and type(node.value) in (int, float)

    @staticmethod
    def _is_text(node: Any):
        return (
            isinstance(node, ast.JoinedStr)
            or isinstance(node, ast.Constant)
            and isinstance(node.value, (str, bytes))
        )

    def _zero_or(self, left, op, right):
        """``left op right``, unless the right side is the integer 0. (Unsigned looks itself.)"""
        self.changed = True
        self.n_divisors += 1
        name = f"@divisor{self.n_divisors}"

        def divisor():
            return ast.Name(name, ast.Load())

        test = ast.BoolOp(
            ast.Or(),
            [
                ast.Compare(
                    ast.Attribute(ast.NamedExpr(ast.Name(name, ast.Store()), right), "__class__", ast.Load()),
                    [ast.IsNot()],
                    [ast.Name("@int", ast.Load())],
                ),
                divisor(),
            ],
        )
        operation = "floor_divide" if isinstance(op, ast.FloorDiv) else "remainder"
        return ast.IfExp(
            test, ast.BinOp(left, op, divisor()), self._call("@by_zero", left, ast.Constant(operation))
        )

    def visit_Compare(self, node: Any):
        operands = [node.left, *node.comparators]
        new = [self._in_64_bits(o, self.visit(o)) for o in operands]
        return self._at(node, ast.Compare(new[0], node.ops, list[Any](new[1:])))

    def visit_Return(self, node: Any):
        if node.value is not None:
            new = self.visit(node.value)
            multiplies = any(isinstance(getattr(n, "op", None), _OVERFLOWS) for n in ast.walk(node.value))
            node.value = self._in_64_bits(node.value, new) if multiplies else new
        return node

    def _stored(self, target, value, new):
        if isinstance(target, ast.Name):
            if self._multiplies(target.id, value):
                return self._at(value, self._call("@wrapped", new))
            if target.id in self.looked_at:
                return self._in_64_bits(value, new)
        return new

    def visit_Assign(self, node: Any):
        new = self.visit(node.value)
        node.value = self._stored(node.targets[0], node.value, new) if len(node.targets) == 1 else new
        node.targets = [self.visit(t) for t in node.targets]
        return node

    def visit_AugAssign(self, node: Any):
        target = node.target
        simple = isinstance(target, ast.Name) or _is_simple(target)
        if not simple or not isinstance(node.op, (ast.Div, *_LOOK_AT_ALL, *_OVERFLOWS, *_SUMS)):
            return self.generic_visit(node)
        value = self._at(node, ast.BinOp(self._at(target, _loaded(target)), node.op, node.value))
        changed, self.changed = self.changed, False
        whole = self._at(node, ast.Assign([target], self._stored(target, value, self.visit(value))))
        needed, self.changed = self.changed, self.changed or changed
        return whole if needed else node

    def visit(self, node: Any) -> Any:
        """Names in these have a scope of their own."""
        scopes = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
        return node if isinstance(node, scopes) else super().visit(node)

    def visit_FunctionDef(self, node: Any):
        if self.in_scope:
            return node  # one inside of the kernel
        self.in_scope = True
        node.body = [self.visit(statement) for statement in node.body]
        return node


def _is_simple(target):
    """Whether it may be evaluated twice."""
    return isinstance(target, ast.Subscript) and all(
        isinstance(n, (ast.Name, ast.Constant, ast.Tuple, ast.expr_context, ast.Subscript))
        for n in ast.walk(target)
    )


def _loaded(target):
    new = copy.copy(target)
    new.ctx = ast.Load()
    return new
