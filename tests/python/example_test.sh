#!/usr/bin/env bash
# examples/python/finetune_hf.py on two ranks: the loss falls, and the folder that it
# saves is one that transformers loads.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${FLATSHARD_PYTHON:-.venv/bin/python}
export PYTHONPATH="${FLATSHARD_BUILD:-build}/python${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 \
  examples/python/finetune_hf.py --model tiny --text README.md --steps 40 \
  --seq 64 --lr 1e-2 --out "$out/model" | tee "$out/log"
"$python" - "$out" <<'PYTHON'
import sys
from transformers import AutoModelForCausalLM

losses = [float(line.split()[-1]) for line in open(sys.argv[1] + "/log") if "loss" in line]
assert losses[-1] < 0.8 * losses[0], losses
AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/model")
PYTHON
