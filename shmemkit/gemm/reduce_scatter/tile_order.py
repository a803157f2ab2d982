"""The order of the tiles of a product that is reduced over the ranks: tiles of the others' rows, which are
sent, and tiles of the rank's own rows, to which parts are added.

Each round has about as many tiles as there are multiprocessors. Some are the next rank's, as many those of
the rank after it, .., and the last ones the rank's own. So the links are busy all the time. Otherwise they
would be overloaded while the others' tiles are computed, and then idle. The own tiles are some rounds late:
by then the others have sent their parts.
"""

import numpy as np


def schedule(part_tiles, n_ranks, me, stripe, lag):
    """-> int32 (n_ranks * part_tiles,): which tile comes when; tile i of rank k's rows is k * part_tiles + i.

    stripe  tiles of each rank in a round
    lag     rounds by which the own tiles follow the others' of the same number
    """
    owner, i = np.divmod(np.arange(n_ranks * part_tiles), part_tiles)
    turn = (owner - me - 1) % n_ranks
    rounds = i // stripe + lag * (turn == n_ranks - 1)
    return np.lexsort((i, turn, rounds)).astype("int32")
