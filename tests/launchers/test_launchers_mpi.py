"""mpirun, srun, sbatch and `shmemkit run` start the ranks of one World, with each MPI that is here."""

# ruff: noqa: F811 (arguments that are fixtures)

import os
import re
import shutil
import sys
import time

import pytest
from launch_outcomes import N, check, run, write_script
from launched import ROOT, RUN
from slurm import slurm  # noqa: F401 (a fixture)

pytestmark = [pytest.mark.full, pytest.mark.processes(N)]
MPICH = ROOT / "build" / "mpich"  # .ci/launchers installs it there
FOLDERS = {"Open MPI": os.path.dirname(sys.executable), "MPICH": str(MPICH / "bin")}
PROTOCOL = {"Open MPI": "pmix", "MPICH": "pmi2"}
PYTHON = [sys.executable, "-m", "mpi4py"]
MPIRUN = {
    "Open MPI": ["--allow-run-as-root", "--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"],
    "MPICH": [],
}
FEW = 2  # ranks of `shmemkit run`, which starts what the tests of mpirun and srun start
every_end = pytest.mark.parametrize("how", ["end", "kill", "raise"])


@pytest.fixture(params=FOLDERS)
def mpi(request):
    """Its name, and the variables by which it is the one that mpi4py loads."""
    folder = FOLDERS[request.param]
    if not os.path.exists(f"{folder}/mpirun"):
        pytest.skip(f"no {request.param} in {folder}; .ci/launchers installs it")
    library = {"Open MPI": "libmpi.so.40", "MPICH": "libmpi.so.12"}[request.param]
    path = os.pathsep.join([folder, os.environ["PATH"]])
    return request.param, {"PATH": path, "MPI4PY_LIBMPI": f"{os.path.dirname(folder)}/lib/{library}"}


@every_end
def test_mpirun(mpi, tmp_path, how):
    name, variables = mpi
    command = [shutil.which("mpirun", path=variables["PATH"]), "-n", str(N), *MPIRUN[name]]
    check(how, run([*command, *PYTHON, write_script(tmp_path), how], **variables))


@every_end
def test_shmemkit_run(mpi, tmp_path, how):
    name, variables = mpi
    outcome = run([*RUN, "-n", str(FEW), write_script(tmp_path), how], **variables)
    check(how, outcome, FEW)
    assert f"shmemkit run: {FEW} ranks, {name}" in outcome[1]


@every_end
def test_srun(slurm, mpi, tmp_path, how):
    name, variables = mpi
    n = N if name == "Open MPI" else FEW  # MPICH's spin while they start, each on a core
    command = ["srun", "-n", str(n), "--kill-on-bad-exit=1", f"--mpi={PROTOCOL[name]}"]
    check(how, run([*command, *PYTHON, write_script(tmp_path), how], **variables, **slurm), n)


@every_end
def test_shmemkit_run_in_an_allocation(slurm, mpi, tmp_path, how):
    name, variables = mpi
    command = ["salloc", "-n", str(FEW), *RUN, "-n", str(FEW), write_script(tmp_path), how]
    outcome = run(command, **variables, **slurm)
    check(how, outcome, FEW)
    lines = [line for line in outcome[1].splitlines() if line.startswith("shmemkit run:")]
    assert len(lines) == 1 and f"srun --mpi={PROTOCOL[name]} for {name}" in lines[0]


@every_end
def test_sbatch(slurm, mpi, tmp_path, how):
    """The recipe of docs/launchers.md."""
    _, variables = mpi
    job, printed = tmp_path / "job.sh", tmp_path / "printed"
    command = f"{' '.join(RUN)} -n $SLURM_NTASKS {write_script(tmp_path)} {how}"
    job.write_text(f"#!/bin/bash\n#SBATCH --ntasks={FEW}\n{command}\necho ended with $?\n")
    status, said, _ = run(["sbatch", "-o", printed, job], **variables, **slurm)
    assert status == 0, said
    deadline = time.monotonic() + 60
    while not (ended := printed.exists() and re.search(r"ended with (\d+)\n", printed.read_text())):
        assert time.monotonic() < deadline, printed.exists() and printed.read_text()
        time.sleep(0.05)
    check(how, (int(ended[1]), printed.read_text(), printed.stat().st_mtime), FEW)


def test_mpirun_in_an_allocation(slurm, mpi, tmp_path):
    name, variables = mpi
    command = ["salloc", "-n", str(FEW), *RUN, "-n", str(FEW), write_script(tmp_path), "end"]
    outcome = run(command, **variables, **slurm, SHMEMKIT_MPIRUN="mpirun")
    check("end", outcome, FEW)
    assert f"{FEW} ranks, {name}" in outcome[1] and "Slurm" not in outcome[1]


def dry_run(slurm, tmp_path, *arguments, srun="", **variables):
    """What `shmemkit run` would start in an allocation. `srun`: a line of a script around the real one."""
    path = variables.pop("PATH", os.environ["PATH"])
    if srun:
        wrapper = tmp_path / "srun"
        wrapper.write_text(f'#!/bin/bash\n{srun}\nexec {shutil.which("srun")} "$@"\n')
        wrapper.chmod(0o755)
        path = f"{tmp_path}{os.pathsep}{path}"
    command = ["salloc", "-n", "1", *RUN, "-n", "2", *arguments, "--dry-run", "-c", "pass"]
    status, output, _ = run(command, PATH=path, **variables, **slurm)
    return status, output


def test_mpirun_where_srun_lacks_the_protocol(slurm, mpi, tmp_path):
    name, variables = mpi
    without = '[ "$1" != --mpi=list ] || { echo none; exit; }'
    status, output = dry_run(slurm, tmp_path, srun=without, **variables)
    assert status == 0 and "/mpirun -n 2" in output
    assert f"needs --mpi={PROTOCOL[name]}; 'srun --mpi=list' shows none" in output


def test_mpirun_where_the_protocol_does_not_load(slurm, mpi, tmp_path):
    """As on Debian without libpmix-dev."""
    name, variables = mpi
    broken = '[ "$2" != --test-only ] || exec ' + f"{shutil.which('srun')} --mpi=nothing true"
    status, output = dry_run(slurm, tmp_path, srun=broken, **variables)
    assert status == 0 and "/mpirun -n 2" in output
    assert f"needs --mpi={PROTOCOL[name]}, which srun lists and does not load" in output


def test_neither_srun_nor_mpirun(slurm, mpi, tmp_path):
    without = '[ "$1" != --mpi=list ] || { echo none; exit; }'
    status, output = dry_run(slurm, tmp_path, srun=without, **mpi[1], SHMEMKIT_MPIRUN=str(tmp_path / "srun"))
    assert status == 2 and "not using" in output and "Put the mpirun of the MPI" in output


def test_another_srun(slurm, tmp_path):
    status, output = dry_run(slurm, tmp_path, srun="echo cows 1.0; exit")
    assert status == 2 and "--version says 'cows 1.0" in output and "SHMEMKIT_MPIRUN" in output


@pytest.mark.parametrize("given", [["--mpi-arg", "--mpi=none"], {"SLURM_MPI_TYPE": "none"}])
def test_a_protocol_that_the_user_chose(slurm, tmp_path, given):
    arguments, variables = (given, {}) if isinstance(given, list) else ([], given)
    status, output = dry_run(slurm, tmp_path, *arguments, **variables)
    assert status == 0 and "--mpi=pmi" not in output and ("--mpi=none" in output) == bool(arguments)


@every_end
def test_srun_without_mpi(slurm, tmp_path, how):
    """No MPI is loaded: the ranks find each other by Slurm's variables."""
    command = ["srun", "-n", str(N), "--kill-on-bad-exit=1", "--mpi=none"]
    check(how, run([*command, sys.executable, write_script(tmp_path), how], **slurm))
