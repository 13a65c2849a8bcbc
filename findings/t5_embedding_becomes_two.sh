#!/usr/bin/env bash
# accelerate 1.15.0 with transformers 5.24.0 and torch 2.11.0: FSDP2 trains two copies of the
# embedding that T5's encoder, decoder and head share. Nothing is raised or warned.
#
# accelerate makes one unit of the final norm, `shared` and `lm_head`. The encoder and the
# decoder of transformers 5 have embeddings of their own with the same weight, and these
# are in the unit of the model. BART is the same, and so is BERT's language model with the
# bias of its head, of which the saved one is never trained. torch 2.15.0 raises.
#
# Seen on 2026-11-29: losses of AdamW at a learning rate of 0.01, on the same batches
#   one process:    4.7695 4.5272 4.5543
#   two Gloo ranks: 4.7695 4.5265 4.5586
# With one embedding module, encoder.embed_tokens = decoder.embed_tokens = shared, the ranks
# have the losses of one process.
#
# Exits with 1 when the behavior is another.
# usage: findings/t5_embedding_becomes_two.sh [a Python that has the three packages]
# Without one it installs them from PyPI into a temporary folder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${1:-$folder/venv/bin/python}
if [ $# -eq 0 ]; then
  python3 -m venv "$folder/venv"
  "$python" -m pip install -q torch==2.11.0 transformers==5.24.0 accelerate==1.15.0
fi
cat >"$folder/program.py" <<'PROGRAM'
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model
from transformers import T5Config, T5ForConditionalGeneration


def model(one_embedding):
    torch.manual_seed(0)
    made = T5ForConditionalGeneration(
        T5Config(
            vocab_size=65,
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=0,
        )
    )
    if one_embedding:
        made.encoder.embed_tokens = made.decoder.embed_tokens = made.shared
    return made


def shard(made):
    """What Accelerator.prepare does, on CPUs."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=None,
        mixed_precision="no",
        is_main_process=True,
        device=torch.device("cpu"),
    )
    return fsdp2_prepare_model(accelerator, made)


def losses(made, rows, world):
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-2)
    found = []
    for ids in rows.split(4):
        mine = ids if world == 1 else ids.chunk(world)[dist.get_rank()]
        loss = made(input_ids=mine, labels=mine).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach()
        if world > 1:
            dist.all_reduce(loss)
        found.append(loss.item() / world)
    return found


def run(rank, folder, rows, expected):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    two = losses(shard(model(False)), rows, 2)
    one = losses(shard(model(True)), rows, 2)
    if rank == 0:
        print("two Gloo ranks:          ", *(f"{loss:.4f}" for loss in two))
        print("with one embedding module:", *(f"{loss:.4f}" for loss in one), flush=True)
    dist.destroy_process_group()
    right = max(abs(a - b) for a, b in zip(one, expected)) < 1e-4
    wrong = max(abs(a - b) for a, b in zip(two, expected)) > 1e-3
    sys.exit(0 if right and wrong else 1)


if __name__ == "__main__":
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(1, 65, (12, 12), generator=generator)
    expected = losses(model(False), rows, 1)
    print("one process:             ", *(f"{loss:.4f}" for loss in expected), flush=True)
    multiprocessing.spawn(run, (sys.argv[1], rows, expected), nprocs=2)
PROGRAM
OMP_NUM_THREADS=1 "$python" "$folder/program.py" "$folder" 2>/dev/null
