"""Stores through a multicast view, as ordinary accesses of the same memory see them: after a fence between
the two addresses (``multimem_fence``, fence.proxy.alias), or the end of the storing kernel.

A fence is about the stores that the fencing thread knows of. It counts for whoever knows of the store and of
the fence: for the reader, who fences after its wait, as for the writer, who does so before its signal. What
clocks keep of fences is one number for each PE, as of quiet (``vector_clock.py``).
"""

import collections
import weakref

from .vector_clock import Moment, quiet_of

_all = weakref.WeakKeyDictionary()  # Races -> _Aliases


def _fences_of(pe):
    """The key of clocks that says of how many fences of a PE they know: the last of those of the PE."""
    return quiet_of(pe + 1) - 1


class AliasedStore:
    """An ordinary store by `thread`, at `issued`, through a multicast view. `fenced`: PE -> number of the
    first fence there that was about it."""

    __slots__ = ("thread", "issued", "fenced", "__weakref__")
    what = "multimem store"

    def __init__(self, thread, issued):
        self.thread, self.issued, self.fenced = thread, issued, {}

    def known(self, thread, clock):
        """Whether `thread`, which knows `clock`, knows of it."""
        return self.thread is thread or self.issued.before(clock)

    def is_over(self, clock):
        """Whether it has happened before what is done with `clock` by ordinary accesses."""
        issued = self.issued
        if clock.get(issued.stream, 0) >= issued.kernel:
            return True
        fenced = any(clock.get(_fences_of(pe), 0) >= number for pe, number in self.fenced.items())
        return fenced and issued.before(clock)


class _AliasedMoment(Moment):
    """When ordinary accesses see an AliasedStore."""

    __slots__ = ()

    def __init__(self, serial, store):
        Moment.__init__(self, -serial, 0, -serial, 1, None, 1, store)  # its key is in no clock

    def before(self, clock):
        if type(clock) is SameAddress:
            return self.of.issued.before(clock)
        return self.of.is_over(clock)


class SameAddress(dict):
    """What `thread` knows, for its accesses through a multicast view: they need no fence after stores through
    it."""

    def __init__(self, thread):
        super().__init__(thread.clock)
        self[thread.key] = 1 << 62  # all that it did itself


class _Aliases:
    def __init__(self):
        self.fences = collections.Counter()  # PE -> calls so far
        self.unfenced = collections.defaultdict(weakref.WeakSet)  # PE -> stores that none of these was about


def aliased(thread, issued, pes):
    """-> the moment of a store by `thread` to the memory of `pes`, as others see it"""
    races = thread.block.machine.races
    store = AliasedStore(thread, issued)
    aliases = _all.setdefault(races, _Aliases())
    for pe in pes:
        aliases.unfenced[pe].add(store)
    return _AliasedMoment(next(races.serials), store)


def fence(thread):
    """multimem_fence of a `thread` that is checked for races."""
    aliases, pe = _all.setdefault(thread.block.machine.races, _Aliases()), thread.pe
    aliases.fences[pe] += 1
    number, unfenced = aliases.fences[pe], aliases.unfenced[pe]
    for store in [s for s in unfenced if s.known(thread, thread.clock)]:
        store.fenced[pe] = number
        unfenced.discard(store)
    thread.learn({_fences_of(pe): number, thread.key: (thread.moment or thread.now()).time})
