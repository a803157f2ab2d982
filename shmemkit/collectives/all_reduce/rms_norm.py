"""All-reduce with what follows it in every decoder layer: the residual is added, and the sum normalized.

    total    = sum of x over the ranks, as of AllReduce: in float32, in the order of the ranks, rounded once
    residual = residual + total, rounded
    out      = residual / sqrt(mean(residual**2) + eps) * weight, in float32, rounded once; by rows
    out8     = out * (1 / scale), in float32, rounded to float8_e4m3fn    where out is wanted so
    scale    = one for all, which is given; or of 128 elements of a row max(largest magnitude, 1e-12) / 448

A block has a row. The row stays in registers from its arrival to its last store. Packets are Lamport's.

Slots     inputs[buffer, k, r]: row r of rank k's x. Two shots: rank r % n combines row r, of
          inputs[buffer, k, r // n], and sends results[buffer, r % n, r // n]. Only rank k writes its inputs
Epochs    epochs[r], local: of row r; it selects the buffer. Device-resident, so graph-safe

  a block, for its rows r in ascending order:
          1. send row r of x to inputs on all ranks; of two shots, on rank r % n
          2. add 1 to the row's epoch
          3. of two shots, on rank r % n: wait for the row of all ranks, combine them, and send the sum to
             results on all ranks
          4. wait for the row of all ranks, and combine them; of two shots, wait for the result
          5. add the residual and store it; sum up the squares over the block; store the normalized row. For
             a scale of 128 elements, the 16 threads that have them find the largest one

All ranks combine in the same order, and sum squares alike: they get the same bits, in every run.

No race: the double-buffer lemma (docs/protocols.md), of each row; consuming a slot includes resetting it. Two
epochs later, a rank sends a row's inputs again, and its owner the result. In the epoch between, the owner has
had that row's inputs from all ranks, and they its result. Each of these was sent in a launch after the one
that reset the slot. out may be x, and the new residual the old one: a block alone loads and stores its rows.

No deadlock: ascending-order progress; a row's inputs are sent before anything of it is waited for, and all
blocks are resident.

The machine code must keep (docs/machine_code.md): whole packet, whole warp.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numba import cuda, types

from shmemkit.device import griddepcontrol_launch_dependents, griddepcontrol_wait, rank, symm_at
from shmemkit.device.cuda.float8 import FLOAT8, four_e4m3
from shmemkit.device.cuda.float_storage import element
from shmemkit.device.cuda.unroll import folded, for_each, tuple_of
from shmemkit.device.packets.transports import LAMPORT
from shmemkit.device.packets.units import combining, repeating
from shmemkit.operations.operation import Given, Operation
from shmemkit.operations.packet_method import PacketMethod
from shmemkit.runtime.symmetric_memory import as_dtype
from shmemkit.runtime.world import World
from shmemkit.support.settings import integer, listed, one_of, options_of, shown
from shmemkit.typing import AllReduceRMSNormMethod, AnyArray, AnyStream, ArrayT, DType

DTYPES = ("bfloat16", "float16")
PIECE = LAMPORT.unit_bytes
THREADS = 512  # of a block, with 128 registers: enough for 2 pieces, from 9 ranks on for 1
MOST_PIECES = 8  # of a thread, in half as many threads
BLOCK, PIECES_OF_BLOCK = 128, 16  # elements that have a scale, as sk.matmul takes them
OUT8, LEAST = "float8_e4m3fn", 1e-12  # a block of zeros has a scale, too
MOST = FLOAT8[OUT8].most
UNSCALED, ONE_SCALE, BLOCK_SCALES = 0, 1, 2
# Bytes that a rank sends, up to which "auto" takes one shot: decided by
# benchmarks/results/model/all_reduce_rms_norm_h100x4.json
ONE_SHOT = 3 << 18

device = cuda.jit(device=True)
u32, u64, f32 = types.uint32, types.uint64, types.float32
ALL = 0xFFFFFFFF
load, store, receive = LAMPORT.load, LAMPORT.store, LAMPORT.receive


@functools.cache
def norm_kernel(n, pieces, dtype, two_shots, by_instruction):
    """-> the kernel for `n` ranks, and threads that have `pieces` of a row each; `by_instruction`, of compute
    capability 8.9, it rounds to float8"""
    send, send_all, receive_all = LAMPORT.send, LAMPORT.send_all(n), LAMPORT.receive_all(n)
    combine, add, copies = combining("sum", dtype, n), combining("sum", dtype, 2), repeating(n)
    widen, pack, pack_float8 = element(dtype).widen, element(dtype).pack, four_e4m3(by_instruction)

    @device
    def send_row(x, r, count, channel, buffer, epoch, me):
        i, row = u32(cuda.threadIdx.x), u32(buffer * n + me)
        while i < count:
            words = load(x, r * count + i)
            if two_shots:
                send(channel, u32(row * channel[1] + (r // n) * count + i), words, epoch, r % n)
            else:
                send_all(channel, row, u32(r * count + i), copies(words), epoch, me)
            i = u32(i + cuda.blockDim.x)

    @device
    def combine_row(r, count, channel, buffer, epoch, me):
        i = u32(cuda.threadIdx.x)
        while i < count:
            at = u32((r // n) * count + i)
            words = combine(receive_all(channel, u32(buffer * n), at, epoch))
            send_all(channel, u32(2 * n + buffer * n + me), at, copies(words), epoch, me)
            i = u32(i + cuda.blockDim.x)

    @device
    def place(k):
        return u32(cuda.threadIdx.x + k * cuda.blockDim.x)

    @device
    def piece_of(k, arguments):
        """Zeros beyond the row."""
        x, first, count = arguments
        return load(x, u32(first + place(k))) if place(k) < count else (u64(0), u64(0))

    @device
    def total_of(k, arguments):
        """The sum of all ranks, and the residual: the new residual, which it stores."""
        r, count, channel, buffer, epoch, residual, new_residual = arguments
        i, words = place(k), residual[k]
        if i < count:
            if two_shots:
                slot = u32((2 * n + buffer * n + r % n) * channel[1] + (r // n) * count + i)
                total = receive(channel, slot, epoch)
            else:
                total = combine(receive_all(channel, u32(buffer * n), u32(r * count + i), epoch))
            words = add((total, words))
            store(new_residual, u32(r * count + i), words)
        return words

    @device
    def part(word, k):
        return widen(types.uint16(word >> u64(16 * k) & u64(0xFFFF)))

    @device
    def squares_of_word(word):
        a, b, c, d = part(word, 0), part(word, 1), part(word, 2), part(word, 3)
        return f32(f32(a * a + b * b) + f32(c * c + d * d))

    @device
    def squares(words, _):
        return f32(squares_of_word(words[0]) + squares_of_word(words[1]))

    @device
    def add_squares(total, words, _):
        return f32(total + squares(words, _))

    @device
    def normal_word(word, scale, weight):
        low = pack(f32(part(word, 0) * scale) * part(weight, 0), f32(part(word, 1) * scale) * part(weight, 1))
        high = pack(
            f32(part(word, 2) * scale) * part(weight, 2), f32(part(word, 3) * scale) * part(weight, 3)
        )
        return u64(low) | u64(high) << u64(32)

    @device
    def most_of_word(word):
        """The largest magnitude's bits: they are ordered as the numbers, NaN last."""
        word, most = u64(word & u64(0x7FFF7FFF7FFF7FFF)), u32(0)
        for k in range(4):
            most = max(most, u32(word >> u64(16 * k) & u64(0xFFFF)))
        return most

    @device
    def scale_of(words):
        """That of the block of elements to which the thread's words belong."""
        most = max(most_of_word(words[0]), most_of_word(words[1]))
        for lanes in (8, 4, 2, 1):
            most = max(most, u32(cuda.shfl_xor_sync(ALL, types.int32(most), lanes)))
        largest = widen(types.uint16(most))
        if largest < f32(LEAST):
            largest = f32(LEAST)
        return f32(largest / f32(MOST))

    @device
    def word_of_float8(word, inverse):
        return pack_float8(
            *(f32(part(word, 0) * inverse), f32(part(word, 1) * inverse)),
            *(f32(part(word, 2) * inverse), f32(part(word, 3) * inverse)),
        )

    @device
    def store_normal(k, words, arguments):
        r, count, scale, weight, out, out8, scales, scaling, inverse = arguments
        i, factors = place(k), weight_of(k, weight)
        done = normal_word(words[0], scale, factors[0]), normal_word(words[1], scale, factors[1])
        if scaling == BLOCK_SCALES:
            of_block = scale_of(done)
            inverse = f32(f32(1) / of_block)
            if i < count and i % PIECES_OF_BLOCK == 0:
                blocks = u32((count + (PIECES_OF_BLOCK - 1)) // PIECES_OF_BLOCK)
                scales[u32(r * blocks + i // PIECES_OF_BLOCK)] = of_block
        if i < count:
            if scaling == UNSCALED:
                store(out, u32(r * count + i), done)
            else:
                high = u64(word_of_float8(done[1], inverse))
                out8[u32(r * count + i)] = high << u64(32) | u64(word_of_float8(done[0], inverse))

    @device
    def held(k, weights):
        return weights[k]

    @device
    def later(arguments):
        return arguments

    pieces_of, totals_of = tuple_of(pieces, piece_of), tuple_of(pieces, total_of)
    # The weight is loaded before the row arrives, unless that takes too many registers.
    weights_of, weight_of = (pieces_of, held) if pieces <= MOST_PIECES // 2 else (later, piece_of)
    store_normals, all_squares = for_each(pieces, store_normal), folded(pieces, squares, add_squares)

    @device
    def sum_of_block(x, shared):
        """The sum of all threads' x, the same bits in all of them."""
        for lanes in (16, 8, 4, 2, 1):
            x = f32(x + cuda.shfl_xor_sync(ALL, x, lanes))
        if cuda.threadIdx.x & 31 == 0:
            shared[cuda.threadIdx.x >> 5] = x
        cuda.syncthreads()
        total, warp = shared[0], 1
        while warp < cuda.blockDim.x >> 5:
            total = f32(total + shared[warp])
            warp += 1
        return total

    @cuda.jit
    def all_reduce_rms_norm(
        x, residual, weight, new_residual, out, out8, scales, scaling, rows, count, size, eps, channel, epochs
    ):
        """Of the arrays of all ranks.

        x, residual, new_residual, out
                 complex128, rows of `count` pieces: of `size` elements
        weight   complex128, a row
        out8     uint64, likewise, of float8; empty if UNSCALED, else out is
        scales   float32: the one that is given (ONE_SCALE), those of the rows' blocks (BLOCK_SCALES), none
        channel  of 2 * n rows of inputs; of two shots, then as many of results
        epochs   uint32, of each row, zeros at first
        grid     any number of blocks of whole warps, one-dimensional, as the blocks are
        """
        shared = cuda.shared.array(32, f32)
        r, me = u32(cuda.blockIdx.x), rank()
        griddepcontrol_wait(x, residual, weight, scales, symm_at(channel[0], 0), epochs, me, r)
        griddepcontrol_launch_dependents()
        inverse = f32(1)
        if scaling == ONE_SCALE:
            inverse = f32(f32(1) / scales[0])
        while r < rows:
            epoch = u32(epochs[r] + 1)
            buffer = epoch & 1
            send_row(x, r, count, channel, buffer, epoch, me)
            cuda.syncthreads()  # all threads have read the epoch, and the sums of the row before
            if cuda.threadIdx.x == 0:
                epochs[r] = epoch
            old, factors = pieces_of((residual, u32(r * count), count)), weights_of((weight, u32(0), count))
            if two_shots and r % n == me:
                combine_row(r, count, channel, buffer, epoch, me)
            words = totals_of((r, count, channel, buffer, epoch, old, new_residual))
            mean = f32(sum_of_block(all_squares(words, 0), shared) / f32(size))
            scale = f32(f32(1) / f32(math.sqrt(f32(mean + eps))))
            store_normals(words, (r, count, scale, factors, out, out8, scales, scaling, inverse))
            r = u32(r + cuda.gridDim.x)

    return all_reduce_rms_norm


class RowMethod(PacketMethod):
    """One shot, or two."""

    at_once, t = True, LAMPORT

    def prepare(self, max_tokens, hidden, dtype, two_shots):
        world, n = self.world, self.world.n_ranks
        self.check_ranks()
        self.size, self.count = hidden, hidden * dtype.itemsize // PIECE
        threads = THREADS if self.count <= THREADS * (2 if n <= 8 else 1) else THREADS // 2
        threads = 32 if world.backend.name == "emulator" else threads
        pieces = min(MOST_PIECES, -(-self.count // threads))
        self.threads = -(-self.count // (32 * pieces)) * 32
        rows = -(-max_tokens // n) if two_shots else max_tokens
        n_bytes = rows * self.count * PIECE
        self.channel = self.t.channel(self, (4 if two_shots else 2) * n, n_bytes, self.array_name("slots"))
        self.epochs = world.xp.zeros(max_tokens, "uint32")
        by_instruction = world.backend.compute_capability >= (8, 9)
        self.kernel = norm_kernel(n, pieces, dtype.name, two_shots, by_instruction)
        self.bind(*[world.xp.empty(0, dtype)] * 5, 0.0)

    def bind(self, x, residual, weight, new_residual, out, eps, scale=None, scales=None):
        rows, nothing = x.size // self.size, self.world.xp.empty(0, "uint8")
        out8, given, scaling = nothing, nothing.view("float32"), UNSCALED
        if scale is not None or scales is not None:
            out, out8 = nothing, out
            given, scaling = (scale, ONE_SCALE) if scales is None else (scales, BLOCK_SCALES)
        arrays = [
            a.reshape(-1).view("uint8").view("complex128") for a in (x, residual, weight, new_residual, out)
        ]
        args = (
            *(*arrays, out8.reshape(-1).view("uint8").view("uint64"), given.reshape(-1), scaling, rows),
            *(self.count, self.size, np.float32(eps), self.channel, self.epochs),
        )
        fit = self.launch(self.kernel, 1, *args, pdl=True).resident_blocks
        return self.launch(self.kernel, self.within(max(1, min(rows, fit))), *args, pdl=True)


class AllReduceRMSNorm(Operation):
    """All-reduce rows, add them to a residual, and normalize the sum by RMSNorm, in one kernel. Collective.

    ``op = sk.AllReduceRMSNorm(world, max_tokens, hidden)``, then ``out, residual = op(x, residual, weight)``:

        residual = residual + sum of x over the ranks
        out      = residual / sqrt(mean(residual**2) + eps) * weight        mean: of a row

    ``help(sk.collectives)`` has the rules for calls, streams, order, graphs, memory and errors.

    world       the World; its ranks, 16 at most, reach each other over NVLink, as in one node
    max_tokens  the most rows of a call
    hidden      elements of a row: a multiple of 8, 16384 at most
    dtype       of all arrays: bfloat16 or float16
    method      "auto", or
                  one_shot   few rows: each rank sends all of x to all others
                  two_shot   more rows: rank r % n_ranks combines row r, and sends the sum
    options     numbers for tuning, the same on all ranks; None: those that are chosen
                  one_shot   bytes that a rank sends, up to which "auto" takes one_shot
    sms         the most multiprocessors that it uses, 1 or more; None: as many as are tuned

    Ranks are summed in their order, in float32. The sum is rounded to dtype, and so is the new residual. The
    squares are of the rounded residual, and summed up in float32. All ranks get the same bits, in every run,
    by each method.

    A call with `scale` or `scales` rounds out once more, to float8_e4m3fn: the same bits as if a kernel of
    its own did it. Larger numbers than 448 become 448; NaN stays.

    It allocates symmetric memory: of one_shot 2 * n_ranks * max_tokens rows, of two_shot 4 * max_tokens.
    """

    ARRAYS = {
        "x": Given("tokens hidden"),
        "residual": Given("tokens hidden"),
        "weight": Given("hidden"),
        "new_residual": Given("tokens hidden", new=True, may_be="residual"),
        "out": Given("tokens hidden", new=True, may_be="x"),
        "scale": Given("", "float32", align=0, optional=True),
        "scales": Given("tokens blocks", "float32", align=0, optional=True, written=True),
    }
    LIMITS = {"tokens": ("max_tokens", "tokens")}
    METHODS = {"one_shot": False, "two_shot": True}
    methods = tuple(METHODS)
    options: dict[str, Any] = {"one_shot": None}

    def __init__(
        self,
        world: World,
        max_tokens: int,
        hidden: int,
        dtype: DType = "bfloat16",
        method: AllReduceRMSNormMethod = "auto",
        *,
        options: dict[str, Any] | None = None,
        sms: int | None = None,
    ):
        def check():
            integer(WHO, "max_tokens", max_tokens, 1, 1 << 20)
            integer(WHO, "hidden", hidden, 8, THREADS // 2 * MOST_PIECES * PIECE // 2)
            self.dtype = as_dtype(dtype, f"{WHO}: ")
            if self.dtype.name not in DTYPES:
                raise ValueError(f"{WHO}: dtype is {self.dtype.name}; it must be {listed(DTYPES)}")
            if hidden % 8:
                raise ValueError(f"{WHO}: hidden is {hidden}; it must be a multiple of 8")
            self.method = one_of(WHO, "method", method, (*self.METHODS, "auto"))
            self.options = options_of(WHO, self.options, options)
            if self.options["one_shot"] is not None:
                integer(WHO, "one_shot", self.options["one_shot"], 0)
            self.max_tokens, self.hidden = int(max_tokens), int(hidden)
            self.blocks = -(-self.hidden // BLOCK)
            given = {"max_tokens": max_tokens, "hidden": hidden, "dtype": self.dtype.name}
            return {"options": self.options, **given, "method": method}

        super().__init__(world, check, sms)
        last = self.method_for(self.max_tokens)
        try:
            for name in dict.fromkeys((self.method_for(1), last)):
                tokens = self.max_tokens if name == last else self._most_of_one_shot()
                given = tokens, self.hidden, self.dtype, self.METHODS[name]
                self._methods[name] = self._part(RowMethod, world, *given, name=f"{WHO} {name}")
        except (ValueError, MemoryError):
            self.free()
            raise

    def _most_of_one_shot(self):
        """Rows up to which "auto" takes one shot: to two ranks, two shots send as many bytes."""
        peers = self.world.n_ranks - 1
        row, limit = self.hidden * self.dtype.itemsize, self.options["one_shot"]
        if limit is None and peers <= 1:
            return self.max_tokens
        return min(self.max_tokens, (ONE_SHOT if limit is None else limit) // (row * max(1, peers)))

    def method_for(self, tokens: int) -> str:
        """-> the method for so many rows, up to max_tokens. TypeError or ValueError for others."""
        integer(WHO, "tokens", tokens, 0, self.max_tokens)
        if self.method != "auto":
            return self.method
        return "one_shot" if tokens <= self._most_of_one_shot() else "two_shot"

    def __call__(
        self,
        x: ArrayT,
        residual: AnyArray,
        weight: AnyArray,
        eps: float = 1e-6,
        out: ArrayT | None = None,
        new_residual: AnyArray | None = None,
        *,
        stream: AnyStream | None = None,
        scale: AnyArray | None = None,
        scales: AnyArray | None = None,
    ) -> tuple[Any, Any]:
        """Enqueue one. -> (out, new_residual)

        x             (tokens, hidden), of the same shape on all ranks; tokens is 0 to max_tokens
        residual      (tokens, hidden), the same on all ranks
        weight        (hidden,), the same on all ranks
        eps           a number of 0 or more, the same on all ranks
        out           (tokens, hidden). It may be x. Default: a new one of x's kind. With `scale` or `scales`
                      it is float8_e4m3fn, and may not be x
        new_residual  (tokens, hidden). It may be the residual. Default: a new one of x's kind
        stream        default: PyTorch's current one if any array is a tensor on a GPU, else the World's
        scale         one float32, on the GPU: out is float8, each number divided by it
        scales        (tokens, ceil(hidden / 128)), float32, where it writes: out is float8, each block of 128
                      elements of a row divided by a scale of its own: its largest magnitude, at least 1e-12,
                      divided by 448. out and scales are what sk.matmul takes (docs/float8.md)

        All others are of dtype. All are C-contiguous, and begin at multiples of 16 bytes, but for scale and
        scales. Those that are not the same do not overlap. When the stream has run it, later work on it sees
        the results.
        """
        if scale is not None and scales is not None:
            raise ValueError(f"{WHO}: scale and scales are given; it must be one of them, or none")
        arrays = {"x": x, "residual": residual, "weight": weight, "new_residual": new_residual}
        arrays |= {"out": out, "scale": scale, "scales": scales}
        arrays = self._enqueue(arrays, stream, eps=_number(eps))
        return arrays["out"], arrays["new_residual"]

    def _dtype_of(self, name, arrays):
        if name == "out" and (arrays.get("scale") is not None or arrays.get("scales") is not None):
            return as_dtype(OUT8)
        return super()._dtype_of(name, arrays)

    def _bind(self, x, residual, weight, new_residual, out, scale, scales, eps):
        method = self._methods[self.method_for(x.shape[0])]
        return method.bind(x, residual, weight, new_residual, out, eps, scale, scales)


def _number(eps):
    try:
        number = np.float64(eps)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if np.ndim(number) or not 0 <= number <= np.finfo("float32").max:
        raise ValueError(f"{WHO}: eps is {shown(eps)}; it must be a number of 0 or more, as float32 has it")
    return float(number)


WHO = AllReduceRMSNorm.__name__
GPU_KERNELS = {
    f"[{', '.join(map(str, of))}]": (norm_kernel(*of), {}, *[(8, 9)] * of[-1])
    for of in (
        (2, 1, "bfloat16", False, False),
        (2, 1, "bfloat16", False, True),
        (4, 2, "bfloat16", True, True),
        (8, 1, "float16", False, True),
        (8, 2, "bfloat16", False, True),
        (16, 8, "bfloat16", False, True),
        (16, 8, "bfloat16", True, True),
    )
}
