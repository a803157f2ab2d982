"""Combine partial attention: each rank has attended to its part of the KV cache.

    m   = max of lse over the ranks                            lse: natural logarithm of a row's sum of exp
    out = sum of exp(lse - m) * partial / sum of exp(lse - m)  in float32, in the order of the ranks

A row is what a rank has for one head of one batch entry. A rank whose lse is -inf has seen no token: its
partial is not used. Where all have seen none, out is 0. Packets are Lamport's.

Slots     slots[buffer, k, r, i], on the rank that gets row r: piece i of rank k's row; the last piece has the
          lse. "all_gather": all ranks get all rows. "all_to_all": rank k gets the k-th segment of heads
Epochs    sent[row], received[r], local: of a row sent, and of a row received. They select the buffer.
          Device-resident, so graph-safe

  `lanes` threads of a warp together, for their rows in ascending order:
          1. add 1 to sent[row]; send the row's pieces, and its lse, to the rank or the ranks that get it
          2. add 1 to received[r]; one lane waits for the lse of all ranks, and tells the others
          3. each lane waits for its pieces of all ranks, adds them up by their weights, and stores the sum

The kernel here does 1 to 3 for one row after another. Other kernels send a row when they have it, and receive
rows at their end, in any blocks: ``PartialAttention``.

All ranks combine in the same order: they get the same bits, in every run.

No race: the double-buffer lemma (docs/protocols.md), of the rows of a batch entry: a call that has the entry
sends all of its rows, and every rank sends rows of it to every other one. No deadlock: a kernel sends a row
before it waits for that row or a later one, sending waits for nothing, and all blocks are resident.

The machine code must keep (docs/machine_code.md): whole packet, whole warp.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from numba import cuda, types

from shmemkit.device import griddepcontrol_launch_dependents, griddepcontrol_wait, rank, symm_at
from shmemkit.device.cuda.float_storage import ELEMENTS, element
from shmemkit.device.cuda.unroll import folded, for_each, mapped, tuple_of
from shmemkit.device.cuda.weighted_sums import four_words, two_words, weighted_sum
from shmemkit.device.packets.transports import LAMPORT, rank_after
from shmemkit.device.packets.units import repeating
from shmemkit.operations.operation import Given, Operation
from shmemkit.operations.packet_method import PacketMethod
from shmemkit.runtime.symmetric_memory import as_dtype
from shmemkit.runtime.world import World
from shmemkit.support.dtypes import numpy_dtype
from shmemkit.support.settings import integer, listed, one_of
from shmemkit.typing import AnyArray, AnyStream, ArrayT, AttentionForm, DType

PIECE = LAMPORT.unit_bytes
FORMS = ("all_gather", "all_to_all")
MOST_PIECES = 8  # of a thread

device = cuda.jit(device=True)
u32, u64, f32 = types.uint32, types.uint64, types.float32
ALL = 0xFFFFFFFF
NONE = f32(-math.inf)


class PartialAttention(NamedTuple):
    """Functions for kernels that combine partial attention. `lanes` neighbouring threads of a warp call them
    together; other threads of the warp need not. `packets` is an argument of the kernel.

    lanes           lane j has pieces j, j + lanes, ... of a row, of 16 bytes each
    pieces          of a lane; zeros beyond the row
    send(packets, row, j, words, lse)
                    row: batch entry * heads + head; words: a tuple of the lane's `pieces`, two uint64 each;
                    lse: float32, the same in all lanes
    receive(packets, r, j) -> words
                    r: batch entry * the heads that this rank gets + head

    A launch sends each row of the first batch entries once, receives each row that this rank gets once, and
    sends all that it sends before it waits in the same thread. All its blocks are resident. It begins with
    griddepcontrol_wait if it is launched with pdl=True.
    """

    lanes: int
    pieces: int
    send: Callable
    receive: Callable


@device
def _lane_mask(lanes):
    """Of the lanes that have a row together."""
    if lanes == 32:
        return u32(ALL)
    return u32(u32((1 << lanes) - 1) << u32(cuda.laneid & ~(lanes - 1) & 31))


@device
def counted(counters, row, j, lanes):
    """-> the epoch of `row`, which it counts"""
    epoch = u32(counters[row] + 1)
    cuda.syncwarp(_lane_mask(lanes))  # all have read it
    if j == 0:
        counters[row] = epoch
    return epoch


@device
def _larger(most, lse, _):
    return max(most, lse)


@device
def _same(lse, _):
    return lse


@device
def _weight(lse, most):
    # Of a rank without tokens 0. NaN stays.
    return f32(0) if lse == NONE else f32(math.exp(f32(lse - most)))


@device
def _sum(total, weight, _):
    return f32(total + weight)


@device
def _scaled(weight, scale):
    return f32(weight * scale)


@functools.cache
def partial_attention(n, heads, head_dim, dtype, form):
    """-> the PartialAttention of `n` ranks, of rows of `dtype`"""
    count = head_dim * numpy_dtype(dtype).itemsize // PIECE
    lanes = min(32, 1 << count.bit_length() - 1)
    pieces, units, own_heads = -(-count // lanes), count + 1, heads // n
    send_one, send_all, receive_all = LAMPORT.send, LAMPORT.send_all(n), LAMPORT.receive_all(n)
    copies, to_all = repeating(n), form == "all_gather"
    zero, add, result = weighted_sum(dtype)
    floats, pack = weighted_sum("float32"), element("float32").pack
    float_zero, float_add = floats.zero, floats.add

    @device
    def send_unit(channel, row, i, words, epoch):
        buffer_row = u32((epoch & 1) * n + rank())
        if to_all:
            send_all(channel, buffer_row, u32(row * units + i), copies(words), epoch, rank())
        else:
            b = u32(row // heads)
            head = u32(row - b * heads)
            to = u32(head // own_heads)
            r = u32(b * own_heads + head - to * own_heads)
            send_one(channel, u32(buffer_row * channel[1] + r * units + i), words, epoch, to)

    @device
    def send_piece(k, words, arguments):
        channel, row, j, epoch = arguments
        i = u32(j + k * lanes)
        if i < count:
            send_unit(channel, row, i, words, epoch)

    send_pieces = for_each(pieces, send_piece)

    @device
    def send(packets, row, j, words, lse):
        channel, sent, _ = packets
        epoch = counted(sent, row, j, lanes)
        if j == 0:
            send_unit(channel, row, u32(count), (pack(lse, f32(0)), u64(0)), epoch)
        send_pieces(words, (channel, row, j, epoch))

    @device
    def lse_of(words, _):
        lse = float_add(float_zero(), four_words(words), f32(1))[0]
        return f32(cuda.shfl_sync(_lane_mask(lanes), lse, cuda.laneid & ~(lanes - 1)))

    @device
    def nothing(k, _):
        return u64(0), u64(0)

    @device
    def first_part(part, _):
        words, weight = part
        return add(zero(), four_words(words), weight)

    @device
    def next_part(total, part, _):
        words, weight = part
        return add(total, four_words(words), weight)

    @device
    def used(k, arguments):
        """The words of a rank that has seen tokens: those of others may be anything, as NaN."""
        words, weights = arguments
        return (words[k] if weights[k] != 0 else (u64(0), u64(0))), weights[k]

    no_words, lses_of = tuple_of(n, nothing), mapped(n, lse_of)
    largest, weights_of, total_of = folded(n, _same, _larger), mapped(n, _weight), folded(n, _same, _sum)
    scaled_by, parts_of, add_up = mapped(n, _scaled), tuple_of(n, used), folded(n, first_part, next_part)

    @device
    def receive_piece(k, arguments):
        channel, first, r, j, epoch, weights = arguments
        i, words = u32(j + k * lanes), (u64(0), u64(0))
        if i < count:
            words_of_all = receive_all(channel, first, u32(r * units + i), epoch)
            words = two_words(result(add_up(parts_of((words_of_all, weights)), 0)))
        return words

    pieces_of = tuple_of(pieces, receive_piece)

    @device
    def receive(packets, r, j):
        channel, _, received = packets
        epoch = counted(received, r, j, lanes)
        first = u32((epoch & 1) * n)
        words = no_words(0)
        if j == 0:
            words = receive_all(channel, first, u32(r * units + count), epoch)
        lses = lses_of(words, 0)
        weights = weights_of(lses, largest(lses, 0))
        total = total_of(weights, 0)
        scale = f32(0) if total == 0 else f32(f32(1) / total)
        return pieces_of((channel, first, r, j, epoch, scaled_by(weights, scale)))

    return PartialAttention(lanes, pieces, send, receive)


@functools.cache
def combine_kernel(n, heads, head_dim, dtype, form):
    lanes, pieces, send, receive = partial_attention(n, heads, head_dim, dtype, form)
    count = head_dim * numpy_dtype(dtype).itemsize // PIECE
    to_all, own_heads = form == "all_gather", heads // n
    load_piece, store_piece = LAMPORT.load, LAMPORT.store

    @device
    def load(k, arguments):
        x, row, j = arguments
        i = u32(j + k * lanes)
        return load_piece(x, u32(row * count + i)) if i < count else (u64(0), u64(0))

    @device
    def store(k, words, arguments):
        out, row, j = arguments
        i = u32(j + k * lanes)
        if i < count:
            store_piece(out, u32(row * count + i), words)

    load_pieces, store_pieces = tuple_of(pieces, load), for_each(pieces, store)

    @cuda.jit
    def attention_combine(x, lse, out, rows, packets):
        """x, out   complex128, pieces: the rows of this rank's partial, and the `rows` that it gets
        lse      float32, of each row of x
        packets  (channel, sent, received), as of ``packets_of``
        grid     any number of blocks of whole warps, one-dimensional, as the blocks are
        """
        j = u32(cuda.threadIdx.x & (lanes - 1))
        r = u32((cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x) // lanes)
        griddepcontrol_wait(x, lse, symm_at(packets[0][0], 0), packets[1], packets[2], r)
        griddepcontrol_launch_dependents()
        while r < rows:
            if to_all:
                send(packets, r, j, load_pieces((x, r, j)), lse[r])
            else:
                b = u32(r // own_heads)
                first = u32(b * heads + r - b * own_heads)
                for k in range(n):
                    row = u32(first + rank_after(rank(), k) * own_heads)
                    send(packets, row, j, load_pieces((x, row, j)), lse[row])
            store_pieces(receive(packets, r, j), (out, r, j))
            r = u32(r + cuda.gridDim.x * cuda.blockDim.x // lanes)

    return attention_combine


def packets_of(method, max_batch, heads, head_dim, dtype, form):
    """-> the `packets` of a PartialAttention. Collective."""
    n, xp = method.world.n_ranks, method.world.xp
    sent, received = max_batch * heads, max_batch * (heads if form == "all_gather" else heads // n)
    units = head_dim * numpy_dtype(dtype).itemsize // PIECE + 1
    channel = LAMPORT.channel(method, 2 * n, received * units * PIECE, method.array_name("rows"))
    return channel, xp.zeros(sent, "uint32"), xp.zeros(received, "uint32")


class _Combine(PacketMethod):
    at_once, t = True, LAMPORT

    def prepare(self, max_batch, *of):
        self.check_ranks()
        self.functions, self.packets = (
            partial_attention(self.world.n_ranks, *of),
            packets_of(self, max_batch, *of),
        )
        self.kernel = combine_kernel(self.world.n_ranks, *of)
        nothing = self.world.xp.empty(0, "uint8")
        self.bind(nothing, nothing, nothing, 0)

    def bind(self, x, lse, out, rows):
        x, out = (a.reshape(-1).view("uint8").view("complex128") for a in (x, out))
        args = x, lse.reshape(-1).view("float32"), out, rows, self.packets
        fit = self.launch(self.kernel, 1, *args, pdl=True).resident_blocks
        grid = self.within(min(-(-rows * self.functions.lanes // self.threads), fit))
        return self.launch(self.kernel, max(1, grid), *args, pdl=True)


class AttentionCombine(Operation):
    """Combine partial attention over the ranks. Collective.

    ``op = sk.AttentionCombine(world, max_batch, heads, head_dim)``, then ``out = op(partial, lse)``. Each
    rank has attended to its part of the KV cache by any kernel, and has the log-sum-exp of each row:

        m   = max of lse over the ranks
        out = sum of exp(lse - m) * partial / sum of exp(lse - m)

    ``help(sk.collectives)`` has the rules for calls, streams, order, graphs, memory and errors.

    world      the World; its ranks, 16 at most, reach each other over NVLink, as in one node
    max_batch  the most batch entries of a call
    heads      of the queries
    head_dim   elements of a row: a multiple of 16 bytes, 4096 bytes at most
    dtype      of partial and out: bfloat16, float16 or float32
    form       "all_gather": every rank gets all heads. "all_to_all": rank r gets the r-th segment of heads,
               whose number the ranks divide
    sms        the most multiprocessors that its calls use, 1 or more; None: as many as are tuned

    For kernels of users that end with it:

    packets    an argument of theirs
    functions  `lanes`, `pieces`, `send` and `receive`: see ``help(op.functions)``. All launches with these
               packets, calls of this object among them, run one after another

    It sums in float32 and rounds once; all ranks that get a row get the same bits. Symmetric memory:
    2 * n_ranks times what a rank gets in a call.
    """

    ARRAYS = {
        "partial": Given("batch heads head_dim"),
        "lse": Given("batch heads", "float32", align=0),
        "out": Given("batch own_heads head_dim", new=True, may_be="partial"),
    }
    LIMITS = {"batch": ("max_batch", "batch entries")}
    max_batch: int
    heads: int
    head_dim: int
    form: AttentionForm

    def __init__(
        self,
        world: World,
        max_batch: int,
        heads: int,
        head_dim: int,
        dtype: DType = "bfloat16",
        form: AttentionForm = "all_gather",
        *,
        sms: int | None = None,
    ):
        def check():
            self.dtype = check_heads(WHO, world, max_batch, heads, head_dim, dtype, form)
            given = {
                "max_batch": int(max_batch),
                "heads": int(heads),
                "head_dim": int(head_dim),
                "form": form,
            }
            vars(self).update(given)
            return {**given, "dtype": self.dtype.name}

        super().__init__(world, check, sms)
        self.own_heads = self.heads if form == "all_gather" else self.heads // world.n_ranks
        of = self.max_batch, self.heads, self.head_dim, self.dtype.name, form
        self._method: Any = self._part(_Combine, world, *of, name=f"attention_combine {form}")
        self.packets, self.functions = self._method.packets, self._method.functions

    def __call__(
        self, partial: ArrayT, lse: AnyArray, out: ArrayT | None = None, *, stream: AnyStream | None = None
    ) -> ArrayT:
        """Enqueue one. -> out

        partial  (batch, heads, head_dim), of the same shape on all ranks; batch is 0 to max_batch
        lse      (batch, heads), float32: the natural logarithm of the sum of exp of a row's scaled scores, as
                 PyTorch's. (FlashInfer's is to base 2: times ln 2.) -inf of a row without tokens, whose
                 partial is not used
        out      (batch, heads, head_dim), or (batch, heads / n_ranks, head_dim) by "all_to_all". By
                 "all_gather" it may be partial. Default: a new one of partial's kind
        stream   default: PyTorch's current one if any array is a tensor on a GPU, else the World's

        All are C-contiguous; partial and out begin at multiples of 16 bytes. When the stream has run it,
        later work on it sees the result.
        """
        return self._enqueue({"partial": partial, "lse": lse, "out": out}, stream)["out"]

    def _bind(self, partial, lse, out):
        return self._method.bind(partial, lse, out, math.prod(out.shape[:2]))


WHO = AttentionCombine.__name__


def check_heads(who, world, max_batch, heads, head_dim, dtype, form):
    """-> the dtype. TypeError or ValueError unless these fit together."""
    kind = as_dtype(dtype, who)
    if kind.name not in ELEMENTS:
        raise ValueError(f"{who}: dtype is {kind.name}; it must be {listed(ELEMENTS)}")
    integer(who, "max_batch", max_batch, 1, 1 << 16)
    integer(who, "heads", heads, 1, 1 << 12)
    step = PIECE // kind.itemsize
    integer(who, "head_dim", head_dim, step, MOST_PIECES * 32 * step)
    if head_dim % step:
        raise ValueError(f"{who}: head_dim is {head_dim}; of {kind.name} it must be a multiple of {step}")
    one_of(who, "form", form, FORMS)
    if form == "all_to_all" and heads % world.n_ranks:
        raise ValueError(
            f"{who}: there are {heads} heads and {world.n_ranks} ranks; by all_to_all, heads must be a "
            "multiple of the ranks"
        )
    return kind


GPU_KERNELS = {
    f"[{', '.join(map(str, of))}]": combine_kernel(*of)
    for of in (
        (2, 32, 128, "bfloat16", "all_gather"),
        (8, 32, 128, "float16", "all_gather"),
        (4, 96, 128, "float32", "all_to_all"),
        (4, 128, 512, "bfloat16", "all_to_all"),
    )
}
