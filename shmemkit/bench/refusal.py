"""Whether all ranks can do something: what one of them refuses, none of them does."""


class Refused(Exception):
    """At least one rank refused; the message says why. Raised on every rank."""


def agreed(world, action):
    """-> what ``action()`` returns, if it raises ValueError on no rank; Refused on every rank otherwise.
    Collective."""
    result = reason = None
    try:
        result = action()
    except ValueError as error:
        reason = str(error) or type(error).__name__
    reasons = [r for r in world.host_allgather(reason) if r is not None]
    if reasons:
        raise Refused(reasons[0])
    return result
