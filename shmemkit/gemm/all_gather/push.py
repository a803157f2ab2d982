"""All-gather and matrix product in one kernel: some blocks store this rank's rows into the others' memory
while the rest multiply the rows that have come. For Hopper, and GPUs that reach each other's memory.

Copy engines leave all multiprocessors to the product (``sm90.py``). But it takes some 20 us to start them,
and to learn that they have finished.

Staged    staged[buffer, k], on every rank: the rows of rank k, in their layout there. Written by rank k only;
          its own by the rank itself, unless the product reads them from x
Parts     a product of few tiles gets x by columns: the first columns of all rows, to all ranks at once, then
          the next. Other products get it by rows: all to the rank before, which wants them first, then to the
          one before that, each time in a few parts
Signals   arrived[k, i], on every rank: SHARES times the epochs whose part i of rank k's rows is here. Only
          rank k adds to it, SHARES in each epoch, whatever the parts: parts without columns count, too, and
          by rows one part has several words
Epochs    epochs[0], local: the epoch selects the buffer. Device-resident, so graph-safe. done[0]: blocks of
          this launch that have read it

  senders, the first blocks, each for its share of every part:
          1. store it to staged[buffer, me] of the rank, or of all others; barrier of the warps, by columns an
             mbarrier of the part, where only the warp waits that sends the signals
          2. add the block's shares to arrived[me, i] there       release, sys: publishes the block's stores
  loader of the other blocks, one thread, for each tile (by columns: each slab) that is not known to be here:
          3. wait until arrived[k, i] >= SHARES * epoch, for all parts that it has rows of    acquire, sys
          4. fence between proxies: the loads of the TMA see the rows, too
  the last block that has read epochs, of a call's last launch:
          5. adds 1 to it: the next launch begins when this one has ended

``sm90.py``, or ``column_hooks.py``, has steps 3 and 4; the rest is ``shmemkit.gemm.sm90``. Several products
of one gathering are several launches: the first one sends, and the others find all rows here.

No race: the double-buffer lemma (docs/protocols.md). Each rank has rows, and each launch computes tiles of
all rows, so a rank that ends an epoch has received rows of all others. Signals count up, so the rows of one
epoch are not taken for those of another.

No deadlock: senders wait for no rank. All blocks are co-resident.

The machine code must keep (docs/machine_code.md): one elected thread.
"""

import functools
from typing import Any, NamedTuple

from numba import cuda, int64, types

from shmemkit.device.cuda.copies import copy_block
from shmemkit.device.cuda.marks import begin_phase, end_phase
from shmemkit.device.cuda.mbarrier import fence_mbarrier_init, mbarrier_arrive, mbarrier_init, mbarrier_wait
from shmemkit.device.cuda.subarrays import span
from shmemkit.device.cuda.tma import tensormap_acquire
from shmemkit.device.cuda.wgmma import SLAB
from shmemkit.device.shmem.ordered_access import load_vec16, peer_at, store_vec16
from shmemkit.device.shmem.signals import notify_at
from shmemkit.device.swizzle import quotient
from shmemkit.operations.method import Method
from shmemkit.support.arrays import new_array
from shmemkit.support.settings import listed

from ..aligned_copies import aligned, copying
from ..distributed import multiprocessors_of_all
from ..epilogue import inline
from ..last_block import is_last_block
from ..problem import HALVES
from ..sm90 import WATCHING, Kinds, Tile, gemm_body, table_entry
from ..sm90_host import CLOCK, Choice, bind_gemm, choose, estimate, map_of_operand, taken
from . import column_hooks
from .sm90 import Coming, hooks_of, mine_first, mine_from_x
from .sm90_host import aligned_groups

SENDERS = 4, 8, 16  # blocks that send
RATE = 25e9  # bytes that one sends, per second: measured with 4 and with 8 of them on 4 H200
SHARES = 16  # of a part, which the senders share
PARTS = 16  # of the columns, at most
PIECE = 2048  # bytes: 4 loads of each thread of a warp
AT_ONCE = 192  # pieces that a part of the columns has, at least: 4 senders have about so many under way


class Sending(NamedTuple):
    """Arguments of a sender, as the kernel's. `slot`: where this rank's rows lie in staged; `begin`: by
    columns, the next rank; by rows, the first receiver: the rank before, or this rank if it waits for them,
    too."""

    x: Any
    rows: Any
    row_bytes: Any
    staged: Any
    slot: Any
    arrived: Any
    offsets: Any
    me: Any
    n_ranks: Any
    and_mine: Any
    begin: Any
    senders: Any


@inline
def tell(to, peer, word):
    """Step 2, by one thread."""
    shares = quotient(SHARES, to.senders)
    notify_at(to.arrived, to.me * PARTS + word, to.offsets, peer, shares, "add")


@inline
def load_piece(x, at, last):
    """-> a lane's 4 vectors of a piece; the last of its row begins at `last`"""
    return (
        load_vec16(x, min(at, last)),
        load_vec16(x, min(at + 512, last)),
        load_vec16(x, min(at + 1024, last)),
        load_vec16(x, min(at + 1536, last)),
    )


@inline
def store_piece(there, at, last, vectors):
    a, b, c, d = vectors
    if at <= last:
        store_vec16(there, at, a)
    if at + 512 <= last:
        store_vec16(there, at + 512, b)
    if at + 1024 <= last:
        store_vec16(there, at + 1024, c)
    if at + 1536 <= last:
        store_vec16(there, at + 1536, d)


@inline
def vectors_of(i, pieces, begin, pitch, size, lane):
    """-> where a lane's vectors of the i-th piece begin in x, and the last vector of that row"""
    row = quotient(i, pieces)
    at = begin + row * pitch
    return at + (i - row * pieces) * PIECE + 16 * lane, at + size - 16


@inline
def send(to, begin, rows, pitch, size, peer, peers, warps):
    """Step 1: `size` bytes of each of `rows` rows, the first of which begins at byte `begin`, `pitch` bytes
    before the next one, to `peers` ranks from `peer` on. The first `warps` of the senders share the pieces;
    each has 4 under way: a multiprocessor sends as much as it loads meanwhile."""
    lane = cuda.threadIdx.x & 31
    step, pieces = to.senders * warps, (size + PIECE - 1) // PIECE  # of 4 GB, too
    i, count = int64(cuda.blockIdx.x * warps + quotient(cuda.threadIdx.x, 32)), rows * pieces
    begin_phase("send")
    while i < count:
        final = count - 1
        at0, last0 = vectors_of(i, pieces, begin, pitch, size, lane)
        at1, last1 = vectors_of(min(i + step, final), pieces, begin, pitch, size, lane)
        at2, last2 = vectors_of(min(i + 2 * step, final), pieces, begin, pitch, size, lane)
        at3, last3 = vectors_of(min(i + 3 * step, final), pieces, begin, pitch, size, lane)
        piece0, piece1 = load_piece(to.x, at0, last0), load_piece(to.x, at1, last1)
        piece2, piece3 = load_piece(to.x, at2, last2), load_piece(to.x, at3, last3)
        for k in range(peers):
            rank = peer + k if peer + k < to.n_ranks else peer + k - to.n_ranks
            there, slot = peer_at(to.staged, to.offsets, rank), to.slot
            store_piece(there, slot + at0, slot + last0, piece0)
            if i + step < count:
                store_piece(there, slot + at1, slot + last1, piece1)
            if i + 2 * step < count:
                store_piece(there, slot + at2, slot + last2, piece2)
            if i + 3 * step < count:
                store_piece(there, slot + at3, slot + last3, piece3)
        i += 4 * step
    end_phase("send")


@inline
def send_columns(to, width, sent):
    """By columns: `width` bytes of all own rows to all ranks, then the next ones. The last warp sends the
    signals, which takes longer than a piece takes the other warps. So each of them arrives at sent[i] when it
    has stored its share of part i, and goes on."""
    lane, warp = int64(cuda.threadIdx.x & 31), quotient(cuda.threadIdx.x, 32)
    last = quotient(cuda.blockDim.x, 32) - 1
    parts = quotient(to.row_bytes + width - 1, width)
    if cuda.threadIdx.x == 0:
        for i in range(PARTS):
            mbarrier_init(sent, i, last)
        fence_mbarrier_init()
    cuda.syncthreads()
    if warp < last:
        for i in range(parts):
            size = min(width, to.row_bytes - i * width)
            peers = to.n_ranks - 1 + to.and_mine
            send(to, i * width, to.rows, to.row_bytes, size, to.begin, peers, last)
            cuda.syncwarp()
            if lane == 0:
                mbarrier_arrive(sent, i)
    else:
        for i in range(parts):
            mbarrier_wait(sent, i, 0)
            peer = lane
            while peer < to.n_ranks:  # the own shares count, too, whoever reads them
                tell(to, peer, i)
                peer += 32
        i, rest = lane, PARTS - parts
        while i < to.n_ranks * rest:  # parts without columns
            peer = quotient(i, rest)
            tell(to, peer, parts + i - peer * rest)
            i += 32


@inline
def send_rows(to, parts):
    """By rows: in so many parts, to one rank, then to the one before that."""
    peer, words, n_bytes = to.begin, quotient(PARTS, parts), quotient(to.rows, parts) * to.row_bytes
    warps = quotient(cuda.blockDim.x, 32)
    for _ in range(to.n_ranks):
        for part in range(parts):
            if peer != to.me or to.and_mine:
                send(to, part * n_bytes, 1, 0, n_bytes, peer, 1, warps)
            cuda.syncthreads()
            if cuda.threadIdx.x < words:
                tell(to, peer, part * words + cuda.threadIdx.x)
        peer = peer - 1 if peer > 0 else to.n_ranks - 1


@inline
def workers(extra):
    """``blocks`` of ``gemm_body``."""
    return int64(cuda.blockIdx.x) - extra.senders, int64(cuda.gridDim.x) - extra.senders


@functools.cache
def push_kernel(tile, kinds, by_columns):
    """-> the kernel for tiles like `tile` of products like `kinds`, whose A comes by columns or by rows."""
    hooks = hooks_of(tile, by_columns)
    gemm = gemm_body(tile, kinds, mine_first(tile.group), a_at=mine_from_x, blocks=workers, **hooks)

    @cuda.jit(launch_bounds=(tile.threads, 1))
    def ag_gemm_push(operands, size, split, own, me, n_ranks, plan, inbox, epochs, done):
        """As of ``gemm_kernel``, of an A that this launch gathers, or one before it of the same call, and

        map_a    two tensor maps, of A in each buffer of staged
        own      map_x, from_x, x, rows:
        map_x    the tensor map of x; its box is that of map_a
        from_x   int64 (begin, end): this rank's rows of A, if they are read from x; (0, 0) if not
        x        uint8, this rank's rows one after another, at a multiple of 16 bytes
        rows     of each of n_ranks ranks; each of a multiple of 16 bytes
        me       this rank
        plan     and_mine, senders, ends, slabs, together, parts:
        and_mine 1 if its own rows are stored to staged here, too; else 0
        senders  blocks that send, of SENDERS; 0: the rows have been sent
        ends     whether it is the last launch of the call
        slabs    by columns: of a part, which begins with slab i * slabs: there are up to PARTS
        together by columns: whether all tiles wait for those of all ranks
        parts    by rows: of a rank's, of as many rows each; divides PARTS
        inbox    staged, room, arrived, offsets:
        staged   uint8 (2 * room,), symmetric
        room     bytes of a buffer
        arrived  uint64 (n_ranks * PARTS,), symmetric, zeros at first
        offsets  as of `peer_at`
        epochs    int64 (1,), zero at first; done: int32 (1,)
        grid     as of ``gemm_kernel``, and the senders; all blocks must be resident
        """
        map_x, from_x, x, rows = own
        and_mine, senders, ends, slabs, together, parts = plan
        staged, room, arrived, offsets = inbox
        come, sent = cuda.shared.array(1, types.int64), cuda.shared.array(PARTS, types.uint64)
        epoch = epochs[0] + 1
        buffer = epoch & 1
        cuda.syncthreads()
        # Not at the end: the loader would keep all this in registers.
        if cuda.threadIdx.x == WATCHING and is_last_block(done):
            epochs[0] += ends  # 5
        begin = me
        if by_columns:
            begin = me + 1 if me + 1 < n_ranks else 0
        elif from_x[1]:
            begin = me - 1 if me > 0 else n_ranks - 1
        if cuda.blockIdx.x < senders:
            row_bytes = 2 * size[2]
            to = Sending(
                *(x, rows, row_bytes, staged, buffer * room + me * rows * row_bytes, arrived, offsets),
                *(me, n_ranks, and_mine, begin, senders),
            )
            if by_columns:
                send_columns(to, slabs * 2 * SLAB, sent)
            else:
                send_rows(to, parts)
        else:
            if cuda.threadIdx.x == 0:  # the loader
                tensormap_acquire(map_x)
                come[0] = parts if from_x[1] else 0
            parts = 1 if by_columns else parts  # a constant, which takes no register
            coming = Coming(
                *(arrived, quotient(PARTS, parts), size[0], quotient(rows, parts), me * parts, slabs),
                *(n_ranks * parts, map_x, from_x, come, SHARES * epoch, together != 0, senders),
            )
            map_buffer = span(operands[0], 16 * buffer, 16)
            gemm((map_buffer, *operands[1:]), size, split, coming)

    return ag_gemm_push


@cuda.jit
def copy_gathered(gathered, staged, room, epochs):
    """The rows of the last epoch, to an array of uint8.

    grid    any number of blocks and threads; others as of ``push_kernel``
    """
    part = (gathered.size + cuda.gridDim.x - 1) // cuda.gridDim.x + 15 & -16  # of 4 GB, too
    begin = min(cuda.blockIdx.x * part, gathered.size)
    size = min(part, gathered.size - begin)
    copy_block(span(gathered, begin, size), span(staged, (epochs[0] & 1) * room + begin, size))


class Push(Method):
    """The method "push" of ``AllGatherGemm``, for up to `max_nbytes` of gathered rows."""

    options = {"senders": None, "part_bytes": None}

    def prepare(self, max_nbytes, options):
        world, self.options = self.world, options
        if options["senders"] and SHARES % options["senders"]:
            raise ValueError(f"push: senders is {options['senders']}; it must be 1, 2, 4, 8 or 16")
        if (options["part_bytes"] or 0) % (2 * SLAB):
            raise ValueError(f"push: part_bytes is {options['part_bytes']}; it must be a multiple of 128")
        world.check_reach("push")
        self.within(2, 2)
        self.multiprocessors = multiprocessors_of_all(world, "push", sms=self.sms)
        if self.multiprocessors < 2:
            raise ValueError("push: the GPU has one multiprocessor; it must have 2 or more, to send by some")
        self.room = -(-max(max_nbytes, 1) // 128) * 128
        self.staged = self.empty((2 * self.room,), "uint8", "ag_gemm.staged")
        self.arrived = self.zeros((world.n_ranks * PARTS,), "uint64", "ag_gemm.arrived")
        self.offsets = self.offsets_of(self.arrived, range(world.n_ranks))
        self.epochs, self.done = world.xp.zeros(1, "int64"), world.xp.zeros(1, "int32")

    @staticmethod
    def refuses(k, dtype, n):
        """-> why it does not compute products of such rows, with n columns, alike on all ranks, or None"""
        if not n:
            return "the weights have no columns; they must have 1 or more"
        if dtype.name not in HALVES or k % 8:
            return f"x is {dtype} and K is {k}; they must be {listed(HALVES)}, and a multiple of 8"
        return None

    def bind(self, x, problems, gathered=None):
        """-> run(stream). x has at least one element; the problems' a is not used."""
        problems = sorted((p for p in problems if p.out.size), key=lambda p: -p.out.size)
        steps, mine = [], x
        if not taken(x):
            mine = new_array(self.world.xp, x.shape, x.dtype)
            steps.append(copying(mine, x, self.sms))
        for i, p in enumerate(problems):
            launch = functools.partial(self._launch, p, i == 0, p is problems[-1], gathered is not None)
            steps.append(aligned(launch, mine, p.b, p.out, sms=self.sms))
        if gathered is not None:
            flat = gathered.reshape(-1).view("uint8")
            blocks = min(self.multiprocessors, -(-flat.size // (1 << 14)))
            steps.append(self.launch(copy_gathered, blocks, flat, self.staged, self.room, self.epochs))

        def run(stream):
            for step in steps:
                step(stream)

        run.kept = mine
        return run

    def _launch(self, problem, first, last, keep, x, b, out):
        """A product, which sends the rows if it is the `first`; with `keep` staged gets its own, too."""
        world, (rows, k), n = self.world, x.shape, b.shape[1]
        me, n_ranks = world.rank, world.n_ranks
        plan = plan_of(rows, k, n, n_ranks, self.multiprocessors, self.options)
        tile, reads_x = plan.choice.tile, rows % plan.choice.tile.m == 0
        senders, from_x = plan.senders if first else 0, (me * rows, (me + 1) * rows) if reads_x else (0, 0)
        buffers = [
            self.staged[buffer * self.room :][: n_ranks * x.nbytes].view(x.dtype).reshape(n_ranks * rows, k)
            for buffer in range(2)
        ]
        return bind_gemm(
            lambda tile, kinds: push_kernel(tile, kinds, plan.by_columns),
            *(problem._replace(a=buffers[0], b=b, out=out), plan.choice, self.multiprocessors - senders),
            (map_of_operand(x, tile.m), from_x, x.reshape(-1).view("uint8"), rows),
            *(me, n_ranks),
            (int(keep or not reads_x), senders, int(last), plan.slabs, int(plan.together), plan.parts),
            (self.staged, self.room, self.arrived, self.offsets),
            *(self.epochs, self.done),
            sources=buffers,
            beside=senders,
            co_resident=True,
            group=self.world,
        )


class Plan(NamedTuple):
    """How a product is computed, as the kernel's arguments, and about how long that takes."""

    choice: Choice
    senders: int
    by_columns: bool
    slabs: int
    together: bool
    parts: int
    seconds: float


def plan_of(rows, k, n, n_ranks, sms, options):
    """-> the Plan for `rows` rows of each rank, (rows, k), and n columns, on so many multiprocessors: by the
    number of senders with which neither the product nor what it waits for takes long, or as the `options` of
    AllGatherGemm say."""
    m, found = n_ranks * rows, []
    given, part = options["senders"], options["part_bytes"]
    for senders in [s for s in ([given] if given else SENDERS) if s <= sms // 2] or [1]:
        choice = choose(m, n, k, sms - senders, options["tile"], options["splits"])
        sent = 2 * (n_ranks - 1) * rows * k / (RATE * senders)
        seconds = max(estimate(m, n, k, choice, sms - senders) / CLOCK, sent)
        found.append((seconds, -senders, choice))
    seconds, senders, choice = min(found)
    senders, tile = -senders, choice.tile
    works = tile.count(m, n) * choice.splits
    by_columns = options["by_columns"]
    if by_columns is None:
        by_columns = works <= column_hooks.ROUNDS * sms
    parts = 1 if by_columns else next(p for p in (4, 2, 1) if rows % p == 0)
    unit, pieces = (part, 1) if part else (PIECE, AT_ONCE)
    width = max(-(-2 * k // (PARTS * unit)), -(-pieces // rows)) * unit
    choice = choice._replace(tile=aligned_groups(tile, rows // parts, rows))
    together = by_columns and works <= sms - senders
    return Plan(choice, senders, by_columns, width // (2 * SLAB), together, parts, seconds)


def _listed(by_columns, tile, *kinds):
    kinds = Kinds(*kinds)
    return table_entry(push_kernel(Tile(*tile), kinds, by_columns), kinds)


MINIMUM_CC = (9, 0)
GPU_KERNELS = {
    "128x256": _listed(False, (128, 256), "bfloat16", "k", "k", "bfloat16"),
    "128x224 mn": _listed(False, (128, 224), "bfloat16", "k", "mn", "float16", "float32", "silu"),
    "128x224 columns": _listed(True, (128, 224), "bfloat16", "k", "k", "bfloat16"),
    "128x128 columns split": _listed(True, (128, 128, 8, True), "float16", "k", "k", "float32"),
    "64x64 columns": _listed(True, (64, 64), "bfloat16", "k", "k", "bfloat16", "bfloat16", "gelu"),
    "copy_gathered": (copy_gathered, (*[types.uint8[::1]] * 2, types.int64, types.int64[::1])),
}
