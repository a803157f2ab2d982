"""``bench all_gather --tune``: which method was the fastest at which size, as an entry of the tuning table.

A method's range are the sizes where it is the fastest. From one size to the next larger one the method
changes only if another takes less than 1 - MARGIN of its time: the clock's own scatter makes no ranges, and
each method costs memory. What gave wrong results, or did not run, does not count.
"""

import datetime

from shmemkit.collectives import tuning

MARGIN = 0.03


def ranges(times):
    """`times`, {bytes: {method: microseconds}} -> [(limit in bytes, or None, method), ...], a tuning table's
    choices."""
    result, method = [], None
    for size in sorted(times):
        of_size = times[size]
        fastest = min(of_size, key=of_size.get)
        if method not in of_size or of_size[fastest] < (1 - MARGIN) * of_size[method]:
            method = fastest
        if result and result[-1][1] == method:
            result.pop()
        result.append((size, method))
    return [*result[:-1], (None, result[-1][1])]


def entry_of(world, rows, methods):
    """-> the entry of this machine, from the rows of `methods`. ValueError if there are none for one kind of
    output that are right."""
    entry = {"gpu": world.backend.gpu_name, "n_ranks": world.n_ranks, "n_nodes": world.n_nodes}
    entry["date"] = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    for kind in tuning.OUTPUTS:
        times = {}
        for row in rows:
            if row.method in methods and not row.note and (row.out or "private") == kind:
                times.setdefault(row.bytes, {})[row.method] = row.us
        if not times:
            raise ValueError(f"no method gave a right result in {kind} memory")
        entry[kind] = ranges(times)
    return entry
