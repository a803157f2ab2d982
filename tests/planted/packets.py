"""Bugs of LL, LL128 and Lamport packets, which show by themselves that they have arrived, and nothing
else."""

import numpy as np
from numba import cuda

import shmemkit as sk
from shmemkit.device import (
    TILE_WORDS,
    lamport_load,
    lamport_store,
    ll128_load_some,
    ll128_store_tile,
    ll_load,
    ll_pack_block,
    ll_put_block,
    ll_recv_block,
    ll_recv_pack_block,
    ll_store,
    ll_words,
    load_tile,
    quiet,
    rank,
    store_tile,
    symm_at,
)
from shmemkit.emu import DeadlockError, EmulatorError, RaceError

from .plant import CREDITS, DOUBLE_BUFFER, PACKETS, PUTS, THREADS, ints, launches, planted, private


def four(first=0, step=0):
    """Four integers of one rank."""
    return lambda world: np.arange(4, dtype="int32") + first + step * world.rank


def calls_of(kernel, lines, flags, barrier=False):
    """``kernel(lines, x, out, flag)`` is launched for each of the flags."""

    def main(world):
        slots, out = lines(world), np.zeros(4, "int32")
        for flag in flags:
            kernel[1, 4, world.stream](slots, four(20, 10)(world), out, flag)
            if barrier:
                world.barrier()
        world.stream.synchronize()
        return out.tolist()

    return main


SWAPPED = [[30, 31, 32, 33], [20, 21, 22, 23]]


@planted(DeadlockError, DOUBLE_BUFFER, "waits for", right=SWAPPED, seed=0)
def ll_with_one_buffer(correct):
    """Of two buffers in turn, one is used again two launches later: the partner's data of the launch between
    say that its launch with this buffer has ended. With one, words are lost that nobody has read."""

    @cuda.jit
    def swap(lines, x, out, call):
        here = lines[call % 2 if correct else 0]
        ll_pack_block(symm_at(here, 1 - rank()), x, call)
        ll_recv_block(out, here, call)

    return calls_of(swap, ints((2, ll_words(16)), "uint64"), [1, 2, 3])


@planted(EmulatorError, PACKETS, "flag", right=SWAPPED)
def ll_with_the_same_flag_in_each_call(correct):
    """The words of the second call have the flag that is there already: its receiver may take the old
    data."""

    @cuda.jit
    def swap(lines, x, out, flag):
        ll_pack_block(symm_at(lines, 1 - rank()), x, flag)
        ll_recv_block(out, lines, flag)

    return calls_of(swap, ints(ll_words(16), "uint64"), [1, 2] if correct else [1, 1], barrier=True)


@planted(DeadlockError, CREDITS, "waits for", right=[[-1] * 4, [0, 1, 2, 3]], seed=0)
def ll_words_that_nobody_says_were_read(correct):
    """The sender does not hear from the receiver: without lines of its own, the words of the next call may
    come before those of this one have been read."""

    @cuda.jit
    def kernel(lines, x, out):
        for call in range(1, 4):
            here = lines[call - 1 if correct else 0]
            if rank() == 0:
                ll_pack_block(symm_at(here, 1), x, call)
            else:
                ll_recv_block(out, here, call)

    return launches(kernel, ints((3, ll_words(16)), "uint64"), four(), threads=2, out=4)


@planted(RaceError, THREADS, "dst", right=[[3, 2, 1, 0]] * 2)
def ll_received_share_is_read_by_another_thread(correct):
    """Each thread has stored its own share of the destination, and reads another thread's."""

    @cuda.jit
    def kernel(lines, x, dst, out):
        i = cuda.threadIdx.x
        ll_pack_block(symm_at(lines, 1 - rank()), x, 1)
        ll_recv_block(dst, lines, 1)  # first
        if correct:
            cuda.syncthreads()
        out[i] = dst[3 - i]  # second

    return launches(kernel, ints(ll_words(16), "uint64"), four(), private(4), threads=4, out=4)


@planted(RaceError, PACKETS, "box", right=[[5]] * 2)
def ll_word_as_a_signal_for_an_ordinary_store(correct):
    """The store before ll_store is not released by it. The data travel in the word itself."""

    @cuda.jit
    def kernel(lines, box, out):
        symm_at(box, 1 - rank())[0] = 5  # first
        ll_store(symm_at(lines, 1 - rank()), 0, 5, 1)
        word = ll_load(lines, 0, 1)
        out[0] = word if correct else box[0]  # second

    return launches(kernel, ints(2, "uint64"), ints())


@planted(RaceError, THREADS, "src", right=[[3, 2, 1, 0]] * 2)
def ll_packs_what_other_threads_have_just_stored(correct):
    """The source is filled back to front, so that each thread packs what another one has stored."""

    @cuda.jit
    def kernel(lines, src, out):
        i = cuda.threadIdx.x
        src[3 - i] = i  # first
        if correct:
            cuda.syncthreads()
        ll_pack_block(symm_at(lines, 1 - rank()), src, 1)  # second
        ll_recv_block(out, lines, 1)

    return launches(kernel, ints(ll_words(16), "uint64"), private(4), threads=4, out=4)


@planted(DeadlockError, PACKETS, "waits for", right=[[-1] * 4, [-1] * 4, [4, 5, 6, 7]], ranks=3)
def ll_words_are_passed_on_with_their_flag(correct):
    """Rank 0 packs, rank 1 passes the words on as they are, rank 2 receives them: the flag is still rank
    0's."""

    @cuda.jit
    def kernel(lines, x, out):
        if rank() == 0:
            ll_pack_block(symm_at(lines, 1), x, 1)
        elif rank() == 1:
            ll_recv_pack_block(symm_at(lines, 2), lines, lines.size, 1)
        else:
            ll_recv_block(out, lines, 1 if correct else 2)

    return launches(kernel, ints(ll_words(16), "uint64"), four(4), threads=2, out=4)


@planted(
    RaceError,
    PUTS,
    "source",
    right=[[-1] * 4, [0, 1, 2, 3]],
    out_of_reach="the words of LL are relaxed accesses, which do not race with each other",
)
def ll_put_source_is_packed_again(correct):
    """The words of the first message may still be read when those of the second are packed over them."""

    @cuda.jit
    def kernel(lines, source, x, out):
        if rank() == 0:
            for call in range(1, 3):
                ll_pack_block(source, x, call)  # first
                ll_put_block(lines[call - 1], source, source.size, 1)  # second
                if correct:
                    quiet()
        else:
            ll_recv_block(out, lines[0], 1)
            ll_recv_block(out, lines[1], 2)

    words = ll_words(16)
    return launches(kernel, ints((2, words), "uint64"), ints(words, "uint64"), four(), out=4)


@planted(RaceError, THREADS, "dst", right=[[119]] * 2)
def ll128_tile_is_read_by_another_warp(correct):
    """The first warp reads the last element, which the second warp has stored."""

    @cuda.jit
    def kernel(lines, x, dst, out):
        i = cuda.threadIdx.x // 32
        ll128_store_tile(lines, i, load_tile(x, i), 1, 1 - rank())
        (words,) = ll128_load_some(lines, (i,), 1)
        store_tile(dst, i, words)  # first
        if correct:
            cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            out[0] = dst[119]  # second

    numbers = lambda world: np.arange(120, dtype="uint64")  # noqa: E731
    return launches(kernel, ints(2 * TILE_WORDS, "uint64"), numbers, private(120, "uint64"), threads=64)


def lamport_calls(kernel):
    """``kernel(slots, call, out)`` in four launches; two slots hold the sentinel 123, 456."""

    def main(world):
        slots = sk.array(np.array([123, 456] * 2, "uint64"))
        out = np.zeros(1, "int64")
        world.barrier()
        for call in range(4):
            kernel[1, 1, world.stream](slots, call, out)
        world.stream.synchronize()
        return out.tolist()

    return main


@planted(EmulatorError, DOUBLE_BUFFER, "is not empty", right=[[11], [10]], seed=2)
def lamport_packets_into_one_slot(correct):
    """The partner's packet of the launch between says that its launch with this slot has ended."""

    @cuda.jit
    def swap(slots, call, out):
        slot = call % 2 if correct else 0
        lamport_store(slots, slot, (call, 10 + rank()), 123, 456, 1 - rank())
        (words,) = lamport_load(slots, (slot,), 123, 456)
        out[0] = words[1]

    return lamport_calls(swap)


@planted(EmulatorError, PACKETS, "slots[0] on rank 0 is not empty", right=[[2], [2]])
def lamport_packet_into_a_slot_that_is_not_empty(correct):
    """The second packet comes to the slot of the first one, which nobody has taken: one of them is lost."""

    @cuda.jit
    def kernel(slots, out):
        for call in range(2):
            lamport_store(slots, call if correct else 0, (call, call), 123, 456, 1 - rank())
        out[0] = 2

    return launches(kernel, lambda world: (sk.array(np.array([123, 456] * 2, "uint64")), world.barrier())[0])
