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
# The program finds torch's libraries, also in a .venv inside the checkout.
if [ -x "$work/prefix/bin/flatshard" ]; then
  env -u LD_LIBRARY_PATH "$work/prefix/bin/flatshard" --version
fi
launcher=$(command -v ccache || true)
"$cmake" -S "$example" -B "$work/build" -G Ninja \
  -DCMAKE_PREFIX_PATH="$work/prefix" -DCMAKE_CXX_COMPILER_LAUNCHER="$launcher"
# Another torch than the libraries' raises an error.
mkdir -p "$work/torch/lib"
touch "$work/torch/lib/libtorch_cpu.so"
echo "__version__ = '2.12.0'" >"$work/torch/version.py"
"$cmake" -S "$example" -B "$work/other" -G Ninja -DCMAKE_PREFIX_PATH="$work/prefix" \
  -DFLATSHARD_TORCH_DIR="$work/torch" >"$work/other.log" 2>&1 && {
  echo "expected torch 2.12.0 to be refused"
  exit 1
}
tr -s ' \n' ' ' <"$work/other.log" |
  grep -q "which this Flatshard was built with, got '2.12.0'" || {
  cat "$work/other.log"
  exit 1
}
"$cmake" --build "$work/build" --target example experts
"$work/build/example" "$work/checkpoints"
"$work/build/experts" "$work/experts" 2
