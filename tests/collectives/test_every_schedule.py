"""Every collective by each of its methods, in every schedule of a few calls on the emulator. Blocks have one
thread, or one warp: little enough for all schedules. The third call uses the first buffer again; one of
nothing does not count. (Where a method has several threads, or blocks, its own file has seeds.)"""

import pytest
from specification import ALL, explored

WAYS = [(name, method) for name, what in ALL.items() for method in what.kind.methods]
ONE, TINY = {"threads": 1}, {"least": 2, "most": 2, "blocks": 1}
SETTINGS = {
    ("AllReduce", "push"): {"of_stages": ONE},
    ("AllReduce", "copy_engine"): {**ONE, "of_stages": ONE},
    ("AllReduce", "ring"): TINY,  # words of a chunk
    ("AllReduce", "double_tree"): TINY,
    ("ReduceScatter", "ring"): {**ONE, "part": 512, "chunk": 64, "max_blocks": 3, "max_chunks": 8},
    ("ReduceScatter", "push_2d"): {**ONE, "chunk": 8},
    ("Reduce", "push"): {},
}
COPIED = ("AllGather", "copy_push"), ("AllGather", "copy_pull")  # test_all_gather_copy.py has more of them
MORE = [  # collective, method, ranks, nodes, and what few_calls takes
    *[("AllGather", method, 2, 1, [4, 0, 4, 4], "uint8") for method in ("ll", "pull", "push_1d")],
    ("AllGather", "ll", 3, 1, [1]),
    ("AllGather", "push_1d", 2, 1, [4] * 3, "uint8", 0, True),
    *[
        ("AllGather", method, n, nodes, [4] * calls, "uint8")
        for method in ("ll_2d", "push_2d")
        for n, nodes, calls in ((2, 2, 3), (3, 3, 3), (4, 2, 2))
    ],
    ("AllGather", "ll_2d_multimem", 2, 2, [1] * 3),
    ("AllReduce", "push", 2, 1, [4] * 2),
    *[("AllReduce", "ring", *case) for case in ((2, 1, [6] * 3), (2, 2, [4] * 3), (3, 1, [4] * 2))],
    *[("AllReduce", "double_tree", n, 1, [8] * calls) for n, calls in ((2, 3), (3, 2), (5, 1))],
    ("AllReduce", "double_tree", 2, 2, [8] * 3),
    *[("AllReduce", "multimem_one_shot", 3, 1, [1] * 2), ("AllReduce", "multimem_two_shot", 2, 1, [4] * 3)],
    ("AllReduce", "multimem_two_shot", 3, 1, [6] * 3),
    ("ReduceScatter", "ring", 2, 1, [4] * 3, "float16"),
    ("ReduceScatter", "push_2d", 2, 2, [17] * 3),  # two chunks
    ("ReduceScatter", "push_2d", 2, 1, [68] * 3, "float16"),
    ("ReduceScatter", "push_2d", 3, 3, [4] * 3, "float16"),
    ("AllToAll", "ll", 2, 1, [4, 0, 4, 4], "uint8"),
    *[("AllToAll", "push", 2, 1, [4] * 3, "uint8", 0, symmetric) for symmetric in (False, True)],
    *[("AllToAll", "push_2d", n, 2, [4] * calls, "uint8") for n, calls in ((2, 3), (4, 1))],
    ("Broadcast", "lamport", 3, 1, [2] * 2, "uint64", 1),  # with relays
    *[("Broadcast", "push_2d", n, n, [1] * calls) for n, calls in ((2, 4), (3, 3))],
    *[("Gather", method, 3, 1, [1] * 3) for method in ("ll", "push")],
    *[("Gather", "push_2d", n, nodes, [1] * calls) for n, nodes, calls in ((2, 2, 4), (3, 3, 3), (4, 2, 2))],
    *[(*way, 2, 1, [2, 5]) for way in WAYS if way[1] in ("copy_engine", "copy_staged")],  # pieces
]
# Of two ranks, each hears of the other: only a third one shows that somebody is overtaken. Here are those of
# collectives that have no such case above.
OF_THREE = [way for way in WAYS if way[0] not in {case[0] for case in MORE if case[2] > 2}]


def text(value):
    return value if isinstance(value, str) else None


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, method, n_ranks, nodes, args",
    [
        *[(*way, 2, 1, ([1, 0, 1, 1],)) for way in WAYS if way not in COPIED],
        *[(*way, 2, 1, ([1, 1],)) for way in COPIED],
        *[(*way, 3, 1, ([1] * (2 if "copy" in way[1] else 3),)) for way in OF_THREE],
        *[(*case[:4], case[4:]) for case in MORE],
    ],
    ids=text,
)
def test_right_in_every_schedule(small, name, method, n_ranks, nodes, args):
    by_warps = "ll128" in method or "lamport" in method
    small(ALL[name].kind, **{method: SETTINGS.get((name, method), {} if by_warps else ONE)})
    found = explored(n_ranks, name, method, *args, nodes=nodes)
    assert found.finished and found.failure is None, str(found)
