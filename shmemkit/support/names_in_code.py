"""Which names a function's code uses. `co_names` alone does not say what for: in ``cuda.threadIdx.x`` it has
`x`, although no variable of that name is read."""

import dis
import functools
import types

_OF_VARIABLES = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}


@functools.lru_cache(4096)  # factories make many functions of one code
def names_in(code):
    """-> (names of global variables, names of attributes) that `code` and the functions inside it load. Cells
    are in `co_freevars`."""
    variables, attributes = set(), set()
    for instruction in dis.get_instructions(code):
        if instruction.opcode in dis.hasname:
            kind = variables if instruction.opname in _OF_VARIABLES else attributes
            kind.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = names_in(constant)
            variables |= inner[0]
            attributes |= inner[1]
    return frozenset(variables), frozenset(attributes)
