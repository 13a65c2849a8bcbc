# Sourced by the other scripts: the repository's root, and small helpers.
# shellcheck shell=bash
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

note() { echo "flatshard: $*"; }
die() {
  echo "flatshard: $*" >&2
  exit 1
}

# --- torch -----------------------------------------------------------------
# TORCH=2.15.0 builds and tests with that version, in a separate virtual
# environment and build folders; without it, the version that requirements.txt
# pins.
pinned_torch=$(sed -n 's/^torch==//p' requirements.txt)
TORCH=${TORCH:-$pinned_torch}

# Fails unless it is in the range that pyproject.toml builds with.
check_torch_version() {
  local least above
  read -r least above < <(sed -n \
    '/^requires/s/.*"torch>=\([0-9.]*\),<\([0-9.]*\)".*/\1 \2/p' pyproject.toml)
  [[ $TORCH =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] &&
    [ "$(printf '%s\n' "$least" "$TORCH" | sort -V | head -1)" = "$least" ] &&
    [ "$(printf '%s\n' "$TORCH" "$above" | sort -V | head -1)" = "$TORCH" ] ||
    die "TORCH=$TORCH: expected a version of torch from $least on and below $above, \
such as TORCH=$pinned_torch; others have not been tried with Flatshard."
}

venv=.venv torch_suffix=''
[ "$TORCH" = "$pinned_torch" ] || torch_suffix=-torch-$TORCH
# scripts/wheel sets it: a wheel's Python, such as 3.12, unless `python3` is
# that version.
if [ -n "${FLATSHARD_PYTHON_VERSION:-}" ]; then
  torch_suffix=-py$FLATSHARD_PYTHON_VERSION$torch_suffix
fi
venv=$venv$torch_suffix
export TORCH
export FLATSHARD_PYTHON=${FLATSHARD_PYTHON:-$root/$venv/bin/python}

# --- the build -------------------------------------------------------------
# Parallel compilers: one per core, but 2 GB of memory for each.
num_jobs() {
  if [ -n "${JOBS:-}" ]; then
    echo "$JOBS"
    return
  fi
  local cores memory
  cores=$(nproc)
  memory=$(sed -n 's/^MemTotal: *\([0-9]*\) kB/\1/p' /proc/meminfo)
  memory=$((memory / 2000000))
  ((memory < cores)) && cores=$memory
  echo $((cores > 0 ? cores : 1))
}

counts_lines() { [[ ${COVERAGE:-off} =~ ^(1|on|ON)$ ]]; }

# The build folder: another torch, sanitizers and coverage have their own.
build_dir() {
  if counts_lines; then
    echo "build-coverage$torch_suffix"
  else
    echo "build${SAN:+-san}$torch_suffix"
  fi
}

# From second $1 to second $2, or until now, as 2:05.
elapsed() {
  local s=$((${2:-$(date +%s)} - $1))
  printf '%d:%02d' $((s / 60)) $((s % 60))
}

# The program of a Python such as 3.12, of PATH or of pyenv.
find_python() {
  local program
  for program in "python$1" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$1".*/bin/"python$1"; do
    if "$program" -c 'import ensurepip, venv' 2>/dev/null; then
      echo "$program"
      return
    fi
  done
  return 1
}

# clang-format 14, the version whose output the repository keeps.
find_clang_format() {
  local name
  for name in clang-format-14 clang-format; do
    if command -v "$name" >/dev/null &&
      "$name" --version | grep -q 'version 14\.'; then
      echo "$name"
      return
    fi
  done
  return 1
}

cpp_files() {
  git ls-files -z -co --exclude-standard -- '*.h' '*.cpp' '*.cu' '*.cuh' '*.def'
}
