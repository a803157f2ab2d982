"""LL, LL128 and pieces: data that say themselves that they have arrived, and nothing else."""

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

from .case import ERROR, RACE, RIGHT, case

ITSELF = "shmemkit, LL: the words are relaxed accesses, which order nothing but themselves"
RECV = (
    "shmemkit ll_recv_block: each thread has stored its share when it returns: syncthreads before others "
    "use dst"
)
TILE = "shmemkit store_tile: ordinary stores of a warp; syncthreads before another warp uses them"
FLAG = "shmemkit, LL: the flag must be another one than the words hold"
READ = "shmemkit, LL: before a word is written again, its receiver must have read it"
PLACE = (
    "shmemkit, Pieces: a place must have been made empty, by a launch that has ended, before the next "
    "piece comes"
)


@case(RIGHT, READ, gives=[[30, 31, 32, 33], [20, 21, 22, 23]])
def ll_with_two_buffers_in_turn(world):
    """A buffer is used again two launches later: the partner's data of the launch between say that its launch
    with this buffer has ended."""

    @cuda.jit
    def swap(lines, x, out, call):
        here = lines[call % 2]
        ll_pack_block(symm_at(here, 1 - rank()), x, call)
        ll_recv_block(out, here, call)

    lines, out = sk.zeros((2, ll_words(16)), "uint64"), world.xp.zeros(4, "int32")
    for call in range(1, 4):
        x = world.xp.arange(4, dtype="int32") + 10 * (world.rank + 2)
        swap[1, 4, world.stream](lines, x, out, call)
    return world.asnumpy(out).tolist()


@case(ERROR, FLAG)
def ll_with_the_same_flag_in_each_call(world):
    """The words of the second call have the flag that is there already: its receiver may take the old
    data."""

    @cuda.jit
    def swap(lines, x, out):
        ll_pack_block(symm_at(lines, 1 - rank()), x, 1)
        ll_recv_block(out, lines, 1)

    lines, out = sk.zeros(ll_words(16), "uint64"), world.xp.zeros(4, "int32")
    for _ in range(2):
        swap[1, 4, world.stream](lines, world.xp.ones(4, "int32"), out)
        world.barrier()
    return world.asnumpy(out).tolist()


@case(ERROR, READ, schedules=True)
def ll_with_one_buffer_for_two_calls(world):
    """The words of the next call may come before those of this one have been read, which are lost then."""

    @cuda.jit
    def send(lines, x, out):
        for call in range(1, 4):
            if rank() == 0:
                ll_pack_block(symm_at(lines, 1), x, call)
            else:
                ll_recv_block(out, lines, call)

    lines, out = sk.zeros(ll_words(16), "uint64"), world.xp.zeros(4, "int32")
    send[1, 2, world.stream](lines, world.xp.ones(4, "int32"), out)
    return world.asnumpy(out).tolist()


@case(RACE, RECV)
def ll_received_share_is_read_by_another_thread(world):
    """Each thread has stored its own share of the destination, and reads another thread's."""

    @cuda.jit
    def swap(lines, x, dst, out):
        i = cuda.threadIdx.x
        ll_pack_block(symm_at(lines, 1 - rank()), x, 1)
        ll_recv_block(dst, lines, 1)  # first
        out[i] = dst[7 - i]  # second

    lines, dst, out = sk.zeros(ll_words(32), "uint64"), world.xp.zeros(8, "int32"), world.xp.zeros(8, "int32")
    swap[1, 4, world.stream](lines, world.xp.arange(8, dtype="int32"), dst, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, RECV, gives=[[7, 6, 5, 4]] * 2)
def ll_received_share_is_read_behind_syncthreads(world):
    """The barrier of the block is between all shares and all loads."""

    @cuda.jit
    def swap(lines, x, dst, out):
        i = cuda.threadIdx.x
        ll_pack_block(symm_at(lines, 1 - rank()), x, 1)
        ll_recv_block(dst, lines, 1)
        cuda.syncthreads()
        out[i] = dst[7 - i]

    lines, dst, out = sk.zeros(ll_words(32), "uint64"), world.xp.zeros(8, "int32"), world.xp.zeros(4, "int32")
    swap[1, 4, world.stream](lines, world.xp.arange(8, dtype="int32"), dst, out)
    return world.asnumpy(out).tolist()


@case(RACE, ITSELF)
def ll_word_as_a_signal_for_an_ordinary_store(world):
    """The store before ll_store is not released by it."""

    @cuda.jit
    def send(lines, box, out):
        symm_at(box, 1 - rank())[0] = 5  # first
        ll_store(symm_at(lines, 1 - rank()), 0, 1, 1)
        ll_load(lines, 0, 1)
        out[0] = box[0]  # second

    box, out = sk.zeros(1, "int32"), world.xp.zeros(1, "int32")
    send[1, 1, world.stream](sk.zeros(2, "uint64"), box, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, ITSELF, gives=[[11], [10]])
def ll_word_with_the_data_in_it(world):
    """The data travel in the word itself."""

    @cuda.jit
    def send(lines, out):
        ll_store(symm_at(lines, 1 - rank()), 0, 10 + rank(), 1)
        out[0] = ll_load(lines, 0, 1)

    out = world.xp.zeros(1, "int64")
    send[1, 1, world.stream](sk.zeros(2, "uint64"), out)
    return world.asnumpy(out).tolist()


@case(RACE, "shmemkit ll_pack_block: it orders nothing and has no barrier")
def ll_packs_what_other_threads_have_just_stored(world):
    """The source is filled back to front, so that each thread packs what another one has stored, without a
    barrier."""

    @cuda.jit
    def swap(lines, src, out):
        i = cuda.threadIdx.x
        src[7 - i] = i  # first
        ll_pack_block(symm_at(lines, 1 - rank()), src, 1)  # second
        ll_recv_block(out, lines, 1)

    lines, src, out = sk.zeros(ll_words(32), "uint64"), world.xp.zeros(8, "int32"), world.xp.zeros(8, "int32")
    swap[1, 8, world.stream](lines, src, out)
    return world.asnumpy(out).tolist()


@case(
    RIGHT,
    "shmemkit ll_recv_pack_block: waits for words, and passes them on as they are",
    ranks=3,
    gives=[[0] * 4, [0] * 4, [4, 5, 6, 7]],
)
def ll_words_are_passed_on(world):
    """Rank 0 packs, rank 1 passes the words on, rank 2 receives them; each buffer is used once."""

    @cuda.jit
    def relay(lines, x, out):
        if rank() == 0:
            ll_pack_block(symm_at(lines, 1), x, 1)
        elif rank() == 1:
            ll_recv_pack_block(symm_at(lines, 2), lines, lines.size, 1)
        else:
            ll_recv_block(out, lines, 1)

    lines, out = sk.zeros(ll_words(16), "uint64"), world.xp.zeros(4, "int32")
    relay[1, 2, world.stream](lines, world.xp.arange(4, 8, dtype="int32"), out)
    return world.asnumpy(out).tolist()


@case(
    RACE,
    "shmemkit ll_put_block: source may be written again after quiet, or when all of it has been received",
    out_of_reach="the words of LL are relaxed accesses, which do not race with each other",
)
def ll_put_source_is_packed_again(world):
    """The words of the first message may still be read when those of the second are packed over them."""

    @cuda.jit
    def send(lines, source, x, out):
        if rank() == 0:
            ll_pack_block(source, x, 1)
            ll_put_block(lines[0], source, source.size, 1)  # first
            ll_pack_block(source, x, 2)  # second
            ll_put_block(lines[1], source, source.size, 1)
        quiet()

    lines, source = sk.zeros((2, ll_words(16)), "uint64"), sk.zeros(ll_words(16), "uint64")
    send[1, 1, world.stream](lines, source, world.xp.ones(4, "int32"), world.xp.zeros(4, "int32"))
    world.barrier()
    return world.asnumpy(lines[0]).tolist()


@case(RACE, TILE)
def ll128_tile_is_read_by_another_warp(world):
    """The first warp reads the last element, which the second warp has stored."""

    @cuda.jit
    def swap(lines, x, dst, out):
        i = cuda.threadIdx.x // 32
        ll128_store_tile(lines, i, load_tile(x, i), 1, 1 - rank())
        (words,) = ll128_load_some(lines, (i,), 1)
        store_tile(dst, i, words)  # first
        if cuda.threadIdx.x == 0:
            out[0] = dst[119]  # second

    lines, dst = sk.zeros(2 * TILE_WORDS, "uint64"), world.xp.zeros(120, "uint64")
    out = world.xp.zeros(1, "uint64")
    swap[1, 64, world.stream](lines, world.xp.ones(120, "uint64"), dst, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, TILE, gives=[[119]] * 2)
def ll128_tile_is_read_behind_syncthreads(world):
    """All tiles are stored when the block has met."""

    @cuda.jit
    def swap(lines, x, dst, out):
        i = cuda.threadIdx.x // 32
        ll128_store_tile(lines, i, load_tile(x, i), 1, 1 - rank())
        (words,) = ll128_load_some(lines, (i,), 1)
        store_tile(dst, i, words)
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            out[0] = dst[119]

    lines, dst = sk.zeros(2 * TILE_WORDS, "uint64"), world.xp.zeros(120, "uint64")
    out = world.xp.zeros(1, "uint64")
    swap[1, 64, world.stream](lines, world.xp.arange(120, dtype="uint64"), dst, out)
    return world.asnumpy(out).tolist()


def empty_places(world, n):
    """n places, which hold the pattern 123, 456"""
    lines = sk.array(np.array([123, 456] * n, "uint64"))
    world.barrier()
    return lines


@case(RIGHT, PLACE, gives=[[11], [10]])
def pieces_into_two_places_in_turn(world):
    """The partner's piece of the launch between says that its launch with this place has ended."""

    @cuda.jit
    def swap(lines, call, out):
        lamport_store(lines, call % 2, (call, 10 + rank()), 123, 456, 1 - rank())
        (words,) = lamport_load(lines, (call % 2,), 123, 456)
        out[0] = words[1]

    lines, out = empty_places(world, 2), world.xp.zeros(1, "int64")
    for call in range(4):
        swap[1, 1, world.stream](lines, call, out)
    return world.asnumpy(out).tolist()


@case(ERROR, PLACE)
def piece_into_a_place_that_is_not_empty(world):
    """The second piece comes to the place of the first one, which nobody takes: one of them is lost."""

    @cuda.jit
    def send(lines):
        for call in range(2):
            lamport_store(lines, 0, (call, call), 123, 456, 1 - rank())

    lines = empty_places(world, 1)
    send[1, 1, world.stream](lines)
    world.barrier()
    return world.asnumpy(lines).tolist()
