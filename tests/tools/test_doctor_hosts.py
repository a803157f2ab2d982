"""python -m shmemkit doctor --hosts: what differs between hosts, and who reaches whom."""

import pytest
from launched import MPIRUN, mpirun, needs_mpi

import shmemkit as sk
from shmemkit.support.hosts import Host
from shmemkit.tools import doctor_hosts

A, B = Host("a", ""), Host("b", "")


def report(got, near=None, hosts=(A, A, B, B)):
    lines = []
    advice = doctor_hosts.table(hosts, got, near or NEAR, "NVSHMEM's ibrc", lines.append)
    return "\n".join(lines), advice


NEAR = [[a // 2 == b // 2 for b in range(4)] for a in range(4)]
ALL = [[True] * 4 for _ in range(4)]


def test_who_reaches_whom():
    shown, advice = report(ALL)
    assert advice == []
    assert [line.split() for line in shown.splitlines()[-2:]] == [
        ["ranks", "0", "and", "1", "memory", "network"],
        ["ranks", "2", "and", "3", "network", "memory"],
    ]


def test_puts_that_do_not_come():
    got = [list(row) for row in ALL]
    got[2][1] = got[3][1] = False  # of rank 1, at the other host
    shown, advice = report(got)
    assert "2 of 4 come" in shown.splitlines()[-2] and "come" not in shown.splitlines()[-1], shown
    assert len(advice) == 1 and "Puts of rank 1 (on a) do not reach ranks 2 and 3" in advice[0]


def test_facts_that_differ():
    """Also after a World of fewer ranks."""
    sk.init("emulator").finalize()
    lines = []
    found = [
        {"driver": "580", "MTU": mtu, "shmemkit": v} for mtu, v in (("eth0 1500", "1"), ("eth0 9000", "2"))
    ]
    advice = doctor_hosts._compared(found, lines.append)
    assert "  driver               580" in lines
    assert "  MTU                  rank 0: eth0 1500; rank 1: eth0 9000" in lines
    assert len(advice) == 2 and "mtu 9000" in advice[0] and "same version on all hosts" in advice[1], advice


def test_interfaces(tmp_path):
    for name, state, mtu in (("lo", "unknown", 65536), ("eth0", "up", 1500), ("eth1", "down", 9000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(f"{state}\n")
        (tmp_path / name / "mtu").write_text(f"{mtu}\n")
    assert doctor_hosts.mtus(str(tmp_path)) == "eth0 1500"


def test_one_rank_says_how_to_start_it(monkeypatch, capsys):
    monkeypatch.setattr(doctor_hosts.choice, "default", lambda: None)
    assert (
        doctor_hosts.main() == 2
        and "shmemkit run -n 8 -H node1:4,node2:4 -m shmemkit doctor" in capsys.readouterr().out
    )


PROGRAM = """
from shmemkit.tools import doctor, doctor_hosts
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
os.environ["SHMEMKIT_HOST_ID"] = "ab"[{host}]

class Here(doctor.Machine):
    def version(self, package):
        return (package, f"1.{{rank // 2}}") if package == {other!r} else super().version(package)

sys.exit(doctor_hosts.main(Here()))
"""


@pytest.mark.slow
@pytest.mark.processes(4)
@needs_mpi
@pytest.mark.parametrize(
    "host, other, status, said",
    [
        ("rank // 2", None, 0, "a (ranks 0 and 1) and b (ranks 2 and 3)"),
        ("rank // 2", "greenlet", 1, "greenlet differs (ranks 0 and 1: 1.0; ranks 2 and 3: 1.1)"),
        ("rank % 2", None, 1, "Ranks alternate between hosts (a (ranks 0 and 2) and b (ranks 1 and 3))"),
    ],
)
def test_two_hosts_of_two_ranks(host, other, status, said):
    assert MPIRUN is not None
    code = PROGRAM.format(host=host, other=other)
    found, shown, _ = mpirun(4, code)
    assert found == status and said in shown, shown
    assert ("The hosts fit." if status == 0 else "The hosts do not fit.") in shown, shown
