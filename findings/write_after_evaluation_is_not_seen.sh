#!/usr/bin/env bash
# torch 2.11.0: a unit of FSDP2 that stays unsharded after its forward does not see a write
# to its sharded parameters before the next forward. Without a backward in between, it
# computes with the values of the first forward. The model's outermost unit is such a unit
# by default, and so is accelerate's unit of the final norm and the head.
#
# Seen on 2026-11-30 with torch 2.11.0 on two Gloo ranks, for a linear layer of ones:
#   forward without gradients:                     4.0
#   after p.mul_(2) on the optimizer's parameter:  4.0
#   after reshard():                               8.0
# So an evaluation with averaged weights (EMA) that are swapped in after another
# evaluation computes with new values in some layers and with old ones in the others.
#
# Exits with 1 when the behavior is another.
# usage: findings/write_after_evaluation_is_not_seen.sh [a Python that has torch 2.11.0]
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


@torch.no_grad()
def run(rank, folder):
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    net = torch.nn.Linear(4, 2, bias=False)
    net.weight.fill_(1.0)
    fully_shard(net, mesh=dist.device_mesh.init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    (p,) = optimizer.param_groups[0]["params"]
    x = torch.ones(1, 4)
    found = [net(x)[0, 0].item()]
    p.mul_(2)
    found.append(net(x)[0, 0].item())
    net.reshard()
    found.append(net(x)[0, 0].item())
    if rank == 0:
        print("forward, after p.mul_(2), after reshard():", *found, flush=True)
    dist.destroy_process_group()
    sys.exit(0 if found == [4.0, 4.0, 8.0] else 1)


if __name__ == "__main__":
    print("torch", torch.__version__, flush=True)
    multiprocessing.spawn(run, (sys.argv[1],), nprocs=2)
PROGRAM
"$python" "$folder/program.py" "$folder" 2>/dev/null
