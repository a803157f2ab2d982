"""``bench all_gather --tune``: which method was the fastest at which size, as an entry of the tuning table.

A method's range are the sizes where it is the fastest (``tuning.ranges``). What gave wrong results, or did
not run, does not count.
"""

import datetime

from shmemkit.collectives import tuning


def times_of(rows, op, output):
    """-> {bytes: {method: microseconds}} of rows of `op` that are right, with results in this `output`"""
    times = {}
    for row in rows:
        if row.op == op and not row.note and (row.out or "private") == output:
            times.setdefault(row.bytes, {})[row.method] = row.us
    return times


def entry_of(world, op, rows, methods, outputs=tuning.OUTPUTS):
    """-> the entry of this machine for `op`, from its rows of `methods`. `outputs` were measured; the first
    one stands for the others. ValueError if no row of one of them is right."""
    entry = {"gpu": world.backend.gpu_name, "n_ranks": world.n_ranks, "n_nodes": world.n_nodes}
    entry["date"] = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    for kind in outputs:
        times = times_of([row for row in rows if row.method in methods], op, kind)
        if not times:
            raise ValueError(f"{op}: no method gave a right result in {kind} memory")
        entry[kind] = tuning.ranges(times)
    for kind in tuning.OUTPUTS:
        entry.setdefault(kind, entry[outputs[0]])
    names = {name for kind in tuning.OUTPUTS for _, name in entry[kind]}
    return entry | {"digests": tuning.digests_of(op, names)}
