"""What the methods of host objects share: their symmetric memory, and their kernels, bound once for each
grid."""

from shmemkit.launch import bind


class Method:
    """One way to do a collective operation. A subclass has

    prepare(*args)   called once, by all ranks; ValueError, which says why, where it cannot run. First come
                     all collective calls: ``World.check_reach`` and others that refuse on all ranks,
                     ``zeros``, ``empty``. Then what one rank alone may refuse: each kernel is bound for each
                     dtype, so that none is compiled while others wait
    bind(...)        -> run(stream): enqueues one operation on these arrays; a stream of None is the World's

    and `threads`, per block; on the emulator, which is quicker with few, 32.

    To make one is collective. When prepare refuses on any rank, all ranks free what they have allocated and
    raise ValueError, with their own reason or, prefixed by its rank, with another's. They agree on that when
    prepare has ended: so no collective call may follow what one rank alone refuses.
    """

    threads = 512

    def __init__(self, world, *args):
        self.world = world
        self._arrays, self._launches = [], {}
        if world.backend.name == "emulator":
            self.threads = 32
        refusal = None
        try:
            self.prepare(*args)
        except ValueError as error:
            refusal = error
        except MemoryError:  # on all ranks
            self.free()
            raise
        reasons = world.host_allgather(None if refusal is None else str(refusal))
        for rank, reason in enumerate(reasons):
            if reason is not None:
                self.free()
                raise refusal or ValueError(f"rank {rank}: {reason}")

    def zeros(self, shape, dtype, name):
        """A symmetric array that lives as long as the method. Collective."""
        self._arrays.append(self.world.zeros(shape, dtype, name))
        return self._arrays[-1]

    def empty(self, shape, dtype, name):
        """As ``zeros``, with undefined content."""
        self._arrays.append(self.world.empty(shape, dtype, name))
        return self._arrays[-1]

    def launch(self, kernel, grid, *args):
        """-> `kernel` bound to `grid` and `args`; its blocks wait for each other, so all must fit at once.

        The caller keeps the arrays alive: bound calls outlive what users gather.
        """
        key = kernel, grid, tuple(getattr(arg, "dtype", None) for arg in args)
        if key not in self._launches:
            self._launches[key] = bind(kernel, grid, self.threads, args, co_resident=True)
            self._launches[key].forget_arrays()
        bound = self._launches[key].with_args(*args)
        bound.forget_arrays()
        return bound

    def free(self):
        """Give the symmetric memory back. Collective."""
        while self._arrays:
            self.world.free(self._arrays.pop(0))
