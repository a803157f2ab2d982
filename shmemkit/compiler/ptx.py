"""PTX instructions as functions of a numba kernel.

The one file that knows inline assembly, LLVM and numba-cuda's extension API; the rest of `device` is plain
Python on top of these:

  gpu, gpu_moved, gpu_part
                         decorators: the GPU implementation of a public primitive
  gpu_function           decorator: a helper that exists in kernels only
  asm(text, ...)         one PTX snippet -> one function
  gpu_parts              decorator: the GPU implementation of a loop over parts of a tuple
  constant_words(...)    a table in constant memory that the host fills when a module is loaded
  element_address, load_bytes, unsigned_view, ...: arrays as addresses and bytes

`$0`, `$1`.. in a snippet are the results, then the arguments; `{`, `}` and `%` stand for themselves.
"""

import functools
import inspect
from typing import Any

from llvmlite import ir
from numba.cuda import PTXSource, cgutils, types
from numba.cuda.core.errors import TypingError
from numba.cuda.core.imputils import impl_ret_borrowed
from numba.cuda.descriptor import cuda_target
from numba.cuda.extending import intrinsic, overload, register_jitable
from numba.cuda.np.arrayobj import populate_array
from numba.cuda.nvvmutils import targetconfig
from numba.cuda.typing.templates import infer, infer_global, make_intrinsic_template

GPU = {}
"""primitive -> its typing function; a test finds here what was forgotten."""
TABLES = {}
"""name -> what kernels that read a table of ``constant_words`` are linked with."""

gpu_function = register_jitable

_I8, _I32, _I64 = ir.IntType(8), ir.IntType(32), ir.IntType(64)
_GLOBAL, _SHARED, _CONSTANT = 1, 3, 4  # NVVM's numbers of the address spaces


def gpu(primitive):
    """Decorator: make the decorated typing function the GPU implementation of `primitive`.

    The typing function has the primitive's parameters, gets their numba types (literals as literal types) and
    returns the implementation, a function with the same parameters; or raises TypingError.
    """

    def register(typing_function):
        overload(primitive, target="cuda", prefer_literal=True)(_explaining(primitive, typing_function))
        GPU[primitive] = typing_function
        return typing_function

    return register


def _gpu_intrinsic(define) -> Any:
    """A decorator as `gpu`, for a primitive that is an intrinsic on the GPU:
    ``define(typing_function, *types of arguments)`` -> (its signature, how its code is made)."""

    @functools.wraps(define)
    def decorator(primitive):
        def register(typing_function):
            @functools.wraps(typing_function)
            def definition(typing_context, *given, **named):
                return define(typing_function, *given, **named)

            _register_intrinsic(primitive, definition, typing_function)
            return typing_function

        return register

    return decorator


@_gpu_intrinsic
def gpu_moved(typing_function, *given):
    """Decorator as `gpu`, for a primitive that returns the array it is given (or, without one, its first
    argument, an integer) moved: its address (or the integer) plus what the implementation returns, modulo
    2**64.

    numba returns no array from an overload, unless its reference counting runtime is on, which costs calls
    around every slice. Pointer arithmetic, not integers, so that LLVM still knows the memory as global.
    """
    implementation = typing_function(*given)
    number = next((i for i, a in enumerate(given) if isinstance(a, types.Array)), 0)
    result = types.unliteral(given[number])

    def codegen(context, builder, signature, values):
        offset = context.compile_internal(builder, implementation, types.uint64(*given), values)
        if isinstance(result, types.Integer):
            value = context.cast(builder, values[number], given[number], result)
            return builder.add(value, context.cast(builder, offset, types.uint64, result))
        struct = _struct(context, builder, result, values[number])
        moved = builder.gep(_bytes(builder, struct.data), [offset])
        struct.data = builder.bitcast(moved, struct.data.type)
        return impl_ret_borrowed(context, builder, result, struct._getvalue())

    return result(*given), codegen


@_gpu_intrinsic
def gpu_note(typing_function, *given):
    """Decorator as `gpu`, for a primitive that returns nothing. Its typing function returns ``make()``, which
    is called for each kernel that is compiled. What that returns is a function without parameters, which the
    kernel calls, or None: then nothing is left in the kernel, not even a symbol."""
    make = typing_function(*given)

    def codegen(context, builder, signature, values):
        implementation = make()  # Numba keeps this function for all contexts
        if implementation is not None:
            context.compile_internal(builder, implementation, types.void(), [])
        return context.get_dummy_value()

    return types.void(*given), codegen


@_gpu_intrinsic
def gpu_part(typing_function, array, first, size):
    """Decorator as `gpu`, for a primitive (array, first, size) that returns `size` elements of a 1-D
    contiguous array, from `first` on. Its typing function checks, and returns nothing."""
    typing_function(array, first, size)

    def codegen(context, builder, signature, values):
        struct = _struct(context, builder, array, values[0])
        _lay_out(struct, builder.gep(struct.data, [values[1]]), values[2], itemsize(array.dtype), struct)
        return impl_ret_borrowed(context, builder, array, struct._getvalue())

    return array(array, types.int64, types.int64), codegen


def _lay_out(struct, data, size, n_bytes, of):
    """Make `struct` an array of `size` elements of `n_bytes` each, a part of the array `of`."""
    kept, step = {"meminfo": of.meminfo, "parent": of.parent}, ir.Constant(_I64, n_bytes)
    populate_array(struct, data=data, shape=[size], strides=[step], itemsize=step, **kept)


def gpu_parts(primitive, size, function, mapped, tuples=1):
    """Make `primitive`, of (values, arguments), on the GPU: ``function(part, i, arguments)`` for each part of
    `size` elements of the tuple `values`, i being its number, a constant. If `mapped`, the parts that the
    function returns, as one tuple again. Of two `tuples` both take (values, others, arguments), (part, other,
    i, arguments).

    The code is there once for each part, as nothing else keeps a tuple in registers.
    """

    def definition(typing_context, *given):
        *values, arguments = given
        for kind in values:
            if not isinstance(kind, types.UniTuple) or kind.count % size or kind != values[0]:
                raise TypingError(
                    f"{primitive.__name__}(): the values are of type {kind}; they must be a tuple of one "
                    f"type, with a multiple of {size} elements"
                )
        part = types.UniTuple(values[0].dtype, size)
        signature = (part if mapped else types.void)(*(part,) * tuples, types.int64, arguments)

        def codegen(context, builder, _, given):
            elements = [cgutils.unpack_tuple(builder, values) for values in given[:-1]]
            changed = []
            for i in range(0, len(elements[0]), size):
                pieces = [cgutils.pack_array(builder, part[i : i + size]) for part in elements]
                operands = [*pieces, ir.Constant(_I64, i // size), given[-1]]
                out = context.compile_internal(builder, function, signature, operands)
                if mapped:
                    changed += cgutils.unpack_tuple(builder, out)
            return cgutils.pack_array(builder, changed) if mapped else context.get_dummy_value()

        return (values[0] if mapped else types.void)(*given), codegen

    parameters = {1: lambda values, arguments: None, 2: lambda values, others, arguments: None}
    _register_intrinsic(primitive, definition, parameters[tuples])


def _register_intrinsic(primitive, definition, typing_function):
    """Make `definition`, as of an intrinsic, what `primitive` is on the GPU."""
    definition.__name__ = definition.__qualname__ = primitive.__name__
    definition.__signature__ = _signature(inspect.signature(typing_function).parameters)
    template = make_intrinsic_template(primitive, definition, primitive.__name__, kwargs={"target": "cuda"})
    infer(template)
    infer_global(primitive, types.Function(template))
    GPU[primitive] = typing_function


def _explaining(primitive, typing_function):
    """The typing function under the primitive's name. numba calls it twice: the second time, without the
    literals, its first, better informed refusal is repeated."""
    refused = []

    @functools.wraps(typing_function)
    def typed(*args, **kwargs):
        literals = any(isinstance(a, types.Literal) for a in (*args, *kwargs.values()))
        try:
            implementation = typing_function(*args, **kwargs)
        except TypingError as error:
            if refused and not literals:
                raise refused.pop() from None
            refused[:] = [error] if literals else []
            raise
        refused.clear()
        return implementation

    typed.__name__ = typed.__qualname__ = primitive.__name__
    return typed


def _signature(names):
    """A signature for an intrinsic's definition with these parameters."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Signature([inspect.Parameter(name, kind) for name in ("typing_context", *names)])


def _letter(numba_type):
    """The constraint letter of a register that holds `numba_type`."""
    if isinstance(numba_type, types.Float):
        return {32: "f", 64: "d"}[numba_type.bitwidth]
    return {16: "h", 32: "r", 64: "l"}[numba_type.bitwidth]


def asm(text, returns=types.void, args=(), since=(0, 0), pure=False, tied=False, together=False):
    """A function of a kernel that is the PTX `text`, run where it is called: no compiler removes, repeats
    or moves it, nor any memory access across it, unless it is `pure`, and computes only.

    returns   a numba type, or a UniTuple of one for several results; or of UniTuples
    args      numba types, or likewise UniTuples; what the caller passes is converted to them. Each element
              of a tuple is an operand
    since     compute capability; kernels for earlier ones are compiled without it (it returns nothing then)
    tied      the first of `args` has the type of the results, and their registers
    together  all threads of a warp run it; `pure` or not, it is moved into no branch (what is not pure never
              is)
    """

    def parts(kind):
        if isinstance(kind, types.UniTuple):
            return [part for element in kind for part in parts(element)]
        return [kind] if kind != types.void else []

    def unpacked(builder, kind, value):
        if not isinstance(kind, types.UniTuple):
            return [value]
        elements = zip(kind, cgutils.unpack_tuple(builder, value), strict=True)
        return [part for element, inner in elements for part in unpacked(builder, element, inner)]

    def packed(builder, kind, values):
        if not isinstance(kind, types.UniTuple):
            return next(values)
        return cgutils.pack_array(builder, [packed(builder, element, values) for element in kind])

    results = parts(returns)
    # &: no result shares a register with an argument, which a later instruction of the text may still read
    several = text.count(";") > 1 and not tied
    constraints = [("=&" if several else "=") + _letter(t) for t in results]
    for i, kind in enumerate(args):
        constraints += map(str, range(len(results))) if tied and i == 0 else map(_letter, parts(kind))
    if not pure:
        constraints.append("~{memory}")
    attributes = ("nounwind",) if pure and not together else ("convergent", "nounwind")

    def codegen(context, builder, signature, values):
        if targetconfig.ConfigStack().top().compute_capability < since:
            return context.get_dummy_value()
        given = zip(args, values, strict=True)
        values = [part for kind, value in given for part in unpacked(builder, kind, value)]
        llvm = [context.get_value_type(t) for t in results]
        result = llvm[0] if len(llvm) == 1 else ir.LiteralStructType(llvm) if llvm else ir.VoidType()
        kind = ir.FunctionType(result, [v.type for v in values])
        snippet = ir.InlineAsm(kind, text, ",".join(constraints), side_effect=not pure)
        out = builder.call(snippet, values, attrs=attributes)
        if not results:
            return context.get_dummy_value()
        if len(results) == 1:
            return packed(builder, returns, iter([out]))
        return packed(builder, returns, (builder.extract_value(out, i) for i in range(len(results))))

    def definition(typing_context, *given):
        return returns(*args), codegen

    definition.__name__, definition.__doc__ = text.split(";")[0].split(" ")[0], text
    definition.__signature__ = _signature(f"a{i}" for i in range(len(args)))
    return intrinsic(definition)


def constant_words(name, n_words, loaded, unloaded):
    """A function ``read(index) -> uint64`` of the table `name` of `n_words` words in constant memory.

    loaded, unloaded   called with every module that has the table, before its first launch and when it goes,
                       perhaps several times; module.handle is the CUlibrary in which ``cuLibraryGetGlobal``
                       finds `name`
    """
    # A definition of its own, linked to each kernel that reads it: one table per module, however many
    # functions of the module read it, with link-time optimization and without.
    definition = PTXSource(
        b".version 7.0\n.target sm_70\n.address_size 64\n"
        + f".visible .const .align 8 .b8 {name}[{8 * n_words}];\n".encode(),
        name=f"{name}.ptx",
        setup_callback=loaded,
        teardown_callback=unloaded,
    )
    TABLES[name] = definition

    def codegen(context, builder, signature, values):
        context.active_code_library.add_linking_file(definition)
        table = builder.module.globals.get(name)
        if table is None:
            table = ir.GlobalVariable(builder.module, ir.ArrayType(_I64, n_words), name, addrspace=_CONSTANT)
            table.linkage = "external"
            table.global_constant = True
        return builder.load(builder.gep(table, [ir.Constant(_I64, 0), values[0]]), align=8)

    @intrinsic
    def read(typing_context, index):
        return types.uint64(types.int64), codegen

    read.__doc__ = f"ld.const.u64 $0, {name}[$1];"
    return read


# ---- arrays as pointers


def _struct(context, builder, array_type, value):
    return cgutils.create_struct_proxy(array_type)(context, builder, value=value)


def _bytes(builder, pointer):
    return builder.bitcast(pointer, ir.PointerType(_I8))


@intrinsic
def element_address(typing_context, array, index):
    """Address in global memory of ``array[index]``, a uint64; array: 1-D, any stride; index from 0, not
    checked."""

    def codegen(context, builder, signature, values):
        struct = _struct(context, builder, array, values[0])
        stride = builder.extract_value(struct.strides, 0)
        if array.layout == "C":
            stride = ir.Constant(_I64, itemsize(array.dtype))
        pointer = builder.gep(_bytes(builder, struct.data), [builder.mul(values[1], stride)])
        return builder.ptrtoint(builder.addrspacecast(pointer, ir.PointerType(_I8, _GLOBAL)), _I64)

    return types.uint64(array, types.int64), codegen


@intrinsic
def data_address(typing_context, array):
    """Where the array begins, an int64; its low bits tell the alignment, in whatever memory it is."""

    def codegen(context, builder, signature, values):
        return builder.ptrtoint(_struct(context, builder, array, values[0]).data, _I64)

    return types.int64(array), codegen


@intrinsic
def shared_address(typing_context, array):
    """Where an array in shared memory begins there, a uint32, as instructions on shared memory take it."""

    def codegen(context, builder, signature, values):
        data = _bytes(builder, _struct(context, builder, array, values[0]).data)
        return builder.ptrtoint(builder.addrspacecast(data, ir.PointerType(_I8, _SHARED)), _I32)

    return types.uint32(array), codegen


@intrinsic
def any_bits(typing_context, values):
    """The bits that are set in any of a tuple of arrays, as addresses, and integers: a uint64."""

    def codegen(context, builder, signature, given):
        bits = ir.Constant(_I64, 0)
        for i, kind in enumerate(values):
            value = builder.extract_value(given[0], i)
            if isinstance(kind, types.Array):
                value = builder.ptrtoint(_struct(context, builder, kind, value).data, _I64)
            else:
                value = context.cast(builder, value, kind, types.uint64)
            bits = builder.or_(bits, value)
        return bits

    return types.uint64(values), codegen


def _pointer(pointee):
    """A function of an array: its data as a C pointer to ``pointee(dtype)``."""

    @intrinsic
    def pointer(typing_context, array):
        def codegen(context, builder, signature, values):
            data = _struct(context, builder, array, values[0]).data
            return builder.bitcast(data, context.get_value_type(signature.return_type))

        return types.CPointer(pointee(array.dtype))(array), codegen

    return pointer


data_pointer = _pointer(lambda dtype: dtype)
"""The array's data as ``dtype*``, for NVSHMEM's functions."""

void_pointer = _pointer(lambda dtype: types.void)
"""The array's data as ``void*``, for NVSHMEM's functions."""


@intrinsic
def pointer_address(typing_context, pointer):
    """A C pointer as an int64."""

    def codegen(context, builder, signature, values):
        return builder.ptrtoint(values[0], _I64)

    return types.int64(pointer), codegen


def itemsize(dtype):
    """Bytes of an array element."""
    context = cuda_target.target_context
    return context.get_abi_sizeof(context.get_data_type(dtype))


def _unsigned(dtype):
    """The widest unsigned integer that elements of `dtype` are a whole number of."""
    size = itemsize(dtype)
    return {1: types.uint8, 2: types.uint16, 4: types.uint32}.get(size & -size, types.uint64)


@intrinsic
def unsigned_view(typing_context, array):
    """A contiguous array's bytes as a 1-D array of unsigned integers, as wide as its elements allow."""
    unsigned = _unsigned(array.dtype)
    flat = types.Array(unsigned, 1, "C")
    width = unsigned.bitwidth // 8
    per_element = itemsize(array.dtype) // width

    def codegen(context, builder, signature, values):
        struct = _struct(context, builder, array, values[0])
        view = cgutils.create_struct_proxy(flat)(context, builder)
        size = builder.mul(struct.nitems, ir.Constant(_I64, per_element))
        _lay_out(view, builder.bitcast(struct.data, view.data.type), size, width, struct)
        return impl_ret_borrowed(context, builder, flat, view._getvalue())

    return flat(array), codegen


@intrinsic
def bits_of(typing_context, array, value):
    """`value` as an element of `array`, as the unsigned integer with the same bits (elements of 1, 2, 4 or 8
    bytes)."""
    unsigned = _unsigned(array.dtype)

    def codegen(context, builder, signature, values):
        element = context.cast(builder, values[1], value, array.dtype)
        stored = context.get_value_as_data(builder, array.dtype, element)
        slot = cgutils.alloca_once_value(builder, stored)
        return builder.load(builder.bitcast(slot, ir.PointerType(context.get_value_type(unsigned))))

    return unsigned(array, value), codegen


@intrinsic
def from_bits(typing_context, array, bits):
    """The element of `array` that has these bits."""

    def codegen(context, builder, signature, values):
        stored = context.get_data_type(array.dtype)
        slot = cgutils.alloca_once(builder, stored)
        builder.store(values[1], builder.bitcast(slot, ir.PointerType(values[1].type)))
        return context.data_model_manager[array.dtype].from_data(builder, builder.load(slot))

    return array.dtype(array, bits), codegen


@functools.cache
def bitcast(of, to):
    """A function of a kernel: the number of numba type `to` that has the bits of one of type `of`."""

    def codegen(context, builder, signature, values):
        return builder.bitcast(values[0], context.get_value_type(to))

    @intrinsic
    def cast(typing_context, number):
        return to(of), codegen

    return cast


@intrinsic
def extend_half(typing_context, bits):
    """float32 of the float16 with these bits, an uint16."""

    def codegen(context, builder, signature, values):
        return builder.fpext(builder.bitcast(values[0], ir.HalfType()), ir.FloatType())

    return types.float32(types.uint16), codegen


@intrinsic
def round_to_half(typing_context, number):
    """The bits, as uint16, of the float16 nearest to a float32."""

    def codegen(context, builder, signature, values):
        return builder.bitcast(builder.fptrunc(values[0], ir.HalfType()), ir.IntType(16))

    return types.uint16(types.float32), codegen


# ---- ordinary loads and stores of a given width: LLVM may move them, though not across a snippet of asm()


def _words(width):
    """The numba type and the LLVM memory type of `width` bytes."""
    if width == 16:
        return types.UniTuple(types.uint32, 4), ir.VectorType(_I32, 4)
    return {1: types.uint8, 2: types.uint16, 4: types.uint32, 8: types.uint64}[width], ir.IntType(8 * width)


@functools.cache
def load_bytes(width):
    """A function ``load(array, offset)`` of the `width` bytes at byte `offset`: an unsigned integer, or 4
    for 16."""
    result, memory = _words(width)

    def codegen(context, builder, signature, values):
        data = _struct(context, builder, signature.args[0], values[0]).data
        pointer = builder.bitcast(builder.gep(_bytes(builder, data), [values[1]]), ir.PointerType(memory))
        loaded = builder.load(pointer, align=width)
        if width < 16:
            return loaded
        return cgutils.pack_array(
            builder, [builder.extract_element(loaded, ir.Constant(_I32, i)) for i in range(4)]
        )

    @intrinsic
    def load(typing_context, array, offset):
        return result(array, types.int64), codegen

    load.__doc__ = f"load {width} bytes"
    return load


@functools.cache
def store_bytes(width):
    """A function ``store(array, offset, value)``, the inverse of load_bytes."""
    value_type, memory = _words(width)

    def codegen(context, builder, signature, values):
        data = _struct(context, builder, signature.args[0], values[0]).data
        pointer = builder.bitcast(builder.gep(_bytes(builder, data), [values[1]]), ir.PointerType(memory))
        value = values[2]
        if width == 16:
            words = [builder.extract_value(value, i) for i in range(4)]
            value = ir.Constant(memory, ir.Undefined)
            for i, word in enumerate(words):
                value = builder.insert_element(value, word, ir.Constant(_I32, i))
        builder.store(value, pointer, align=width)
        return context.get_dummy_value()

    @intrinsic
    def store(typing_context, array, offset, value):
        return types.void(array, types.int64, value_type), codegen

    return store


@functools.cache
def float_zeros(n):
    """A function of a kernel: a tuple of `n` float32, all zero."""
    zeros = types.UniTuple(types.float32, n)

    def codegen(context, builder, signature, values):
        return ir.Constant(context.get_value_type(zeros), [ir.Constant(ir.FloatType(), 0.0)] * n)

    @intrinsic
    def make(typing_context):
        return zeros(), codegen

    return make
