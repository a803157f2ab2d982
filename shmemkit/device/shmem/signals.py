"""Signals: integers in symmetric memory that one rank sets and another waits for.

`notify` is a release and `wait` an acquire, directly over NVLink. When a `wait` reads the notified value,
the waiting thread sees everything that the notifying thread did before its `notify`. That includes the
stores of threads that shared a barrier with the notifying thread before. Threads that share a
barrier with the waiting thread afterwards see it, too.

Wrong arguments are TypingError when a kernel is compiled, and TypeError or ValueError on the emulator.
"""

from __future__ import annotations

import operator
from itertools import product
from typing import TypeVar, get_args

from shmemkit.compiler.ptx import TypingError, asm, element_address, gpu, gpu_function, gpu_moved, types
from shmemkit.typing import Array, Comparison, Scope, SigOp, WaitSemantic

from ..argument_checks import (
    COMPARES,
    OFFSETS,
    SCOPES,
    SIGNALS,
    check_choice,
    check_emulated_integer,
    check_emulated_words,
    check_integer,
    check_words,
    described,
    is_one,
    literal_choice,
)
from ..cuda.thread_index import SHARES
from ..emulator import current_thread
from ..enums import comparison_name, signal_op_name
from . import bounded_waits
from .groups import ENTER, called_by, called_by_a_thread, share_of
from .nvshmem_functions import nvshmem, signal_array, to_pe
from .ordered_access import add, load, store
from .peers import offset_of

__all__ = ["wait", "wait_warp", "wait_block", "consume_token", "notify", "notify_at", "signal_op"]
__all__ += ["signal_wait_until", "signal_wait"]

_SEMANTICS, _SIG_OPS = get_args(WaitSemantic), get_args(SigOp)
_WAITS = frozenset(product(SCOPES, _SEMANTICS, COMPARES))

_SHARED = ": they share the signals, and synchronize; each has acquired all n."

T = TypeVar("T")
_stopped = bounded_waits.stopped
_zero_from = asm("sub.u64 $0, $1, $1;", types.uint64, (types.uint64,))


# ---- wait


def _waiting(kind, name, group):
    """The family of ``wait(signals, n, scope, semantic, value=1, compare="ge")``: a `group` shares the
    signals, and synchronizes."""
    enter, (number, count, meet) = ENTER[group], SHARES[group]

    def waiting(signals, n, scope, semantic, value=1, compare="ge"):
        thread = enter(group, name, signals, n, scope, semantic, value, compare)
        first, step = share_of(thread, group)
        if first == 0:  # the others have the same arguments
            if (scope, semantic, compare) not in _WAITS:
                _explain_wait(name, scope, semantic, compare)
            check_emulated_words(name, "signals", signals)
        seen = value
        for i in range(first, n, step):
            seen = thread.wait(signals, i, compare, value, scope, semantic)
        thread.together(group)
        return seen

    def on_gpu(signals, n, scope, semantic, value=1, compare="ge"):
        check_words(name, "signals", signals)
        check_integer(name, n=n, value=value)
        scope = literal_choice(name, "scope", scope, SCOPES)
        semantic = literal_choice(name, "semantic", semantic, _SEMANTICS)
        compare = literal_choice(name, "compare", compare, COMPARES)
        holds = getattr(operator, compare)
        dtype = signals.dtype
        read = load(dtype, semantic, scope)

        @gpu_function
        def poll(address, wanted):
            seen = read(address)
            while not holds(seen, wanted):
                seen = read(address)
            return seen

        if bounded_waits.armed():
            poll = bounded_waits.bounded(name, dtype, read, compare)

        if is_one(n) and group == "thread":

            def impl(signals, n, scope, semantic, value=1, compare="ge"):
                return poll(element_address(signals, 0), dtype(value))

        elif is_one(n):

            def impl(signals, n, scope, semantic, value=1, compare="ge"):
                seen = dtype(value)
                if number() == 0:
                    seen = poll(element_address(signals, 0), seen)
                meet()
                return seen

        else:

            def impl(signals, n, scope, semantic, value=1, compare="ge"):
                wanted = seen = dtype(value)
                # Not range(): its length is a 64-bit division.
                i, end, step = number(), types.int64(n), count()
                while i < end:
                    seen = poll(element_address(signals, i), wanted)
                    i += step
                meet()
                return seen

        return impl

    return waiting, on_gpu


def _explain_wait(primitive, scope, semantic, compare):
    check_choice(primitive, "scope", scope, SCOPES)
    check_choice(primitive, "semantic", semantic, _SEMANTICS)
    check_choice(primitive, "compare", compare, COMPARES)


@called_by_a_thread(_waiting)
def wait(
    signals: Array, n: int, scope: Scope, semantic: WaitSemantic, value: int = 1, compare: Comparison = "ge"
) -> int:
    """Wait until each of ``signals[0] .. signals[n - 1]`` satisfies the comparison with `value`. -> a token

    signals   1-D, of uint64, int64, uint32 or int32, in global memory: this rank's, or a peer's (`symm_at`)
    n         how many; ``signals[3:], 1`` waits for one. The literal 1 compiles without a loop over n
    scope     "gpu" if the notifying threads run on this GPU, "sys" if they run on any GPU of the host; a
              literal
    semantic  "acquire": the calling thread's later accesses see what preceded each notify that it waited
              for; "relaxed": no ordering; a literal
    value     an integer, converted to the signals' dtype; 1 if it is left out
    compare   "ge" (default: for signals that only grow), "eq", "ne", "gt", "le" or "lt"; a literal
    ->        the value read of the last signal: for `consume_token`, or to use, such as a tail index

    The wait orders what preceded the value that it read, and nothing that preceded a later value. When the
    emulator looks for races, it returns the first value that satisfies the condition and that the thread may
    still read, although the signal may hold a later one. A program must be correct with it.

    The calling thread waits alone. ``cuda.syncthreads()`` afterwards passes on what it acquired to the other
    threads of the block. In the PTX memory model the notify's release precedes the acquire, the acquire
    precedes the barrier, and the barrier precedes what any thread of the block does next. Causality is
    transitive, whatever the scopes on the way.

    All threads of a warp or block call `wait_warp` and `wait_block`, with the same arguments; of one signal,
    thread 0 waits. These return the last value that the calling thread itself read, or `value` if it read
    none.

    Prefer signals of the waiting rank: for a peer's, the wait polls with loads over NVLink. For a signal that
    arrives over the network (put_signal, or signal_op of a remote rank), use `signal_wait_until`.
    """
    ...


wait_warp = called_by("warp", wait, _SHARED)
"""`wait` by all threads of a warp: they share the signals, and synchronize; each has acquired all n."""
wait_block = called_by("block", wait, _SHARED)
"""`wait` by all threads of a block: they share the signals, and synchronize; each has acquired all n."""


def consume_token(value: T, token: int) -> T:
    """Return `value`, which then depends on `token`: what uses the result needs the wait.

    value   an array or an integer
    token   what `wait` returned

    The acquire in `wait` already orders the calling thread's later accesses. `consume_token` states which of
    them need it: for the reader, and for the compilers as a data dependency. The returned pointer (or
    integer) is computed from the token, by an instruction that keeps its position among all memory accesses.
    One thread; it costs an addition.
    """
    current_thread("consume_token")
    return value


@gpu_moved(consume_token)
def _(value, token):
    check_integer("consume_token", token=token)
    if not isinstance(value, (types.Array, types.Integer)):
        raise TypingError(f"consume_token(): value is {described(value)}; it must be an array or an integer")
    return lambda value, token: _zero_from(token)


# ---- notify


def notify(signal: Array, rank: int, value: int, sig_op: SigOp = "set", scope: Scope = "sys") -> None:
    """Set ``signal[0]`` on `rank` to `value`, or add `value` to it, directly over NVLink, as a release.

    signal    symmetric, 1-D, of uint64, int64, uint32 or int32: ``notify(signals[3:], ...)`` notifies
              signals[3]
    rank      0 .. num_ranks() - 1, this rank included; not checked on the GPU. Its memory must be mapped
              here (as for `symm_at`)
    value     an integer, converted to the signal's dtype
    sig_op    "set", or "add" (atomic); a literal
    scope     "sys"; or "gpu" if the waiting threads run on this GPU (`rank` is this rank); a literal

    One thread. A thread that acquires the value sees everything that this thread did and saw before. To
    publish the stores of a whole block, call ``cuda.syncthreads()``, then let one thread notify. It does not
    wait for puts that are still in flight: send their signal with `put_signal`, or with `fence` and
    `signal_op`.

    Sets of a signal by one thread stay in order. If several threads set it or add to it, and nothing orders
    them, an update may be lost, and what it announced with it. Let all threads add, or give each its own
    signal.
    """
    thread = current_thread("notify")
    check_choice("notify", "sig_op", sig_op, _SIG_OPS)
    check_choice("notify", "scope", scope, SCOPES)
    check_emulated_words("notify", "signal", signal)
    if scope == "gpu" and rank != thread.rank:
        raise ValueError(
            f"notify(): scope is 'gpu' and rank is {rank}, but this is rank {thread.rank}; scope must be "
            "'sys' for other ranks"
        )
    theirs = thread.peer(signal, rank)
    if sig_op == "set":
        thread.store(theirs, 0, value, scope)
    else:
        thread.atomic(theirs, 0, lambda old: old + value, scope, "release")


@gpu(notify)
def _(signal, rank, value, sig_op="set", scope="sys"):
    check_words("notify", "signal", signal)
    check_integer("notify", rank=rank, value=value)
    dtype, armed = signal.dtype, bounded_waits.armed()
    write = {"set": store, "add": add}[literal_choice("notify", "sig_op", sig_op, _SIG_OPS)]
    write = write(dtype, literal_choice("notify", "scope", scope, SCOPES))

    def impl(signal, rank, value, sig_op="set", scope="sys"):
        if not (armed and _stopped()):
            write(element_address(signal, 0) + offset_of(rank), dtype(value))

    return impl


def notify_at(array: Array, index: int, offsets: Array, rank: int, value: int, sig_op: SigOp = "set") -> None:
    """`notify` for ``array[index]``, of scope "sys", with a table that the kernel gets as an argument.

    array    symmetric, 1-D, of uint64, int64, uint32 or int32
    index    0 <= index < array.size, not checked on the GPU
    offsets  as of `peer_at`
    rank, value, sig_op   as of `notify`

    One thread. For kernels with `setmaxnreg_inc`, as `peer_at`.
    """
    thread = current_thread("notify_at")
    check_choice("notify_at", "sig_op", sig_op, _SIG_OPS)
    check_emulated_words("notify_at", "array", array)
    check_emulated_words("notify_at", "offsets", offsets, OFFSETS)
    theirs = thread.peer(array, rank)
    if sig_op == "set":
        thread.store(theirs, index, value, "sys")
    else:
        thread.atomic(theirs, index, lambda old: old + value, "sys", "release")


@gpu(notify_at)
def _(array, index, offsets, rank, value, sig_op="set"):
    check_words("notify_at", "array", array)
    check_words("notify_at", "offsets", offsets, OFFSETS)
    check_integer("notify_at", index=index, rank=rank, value=value)
    dtype, armed = array.dtype, bounded_waits.armed()
    write = {"set": store, "add": add}[literal_choice("notify_at", "sig_op", sig_op, _SIG_OPS)](dtype, "sys")

    def impl(array, index, offsets, rank, value, sig_op="set"):
        if not (armed and _stopped()):
            write(element_address(array, index) + types.uint64(offsets[rank]), dtype(value))

    return impl


# ---- OpenSHMEM's signals


def signal_op(signal_var: Array, signal_val: int, signal_op: int, pe: int) -> None:
    """Set ``signal_var[0]`` on rank `pe`, or add to it, over NVLink or the network.

    signal_var   symmetric, 1-D, of uint64 (or int64)
    signal_val   an integer
    signal_op    SignalOp.SIGNAL_SET or SignalOp.SIGNAL_ADD
    pe           0 .. n_pes() - 1

    One thread. It is not ordered after this thread's earlier puts and signals: call `fence` (for the same
    rank) or `quiet` (for all ranks) before it. Two sets by one thread may arrive in either order, unless a
    fence or an answer of rank `pe` is between them. If nothing orders sets and adds of one signal, some may
    be lost.
    """
    thread = current_thread("signal_op")
    check_emulated_words("signal_op", "signal_var", signal_var, SIGNALS)
    check_emulated_integer("signal_op", signal_val=signal_val, signal_op=signal_op, pe=pe)
    thread.signal(signal_var, signal_val, signal_op_name("signal_op", signal_op), pe)


@gpu(signal_op)
def _(signal_var, signal_val, signal_op, pe):
    check_words("signal_op", "signal_var", signal_var, SIGNALS)
    check_integer("signal_op", signal_val=signal_val, signal_op=signal_op, pe=pe)
    call, armed = nvshmem("signal_op"), bounded_waits.armed()
    pe_of = to_pe()

    def impl(signal_var, signal_val, signal_op, pe):
        if not (armed and _stopped()):
            call(signal_array(signal_var), types.uint64(signal_val), types.int32(signal_op), pe_of(pe))

    return impl


def signal_wait_until(signal: Array, compare: int, value: int) -> int:
    """Wait until this rank's ``signal[0]`` satisfies the comparison with `value`. -> the value read

    signal    symmetric, 1-D, of uint64 (or int64), this rank's; compared as uint64
    compare   ComparisonType.CMP_EQ, CMP_NE, CMP_GT, CMP_GE, CMP_LT or CMP_LE
    value     an integer

    One thread, over NVLink and over the network. Afterwards the data of the `put_signal` that set this value
    has arrived. If `signal_op` set it, the puts before the `fence` before it have arrived. As in `wait`,
    nothing follows for later values: before the sender fills a slot again, it needs an answer that the slot
    was read.
    """
    thread = current_thread("signal_wait_until")
    check_emulated_words("signal_wait_until", "signal", signal, SIGNALS)
    check_emulated_integer("signal_wait_until", compare=compare, value=value)
    return thread.wait(signal, 0, comparison_name(compare), value)


@gpu(signal_wait_until)
def _(signal, compare, value):
    check_words("signal_wait_until", "signal", signal, SIGNALS)
    check_integer("signal_wait_until", compare=compare, value=value)
    if bounded_waits.armed():  # NVSHMEM's wait has no limit; it polls the local word, too
        read = load(types.uint64, "acquire", "sys")
        poll = bounded_waits.bounded_by_number("signal_wait_until", types.uint64, read)

        def bounded(signal, compare, value):
            return poll(element_address(signal, 0), types.uint64(value), types.int32(compare))

        return bounded
    call = nvshmem("signal_wait")

    def impl(signal, compare, value):
        return call(signal_array(signal), types.int32(compare), types.uint64(value))

    return impl


def signal_wait(signal_var: Array, signal_op: int, signal_val: int) -> int:
    """`signal_wait_until` under nvshmem4py's name; `signal_op` is the comparison."""
    return signal_wait_until(signal_var, signal_op, signal_val)


@gpu(signal_wait)
def _(signal_var, signal_op, signal_val):
    return lambda signal_var, signal_op, signal_val: signal_wait_until(signal_var, signal_op, signal_val)
