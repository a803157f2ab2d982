"""Scripts that know nothing of shmemkit, run by tests."""

import json
import textwrap

from shmemkit.emu.__main__ import main
from shmemkit.emulated_scripts.runner import Script, run_script

RAN = "\nopen(f'{__file__}.{id(globals())}.ran', 'w').close()\n"
NVSHMEM = """
import numpy as np
import cupy as cp
import nvshmem.core as nv
from cuda.core import Device
from mpi4py import MPI
from numba import cuda
comm = MPI.COMM_WORLD
me, n = comm.rank, comm.size
device = Device(me)
device.set_current()
nv.init(device=device, mpi_comm=comm, initializer_method="mpi")
stream = device.create_stream()
world = nv.Teams.TEAM_WORLD
"""


def run(tmp_path, text, n, argv=(), **options):
    """`text` as a script on `n` PEs; its PEs leave files behind, so that none is left out."""
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(text) + RAN)
    run_script(Script(str(path), argv), n, **options)
    ran = list(tmp_path.glob("*.ran"))
    assert len(ran) == n
    for file in ran:
        file.unlink()


def ended(tmp_path, text, *options):
    """`text` as a script of the command. -> (exit status, what --json wrote)"""
    path, out = tmp_path / "script.py", tmp_path / "out.json"
    path.write_text(textwrap.dedent(text))
    status = main([*options, "--json", str(out), str(path)])
    return status, json.loads(out.read_text())
