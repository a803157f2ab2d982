"""Several threads and blocks: barriers of a grid, a block and a warp, shuffles and copies."""

from numba import cuda, int32, uint64

import shmemkit as sk
from shmemkit.device import (
    copy_block,
    fence_mbarrier_init,
    grid_barrier,
    ld_acquire,
    mbarrier_arrive,
    mbarrier_init,
    mbarrier_wait,
    notify,
    rank,
    st_release,
    symm_at,
    wait,
    wait_block,
)

from .case import RACE, RIGHT, case

GRID = (
    "shmemkit grid_barrier: all blocks meet; what each thread did before it, all threads of the grid see "
    "after it"
)
WARP = "PTX, bar.warp.sync: memory ordering among the threads of its mask"
SHUFFLE = "CUDA Programming Guide, Warp Shuffle Functions: these intrinsics do not imply a memory barrier"
CTA = (
    "PTX, barrier{.cta}: memory ordering among the participating threads, which may arrive at several "
    "places by warps"
)
MBARRIER = "PTX, mbarrier: an arrival releases, a wait for the phase acquires"


@case(RACE, GRID)
def block_reads_another_blocks_part_without_a_grid_barrier(world):
    """Each block stores a part and reads its neighbour's; syncthreads is the own block's."""

    @cuda.jit
    def exchange(parts, out):
        b = cuda.blockIdx.x
        parts[b] = b  # first
        cuda.syncthreads()
        out[b] = parts[(b + 1) % 3]  # second

    parts, out = world.xp.zeros(3, "int32"), world.xp.zeros(3, "int32")
    exchange[3, 1, world.stream](parts, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, GRID, gives=[[1, 2, 0]] * 2)
def block_reads_another_blocks_part_behind_a_grid_barrier(world):
    """The barrier of the grid is between all stores and all loads."""

    @cuda.jit
    def exchange(parts, state, out):
        b = cuda.blockIdx.x
        parts[b] = b
        grid_barrier(state)
        out[b] = parts[(b + 1) % 3]

    parts, out = world.xp.zeros(3, "int32"), world.xp.zeros(3, "int32")
    exchange[3, 1, world.stream](parts, world.xp.zeros(2, "uint32"), out)
    return world.asnumpy(out).tolist()


@case(RACE, GRID)
def stencil_in_place_with_one_grid_barrier_a_step(world):
    """All load, then store in place, then meet: a block's store has no order with its neighbour's load of the
    step."""

    @cuda.jit
    def steps(x, state):
        b = cuda.blockIdx.x
        for _ in range(2):
            x[b] = x[b] + x[(b + 1) % 3]  # first second
            grid_barrier(state)

    x = world.xp.ones(3, "int32")
    steps[3, 1, world.stream](x, world.xp.zeros(2, "uint32"))
    return world.asnumpy(x).tolist()


@case(RIGHT, GRID, gives=[[4, 4, 4]] * 2)
def stencil_with_two_arrays_in_turn(world):
    """Each step reads one array and writes the other; the barrier is between the steps."""

    @cuda.jit
    def steps(x, state):
        b = cuda.blockIdx.x
        for k in range(2):
            x[1 - k, b] = x[k, b] + x[k, (b + 1) % 3]
            grid_barrier(state)

    x = world.xp.ones((2, 3), "int32")
    steps[3, 1, world.stream](x, world.xp.zeros(2, "uint32"))
    return world.asnumpy(x[0]).tolist()


@case(
    RIGHT, GRID + "; PTX, Causality order is transitive, whatever the scopes on the way", gives=[[6, 7]] * 2
)
def grid_barrier_between_the_stores_and_the_notify(world):
    """Every block stores to the peer, all meet, block 0 releases; the peer's block 0 acquires, and all meet
    again."""

    @cuda.jit
    def exchange(box, ready, state, out):
        b = cuda.blockIdx.x
        symm_at(box, 1 - rank())[b] = 6 + b
        grid_barrier(state)
        if b == 0:
            notify(ready, 1 - rank(), 1)
            wait(ready, 1, "sys", "acquire", 1)
        grid_barrier(state)
        out[b] = box[b]

    box, out = sk.zeros(2, "int32"), world.xp.zeros(2, "int32")
    exchange[2, 1, world.stream](box, sk.signals(1), world.xp.zeros(2, "uint32"), out)
    return world.asnumpy(out).tolist()


@case(RACE, SHUFFLE)
def shuffle_between_store_and_load(world):
    """All threads are at the shuffle at once, but it orders no memory."""

    @cuda.jit
    def swap(out):
        tile = cuda.shared.array(32, int32)
        i = cuda.threadIdx.x
        tile[i] = i  # first
        other = cuda.shfl_xor_sync(0xFFFFFFFF, i, 1)
        out[i] = tile[other]  # second

    out = world.xp.zeros(32, "int32")
    swap[1, 32, world.stream](out)
    return world.asnumpy(out).tolist()


@case(RACE, SHUFFLE)
def vote_between_store_and_load(world):
    """Nor does a vote."""

    @cuda.jit
    def swap(x, out):
        i = cuda.threadIdx.x
        x[i] = i  # first
        if cuda.all_sync(0xFFFFFFFF, True):
            out[i] = x[31 - i]  # second

    x, out = world.xp.zeros(32, "int32"), world.xp.zeros(32, "int32")
    swap[1, 32, world.stream](x, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, SHUFFLE, gives=[[496]] * 2)
def sum_by_shuffles_of_registers(world):
    """The values travel in registers; one thread stores the result."""

    @cuda.jit
    def add_up(x, out):
        i = cuda.threadIdx.x
        total = x[i]
        step = 16
        while step > 0:
            total += cuda.shfl_down_sync(0xFFFFFFFF, total, step)
            step //= 2
        if i == 0:
            out[0] = total

    out = world.xp.zeros(1, "int32")
    add_up[1, 32, world.stream](world.xp.arange(32, dtype="int32"), out)
    return world.asnumpy(out).tolist()


@case(RACE, WARP)
def syncwarp_of_half_a_warp(world):
    """The lower half meets among itself, and reads what the upper half has stored."""

    @cuda.jit
    def mirror(out):
        tile = cuda.shared.array(32, int32)
        i = cuda.threadIdx.x
        tile[i] = i  # first
        if i < 16:
            cuda.syncwarp(0x0000FFFF)
            out[i] = tile[31 - i]  # second

    out = world.xp.zeros(16, "int32")
    mirror[1, 32, world.stream](out)
    return world.asnumpy(out).tolist()


@case(RIGHT, WARP, gives=[[15 - i for i in range(16)]] * 2)
def syncwarp_of_half_a_warp_for_its_own_data(world):
    """The lower half meets among itself, and reads what it has stored itself."""

    @cuda.jit
    def mirror(out):
        tile = cuda.shared.array(32, int32)
        i = cuda.threadIdx.x
        tile[i] = i
        if i < 16:
            cuda.syncwarp(0x0000FFFF)
            out[i] = tile[15 - i]

    out = world.xp.zeros(16, "int32")
    mirror[1, 32, world.stream](out)
    return world.asnumpy(out).tolist()


@case(RACE, WARP)
def syncwarp_for_data_of_another_warp(world):
    """Each warp meets by itself; the data come from the other warp."""

    @cuda.jit
    def mirror(x, out):
        i = cuda.threadIdx.x
        x[i] = i  # first
        cuda.syncwarp()
        out[i] = x[63 - i]  # second

    x, out = world.xp.zeros(64, "int32"), world.xp.zeros(64, "int32")
    mirror[1, 64, world.stream](x, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, CTA, gives=[[33 + i for i in range(32)]] * 2)
def specialised_warps_meet_at_two_places(world):
    """The producing and the consuming warp reach the block's barrier at different lines, each as a whole."""

    @cuda.jit
    def pass_on(out):
        tile = cuda.shared.array(32, int32)
        i = cuda.threadIdx.x
        if i < 32:
            tile[i] = 33 + i
            cuda.syncthreads()
        else:
            cuda.syncthreads()
            out[i - 32] = tile[i - 32]

    out = world.xp.zeros(32, "int32")
    pass_on[1, 64, world.stream](out)
    return world.asnumpy(out).tolist()


@case(RACE, CTA)
def consuming_warp_reads_before_the_barrier(world):
    """The consuming warp reaches the same barrier, but reads before it."""

    @cuda.jit
    def pass_on(x, out):
        i = cuda.threadIdx.x
        if i < 32:
            x[i] = 33 + i  # first
            cuda.syncthreads()
        else:
            out[i - 32] = x[i - 32]  # second
            cuda.syncthreads()

    x, out = world.xp.zeros(32, "int32"), world.xp.zeros(32, "int32")
    pass_on[1, 64, world.stream](x, out)
    return world.asnumpy(out).tolist()


@case(RIGHT, CTA + "; threads that have exited do not take part", gives=[[10, 11]] * 2)
def a_warp_that_has_returned_is_not_waited_for(world):
    """The second warp returns as a whole; the first one's barriers are among those that are left."""

    @cuda.jit
    def swap(out):
        tile = cuda.shared.array(32, int32)
        i = cuda.threadIdx.x
        if i >= 32:
            return
        tile[i] = 10 + i
        cuda.syncthreads()
        if i < 2:
            out[1 - i] = tile[1 - i]

    out = world.xp.zeros(2, "int32")
    swap[1, 64, world.stream](out)
    return world.asnumpy(out).tolist()


@case(
    RIGHT,
    "PTX, Release and Acquire Patterns, and bar.warp.sync around them",
    gives=[[100 * k for k in range(2) for _ in range(2)]] * 2,
)
def warps_pass_items_by_flags(world):
    """Warp 0 fills a slot, meets and releases; warp 1 acquires, meets, reads, meets and acknowledges."""

    @cuda.jit
    def stream_items(slot, full, empty, out):
        i, lane = cuda.threadIdx.x, cuda.threadIdx.x % 32
        for k in range(2):
            if i < 32:
                while ld_acquire(empty, 0, "gpu") < k:
                    pass
                if lane < 2:
                    slot[lane] = 100 * k
                cuda.syncwarp()
                if lane == 0:
                    st_release(full, 0, k + 1, "gpu")
            else:
                while ld_acquire(full, 0, "gpu") < k + 1:
                    pass
                if lane < 2:
                    out[2 * k + lane] = slot[1 - lane]
                cuda.syncwarp()
                if lane == 0:
                    st_release(empty, 0, k + 1, "gpu")

    xp = world.xp
    out = xp.zeros(4, "int32")
    stream_items[1, 64, world.stream](xp.zeros(2, "int32"), xp.zeros(1, "int32"), xp.zeros(1, "int32"), out)
    return world.asnumpy(out).tolist()


@case(RACE, WARP)
def lane_0_acknowledges_while_others_of_its_warp_read(world):
    """Without syncwarp before the acknowledgement, lane 1 may still read the slot that is filled again."""

    @cuda.jit
    def stream_items(slot, full, empty, out):
        i, lane = cuda.threadIdx.x, cuda.threadIdx.x % 32
        for k in range(3):
            if i == 0:
                while ld_acquire(empty, 0, "gpu") < k:
                    pass
                slot[0] = 100 * k  # first
                st_release(full, 0, k + 1, "gpu")
            elif i >= 32 and lane < 2:
                while ld_acquire(full, 0, "gpu") < k + 1:
                    pass
                out[2 * k + lane] = slot[0]  # second
                if lane == 0:
                    st_release(empty, 0, k + 1, "gpu")

    xp = world.xp
    out = xp.zeros(6, "int32")
    stream_items[1, 64, world.stream](xp.zeros(1, "int32"), xp.zeros(1, "int32"), xp.zeros(1, "int32"), out)
    return world.asnumpy(out).tolist()


@case(RIGHT, MBARRIER, gives=[[7]] * 2)
def mbarrier_between_two_warps(world):
    """The arrival releases the store, the wait for the phase acquires it."""

    @cuda.jit
    def pass_on(out):
        full, tile = cuda.shared.array(1, uint64), cuda.shared.array(1, int32)
        i = cuda.threadIdx.x
        if i == 0:
            mbarrier_init(full, 0, 1)
            fence_mbarrier_init()
        cuda.syncthreads()
        if i == 0:
            tile[0] = 7
            mbarrier_arrive(full, 0)
        if i == 32:
            mbarrier_wait(full, 0, 0)
            out[0] = tile[0]

    out = world.xp.zeros(1, "int32")
    pass_on[1, 64, world.stream](out)
    return world.asnumpy(out).tolist()


@case(RACE, MBARRIER)
def store_after_the_arrival_at_an_mbarrier(world):
    """The store follows the arrival, which does not release it."""

    @cuda.jit
    def pass_on(x, out):
        full = cuda.shared.array(1, uint64)
        i = cuda.threadIdx.x
        if i == 0:
            mbarrier_init(full, 0, 1)
            fence_mbarrier_init()
        cuda.syncthreads()
        if i == 0:
            mbarrier_arrive(full, 0)
            x[0] = 7  # first
        if i == 32:
            mbarrier_wait(full, 0, 0)
            out[0] = x[0]  # second

    x, out = world.xp.zeros(1, "int32"), world.xp.zeros(1, "int32")
    pass_on[1, 64, world.stream](x, out)
    return world.asnumpy(out).tolist()


@case(
    RACE,
    "shmemkit copy_block: nothing, and no barrier inside: syncthreads before the copy is used or published",
)
def copy_block_is_published_without_syncthreads(world):
    """Thread 0 notifies when its own share of the copy is stored."""

    @cuda.jit
    def push(inbox, mine, ready, out):
        i = cuda.threadIdx.x
        copy_block(symm_at(inbox, 1 - rank()), mine)  # first
        if i == 0:
            notify(ready, 1 - rank(), 1)
        wait_block(ready, 1, "sys", "acquire", 1)
        out[i] = inbox[i]  # second

    inbox, mine = sk.zeros(32, "int32"), world.xp.full(32, 4, "int32")
    out = world.xp.zeros(32, "int32")
    push[1, 32, world.stream](inbox, mine, sk.signals(1), out)
    return world.asnumpy(out).tolist()


@case(RIGHT, "shmemkit copy_block: syncthreads before the copy is used or published", gives=[[4] * 32] * 2)
def copy_block_is_published_behind_syncthreads(world):
    """All threads have stored their shares when thread 0 notifies."""

    @cuda.jit
    def push(inbox, mine, ready, out):
        i = cuda.threadIdx.x
        copy_block(symm_at(inbox, 1 - rank()), mine)
        cuda.syncthreads()
        if i == 0:
            notify(ready, 1 - rank(), 1)
        wait_block(ready, 1, "sys", "acquire", 1)
        out[i] = inbox[i]

    inbox, mine = sk.zeros(32, "int32"), world.xp.full(32, 4, "int32")
    out = world.xp.zeros(32, "int32")
    push[1, 32, world.stream](inbox, mine, sk.signals(1), out)
    return world.asnumpy(out).tolist()
