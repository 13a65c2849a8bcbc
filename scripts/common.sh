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

# The build folder: sanitizers and coverage have their own.
build_dir() {
  if [ "${FLATSHARD_COVERAGE:-OFF}" = ON ]; then
    echo build-coverage
  else
    echo "build${SAN:+-san}"
  fi
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
  git ls-files -z -co --exclude-standard -- '*.h' '*.cpp' '*.cu' '*.cuh'
}
