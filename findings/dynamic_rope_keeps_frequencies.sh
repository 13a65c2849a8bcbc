#!/usr/bin/env bash
# transformers 5.24.0: RoPE of type "dynamic" keeps the frequencies of the longest sequence
# so far. A sequence between the pretraining length and that length then has other rotations
# than in a fresh process, until a sequence shorter than the pretraining length resets them.
#
# Seen on 2026-11-29 with transformers 5.24.0 and torch 2.11.0 on a CPU, in
# LlamaRotaryEmbedding with 16 pretraining positions and factor 2 (4.57.1 does the same):
#   24 tokens in a fresh module, and after a call with 32 tokens: cosines differ by 0.28
#   24 tokens after calls with 32 and then 16 tokens:             still those of 32 tokens
#   24 tokens after calls with 32 and then 15 tokens:             as in a fresh module
# So the loss of a sequence depends on which sequences the process has seen before: an
# evaluation in another order, or on another number of ranks, gives another number.
#
# Exits with 1 when the behavior is another.
# usage: findings/dynamic_rope_keeps_frequencies.sh [a Python that has both packages]
# Without one it installs them from PyPI into a temporary folder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${1:-$folder/venv/bin/python}
if [ $# -eq 0 ]; then
  python3 -m venv "$folder/venv"
  "$python" -m pip install -q torch==2.11.0 transformers==5.24.0
fi
cat >"$folder/program.py" <<'PROGRAM'
import sys

import torch
import transformers
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

PRETRAINED, LENGTH, LONGER, HEAD = 16, 24, 32, 16


def cosines(*lengths):
    """Cosines of LENGTH tokens after sequences of `lengths`."""
    config = LlamaConfig(
        hidden_size=4 * HEAD,
        num_attention_heads=4,
        max_position_embeddings=PRETRAINED,
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    )
    rotary = LlamaRotaryEmbedding(config)
    for length in (*lengths, LENGTH):
        result, _ = rotary(torch.zeros(1, length, HEAD), torch.arange(length)[None])
    return result


print("transformers", transformers.__version__, "torch", torch.__version__)
fresh, after = cosines(), cosines(LONGER)
difference = (fresh - after).abs().max().item()
kept = torch.equal(after, cosines(LONGER, PRETRAINED))
reset = torch.equal(fresh, cosines(LONGER, PRETRAINED - 1))
print(f"after {LONGER} tokens: cosines of {LENGTH} tokens differ by {difference:.2f}")
print(f"the same after {PRETRAINED} tokens in between: {kept}")
print(f"as in a fresh module after {PRETRAINED - 1} tokens in between: {reset}")
sys.exit(0 if difference > 0.2 and kept and reset else 1)
PROGRAM
"$python" "$folder/program.py"
