"""Vector clocks: what a thread knows to have happened before what it does next.

A clock is a dictionary. It need not name every thread, since threads synchronize in blocks, and blocks in
kernels:

  block's key            -> n: everything that any of its threads did before the block's n-th barrier
  thread's key           -> t: everything that the thread did up to its time t
  mbarrier's key         -> n: the loads of its first n phases have read their sources
  stream's key           -> n: everything that its first n kernels did
  operation_done(i)      -> 1: the data of operation i (a put or get under way) is where it belongs
  quiet_of(p)            -> n: PE p's first n calls of quiet
  fence_of(p)            -> n: PE p's first n calls of fence
  delivered(p, q)        -> n: what PE p has sent to PE q before its n-th fence is there

The last three concern operations that the clock, besides, knows to have been issued: so they stay three,
however many operations there are.

All values only grow, so two clocks are joined by the larger of each. A thread's time is (barriers of its
block so far) << 32 | (its releases so far). The idea of compressing clocks along the hierarchy of a GPU is
that of BARRACUDA (Eizenberg et al., PLDI 2017); that of remembering one access instead of a clock is
FastTrack's (Flanagan and Freund, PLDI 2009).
"""

BLOCK = 4096  # keys of a block: its own, those of at most 1024 threads after it, and then its mbarriers'
MBARRIER = 1025  # where those begin
NEVER = (1 << 62) - 1  # the number of a barrier that does not come
STREAM = 1 << 60  # keys of streams begin here
STEP = 1 << 62  # and those that say how many steps of a process are known (``dpor.py``)
PE = 1 << 61  # and those of PEs: at most 1 << 20 for each


def operation_done(serial):
    return -serial


def quiet_of(pe):
    return PE + (pe << 20)


def fence_of(pe):
    return quiet_of(pe) + 1


def delivered(pe, target):
    return quiet_of(pe) + 2 + target


class Moment:
    """When an access happened: its thread's block and barrier, thread and time, stream and kernel. All
    accesses of a thread between two releases or barriers share one. `of` is the Thread, or the Operation.
    `events`: how many signals and waits there had been then, for reports."""

    __slots__ = ("block", "phase", "thread", "time", "stream", "kernel", "of", "events")

    def __init__(self, block, phase, thread, time, stream, kernel, of, events=0):
        self.block, self.phase, self.thread, self.time = block, phase, thread, time
        self.stream, self.kernel, self.of, self.events = stream, kernel, of, events

    def before(self, clock):
        """Whether it has happened before what is done with `clock`."""
        get = clock.get
        return (
            get(self.block, 0) > self.phase
            or get(self.thread, 0) >= self.time
            or get(self.stream, 0) >= self.kernel
        )


class OperationMoment(Moment):
    """When the data of an operation under way is accessed: at some time after it was issued, and before what
    is done by who sees its own signal, or a later one behind a fence, or follows a quiet."""

    __slots__ = ()

    def __init__(self, serial, of):
        key = operation_done(serial)
        Moment.__init__(self, key, 0, key, 1, None, 1, of)

    def before(self, clock):
        return self.block in clock or self.of.is_over(clock)


def joined(*clocks):
    """A new clock that knows what each of `clocks` does."""
    first, *others = sorted({id(c): c for c in clocks}.values(), key=len, reverse=True)
    result = dict(first)
    for other in others:
        join(result, other)
    return result


def join(clock, other):
    """`clock` learns what `other` knows."""
    get = clock.get
    for key, value in other.items():
        if value > get(key, 0):
            clock[key] = value


def forget_superseded(clock, kernel_of_block, live_operations):
    """Drop the entries that others imply: threads of a block whose later barrier is known, blocks and threads
    of a kernel whose end is known, and operations that are over, or whose data nobody can find any more."""
    get = clock.get

    def needed(key, value):
        if key >= STREAM:
            return True
        if key < 0:
            operation = live_operations.get(-key)
            return operation is not None and not operation.is_over(clock)
        block = key - key % BLOCK
        if 0 < key - block < MBARRIER and get(block, 0) > value >> 32:
            return False
        stream, kernel = kernel_of_block.get(block, (0, 1))
        return get(stream, 0) < kernel

    for key in [k for k, v in clock.items() if not needed(k, v)]:
        del clock[key]
