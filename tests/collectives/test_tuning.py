"""The tuning table: what is in it, which entry counts, what "auto" makes of it, how ``--tune`` writes it."""

import contextlib
import io
import json
import math
import os
import stat

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shmemkit as sk
from shmemkit.bench import loop
from shmemkit.bench import tune_all as tune_all_module
from shmemkit.bench.__main__ import main as bench
from shmemkit.bench.__main__ import parse
from shmemkit.bench.cases import host_of
from shmemkit.bench.results import Row
from shmemkit.bench.sizes import parse_sizes
from shmemkit.bench.tune import entry_of
from shmemkit.collectives import all_gather, cost_model, tuning
from shmemkit.collectives.registry import collectives
from shmemkit.collectives.tuning import ranges
from shmemkit.operations.method import Method

H200, LL, PUSH = "NVIDIA H200", [None, "ll"], [None, "push_1d"]


DIGESTS = {"ll": "1" * 16, "ll128": "2" * 16, "push_1d": "3" * 16}


def entry(gpu=H200, n_ranks=4, n_nodes=1, private=(LL,), symmetric=(PUSH,)):
    found = dict(gpu=gpu, n_ranks=n_ranks, n_nodes=n_nodes, private=list(private), symmetric=list(symmetric))
    return found | {"digests": {} if gpu == "emulator" else DIGESTS}


@pytest.fixture(autouse=True)
def _digests(monkeypatch):
    """Of the methods of this shmemkit."""
    monkeypatch.setattr(tuning, "digests", lambda: {"all_gather": DIGESTS})


@pytest.fixture
def table(tmp_path, monkeypatch):
    """-> write(*entries): the user's file."""
    path = tmp_path / "tuning.json"
    monkeypatch.setenv("SHMEMKIT_TUNING", str(path))

    def write(*entries):
        path.write_text(json.dumps({"all_gather": entries}))
        return path

    write()
    return write


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """-> write(*entries): in the place of the package's."""
    path = tmp_path / "packaged.json"
    monkeypatch.setattr(tuning, "PACKAGED", path)

    def write(*entries):
        path.write_text(json.dumps({"all_gather": entries}))

    write()
    return write


def chosen(gpu=H200, n_ranks=4, n_nodes=1, **more):
    """-> (the choices for private results, from where they came)"""
    found = tuning.find("all_gather", tuning.Place(gpu, n_ranks, n_nodes, **more))
    return found.choices[False], found.by


def named(method, *place):
    return entry(*place, private=[[None, method]])


# ---- the files


def test_the_packages_table_is_one_of_methods_that_there_are():
    for op, entries in tuning.read(tuning.PACKAGED).items():
        methods = set(host_of(op).methods)
        assert len({tuning._place(e) for e in entries}) == len(entries)
        for found in entries:
            names = {name for out in tuning.OUTPUTS for _, name in found[out]}
            assert names <= methods and found["gpu"] != tuning.EMULATOR


def test_where_the_users_file_is(monkeypatch, tmp_path):
    monkeypatch.delenv("SHMEMKIT_TUNING", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    assert tuning.user_file() == tmp_path / ".config" / "shmemkit" / "tuning.json"
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "x"))
    assert tuning.user_file() == tmp_path / "x" / "shmemkit" / "tuning.json"
    chosen()  # it need not be there
    monkeypatch.setenv("SHMEMKIT_TUNING", "~/mine.json")
    assert tuning.user_file() == tmp_path / "mine.json"
    missing = "SHMEMKIT_TUNING is '~/mine.json', and there is no such file; .* Correct .*, or unset"
    with pytest.raises(ValueError, match=missing):
        chosen()
    monkeypatch.setenv("SHMEMKIT_TUNING", "~nosuchuser/mine.json")
    with pytest.raises(ValueError, match="SHMEMKIT_TUNING is '~nosuchuser/mine.json', .*home directory"):
        chosen()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "Expecting value"),
        ('{"all_gather": [', "Expecting"),
        ("[]", "must have the form"),
        ("{}", 'it must have the form {"all_gather": [...]}'),
        (json.dumps({"allgather": [entry()]}), 'must have the form {"all_gather": [...]}'),
        ('{"all_gather": {}}', "must have the form"),
        ('{"all_gather": [3]}', 'all_gather, entry 0: "gpu"'),
        (json.dumps({"all_gather": [entry(), entry(gpu=None)]}), 'entry 1: "gpu"'),
        (json.dumps({"all_gather": [entry(n_ranks=0)]}), '"n_ranks" must be a positive integer'),
        (json.dumps({"all_gather": [entry(n_nodes=True)]}), '"n_nodes"'),
        *(
            (json.dumps({"all_gather": [entry(private=value)]}), '"private" must be')
            for value in (
                [],
                [[8, "ll"]],
                [LL, LL],
                [[8, "ll"], [8, "ll"], LL],
                [[9, "ll"], [8, "ll"], LL],
                [["8", "ll"], LL],
                [[8.5, "ll"], LL],
                [[None, 3]],
                [[None]],
                [3],
            )
        ),
        (json.dumps({"all_gather": [{**entry(), "digests": ["1"]}]}), '"digests" must be'),
        (json.dumps({"all_gather": [{**entry(), "symmetric": None}]}), '"symmetric" must be'),
    ],
)
def test_a_broken_file_is_an_error_that_names_it(text, message, table):
    path = table()
    path.write_text(text)
    with pytest.raises(ValueError) as caught:
        chosen()
    assert message in str(caught.value) and str(path) in str(caught.value)
    assert str(caught.value).count(str(path)) == 1


# ---- which entry


def test_the_users_entry_comes_first(table, packaged):
    packaged(named("ll"), named("ll128", H200, 2))
    assert chosen() == ([(None, "ll")], "measured on this GPU model, no date")
    table(named("ll128") | {"date": "2026-11-28"})
    assert chosen() == ([(None, "ll128")], "measured on this GPU model, 2026-11-28")
    assert chosen(n_ranks=2)[0] == [(None, "ll128")]  # the package's, which is exact


@pytest.mark.parametrize(
    "digests", [None, {}, {**DIGESTS, "ll": "0" * 16}, {k: v for k, v in DIGESTS.items() if k != "push_1d"}]
)
def test_an_entry_of_other_kernels_is_not_used(digests, table, packaged):
    packaged()
    without = {k: v for k, v in entry().items() if k != "digests"}
    table(without if digests is None else without | {"digests": digests})
    choices, by = chosen()
    assert choices != [(None, "ll")]
    assert by.startswith("by model, ") and "entries of other kernels" in by


def test_only_the_digests_of_an_entrys_own_methods_count(table, packaged):
    packaged()
    table(entry() | {"digests": DIGESTS | {"ll128": "of other kernels"}})
    assert chosen()[0] == [(None, "ll")]


def test_methods_without_a_digest_here_make_no_entry_current(table, packaged):
    packaged()
    table(named("lamport") | {"digests": DIGESTS | {"lamport": "4" * 16}})
    assert "by model" in chosen()[1]


@pytest.mark.parametrize(
    "place", [("NVIDIA H100 80GB HBM3", 4, 1), (H200, 8, 1), (H200, 1, 1), ("NVIDIA B200", 8, 1)]
)
def test_never_a_neighbours_limits(place, table, packaged):
    """Of another GPU model, or of fewer ranks alone: the model decides."""
    packaged(named("ll"), named("ll", H200, 2), named("ll", "NVIDIA A100-SXM4-80GB", 8))
    table()
    choices, by = chosen(*place)
    assert by.startswith("by model, for links of ") and choices != [(None, "ll")]


def test_three_ranks_are_between_two_and_four(table, packaged):
    """By methods of the tables alone: of all, the model would take LL128."""
    packaged()
    table(
        entry(H200, 2, private=[[1 << 16, "ll"], [None, "push_1d"]]),
        entry(H200, 4, private=[[1 << 20, "ll"], [None, "push_1d"]]),
    )
    choices, by = chosen(n_ranks=3)
    assert by == "by tables of 2 and 4 ranks on this GPU model"
    (limit, small), large = choices
    assert small == "ll" and large == (None, "push_1d") and 1 << 16 <= limit <= 1 << 20
    assert chosen(n_ranks=8)[1].startswith("by model") and "fitted to 2 to 4 ranks" in chosen(n_ranks=8)[1]


def test_several_nodes_have_entries_of_their_own(table, packaged):
    packaged(entry())
    table(named("ll128", H200, 8, 2))
    assert chosen(H200, 8, 2)[0] == [(None, "ll128")]
    for nodes in (4, 2):  # not of one node, nor of other numbers
        choices, by = chosen(H200, 4, nodes)
        assert choices == tuning.defaults("all_gather", True) and "not measured" in by


def test_the_emulator_takes_its_own_entries(table, packaged):
    packaged(entry())
    assert chosen("emulator", 2) == (
        tuning.defaults("all_gather", False),
        "by the defaults of the emulator, whose times mean nothing",
    )
    table(named("of two", "emulator", 2), named("of eight", "emulator", 8))
    assert chosen("emulator", 3) == ([(None, "of two")], "by the emulator's table of 2 ranks")


# ---- the model


def at(choices, *sizes):
    return [tuning.method_at(choices, size) for size in sizes]


def test_a_gpu_without_nvlink_has_slower_links(table, packaged):
    packaged()
    table()
    fast, slow = (
        tuning.find("all_gather", tuning.Place("NVIDIA L40S", 4, 1, 142, link)) for link in (True, False)
    )
    assert slow.times[False][1 << 26]["push_1d"] > 5 * fast.times[False][1 << 26]["push_1d"]
    assert "links of 25 GB/s" in slow.by and "NVIDIA L40S is taken for the H200" in slow.by


@pytest.mark.parametrize(
    ("name", "model", "link"),
    [
        ("NVIDIA H100 80GB HBM3", "H100", 450),
        ("NVIDIA H100 NVL", "H100 NVL", 300),
        ("NVIDIA A100-SXM4-80GB", "A100", 300),
        ("NVIDIA H200", "H200", 450),
        ("NVIDIA GH200 480GB", "GH200", 450),
        ("NVIDIA B200", "B200", 900),
        ("NVIDIA H20", "H20", 450),
        ("Another", cost_model.UNKNOWN, 450),
    ],
)
def test_the_model_of_a_gpu(name, model, link):
    gpu, found = cost_model.gpu_of(name)
    assert found == model and gpu.link == link
    assert cost_model.gpu_of(name, 8)[0].sms == 8


def test_times_follow_links_memory_and_multiprocessors():
    gpu = cost_model.MODELS["H100"]

    def us(method, **changes):
        return cost_model.microseconds("all_gather", method, 4, 1 << 28, False, gpu._replace(**changes))

    for method in ("lamport", "push_1d"):
        assert us(method, link=225) > 1.5 * us(method) and us(method, sms=66) > 1.3 * us(method)
        assert us(method, memory=1675) > us(method)
    assert us("copy_staged", link=225) > 1.5 * us("copy_staged")
    assert us("copy_staged", sms=66) == us("copy_staged")  # copy engines need none
    assert cost_model.microseconds("all_gather", "of a later version", 4, 8, False, gpu) is None


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("op", [*filter(cost_model.methods, collectives())])
def test_the_model_has_all_operations(op, n_ranks, table, packaged):
    """What is small goes by packets, what is large by what sends each byte once."""
    packaged()
    table()
    found = tuning.find(op, tuning.Place("NVIDIA H100 80GB HBM3", n_ranks, 1, 132))
    for choices in found.choices.values():
        assert tuning._are_choices(choices)
        assert set(name for _, name in choices) <= set(host_of(op).methods)
        assert all(part not in tuning.method_at(choices, 1 << 13) for part in ("copy", "push", "scatter"))
        if n_ranks > 2:
            assert "one_shot" not in tuning.method_at(choices, 1 << 24)


def test_a_collective_that_the_model_does_not_know(table, packaged, monkeypatch):
    packaged()
    table()
    monkeypatch.setattr(cost_model, "terms", lambda *given: None)
    assert chosen(H200, 2) == (tuning.defaults("all_gather", False), "by the defaults, not measured")
    assert tune_all_module.candidates("all_gather") == sk.AllGather.methods


def test_what_cannot_run_gives_way_to_the_next_best_by_the_model():
    times = {False: {8: {"a": 1, "b": 2, "c": 3}, 64: {"a": 2, "b": 9, "c": 3}}, True: {8: {"a": 1}}}
    found = tuning.Found({k: ranges(v) for k, v in times.items()}, "by model", times)
    assert tuning._but(found, {}) == {False: [(None, "a")], True: [(None, "a")]}
    assert tuning._but(found, {"a": 0}) == {False: [(8, "b"), (None, "c")], True: [(None, "a")]}
    assert tuning._but(found, {"a": 8}) == {False: [(8, "a"), (None, "c")], True: [(None, "a")]}


def test_a_budget_of_multiprocessors_makes_limits_smaller():
    found = tuning.Found({False: [(64, "a"), (None, "b")]}, "by", {False: {64: {"a": 1}, 128: {"b": 1}}})
    half = tuning._within(found, 0.5)
    assert half.choices == {False: [(32, "a"), (None, "b")]} == tuning._but(half, {})
    assert tuning._but(half, {"a": 0}) == {False: [(None, "b")]}


# ---- what "auto" makes of it


def test_defaults_are_methods_that_there_are(table, packaged):
    """And gather, on one node and on several."""

    def main():
        world = sk.init()
        gather = sk.AllGather(world, 8 << 20)
        out = gather(np.full(5, world.rank, "uint8"))
        world.synchronize()
        assert (out == np.arange(world.n_ranks)[:, None]).all()
        gather.free()
        return gather.refused, {name for choices in gather._choices.values() for _, name in choices}

    for several, local_size in enumerate((4, 2)):
        refused, names = sk.emu.run(main, 4, local_size=local_size)[0]
        assert refused == {}
        assert names == {name for _, name in tuning.defaults("all_gather", several)}


def test_private_and_symmetric(table):
    table(entry(private=[[8, "ll"], PUSH], symmetric=[PUSH]))
    found = tuning.find("all_gather", tuning.Place(H200, 4, 1)).choices
    assert found == {False: [(8, "ll"), (None, "push_1d")], True: [(None, "push_1d")]}


@given(st.lists(st.integers(1, 100), unique=True), st.integers(0, 120))
def test_the_method_at_a_size(limits, nbytes):
    choices = [(limit, str(limit)) for limit in sorted(limits)] + [(None, "beyond")]
    expected = min((limit for limit in limits if limit >= nbytes), default="beyond")
    assert tuning.method_at(choices, nbytes) == str(expected)


class Recorded:
    """A method that holds no memory and gathers through the host."""

    made = ()
    refuse = ()
    room, taken = math.inf, {}  # bytes: that there are, and by (rank, method); b takes twice its capacity
    counts = staticmethod(Method.counts)

    def __init__(self, world, max_nbytes, name):
        if name in self.refuse:
            raise ValueError(f"{name} not here")
        needs = max_nbytes * (2 if name == "b" else 1)
        if sum(n for (rank, _), n in self.taken.items() if rank == world.rank) + needs > self.room:
            raise MemoryError(f"{name} for {max_nbytes} is too much")
        self.world, self.name, self.capacity = world, name, max_nbytes
        self.taken[world.rank, name] = needs
        if world.rank == 0:
            self.made.append((name, max_nbytes))

    def bind(self, x, out, in_place):
        assert out.nbytes <= self.capacity, f"{self.name} holds {self.capacity} bytes"

        def run(stream):
            out.view("uint8")[:] = np.concatenate(self.world.host_allgather(x.view("uint8").copy()))
            self.made.append(self.name)

        return run

    def free(self):
        del self.taken[self.world.rank, self.name]
        if self.world.rank == 0:
            self.made.append(f"{self.name} freed")


@pytest.fixture
def made(monkeypatch):
    """-> what is made and freed, of methods a, b, c and the defaults; a list, on rank 0."""
    names = ("a", "b", "c", "ll", "ll128", "push_1d")
    monkeypatch.setattr(Recorded, "made", [])
    monkeypatch.setattr(Recorded, "taken", {})
    methods = {name: lambda world, n, sms, name=name: Recorded(world, n, name) for name in names}
    monkeypatch.setattr(all_gather.AllGather, "_METHODS", methods)
    return Recorded.made


def auto(max_nbytes, n=2):
    """-> (choices, refused) of rank 0"""

    def main():
        gather = sk.AllGather(sk.init(), max_nbytes)
        gather.free()
        return gather._choices, gather.refused

    results = sk.emu.run(main, n)
    assert all(result == results[0] for result in results)
    return results[0]


def emulated(*args, **kwargs):
    return entry("emulator", 2, 1, *args, **kwargs)


@pytest.mark.parametrize(
    ("max_nbytes", "expected"),
    [
        (0, {"a": 0, "b": 0}),
        (64, {"a": 64, "b": 64}),
        (65, {"a": 64, "b": 65}),
        (100, {"a": 64, "b": 100}),
        (200, {"a": 64, "b": 200, "c": 200}),
        (1000, {"a": 1000, "b": 200, "c": 1000}),
    ],
)
def test_only_the_methods_that_are_needed_as_large_as_needed(max_nbytes, expected, table, made):
    # a has two ranges
    table(emulated([[64, "a"], [200, "b"], [300, "c"], [None, "a"]], [[100, "b"], [None, "c"]]))
    auto(max_nbytes)
    assert dict(made[: len(expected)]) == expected
    assert sorted(made[len(expected) :]) == [f"{name} freed" for name in sorted(expected)]


@pytest.mark.parametrize(
    ("refuse", "private"),
    [
        ("", [(8, "a"), (16, "b"), (None, "c")]),
        ("a", [(16, "b"), (None, "c")]),
        ("b", [(8, "a"), (None, "c")]),
        ("c", [(8, "a"), (None, "b")]),
        ("ab", [(None, "c")]),
        ("bc", [(None, "a")]),
        ("abc", [(None, "ll")]),
        (["a", "b", "c", "ll", "ll128"], [(None, "push_1d")]),
    ],
)
def test_what_cannot_run_gives_way(refuse, private, table, made, monkeypatch):
    monkeypatch.setattr(Recorded, "refuse", refuse)
    table(emulated([[8, "a"], [16, "b"], [None, "c"]], [[None, "b"]]))
    choices, refused = auto(100)
    assert choices[False] == private
    assert set(refused) == set(refuse) and all(why == f"{m} not here" for m, why in refused.items())
    alive = [name for name in made if isinstance(name, tuple)]
    assert len(alive) == len([name for name in made if isinstance(name, str)])  # each was freed
    needed = {name for of_one in choices.values() for _, name in of_one}
    assert {name for name, _ in alive[-len(needed) :]} == needed


K, M = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("room", "private", "symmetric"),
    [
        (math.inf, [(64 * K, "a"), (None, "b")], [(None, "c")]),
        (3 * M + 32 * K, [(32 * K, "a"), (None, "b")], [(None, "c")]),
        (3 * M, [(None, "b")], [(None, "c")]),  # less than 1K is not worth it
        (5 * M // 2, [(64 * K, "a"), (None, "b")], [(256 * K, "c"), (None, "b")]),
        (3 * M // 2, [(64 * K, "a"), (128 * K, "b"), (None, "a")], [(128 * K, "c"), (None, "a")]),
        (M - 1, None, None),
    ],
)
def test_where_memory_is_short_a_method_is_for_as_much_as_there_is(
    room, private, symmetric, table, made, monkeypatch
):
    monkeypatch.setattr(Recorded, "room", room)
    table(emulated([[64 * K, "a"], [None, "b"]], [[None, "c"]]))
    if private is None:
        with pytest.raises(
            MemoryError, match="not enough memory for b, a, c, .*b: b for 1048576 is too much"
        ):
            auto(M)
    else:
        choices, refused = auto(M)
        assert choices == {False: private, True: symmetric}
        limits = {name: limit for those in choices.values() for limit, name in those if limit}
        for name, why in refused.items():
            assert why.startswith(
                f"above {limits[name] >> 10}K: {name} for " if name in limits else f"{name} for "
            )
    assert Recorded.taken == {}  # each was freed


def test_short_memory_and_the_calls_that_it_leaves(table, pes):
    """ll takes 32K for 8K on 4 ranks, push_1d 24K for 16K."""
    table(emulated([[8 * K, "ll"], PUSH], [PUSH]))

    def main():
        world = sk.init()
        gather = sk.AllGather(world, 16 * K)
        assert gather._choices[False] == [(4 * K, "ll"), (None, "push_1d")]
        assert gather.refused["ll"].startswith("above 4K: ") and list(gather.refused) == ["ll"]
        assert "  not ll: above 4K: " in gather.describe()
        for size in (K, K + 16):
            out = gather(np.full(size, world.rank, "uint8"))
            world.synchronize()
            assert (out == np.arange(4)[:, None]).all()
        gather.free()

    pes(4, heap_size=48 * K).run(main)


def test_a_method_that_does_not_exist_gives_way(table, made):
    table(emulated([[8, "of a later version"], PUSH]))
    choices, refused = auto(100)
    assert choices[False] == [(None, "push_1d")]
    assert refused == {"of a later version": "there is no such method"}


def test_a_substitute_for_small_sizes_comes_before_those_of_larger_ones(table, made, monkeypatch):
    monkeypatch.setattr(Recorded, "refuse", ["ll128"])
    table(emulated([[64, "ll128"], [512 << 10, "ll128"], PUSH], [[None, "push_1d"]]))
    choices, refused = auto(1 << 20)
    assert choices[False] == [(64, "ll"), (None, "push_1d")] and set(refused) == {"ll128"}


def test_no_method_at_all(table, made, monkeypatch):
    names = ["a", "ll", "ll128", "push_1d"]
    monkeypatch.setattr(Recorded, "refuse", names)
    table(emulated([[None, "a"]], [[None, "a"]]))
    with pytest.raises(ValueError, match="no method can run here\\. a: a not here; .*ll: ll not here"):
        auto(100)


@pytest.mark.parametrize("where", ["private", "output", "part of output", "symmetric"])
def test_a_call_takes_the_method_for_its_size_and_output(where, table, made):
    table(emulated([[64, "a"], [None, "b"]], [[32, "c"], [None, "a"]]))

    def main():
        world = sk.init()
        gather = sk.AllGather(world, 128)
        del made[:]
        room = gather.output(256, "uint8") if "output" in where else world.empty(256, "uint8")
        for size in (32, 34, 64, 66, 128):
            out = room[10 : 10 + size] if "part" in where else room[:size]
            out = np.zeros(size, "uint8") if where == "private" else out
            gather(np.full(size // 2, world.rank, "uint8"), out)
            assert out.tolist() == [0] * (size // 2) + [1] * (size // 2)
            world.host_barrier()
        return [gather.method_for(size, where != "private") for size in (0, 32, 33, 64, 65, 128)], made

    taken, calls = sk.emu.run(main, 2)[0]
    assert "".join(taken) == ("aaaabb" if where == "private" else "ccaaaa")
    assert "".join(calls) == "".join(2 * name for name in ("aaabb" if where == "private" else "caaaa"))


def test_auto_gathers(table, pes):
    table(emulated([[64, "ll"], PUSH], [PUSH]))

    def main():
        world = sk.init()
        gather = sk.AllGather(world, 1000)
        assert [gather.method_for(n) for n in (0, 64, 65, 1000)] == ["ll", "ll", "push_1d", "push_1d"]
        assert gather.method_for(0, symmetric=True) == "push_1d"
        for size in (8, 50, 16, 100):
            assert (gather(np.full(size, world.rank, "uint8")) == np.arange(world.n_ranks)[:, None]).all()

    pes(2).run(main)


def test_on_several_nodes_ll_gives_way(table, pes):
    """It is for ranks that all reach each other."""
    table(entry("emulator", 4, 2, [[64, "ll"], [None, "pull"]], [[None, "copy_push"]]))

    def main():
        world = sk.init()
        gather = sk.AllGather(world, 1000)
        assert set(gather.refused) == {"ll", "pull", "copy_push"}
        assert all("is on another node" in why for why in gather.refused.values())
        assert gather.method_for(8) == gather.method_for(1000, symmetric=True) == "ll_2d"
        out = gather(np.full(50, world.rank, "uint8"))
        world.synchronize()
        assert (out == np.arange(world.n_ranks)[:, None]).all()
        gather.free()

    pes(4, local_size=2).run(main)


def test_the_table_of_rank_0_counts(table, made, monkeypatch):
    """On several hosts the files may differ."""
    monkeypatch.setattr(
        tuning, "user_file", lambda: table(emulated([[None, "ab"[sk.current().rank]]], [[None, "c"]]))
    )
    choices, _ = auto(8)
    assert choices == {False: [(None, "a")], True: [(None, "c")]}


def test_a_broken_file_is_an_error_on_every_rank(table, made):
    table().write_text("{")

    def main():
        world = sk.init()
        with pytest.raises(ValueError, match="tuning.json is not a tuning table") as caught:
            sk.AllGather(world, 8)
        return caught.value.reported_by

    assert sk.emu.run(main, 3) == [0, 0, 0]


# ---- tuning


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({8: {"a": 1.0}}, [(None, "a")]),
        ({8: {"a": 1.0, "b": 2.0}, 16: {"a": 3.0, "b": 2.0}}, [(8, "a"), (None, "b")]),
        ({8: {"a": 1.0, "b": 2.0}, 16: {"a": 1.0, "b": 0.971}}, [(None, "a")]),  # within the margin
        ({8: {"a": 1.0, "b": 2.0}, 16: {"a": 1.0, "b": 0.969}}, [(8, "a"), (None, "b")]),
        # One that is hardly the faster stays when another is as fast, and goes where it did not run.
        ({16: {"b": 1.0, "a": 1.01}, 8: {"a": 1.0, "b": 1.01}, 32: {"b": 5.0}}, [(16, "a"), (None, "b")]),
        ({8: {"a": 1.0}, 16: {"b": 1.0}, 32: {"a": 1.0}}, [(8, "a"), (16, "b"), (None, "a")]),
    ],
)
def test_ranges(times, expected):
    assert ranges(times) == expected


@given(
    st.dictionaries(
        st.integers(1, 1 << 20),
        st.dictionaries(st.sampled_from("abc"), st.floats(0.5, 2.0), min_size=1),
        min_size=1,
    )
)
def test_ranges_have_a_method_that_ran_and_was_hardly_slower(times):
    found = ranges(times)
    assert tuning._are_choices(found)
    assert all(a != b for (_, a), (_, b) in zip(found, found[1:], strict=False))
    for size, of_size in times.items():
        taken = of_size[tuning.method_at(found, size)]
        assert taken * 0.97 <= min(of_size.values()) * (1 + 1e-9)


def test_an_entry_has_the_right_rows_of_each_output():
    times = {
        ("a", None): (1.0, 3.0),
        ("b", None): (2.0, 2.0),
        ("a", "symmetric"): (2.0, 2.0),
        ("b", "symmetric"): (1.0, 1.0),
        ("nccl", None): (0.1, 0.1),
        ("auto", None): (0.1, 0.1),
    }
    rows = [
        Row("all_gather", method, size, us, out=out)
        for (method, out), of_sizes in times.items()
        for size, us in zip((8, 16), of_sizes, strict=True)
    ]
    rows += [Row("all_gather", "a", 8, 0.1, note="wrong: all"), Row("all_gather", "b", 8, note="refused: no")]
    found = sk.emu.run(lambda: entry_of(sk.init(), "all_gather", rows, ("a", "b")), 2)[0]
    assert found.pop("date") and found == emulated([(8, "a"), (None, "b")], [(None, "b")])


def tune(n, *arguments, status=0):
    """-> printed"""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert sk.emu.run(lambda: bench(["all_gather", "--tune", *arguments]), n) == [status] * n
    return printed.getvalue()


def test_tune_writes_the_entry_that_auto_then_takes(tmp_path, monkeypatch):
    path = tmp_path / "tuning.json"
    printed = tune(2, str(path), "--sizes", "64:256:2", "--methods", "push_1d")
    assert f"auto on emulator, 2 ranks, 1 node, from now on (in {path})" in printed
    (found,) = tuning.read(path)["all_gather"]
    assert len(found.pop("date")) == 10
    assert found == emulated([PUSH], [PUSH]) | {"digests": {"push_1d": DIGESTS["push_1d"]}}
    monkeypatch.setenv("SHMEMKIT_TUNING", str(path))
    choices, _ = auto(8)
    assert choices == {False: [(None, "push_1d")], True: [(None, "push_1d")]}


def test_other_entries_stay(table):
    ours = entry("emulator", 3), entry(), entry("emulator", 2, symmetric=[[8, "ll"], PUSH])
    path = table(*ours)
    os.chmod(path, 0o644)
    whole = {"all_gather": list(ours), "another_op": [entry()]}
    path.write_text(json.dumps(whole))
    tuning.update(path, "all_gather", new := entry("emulator", 2, private=[PUSH]))
    assert tuning.read(path) == {"all_gather": [entry(), new, ours[0]], "another_op": [entry()]}
    assert [*path.parent.iterdir()] == [path]  # nothing else is left


def test_a_table_is_replaced_whole_or_not_at_all(table, monkeypatch):
    path = table(entry())
    before = path.read_text()

    def full(self, text):
        with open(self, "w") as file:
            file.write(text[:10])
        raise OSError("no space left")

    monkeypatch.setattr("pathlib.Path.write_text", full)
    with pytest.raises(OSError, match="no space"):
        tuning.update(path, "all_gather", entry(n_ranks=8))
    assert path.read_text() == before and [*path.parent.iterdir()] == [path]
    monkeypatch.undo()
    with pytest.raises(ValueError, match='"n_ranks"'):
        tuning.update(path, "all_gather", entry(n_ranks=0))
    assert path.read_text() == before


def test_a_new_table_is_as_readable_as_any_new_file(tmp_path):
    tuning.update(tmp_path / "t.json", "all_gather", entry())
    (tmp_path / "other").write_text("")
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("t.json", "other")]
    assert modes[0] == modes[1]


def test_the_folder_of_a_table_is_made(tmp_path):
    path = tmp_path / "config" / "shmemkit" / "tuning.json"
    tuning.update(path, "all_gather", entry())
    assert tuning.read(path) == {"all_gather": [entry()]}


def test_a_link_stays_one(tmp_path):
    (tmp_path / "link.json").symlink_to(tmp_path / "real.json")
    tuning.update(tmp_path / "link.json", "all_gather", entry())
    assert (tmp_path / "link.json").is_symlink() and tuning.read(tmp_path / "real.json")


class Wrong(Recorded):
    """Of the methods a and b, b is the faster, and wrong."""

    def bind(self, x, out, in_place):
        run = super().bind(x, out, in_place)

        def spoiled(stream):
            run(stream)
            out.view("uint8")[0] ^= self.name == "b"

        return spoiled


@pytest.mark.every(3)
@pytest.mark.parametrize(("methods", "status"), [("a,b", 1), ("b,a", 1), ("a,c", 0)])
def test_what_is_wrong_or_does_not_run_is_not_chosen(methods, status, tmp_path, monkeypatch):
    monkeypatch.setattr(Recorded, "made", [])
    monkeypatch.setattr(Recorded, "refuse", "c")
    kinds = {name: lambda world, n, sms, name=name: Wrong(world, n, name) for name in "abc"}
    monkeypatch.setattr(all_gather.AllGather, "_METHODS", kinds)
    monkeypatch.setattr(sk.AllGather, "methods", tuple("abc"))
    path = tmp_path / "t.json"
    tune(2, str(path), "--sizes", "64", "--methods", methods, status=status)
    (found,) = tuning.read(path)["all_gather"]
    assert found["private"] == found["symmetric"] == [[None, "a"]]
    path.unlink()
    with pytest.raises(SystemExit, match="no method gave a right result in private memory"):
        tune(1, str(path), "--sizes", "64", "--methods", "b,c")
    assert not path.exists()


def test_what_tune_measures(tmp_path):
    options = parse(["all_gather", "--tune", str(tmp_path / "f.json")])
    assert options.methods == list(sk.AllGather.methods) and options.vs == []
    assert options.out == ["private", "symmetric"]
    assert parse_sizes(options.usual_sizes) == [8 << (10 + i) for i in range(16)]
    options = parse(["all_gather", "--tune", "--vs", "nccl", "--sizes", "8K", "--out", "private,symmetric"])
    assert options.tune == tuning.user_file() and options.vs == ["nccl"] and options.sizes == [8192]


def test_tune_needs_a_file_on_the_emulator(tmp_path, monkeypatch):
    monkeypatch.setenv("SHMEMKIT_TUNING", str(tmp_path / "mine.json"))
    with pytest.raises(SystemExit, match="the emulator, whose times mean nothing"):
        tune(1)
    assert [*tmp_path.iterdir()] == []
    tune(1, str(tmp_path / "mine.json"), "--sizes", "64", "--methods", "pull")  # it is named
    assert tuning.read(tmp_path / "mine.json")["all_gather"]


@pytest.mark.parametrize("arguments", [["--tune"], ["--methods", "auto"], []])
def test_a_broken_table_is_refused_before_anything_is_measured(arguments, table, capsys):
    table().write_text("{")
    with pytest.raises(SystemExit) as caught:
        parse(["all_gather", *arguments])
    assert caught.value.code == 2 and "tuning.json is not a tuning table" in capsys.readouterr().err
    assert parse(["all_gather", "--methods", "ll"])  # does not need it


# ---- bench tune


def tune_all(path, *arguments, n=2):
    """-> printed"""
    given = ["tune", "--table", str(path), "--replays", "1", "--iters", "1", *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert sk.emu.run(lambda: bench(given), n) == [0] * n
    return printed.getvalue()


def measured_as(monkeypatch, us):
    """`us(op, bytes, method)` in the place of times. -> the list of what is measured."""
    asked = []

    def measure(world, timer, case, ours):
        asked.append((case.op, case.bytes, ours.method))
        return us(*asked[-1]), ""

    monkeypatch.setattr(loop, "measure", measure)
    return asked


def test_one_command_tunes_all_operations_and_goes_on_where_it_stopped(tmp_path, monkeypatch):
    path, part = tmp_path / "t.json", tmp_path / "t.json.part"
    given = path, "--ops", "all_gather,reduce", "--sizes", "64,256"
    asked = measured_as(monkeypatch, lambda *_: 1.0)
    with monkeypatch.context() as slow:
        slow.setattr(tune_all_module.Tuner, "in_time", lambda self: not self.rows)
        assert "all_gather, reduce are not complete: run it again" in tune_all(*given)
    assert not path.exists() and {each[:2] for each in asked} == {("all_gather", 64)}
    before = set(asked)
    del asked[:]
    assert "t.json has what was measured; complete" in tune_all(*given)
    assert not before & set(asked)
    assert {each[:2] for each in asked} == {("all_gather", 256), ("reduce", 64), ("reduce", 256)}
    assert set(tuning.read(path)) == {"all_gather", "reduce"} and not part.exists()


def test_what_is_kept_of_other_kernels_is_measured_again(tmp_path, monkeypatch):
    path, part = tmp_path / "t.json", tmp_path / "t.json.part"
    row = {"op": "gather", "method": "ll", "bytes": 64, "us": 1e-9}
    for digests in ({"all_gather": DIGESTS}, {}):
        part.write_text(json.dumps({"place": ["emulator", 2, 1], "digests": digests, "rows": [row]}))
        measured_as(monkeypatch, lambda op, size, method: 1.0 if method == "ll128" else 2.0)
        tune_all(path, "--ops", "gather", "--sizes", "64")
        (found,) = tuning.read(path)["gather"]
        assert (found["private"] == [[None, "ll"]]) == bool(digests) and found["symmetric"] == found[
            "private"
        ]


def test_where_methods_change_one_more_size_is_measured(tmp_path, monkeypatch):
    times = {64: {"ll": 1, "ll128": 2}, 1024: {"ll": 9, "ll128": 5}, 256: {"ll": 3, "ll128": 2.5}}
    asked = measured_as(monkeypatch, lambda op, size, method: times[size].get(method, 99))
    tune_all(tmp_path / "t.json", "--ops", "gather", "--sizes", "64,1024")
    (found,) = tuning.read(tmp_path / "t.json")["gather"]
    assert found["private"] == [[64, "ll"], [None, "ll128"]]
    assert {method for _, size, method in asked if size == 256} == {"ll", "ll128"}


def test_an_operation_without_a_right_result_gets_no_entry(tmp_path, monkeypatch):
    path = tmp_path / "t.json"
    wrong = {"gather": "wrong: all"}
    monkeypatch.setattr(loop, "measure", lambda w, t, case, ours: (1.0, wrong.get(case.op, "")))
    with pytest.raises(SystemExit, match="no entry was written where gather: no method gave a right result"):
        tune_all(path, "--ops", "gather,reduce", "--sizes", "64")
    assert set(tuning.read(path)) == {"reduce"}


def test_tuning_all_needs_a_file_on_the_emulator():
    with pytest.raises(SystemExit, match="the emulator, whose times mean nothing"):
        sk.emu.run(lambda: bench(["tune"]), 1)


# ---- describe()


def test_describe_says_what_is_taken_and_from_where_that_came(table):
    table(emulated([[64, "ll"], PUSH], [PUSH]))

    def main():
        world = sk.init()
        gather, given = sk.AllGather(world, 1000), sk.AllGather(world, 64, "pull")
        return gather.describe(), given.describe()

    auto, given = sk.emu.run(main, 2)[0]
    assert auto.splitlines() == [
        "AllGather, 2 ranks on emulator: by the emulator's table of 2 ranks",
        "  private: ll up to 64, then push_1d",
        "  symmetric: push_1d",
    ]
    assert given == "AllGather, 2 ranks on emulator: pull, as given"


def test_many_emulated_ranks_send_no_packets():
    """Packets to each of them take the emulator many seconds; GPUs take what they took."""

    def choices(gpu, n_ranks):
        return tuning.find("all_reduce", tuning.Place(gpu, n_ranks, 1, 132)).choices

    assert choices("emulator", 16)[False][0][1] == "one_shot_ll128"
    assert choices("emulator", 17) == dict.fromkeys((False, True), [(None, "push")])
    assert len(choices("NVIDIA H200", 17)[False]) > 1
