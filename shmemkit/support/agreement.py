"""What all ranks must give alike: errors that say which rank gave what, and that all ranks raise.

They name ranks of the World, also where the ranks of a group disagree.
"""

from .settings import listed


def counted(n, word):
    """ "1 rank" or "2 ranks" """
    return f"{n} {word}{'s' * (n != 1)}"


def ranks_text(ranks):
    """ "rank 3", "ranks 1 and 2" or "ranks 0 and 4 to 7", of ranks in ascending order"""
    runs = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    words = []
    for run in runs:
        words += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else run
    return f"rank{'s' * (len(ranks) > 1)} {listed(words, 'and')}"


def of_group(ranks, n_ranks=None):
    """ " (of the group of ranks 0 and 2)", of `ranks` of the World, or "" if these are all of `n_ranks`"""
    return "" if len(ranks) == n_ranks else f" (of the group of {ranks_text(sorted(ranks))})"


def check_equal(given, rule, verb="give", kind: type[Exception] = ValueError):
    """Raise `kind`, on all ranks, unless `given`, a text for each rank, are equal.

    "ranks disagree: rank 0 calls broadcast, ranks 1 to 3 call gather. `rule`", of the verb "call"
    """
    if len(set(given)) > 1:
        says = [(ranks, f"{verb}{'s' * (len(ranks) == 1)} {text}") for ranks, text in by_text(given)]
        said = ", ".join(f"{ranks_text(ranks)} {text}" for ranks, text in says)
        raise reported_by(0, kind(f"ranks disagree: {said}. {rule}"))


def raise_on_all(error, answers):
    """Raise on all ranks if any of them has an error: its own, else that of the first rank which has one.

    error    this rank's, or None
    answers  of each rank, what ``as_message`` makes of its own
    """
    if error is not None:
        raise error
    for rank, answer in enumerate(answers):
        if answer is not None:
            kind, text = answer
            raise reported_by(rank, kind(f"rank {_in_world(rank)}: {text}"))


def as_message(error):
    """Return what another rank needs to raise `error` too: None, or its kind and text. There it is a
    RuntimeError, unless it is a TypeError, ValueError or MemoryError."""
    if error is None:
        return None
    for kind in (MemoryError, TypeError, ValueError):
        if isinstance(error, kind):
            return kind, str(error)
    return RuntimeError, f"{type(error).__name__}: {error}"


def by_text(given):
    """-> [(ranks, text), ...] of `given`, a text for each rank, equal ones together"""
    ranks = {}
    for rank, text in enumerate(given):
        ranks.setdefault(text, []).append(_in_world(rank))
    return [(sorted(k), text) for text, k in ranks.items()]


def _in_world(rank):
    """The rank of the World that is `rank` where the answers come from."""
    from .host_program import host_program  # needs greenlet, and `shmemkit run` begins without it

    asked = host_program().asked
    return rank if asked is None else asked[rank]


def reported_by(rank, error):
    """Return `error`, marked as one that all ranks raise and `rank` prints (``program_end.py``)."""
    error.reported_by = _in_world(rank)
    return error
