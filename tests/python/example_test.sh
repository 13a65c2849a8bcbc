#!/usr/bin/env bash
# The Python programs of the README and of the quickstart, and
# examples/python/finetune_hf.py, on two ranks: the loss falls, and the folders that they
# save are ones that transformers loads.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${FLATSHARD_PYTHON:-$PWD/.venv/bin/python}
build=$(realpath "${FLATSHARD_BUILD:-build}")
export PYTHONPATH="$build/python${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 PYTHONDONTWRITEBYTECODE=1
out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
# Appended to a page's program: ranks that draw the same data train without data
# parallelism.
cat >"$out/differs.py" <<'PYTHON'
    all_data = [torch.empty_like(DATA) for _ in range(2)]
    torch.distributed.all_gather(all_data, DATA)
    assert not torch.equal(*all_data), "both ranks have the same data"
PYTHON

# Runs a program of a page on two ranks; its loss has to fall below a share of the first
# one.
run_page() {
  (cd "$out" && "$python" -m torch.distributed.run --standalone --nproc-per-node 2 "$1") |
    tee "$out/log"
  "$python" - "$out/log" "$2" <<'PYTHON'
import sys

losses = [float(line.split()[-1]) for line in open(sys.argv[1]) if " loss " in line]
last = sum(losses[-3:]) / 3  # batches differ
assert len(losses) > 4 and last < float(sys.argv[2]) * losses[0], losses
PYTHON
}

# Prints the program of a page, with the check that its ranks' data differ.
program_of() {
  "$python" - "$1" "$2" "$out" <<'PYTHON'
import re
import sys
from pathlib import Path

page, data, out = sys.argv[1:]
blocks = re.findall(r"^```python\n(.*?)^```$", Path(page).read_text(), re.M | re.S)
(program,) = (block for block in blocks if "init_process_group" in block)
head, backward, rest = program.partition("    loss.backward()\n")
assert backward, program
check = Path(out, "differs.py").read_text().replace("DATA", data)
print(head + check + backward + rest, end="")
PYTHON
}

program_of README.md x >"$out/train.py"
run_page train.py 0.3

# The quickstart's, with a folder of a tiny model.
"$python" - "$out" <<'PYTHON'
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

out = Path(sys.argv[1])
sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=256)
sizes |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8)
torch.manual_seed(0)
Qwen3ForCausalLM(Qwen3Config(**sizes)).save_pretrained(out / "Qwen3-0.6B")
by_byte = pre_tokenizers.ByteLevel(add_prefix_space=False)
vocabulary = {letter: i for i, letter in enumerate(sorted(by_byte.alphabet()))}
tokenizer = Tokenizer(models.BPE(vocabulary, []))
tokenizer.pre_tokenizer = by_byte
tokenizer.decoder = decoders.ByteLevel()
PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(out / "Qwen3-0.6B")
(out / "text.txt").write_text(Path("README.md").read_text())
PYTHON
program_of docs/get_started/quickstart_python.md ids |
  sed -e 's/range(100)/range(30)/' -e 's/lr=1e-5/lr=1e-2/' -e 's/512/32/g' >"$out/quickstart.py"
run_page quickstart.py 0.8
"$python" - "$out" <<'PYTHON'
import sys
import torch
from transformers import AutoModelForCausalLM

before, tuned = (
    AutoModelForCausalLM.from_pretrained(f"{sys.argv[1]}/{name}").state_dict()
    for name in ("Qwen3-0.6B", "tuned")
)
moved = [name for name in before if not torch.equal(before[name], tuned[name])]
assert before.keys() == tuned.keys() and moved, (len(before), len(moved))
PYTHON

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
