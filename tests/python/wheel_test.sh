#!/usr/bin/env bash
# What `pip install .` of this checkout gives: builds the wheel in an environment of its
# own, installs it into a fresh virtual environment, and trains from there. Both get the
# torch of FLATSHARD_PYTHON, by way of wheels that point at it: no index, no download.
# FLATSHARD_WHEEL_BUILD is kept, so that a second time compiles only what changed.
# usage: wheel_test.sh      CXX and FLATSHARD_CUDA as in the build that ccache knows
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${FLATSHARD_PYTHON:-.venv/bin/python}
build=${FLATSHARD_WHEEL_BUILD:-$PWD/build-wheel}
jobs=$(source scripts/common.sh && num_jobs)
export OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
export CMAKE_BUILD_PARALLEL_LEVEL=${CMAKE_BUILD_PARALLEL_LEVEL:-$jobs}
unset PYTHONPATH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" tests/python/pointer_wheels.py "$work/index" torch scikit-build-core ninja
"$python" -m pip wheel . -q --no-deps --no-index --find-links "$work/index" \
  --config-settings=build-dir="$build" -w "$work/dist"
wheels=("$work"/dist/*.whl)
[ ${#wheels[@]} = 1 ]

"$python" - "${wheels[0]}" <<'PYTHON'
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

wheel = zipfile.ZipFile(sys.argv[1])
names = set(wheel.namelist())
# It fits the torch it was built with and no other, and says so.
metadata = next(name for name in names if name.endswith(".dist-info/METADATA"))
requires = [
    line.split(": ")[1]
    for line in wheel.read(metadata).decode().splitlines()
    if line.startswith("Requires-Dist:")
]
installed = version("torch")
assert [r.replace(" ", "") for r in requires] == [f"torch=={installed}"], requires
names = {name for name in names if ".dist-info/" not in name}
package = Path("python/flatshard")
wanted = {
    str(path.relative_to("python"))
    for kind in ("*.py", "*.pyi", "py.typed")
    for path in package.rglob(kind)
    if path.name not in ("hf_encoder.py", "prepare_tokens.py")
}
extension = {name for name in names if name.startswith("flatshard/_C.cpython")}
assert names - extension == wanted, names ^ wanted
assert len(extension) == 1, extension
PYTHON

# With its dependency, torch, which makes all visible that is installed for `python`.
"$python" -m venv --without-pip "$work/venv"
here=$work/venv/bin/python
"$python" -m pip --python "$here" install -q --no-index --find-links "$work/index" \
  "${wheels[0]}"

cp tests/python/wheel_step.py "$work"
cd "$work"
"$here" -m flatshard.doctor | tee doctor.txt
grep -q "^extension  *$work/venv/" doctor.txt
grep -q '^one step on a CPU  *works' doctor.txt
"$here" -m torch.distributed.run --standalone --nproc-per-node 2 \
  wheel_step.py "$work/venv" 2>step.txt || { cat step.txt >&2; exit 1; }
