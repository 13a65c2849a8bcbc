#!/usr/bin/env bash
# Acts as a person with only `python -m venv`, torch and Flatshard's wheel:
# packs the files of a build folder, installs them, trains with the program and
# from Python, and tries torches that do not fit. Nothing is compiled. The
# virtual environments take torch and its dependencies from FLATSHARD_PYTHON by
# links: no index, no download.
# usage: wheel_test.sh BUILD_FOLDER
set -euo pipefail
cd "$(dirname "$0")/../.."
build=$1
export FLATSHARD_PYTHON=${FLATSHARD_PYTHON:-$PWD/.venv/bin/python}
python=$FLATSHARD_PYTHON
export OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=1 PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONPATH
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

scripts/wheel --from "$build" --to "$work/dist"
wheels=("$work"/dist/*.whl)
[ ${#wheels[@]} = 1 ]
"$python" tests/python/wheel_contents.py "${wheels[0]}"

site() { "$1" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
packages=$(site "$python")
make_venv() { "$python" -m venv --without-pip "$1"; }
install() {
  "$python" -m pip --python "$1/bin/python" install -q --no-index "${@:2}" "${wheels[0]}"
}

# --- Torch beside the package: what pip makes --------------------------------
make_venv "$work/venv"
here=$work/venv/bin
into=$(site "$here/python")
for entry in "$packages"/*; do
  case $(basename "$entry") in
  flatshard* | _flatshard* | pip | pip-* | __pycache__) ;;
  *) ln -s "$entry" "$into/" ;;
  esac
done
install "$work/venv"
cp tests/python/wheel_step.py tests/python/wheel_train.toml "$work"
cd "$work"
unset FLATSHARD_PYTHON

export PATH="$here:$PATH"
seq 20000 >numbers.txt
flatshard data prepare --input numbers.txt --output tokens --tokenizer bytes
flatshard train wheel_train.toml --nproc 2 2>train.txt || { cat train.txt >&2; exit 1; }
python -m torch.distributed.run --standalone --nproc-per-node 2 --no-python \
  flatshard train wheel_train.toml --set run.output_dir=torchrun >train.txt 2>&1 ||
  { cat train.txt >&2; exit 1; }
grep -h '"step":4,.*"loss"' run/metrics.jsonl torchrun/metrics.jsonl | sed 's/.*"loss":\([^,]*\).*/\1/' \
  >losses.txt
[ "$(wc -l <losses.txt)" = 2 ] && [ "$(sort -u losses.txt | wc -l)" = 1 ] ||
  { cat losses.txt; exit 1; }
# Tokenizers are Python's: of the Python that the program was installed for.
flatshard data prepare --input numbers.txt --output t --tokenizer no.json 2>no.txt || true
grep -q 'no.json' no.txt
python -m flatshard.doctor >doctor.txt 2>&1 || { cat doctor.txt >&2; exit 1; }
grep -q "^extension  *$work/venv/" doctor.txt
grep -q '^one step on a CPU  *works' doctor.txt
python -m torch.distributed.run --standalone --nproc-per-node 2 \
  wheel_step.py "$work/venv" 2>step.txt || { cat step.txt >&2; exit 1; }

# --- Torch in another folder: --target, --system-site-packages ---------------
make_venv "$work/other"
echo "$packages" >"$(site "$work/other/bin/python")/elsewhere.pth"
install "$work/other" --no-deps
"$work/other/bin/flatshard" --version

# --- Torches that do not fit -------------------------------------------------
mkdir -p misfit/torch
touch misfit/torch/__init__.py
expect() { # <text> <command...>
  "${@:2}" >said.txt 2>&1 && { echo "expected '$1', but it passed" && exit 1; }
  grep -qF "$1" said.txt || { cat said.txt && exit 1; }
}
printf "__version__ = '2.97.1+cu130'\ncuda: Optional[str] = '13.0'\n" >misfit/torch/version.py
tag=$(python -c 'import sys; print("cp%d%d" % sys.version_info[:2])')
version=$(basename "${wheels[0]}" | cut -d- -f2 | cut -d+ -f1)
other="got torch 2.97.1+cu130 with CUDA 13.0 in $work/misfit/torch; \
install flatshard-$version+cu130torch2.97-$tag-$tag-*.whl"
export PYTHONPATH=$work/misfit
expect "$other" flatshard --version
expect "$other" python -c 'import flatshard'
unset PYTHONPATH
rm "$into/torch"
expect "but torch is not installed; pip install 'torch==" flatshard --version
expect "but torch is not installed; pip install 'torch==" python -c 'import flatshard'
