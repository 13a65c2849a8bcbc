#!/usr/bin/env bash
# The README's Python program, and examples/python/finetune_hf.py, on two ranks: the loss
# falls, and the folder that the example saves is one that transformers loads.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${FLATSHARD_PYTHON:-.venv/bin/python}
export PYTHONPATH="${FLATSHARD_BUILD:-build}/python${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
sed -n '/^import torch$/,/^```$/p' README.md | grep -v '^```$' >"$out/train.py"
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 "$out/train.py" |
  tee "$out/log"
grep -q '^loss 0\.' "$out/log"

# Its config, on random tokens and with a small model.
sed -n '/^model.preset/,/^```$/p' README.md | grep -v '^```$' >"$out/run.toml"
"${FLATSHARD_BUILD:-build}/flatshard" train "$out/run.toml" --device cpu --nproc 2 \
  --set run.output_dir="$out/run" --set data.train=random --set training.steps=2 \
  --set training.seq_len=32 --set model.layers=1 --set model.dim=32 --set model.heads=2 \
  --set model.kv_heads=1 --set model.head_dim=16 --set model.ffn_dim=64 \
  --set model.vocab_size=300 | tee "$out/log"
grep -q '^step: 2/2' "$out/log"

"$python" -m torch.distributed.run --standalone --nproc-per-node 2 \
  examples/python/finetune_hf.py --model tiny --text README.md --steps 40 \
  --seq 64 --lr 1e-2 --out "$out/model" | tee "$out/log"
"$python" - "$out" <<'PYTHON'
import sys
from transformers import AutoModelForCausalLM

losses = [float(line.split()[-1]) for line in open(sys.argv[1] + "/log") if "loss" in line]
assert losses[-1] < 0.8 * losses[0], losses
AutoModelForCausalLM.from_pretrained(sys.argv[1] + "/model")

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

by_byte = pre_tokenizers.ByteLevel(add_prefix_space=False)
ascii = [by_byte.pre_tokenize_str(chr(byte))[0][0] for byte in range(128)]
others = sorted(set(by_byte.alphabet()) - set(ascii))
vocabulary = {letter: i for i, letter in enumerate(ascii + others)}
tokenizer = Tokenizer(models.BPE(vocabulary, []))
tokenizer.pre_tokenizer = by_byte
tokenizer.decoder = decoders.ByteLevel()
PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(sys.argv[1] + "/model")
PYTHON

# A folder with a tokenizer: the ranks read their parts of it.
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 \
  examples/python/finetune_hf.py --model "$out/model" --text README.md --steps 3 \
  --seq 64 | tee "$out/log"
# The weights are those that were trained.
grep -q "step 1 loss [0-3]\." "$out/log"
