"""``python -m shmemkit.emu``: its options, reports and exit statuses."""

import json
import os
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from fast import slow
from scripted import NVSHMEM, ended

import shmemkit as sk
from shmemkit.emu.__main__ import main

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RING = os.path.join(TESTS, "scripts", "ring.py")
EXAMPLES = os.path.join(os.path.dirname(TESTS), "examples")


@pytest.mark.parametrize(
    "chunks, options, status",
    [
        ("1", ["--races", "--delivery", "unordered"], 0),
        ("3", ["--races"], 0),
        ("3", ["--races", "--delivery", "ordered"], 0),
        ("3", ["--delivery", "unordered"], 1),
        ("3", ["--races", "--delivery", "unordered"], 1),
    ],
)
def test_several_chunks_per_signal_need_order(chunks, options, status, capsys):
    assert main(["-n", "4", *options, RING, chunks]) == status
    out, err = capsys.readouterr()
    assert ("passed" in out) == (status == 0)
    assert (err == "") == (status == 0)
    assert ("the wait cannot tell them apart" in err) == (status == 1 and "--races" in options)
    assert ("AssertionError" in err) == (status == 1)


@pytest.mark.parametrize(
    "arguments, said",
    [(["missing.py"], "error: missing.py: no such script"), (["--race", RING], "arguments: --race")],
)
def test_wrong_usage(arguments, said, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 1 and said in capsys.readouterr().err


@pytest.mark.slow
def test_as_a_command(tmp_path):
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", "shmemkit.emu", "-n", "3", "--races", "--delivery", "unordered"]
    result = subprocess.run(
        [*command, "--json", str(out), RING, "2"], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 1, result.stderr
    written = json.loads(out.read_text())
    assert written["outcome"] == "failed" and written["report"] in result.stderr
    race = written["races"][0]
    assert race["array"] == "total" and race["first"]["kernel"] == "all_reduce"
    assert race["first"]["file"].endswith("ring.py") and race["second"]["line"] > 20
    assert result.stderr.startswith("Traceback")


@pytest.mark.slow
def test_what_numba_refuses_is_refused_in_a_new_process(tmp_path):
    """There Numba imports cuda.bindings late, which scripts do not find."""
    program = """
    import numpy as np
    from numba import cuda

    @cuda.jit
    def pack(x):
        seen = []
        seen.append(1)

    pack[1, 1](cuda.to_device(np.zeros(1)))
    """
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(program))
    command = [sys.executable, "-m", "shmemkit.emu", "-n", "1", str(path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1 and "kernel pack: Numba refuses to compile it" in result.stderr


def test_json_of_a_clean_run(tmp_path):
    status, written = ended(tmp_path, "pass", "-n", "3", "--seed", "7", "--delivery", "ordered")
    assert status == 0
    versions = written.pop("versions")
    assert versions["shmemkit"] == sk.__version__ and versions["numpy"] == np.__version__
    assert written == {
        "outcome": "clean",
        "status": 0,
        "report": "",
        "races": [],
        "seed": 7,
        "delivery": "ordered",
        "schedules": 1,
        "n_ranks": 3,
        "n_pes": 3,
        "script": str(tmp_path / "script.py"),
    }


def test_a_failure_is_shown_without_the_emulators_frames(tmp_path, capsys):
    text = """
    from mpi4py import MPI

    def check(rank):
        assert rank != 2, "rank two"

    check(MPI.COMM_WORLD.rank)
    MPI.COMM_WORLD.barrier()
    """
    status, written = ended(tmp_path, text, "-n", "3")
    err = capsys.readouterr().err
    assert status == 1 and written["outcome"] == "failed"
    assert "AssertionError: rank two" in err and "check(MPI.COMM_WORLD.rank)" in err
    assert err.count('File "') == 2


def test_a_deadlock(tmp_path, capsys):
    text = NVSHMEM + textwrap.dedent("""
    from nvshmem.core import ComparisonType
    from nvshmem.core.device.numba import signal_wait

    @cuda.jit
    def stuck(flag):
        signal_wait(flag, ComparisonType.CMP_GE, 1)

    flag = nv.array((1,), "uint64")
    flag[:] = 0
    stuck[1, 1, stream](flag)
    device.sync()
    """)
    status, written = ended(tmp_path, text, "-n", "2")
    assert (status, written["outcome"]) == (3, "deadlock")
    assert "waits for flag[0] on rank 1 >= 1, now 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    "ending, status",
    [
        ("sys.exit()", 0),
        ("sys.exit(0)", 0),
        ("sys.exit(7)", 7),
        ("sys.exit(2)", 1),  # 2 and 3 mean something else
        ("sys.exit(3)", 1),
        ("sys.exit(256)", 1),
        ("sys.exit('gone')", 1),
        ("argparse.ArgumentParser().parse_args(['--unknown'])", 1),
        ("MPI.COMM_WORLD.Abort(5)", 5),
    ],
)
def test_scripts_that_exit(ending, status, tmp_path, capsys):
    text = f"""
    import argparse, sys
    from mpi4py import MPI
    if MPI.COMM_WORLD.rank == 1:
        {ending}
    print('went on')
    """
    got, written = ended(tmp_path, text, "-n", "2")
    assert (got, written["status"]) == (status, status)
    assert written["outcome"] == ("failed" if status else "clean")
    out, err = capsys.readouterr()
    assert ("gone" in err) == ("gone" in ending)
    assert ("rank 1" in err) == (status > 0)
    if not status:
        assert out == "went on\n"


@pytest.mark.parametrize("others", ["world.barrier(); world.synchronize()", "world.host_barrier()"])
@pytest.mark.parametrize(("code", "status"), [("7", 7), ("'bad input'", 1), ("0", 3)])
def test_an_exit_inside_of_a_world(others, code, status, tmp_path, capsys):
    text = f"""
    import sys
    import shmemkit as sk
    with sk.init() as world:
        if world.rank == 2:
            sys.exit({code})
        {others}
    """
    got, _ = ended(tmp_path, text, "-n", "3")
    err = capsys.readouterr().err
    if code == "0":  # it leaves as at the end of the block
        assert got == (3 if "synchronize" in others else 1) and "exited" not in err
    else:
        assert got == status and err.endswith(f"rank 2 exited with status {status}\n")
        assert ("bad input\n" in err) == ("bad" in code)


def test_a_script_that_does_not_compile(tmp_path, capsys):
    status, _ = ended(tmp_path, "if :")
    assert status == 1 and "SyntaxError" in capsys.readouterr().err


def test_os_exit_of_a_rank_is_a_failure(tmp_path, capsys):
    """It would end the process of all ranks, with status 0."""
    text = """
    import os
    import shmemkit as sk
    if sk.init().rank == 1:
        os._exit(0)
    """
    got, _ = ended(tmp_path, text, "-n", "2")
    assert got == 1 and capsys.readouterr().err.endswith("rank 1 left by os._exit(0)\n")


@pytest.mark.parametrize(
    "arguments", ["", "-n 2 -m", "-n 0 x.py", "-n 2 --delivery late x.py", "--json /no/file x.py"]
)
def test_wrong_arguments_are_no_race(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        main(arguments.split())
    assert caught.value.code == 1 and "error: " in capsys.readouterr().err


MODULE = """
import json
import sys
from mpi4py import MPI
from . import runs

runs.append(__name__)
assert runs == ["__main__"] and sys.modules["__main__"].__dict__ is globals()
comm = MPI.COMM_WORLD
found = [comm.rank, sys.argv, __package__, __spec__.name, __file__, sys.path[0]]
found = comm.gather(found)
if comm.rank == 0:
    print(json.dumps(found))
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """-> the folder of a package, which is in the working directory"""
    folder = tmp_path / "some_package"
    folder.mkdir()
    (folder / "__init__.py").write_text("import sys\nruns = []\nassert sys.argv[0] == '-m'\n")
    for name in ("module.py", "__main__.py"):
        (folder / name).write_text(MODULE)
    (folder / "of_others.py").write_text("import not_installed")
    monkeypatch.chdir(tmp_path)
    return folder


@pytest.mark.parametrize(
    "module, name", [("some_package.module", "module"), ("some_package", "__main__")], ids=["module", "main"]
)
def test_a_module(module, name, package, capsys):
    """As ``python -m`` runs it; each PE has its own, and its package's. What follows is its own."""
    assert main(["-n", "3", "--races", "-m", module, "--sizes", "8", "-n", "1"]) == 0
    path = str(package / f"{name}.py")
    assert json.loads(capsys.readouterr().out) == [
        [
            rank,
            [path, "--sizes", "8", "-n", "1"],
            "some_package",
            f"some_package.{name}",
            path,
            str(package.parent),
        ]
        for rank in range(3)
    ]
    assert "some_package" not in sys.modules


def test_a_module_as_python_runs_it(package, capfd):
    """What test_a_module expects is what Python does."""
    text = MODULE.replace("from mpi4py import MPI", "").replace("MPI.COMM_WORLD", "Lone()")
    lone = "class Lone:\n    rank = 0\n\n    def gather(self, found):\n        return [found]\n"
    (package / "module.py").write_text(lone + text)
    command = [sys.executable, "-m", "some_package.module", "--sizes"]
    alone = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert main(["-n", "1", *command[1:]]) == 0
    assert capfd.readouterr().out == alone


@pytest.mark.parametrize(
    "module, message",
    [
        ("no_such.module", "No module named no_such.module\n"),
        ("some_package.nothing", "No module named some_package.nothing\n"),
        ("some_package.empty", "No module named some_package.empty.__main__\n"),
        ("some_package.of_others", "ModuleNotFoundError: No module named 'not_installed'\n"),
        ("some_package.needy.module", "ModuleNotFoundError: No module named 'not_installed'\n"),
        ("math", "math is not a module of Python code\n"),
    ],
)
def test_a_module_that_is_not_there(module, message, package, capsys):
    for name, text in (("empty", ""), ("needy", "import not_installed")):
        (package / name).mkdir()
        (package / name / "__init__.py").write_text(text)
    assert main(["-m", module]) == 1
    err = capsys.readouterr().err
    assert message in err and "runner.py" not in err and ("Traceback" in err) == ("not_installed" in message)


def test_an_interrupt_shows_the_line_and_the_rank(tmp_path, capsys):
    text = """
    import signal
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 1:
        signal.raise_signal(signal.SIGINT)
        while True:
            pass
    MPI.COMM_WORLD.barrier()
    """
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    try:
        status, written = ended(tmp_path, text, "-n", "3")
    finally:
        signal.signal(signal.SIGINT, handler)
    assert (status, written["status"], written["outcome"]) == (130, 130, "failed")
    err = capsys.readouterr().err
    assert "raise_signal(signal.SIGINT)" in err and err.count('File "') == 1
    if sys.version_info >= (3, 11):
        assert "interrupted on rank 1" in err


@pytest.mark.parametrize(
    "name, status", [*slow(("01_notify_wait", 0)), ("broken/hang", 3), ("broken/wrong", 2)]
)
def test_scripts_of_shmemkit(name, status, capsys):
    assert main(["-n", "2", "--races", os.path.join(EXAMPLES, f"{name}.py")]) == status


@pytest.mark.parametrize(
    "races, status, seed, delivery", [((), 1, 1, "unordered"), (("--races",), 2, 0, "eager")]
)
def test_many_seeds(races, status, seed, delivery, tmp_path, capsys):
    wrong, out = os.path.join(EXAMPLES, "broken/wrong.py"), tmp_path / "out.json"
    assert main(["-n", "2", *races, "--explore", "9", "--json", str(out), wrong]) == status
    written, report = json.loads(out.read_text()), capsys.readouterr().err
    assert (written["seed"], written["delivery"], written["schedules"]) == (
        seed,
        delivery,
        3 * seed + 1 + 2 * (not races),
    )
    assert report.endswith(f"in the last one (seed {seed}, delivery '{delivery}')\n")
    assert main(["-n", "2", *races, "--seed", str(seed), "--delivery", delivery, wrong]) == status
    assert capsys.readouterr().err.strip() == report.rsplit("\n", 2)[0].strip()


def test_many_seeds_of_a_correct_script(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SHMEMKIT_RACES", "1")
    status, written = ended(
        tmp_path, "import sys; assert len(sys.argv) == 1", "--explore", "3", "--delivery", "ordered"
    )
    assert status == written["status"] == 0 and (written["seed"], written["schedules"]) == (None, 3)
    assert capsys.readouterr().err.startswith("explored 3 schedules: no deadlock, no race, no failure")
