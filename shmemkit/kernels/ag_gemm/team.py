"""The ranks of my node, as a World to objects that work inside one."""


class NodeTeam:
    """A World of the ranks of my node, as far as copy engines use one: `rank` and `n_ranks` are those within
    the node, and so are the ranks of ``peer_view``; all else is the World's. So symmetric memory is that of
    all ranks, and what is collective is so for all of them: each makes such an object among its own node's.

    Of copy engines' Transfers ``start`` and ``finish`` are allowed, not ``run``, whose barrier is that of all
    ranks.
    """

    def __init__(self, world):
        self._world, self._ranks = world, world.node_ranks
        self.rank, self.n_ranks = world.local_rank, world.local_size
        self.backend = _Backend(world.backend, world.node_ranks)

    def __getattr__(self, name):
        return getattr(self._world, name)

    def peer_view(self, array, rank):
        return self._world.peer_view(array, self._ranks[rank])


class _Backend:
    """The World's, whose streams need to copy to `ranks` only."""

    def __init__(self, backend, ranks):
        self._backend, self._ranks = backend, ranks

    def __getattr__(self, name):
        return getattr(self._backend, name)

    def no_copies(self):
        return self._backend.no_copies(self._ranks)
