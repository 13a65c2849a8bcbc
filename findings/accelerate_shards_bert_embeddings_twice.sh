#!/usr/bin/env bash
# accelerate 1.15.0 with transformers 5.24.0: Accelerator.prepare of BERT and ViT with FSDP2
# raises, with the default wrapping by class.
#
# `_no_split_modules` of these models has the class of the embeddings, so accelerate makes a
# unit of it. Then it makes another one of get_input_embeddings(), which is inside and has
# no parameter left. Llama's list has no embeddings.
#
# Seen on 2026-11-30 with torch 2.11.0 on CPUs:
#   BertForSequenceClassification: TypeError: Invariant encountered: value was None
#   ViTForImageClassification:     TypeError: Invariant encountered: value was None
#   with transformer_cls_names_to_wrap=["BertLayer"] and ["ViTLayer"]: sharded
#
# Exits with 1 when the behavior is another.
# usage: findings/accelerate_shards_bert_embeddings_twice.sh [a Python that has the packages]
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
import transformers
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.fsdp_utils import fsdp2_prepare_model

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
MODELS = {
    "BertForSequenceClassification": ("BertConfig", "BertLayer"),
    "ViTForImageClassification": ("ViTConfig", "ViTLayer"),
}


def prepared(name, config, layers):
    """What Accelerator.prepare does, on a CPU."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        cpu_ram_efficient_loading=False,
        transformer_cls_names_to_wrap=layers,
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=None,
        mixed_precision="no",
        is_main_process=True,
        device=torch.device("cpu"),
    )
    model = getattr(transformers, name)(getattr(transformers, config)(**SIZES))
    try:
        fsdp2_prepare_model(accelerator, model)
    except TypeError as error:
        return f"TypeError: {str(error).split(' when')[0]}"
    return "sharded"


dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
found = []
for name, (config, layer) in MODELS.items():
    found.append(prepared(name, config, None))
    print(f"{name}: {found[-1]}")
    found.append(prepared(name, config, [layer]))
    print(f"  with transformer_cls_names_to_wrap={[layer]}: {found[-1]}")
error = "TypeError: Invariant encountered: value was None"
sys.exit(0 if found == [error, "sharded"] * 2 else 1)
PROGRAM
"$python" "$folder/program.py" 2>/dev/null
