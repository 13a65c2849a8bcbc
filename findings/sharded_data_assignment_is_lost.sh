#!/usr/bin/env bash
# torch 2.11.0: `p.data = tensor` of a parameter that FSDP2's fully_shard sharded has no
# effect, and raises nothing. The DTensor keeps its local tensor.
#
# Seen on 2026-11-29 with torch 2.11.0 on two Gloo ranks:
#   p.data = saved: the weights differ from the saved ones by 1.0, as before
#   p.data.copy_(saved): they are the saved ones
# So an optimizer or callback that keeps `p.data.clone()`, changes p, and assigns the copy to
# p.data trains with the changed values: common implementations of SAM (sharpness-aware
# minimization) do, and swaps of averaged weights (EMA).
#
# Exits with 1 when the behavior is another.
# usage: findings/sharded_data_assignment_is_lost.sh [a Python that has torch 2.11.0]
# Without one it installs torch from PyPI into a temporary folder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${1:-$folder/venv/bin/python}
if [ $# -eq 0 ]; then
  python3 -m venv "$folder/venv"
  "$python" -m pip install -q torch==2.11.0 numpy==2.2.6
fi
cat >"$folder/program.py" <<'PROGRAM'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.distributed.fsdp import fully_shard


def run(rank, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    mesh = dist.device_mesh.init_device_mesh("cpu", (2,))
    p = fully_shard(torch.nn.Linear(4, 6), mesh=mesh).weight
    full = p.full_tensor().detach().clone()
    saved = p.data.clone()
    with torch.no_grad():
        p.add_(1.0)
    p.data = saved
    assigned = (p.full_tensor() - full).abs().max().item()
    p.data.copy_(saved)
    copied = (p.full_tensor() - full).abs().max().item()
    if rank == 0:
        print(f"p.data = saved: the weights differ by {assigned:.1f}")
        print(f"p.data.copy_(saved): the weights differ by {copied:.1f}", flush=True)
    dist.destroy_process_group()
    sys.exit(0 if (round(assigned, 5), copied) == (1.0, 0.0) else 1)


if __name__ == "__main__":
    print("torch", torch.__version__, flush=True)
    multiprocessing.spawn(run, (sys.argv[1],), nprocs=2)
PROGRAM
"$python" "$folder/program.py" "$folder" 2>/dev/null
