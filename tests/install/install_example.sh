#!/usr/bin/env bash
# Installs a build into a fresh prefix, builds examples/cpp against nothing but
# that prefix, and runs it.
# usage: install_example.sh CMAKE BUILD_DIR EXAMPLE_DIR WORK_DIR
set -euo pipefail
cmake=$1 build=$2 example=$3 work=$4

rm -rf "$work"
mkdir -p "$work"
"$cmake" --install "$build" --prefix "$work/prefix" >"$work/install.log"
# An exported target must not lead back into the build folder.
if grep -rF "$build" "$work"/prefix/lib*/cmake/flatshard/flatshardTargets*; then
  echo "expected no path of the build folder in the installed targets"
  exit 1
fi
"$cmake" -S "$example" -B "$work/build" -G Ninja \
  -DCMAKE_PREFIX_PATH="$work/prefix"
"$cmake" --build "$work/build"
"$work/build/example"
