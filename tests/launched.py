"""Programs of several ranks, started by mpirun or by ``shmemkit run``."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
import touched

from shmemkit.tools.mpirun import launchers

ROOT = Path(__file__).resolve().parents[1]
MPIRUN = shutil.which(
    "mpirun", path=os.path.dirname(sys.executable) + os.pathsep + os.environ.get("PATH", "")
)
RUN = [sys.executable, "-m", "shmemkit", "run"]
MPI = next((found for found in launchers() if found.libmpi is not None), None)
needs_mpi = pytest.mark.skipif(MPI is None, reason="needs an MPI")


HEAD = """
import os, sys, time
import numpy as np
from numba import cuda
import shmemkit as sk
from shmemkit.device import *
from shmemkit.emu import DeadlockError, EmulatorError, OutOfBoundsError
"""


def mpirun(n, code, *arguments, timeout=60, **variables):
    """Run `code`, or a script of ours, on n ranks. -> (exit status, output of all ranks, seconds)"""
    launched = ("OMPI_", "PMI", "PRTE_", "SLURM_")  # by an mpirun around the tests
    environment = {k: v for k, v in os.environ.items() if not k.startswith(launched)} | {
        "PYTHONPATH": str(ROOT),
        "SHMEMKIT_BACKEND": "emulator",
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    environment |= variables
    with tempfile.TemporaryDirectory() as folder:
        script = ROOT / code
        touched.examples([script])
        if "\n" in code:  # reports show the lines of a file
            script = Path(folder) / "script.py"
            script.write_text(HEAD + textwrap.dedent(code))
        return _run([MPIRUN, "-n", str(n), sys.executable, str(script), *arguments], environment, timeout)


def _run(command, environment, timeout):
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        pytest.fail(f"mpirun did not end in {timeout} s; it said:\n{output}")
    return process.returncode, output, time.monotonic() - start


def succeed(n, code, **options):
    status, output, _ = mpirun(n, code, **options)
    assert status == 0, output
    assert output.count("rank ok") == n, output
    return output


def environment(**changes):
    """This process's environment without what an MPI, Slurm or an activated environment left in it."""
    left = re.compile(r"OMPI_|PMI|PRTE_|SLURM_|HYD|MPI4PY_|SHMEMKIT_|VIRTUAL_ENV|PYTHONPATH|NUMBA_|OMP_")
    env = {name: value for name, value in os.environ.items() if not left.match(name)}
    return env | {"SHMEMKIT_PYTHON": sys.executable} | changes


def launch(*arguments, way=RUN, cwd=None, **changes):
    command, env = [*way, *arguments], environment(**changes)
    return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=60)
