"""The order of the tiles of a product that is reduced over the ranks: those of the others' rows, which are
sent, and those of my own, which are added up.

In each round, about as many tiles as there are multiprocessors, some are the next rank's, as many those of
the one after it, .., and at last some are mine. So the links carry something all the time; else they carry
all that they can while the others' are computed, which waits for them, and then nothing. Mine are some rounds
behind: those of which the others have sent me their parts meanwhile.
"""

import numpy as np


def schedule(part_tiles, n_ranks, me, stripe, lag):
    """-> int32 (n_ranks * part_tiles,): which tile comes when; tile i of rank k's rows is k * part_tiles + i.

    stripe  tiles of each rank in a round
    lag     rounds that my own tiles are behind the others' of the same number
    """
    owner, i = np.divmod(np.arange(n_ranks * part_tiles), part_tiles)
    turn = (owner - me - 1) % n_ranks
    rounds = i // stripe + lag * (turn == n_ranks - 1)
    return np.lexsort((i, turn, rounds)).astype("int32")
