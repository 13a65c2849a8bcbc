#!/usr/bin/env bash
# transformers 4.57.1 with torch 2.11.0: save_pretrained of a model that FSDP2's
# fully_shard sharded all-gathers a tied weight four times more than it saves it.
#
# It compares the ends of tensors that share memory, `tensor.view(-1)[-1].data_ptr()`.
# For a DTensor the last element is a value: torch all-gathers the whole weight for it, and
# its address is that of no memory. The ends of both names are computed twice. An embedding
# of 128,256 x 4,096 in bfloat16 has 1 GiB, which each rank receives five times.
#
# Seen on 2026-11-29, on two Gloo ranks, for a Llama of two layers:
#   separate weights: 21 tensors, 21 all-gathers
#   tied weights: 20 tensors, 24 all-gathers
#
# Exits with 1 when the behavior is another.
# usage: findings/tied_weights_are_gathered_to_compare.sh [a Python that has torch and transformers]
# Without one it installs them from PyPI into a temporary folder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${1:-$folder/venv/bin/python}
if [ $# -eq 0 ]; then
  python3 -m venv "$folder/venv"
  "$python" -m pip install -q torch==2.11.0 transformers==4.57.1
fi
cat >"$folder/program.py" <<'PROGRAM'
import sys
import tempfile

import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import transformers
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode


def save(rank, tied, store, counts):
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=32,
            intermediate_size=56,
            num_hidden_layers=2,
            num_attention_heads=4,
            vocab_size=96,
            tie_word_embeddings=tied,
        )
    )
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    with tempfile.TemporaryDirectory() as folder, CommDebugMode() as seen:
        model.save_pretrained(folder)
    if rank == 0:
        counts.put((len(list(model.parameters())), seen.get_total_counts()))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    found = []
    for tied in (False, True):
        counts = multiprocessing.get_context("spawn").SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.spawn(save, (tied, f"{folder}/store", counts), nprocs=2)
        found.append(counts.get())
        kind = "tied" if tied else "separate"
        print(f"{kind} weights: {found[-1][0]} tensors, {found[-1][1]} all-gathers")
    sys.exit(0 if found == [(21, 21), (20, 24)] else 1)
PROGRAM
OMP_NUM_THREADS=1 "$python" "$folder/program.py" 2>/dev/null
