"""Which host a rank runs on, and how ranks lie on hosts."""

import os

import pytest

import shmemkit as sk
from shmemkit.support import hosts
from shmemkit.support.hosts import Host, Hosts


def of(text, boots="0" * 9):
    """Ranks on the hosts that the letters of `text` name."""
    found = [Host(name, boot) for name, boot in zip(text, boots, strict=False)]
    return Hosts(list(zip(found, found, strict=True)))


@pytest.mark.parametrize(
    "text, local_size, problem",
    [
        ("aaaa", 4, None),
        ("aabb", 2, None),
        ("abc", 1, None),
        ("a", 1, None),
        ("abab", 1, "ranks alternate between hosts"),
        ("abba", 1, "ranks alternate between hosts"),
        ("aaab", 1, "hosts have different numbers of ranks"),
    ],
)
def test_ranks_per_host(text, local_size, problem):
    found = of(text)
    assert found.local_size == local_size
    assert (found.problem and found.problem[0]) == problem
    assert (found.warning() is None) == (problem is None)


def test_the_warning_says_who_is_where_and_what_to_do():
    text = of("abab").warning() or ""
    assert "a (ranks 0 and 2) and b (ranks 1 and 3)" in text and "--map-by slot" in text, text


def test_one_name_and_two_boots_are_two_hosts():
    found = of("aaaa", "1122")
    assert (
        found.local_size == 2
        and found.text() == "a of boot 1 (ranks 0 and 1) and a of boot 2 (ranks 2 and 3)"
    )
    assert [found.local_rank(rank) for rank in range(4)] == [0, 1, 0, 1]


def test_many_hosts_are_not_all_named():
    text = of("abcdefghijkl", "0" * 12).text()
    assert "h (rank 7) and 4 more" in text and "i (" not in text


def test_this_host(monkeypatch, tmp_path):
    monkeypatch.delenv("SHMEMKIT_HOST_ID", raising=False)
    monkeypatch.setattr(hosts, "BOOT_ID", str(tmp_path / "boot_id"))
    assert hosts.this_host() == (os.uname().nodename, "")
    (tmp_path / "boot_id").write_text("1234\n")
    assert hosts.this_host() == hosts.machine() == (os.uname().nodename, "1234")
    monkeypatch.setenv("SHMEMKIT_HOST_ID", "pod-7")
    assert hosts.this_host().name == "pod-7" and hosts.machine().name != "pod-7"


def test_gpus_are_numbered_by_the_machine():
    machine = Host("node", "1")
    found = Hosts([(Host("a", ""), machine), (Host("b", ""), machine)])
    assert found.local_size == 1 and [found.local_rank(0), found.local_rank(1)] == [0, 1]


def test_network_cards(monkeypatch, tmp_path):
    port = tmp_path / "mlx5_0" / "ports" / "1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    monkeypatch.setattr(hosts, "NICS", str(tmp_path))
    assert hosts.nics() == ["mlx5_0 port 1: ACTIVE, 400 Gb/sec (4X NDR)"]


@pytest.mark.parametrize(
    "variables, said",
    [
        ({}, "ibrc"),
        ({"NVSHMEM_REMOTE_TRANSPORT": "UCX"}, "ucx"),
        ({"NVSHMEM_IB_ENABLE_IBGDA": "1"}, "ibrc and IBGDA"),
    ],
)
def test_transport(variables, said, monkeypatch):
    for name in ("NVSHMEM_REMOTE_TRANSPORT", "NVSHMEM_IB_ENABLE_IBGDA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hosts.transport() == said


def test_a_world_describes_itself():
    def main():
        world = sk.init(local_size=2)
        group = world.group([1, 2])
        return world.describe(), "" if group is None else group.describe()

    (_, _), (_, group), (world, _), _ = sk.emu.run(main, 4)
    assert "4 ranks on 1 host: " in world and "2 nodes of 2; this is rank 2, on node 1" in world, world
    assert "near (loads and stores): ranks 2 and 3\nfar: 2, by the emulator's network" in world, world
    assert "2 ranks on 1 host" in group and "near (loads and stores): rank 0\nfar: 1" in group, group
