"""All-gather and matrix product in one kernel, for few rows: some blocks of it store this rank's rows into
the others' memory, a few columns after another, while the rest multiply what has come. Hopper, GPUs that
reach each other's memory.

Copy engines leave all multiprocessors to the product, but to start them, and to be told by them, takes some
20 us (``sm90.py``); a product of few rows does not take much longer.

Staged    staged[half, k], on every rank: the rows of rank k, as they lie there. Written by rank k only; my
          own by me, unless the product reads them from x
Signals   arrived[k, i], on every rank: SHARES times the calls whose part i of the columns of rank k's rows
          is here. Only rank k adds to it
Counters  calls[0], local: how many calls have ended, and so a call's number, and its half. In device memory,
          so that a replayed graph counts on. done[0]: blocks of this launch that have ended

  senders, the first blocks, for each part i of the columns:
          1. store them, of some of my rows each, to staged[half, me] of all other ranks; syncthreads
          2. add my shares to arrived[me, i] there                release, sys: publishes the block's stores
  loader of the other blocks, one thread, for each slab of a tile that is not known to be here:
          3. wait until arrived[k, i] is at least SHARES times the call's number, for its part i, of all
             segments that the tile has rows of                   acquire, sys
          4. fence between proxies: the loads of the TMA see them, too        (``columns.py`` has 3 and 4)
  the last block that ends, of a call's last launch:
          5. count the call

The rest is ``shmemkit.kernels.gemm.sm90``. Several products of one gathering are several launches: the first
one sends, and in the others all is here already.

No race. Half h of staged is written again two calls later, by a rank k that has ended the call between. In
that one it has waited for all columns of my rows (each rank has rows, and each launch computes tiles of all
rows): I sent them in a launch that began after my launches before had ended, and so had read what half h
held. What has come of another call is not taken for that of this one: signals count up.

No deadlock: senders wait for nobody. All blocks are resident.
"""

import functools

from numba import cuda, int64, types

from shmemkit.device.copies import copy_block
from shmemkit.device.memory import load_vec16, peer_at, store_vec16
from shmemkit.device.signals import notify_at
from shmemkit.device.spans import span
from shmemkit.device.swizzle import quotient
from shmemkit.device.tma import tensormap_acquire
from shmemkit.device.wgmma import SLAB
from shmemkit.kernels.gemm.aligned import aligned, copying
from shmemkit.kernels.gemm.epilogue import inline
from shmemkit.kernels.gemm.problem import HALVES
from shmemkit.kernels.gemm.products import multiprocessors_of_all
from shmemkit.kernels.gemm.sm90 import Kinds, Tile, gemm_body, signature
from shmemkit.kernels.gemm.sm90_host import Choice, bind_gemm, choose, map_of_operand
from shmemkit.kernels.method import Method

from . import columns
from .host import aligned_groups
from .sm90 import Coming, mine_first, mine_from_x

SENDERS = 4, 8, 16  # blocks that send: the most that the product leaves, the fewest in any case
SHARES = 16  # of a part, which the senders share
PARTS = 16  # of the columns, at most
WIDTH = 2048  # bytes of a row that are a part, or a multiple of it


@inline
def send_columns(x, rows, row_bytes, begin, size, senders, staged, place, offsets, me, peers, n_ranks):
    """Step 1, by a sender: bytes begin to begin + size - 1 of its rows of x, to the next `peers` ranks."""
    lane, warps = cuda.threadIdx.x & 31, quotient(cuda.blockDim.x, 32)
    row = int64(cuda.blockIdx.x * warps + quotient(cuda.threadIdx.x, 32))
    while row < rows:
        at = row * row_bytes + begin
        i = int64(16 * lane)
        while i < size:
            a = load_vec16(x, at + i)  # all are under way at once
            b = load_vec16(x, at + min(i + 512, size - 16))
            c = load_vec16(x, at + min(i + 1024, size - 16))
            d = load_vec16(x, at + min(i + 1536, size - 16))
            peer, to = me, place + at + i
            for _ in range(peers):
                peer += 1
                if peer == n_ranks:
                    peer = 0
                there = peer_at(staged, offsets, peer)
                store_vec16(there, to, a)
                if i + 512 < size:
                    store_vec16(there, to + 512, b)
                if i + 1024 < size:
                    store_vec16(there, to + 1024, c)
                if i + 1536 < size:
                    store_vec16(there, to + 1536, d)
            i += 2048
        row += senders * warps


@inline
def workers(extra):
    """``blocks`` of ``gemm_body``."""
    return int64(cuda.blockIdx.x) - extra.senders, int64(cuda.gridDim.x) - extra.senders


@functools.cache
def push_kernel(tile, kinds):
    """-> the kernel for tiles like `tile` of products like `kinds`."""
    gemm = gemm_body(
        tile,
        kinds,
        mine_first(tile.group),
        columns.none_known,
        a_at=mine_from_x,
        before_slab=columns.waiting(tile.m),
        blocks=workers,
    )

    @cuda.jit(launch_bounds=(tile.threads, 1))
    def ag_gemm_push(
        map_a,
        map_b,
        map_out,
        bias,
        m,
        n,
        k,
        splits,
        partials,
        arrivals,
        map_x,
        from_x,
        x,
        rows,
        me,
        n_ranks,
        peers,
        senders,
        ends,
        slabs,
        staged,
        room,
        arrived,
        offsets,
        calls,
        done,
    ):
        """As of ``gemm_kernel``, of an A that this launch gathers, or one before it of the same call, and

        map_a    two tensor maps, of A in each half of staged
        map_x    the tensor map of x; its box is that of map_a
        from_x   int64 (begin, end): my rows of A, if they are read from x; (0, 0) if not
        x        uint8, my rows one after another, at a multiple of 16 bytes
        rows     of each of n_ranks ranks; each of a multiple of 16 bytes
        me       my rank
        peers    how many ranks, from the next one on, get my rows: n_ranks - 1, or all
        senders  blocks that send, of SENDERS; 0: the rows have been sent
        ends     whether it is the last launch of the call
        slabs    of a part of the columns, which begins with slab i * slabs: there are up to PARTS
        staged   uint8 (2 * room,), symmetric
        room     bytes of a half
        arrived  uint64 (n_ranks * PARTS,), symmetric, zeros at first
        offsets  as of `peer_at`
        calls    int64 (1,), zero at first; done: int32 (1,)
        grid     as of ``gemm_kernel``, and the senders; all blocks must be resident
        """
        come = cuda.shared.array(1, types.int64)
        call = calls[0] + 1
        half = call & 1
        if cuda.blockIdx.x < senders:
            row_bytes, place = 2 * k, half * room + me * rows * 2 * k
            for i in range(PARTS):
                begin = i * slabs * 2 * SLAB
                size = min(slabs * 2 * SLAB, row_bytes - begin)
                send_columns(
                    x, rows, row_bytes, begin, size, senders, staged, place, offsets, me, peers, n_ranks
                )
                cuda.syncthreads()
                peer = int64(cuda.threadIdx.x)
                while peer < n_ranks:  # mine are counted, too, whoever reads them
                    shares = quotient(SHARES, senders)
                    notify_at(arrived, me * PARTS + i, offsets, peer, shares, "add")  # 2
                    peer += cuda.blockDim.x
        else:
            if cuda.threadIdx.x == 0:  # the loader
                tensormap_acquire(map_x)
            coming = Coming(
                *(arrived, PARTS, m, rows, me, slabs, n_ranks, map_x, from_x, come),
                *(SHARES * call, senders),
            )
            map_half = span(map_a, 16 * half, 16)
            gemm(map_half, map_b, map_out, bias, m, n, k, splits, partials, arrivals, coming)
        if cuda.threadIdx.x == 0:
            cuda.threadfence()
            if cuda.atomic.add(done, 0, 1) == cuda.gridDim.x - 1:  # all have read the counter
                cuda.threadfence()
                done[0] = 0
                if ends:
                    calls[0] = call  # 5

    return ag_gemm_push


@cuda.jit
def copy_gathered(gathered, staged, room, calls):
    """The rows of the last call, to an array of uint8.

    grid    any number of blocks and threads; others as of ``push_kernel``
    """
    part = quotient(gathered.size + cuda.gridDim.x - 1, cuda.gridDim.x) + 15 & -16
    begin = min(cuda.blockIdx.x * part, gathered.size)
    size = min(part, gathered.size - begin)
    copy_block(span(gathered, begin, size), span(staged, (calls[0] & 1) * room + begin, size))


class Push(Method):
    """The method "push" of ``AllGatherGemm``, for up to `max_nbytes` of gathered rows."""

    def prepare(self, max_nbytes):
        world = self.world
        world.check_reach("push")
        self.multiprocessors = multiprocessors_of_all(world, "push")
        self.room = -(-max(max_nbytes, 1) // 128) * 128
        self.staged = self.empty((2 * self.room,), "uint8", "ag_gemm.staged")
        self.arrived = self.zeros((world.n_ranks * PARTS,), "uint64", "ag_gemm.arrived")
        self.offsets = self.offsets_of(self.arrived, range(world.n_ranks))
        self.calls, self.done = world.xp.zeros(1, "int64"), world.xp.zeros(1, "int32")

    @staticmethod
    def refuses(k, dtype):
        """-> why it does not compute products of such rows, alike on all ranks, or None"""
        if dtype.name not in HALVES or k % 8:
            return f"x is {dtype}, K is {k}: {' or '.join(HALVES)}, and a multiple of 8 are allowed"
        return None

    def bind(self, x, problems, gathered=None):
        """-> run(stream). x has at least one element; the problems' a is not used."""
        problems = sorted((p for p in problems if p.out.size), key=lambda p: -p.out.size)
        steps = [
            self._product(x, p, i == 0, i == len(problems) - 1, gathered is not None)
            for i, p in enumerate(problems)
        ]
        if gathered is not None:
            flat = gathered.reshape(-1).view("uint8")
            blocks = min(self.multiprocessors, -(-flat.size // (1 << 14)))
            steps.append(self.launch(copy_gathered, blocks, flat, self.staged, self.room, self.calls))

        def run(stream):
            for step in steps:
                step(stream)

        return run

    def _product(self, x, problem, first, last, keep):
        """-> run(stream): one product, which sends the rows if it is the `first`"""
        bias, before = problem.bias, None
        if bias is not None and bias.size > 1 and bias.strides[0] != bias.itemsize:
            problem = problem._replace(bias=self.world.xp.empty(bias.shape, bias.dtype))
            before = copying(problem.bias[None], bias[None])

        def bind(x, b, out):
            return self._launch(x, problem._replace(b=b, out=out), first, last, keep)

        product = aligned(bind, x, problem.b, problem.out)
        if before is None:
            return product

        def run(stream):
            before(stream)
            product(stream)

        run.kept = problem.bias
        return run

    def _launch(self, x, problem, first, last, keep):
        world, (rows, k), sms = self.world, x.shape, self.multiprocessors
        n_ranks, me, n = world.n_ranks, world.rank, problem.b.shape[1]
        shape = n_ranks * rows, k
        halves = [
            self.staged[half * self.room :][: 2 * n_ranks * rows * k].view(x.dtype).reshape(shape)
            for half in range(2)
        ]
        tile, splits = choose(shape[0], n, k, sms - SENDERS[0])
        tile, works = aligned_groups(tile, rows), tile.count(shape[0], n) * splits
        senders = [s for s in SENDERS if s == SENDERS[0] or works + s <= sms][-1] if first else 0
        width = max(WIDTH, -(-2 * k // (PARTS * WIDTH)) * WIDTH)
        reads_x = rows % tile.m == 0
        return bind_gemm(
            push_kernel,
            problem._replace(a=halves[0]),
            Choice(tile, splits),
            sms - senders,
            map_of_operand(x, tile.m),
            (me * rows, (me + 1) * rows) if reads_x else (0, 0),
            x.reshape(-1).view("uint8"),
            *(rows, me, n_ranks, n_ranks if keep or not reads_x else n_ranks - 1, senders, int(last)),
            *(width // (2 * SLAB), self.staged, self.room, self.arrived, self.offsets, self.calls, self.done),
            sources=halves,
            beside=senders,
            co_resident=True,
        )


def _listed(tile, *kinds):
    kinds, words, number, bytes_ = Kinds(*kinds), types.uint64[::1], types.int64, types.uint8[::1]
    more = (
        *(words, types.UniTuple(number, 2), bytes_, *[number] * 7, bytes_, number, words),
        *(number[::1], number[::1], types.int32[::1]),
    )
    return push_kernel(Tile(*tile), kinds), signature(kinds, *more), (9, 0)


_bytes = types.uint8[::1]
MINIMUM_CC = (9, 0)
GPU_KERNELS = {
    "128x256": _listed((128, 256), "bfloat16", "k", "k", "bfloat16"),
    "128x224 mn": _listed((128, 224), "bfloat16", "k", "mn", "float16", "float32", "silu"),
    "128x128 split": _listed((128, 128, 8, True), "float16", "k", "k", "float32"),
    "64x64": _listed((64, 64), "bfloat16", "k", "k", "bfloat16", "bfloat16", "gelu"),
    "copy_gathered": (copy_gathered, (_bytes, _bytes, types.int64, types.int64[::1])),
}
