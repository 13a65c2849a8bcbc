#!/usr/bin/env bash
# torch 2.11.0, Gloo: all_reduce(MAX) and all_reduce(MIN) drop a NaN, or keep it, depending
# on the rank that has it and on the place in the tensor. All ranks get the same result.
#
# Seen on 2026-11-29 with torch 2.11.0 on CPUs, two ranks, tensors of 10 elements, NaN in
# elements 0, 4 and 9 of one rank. NaN in the result (1: yes):
#   MAX, NaN on rank 0: 1 1 0
#   MAX, NaN on rank 1: 0 0 1
#   MIN, NaN on rank 0: 1 1 0
#   MIN, NaN on rank 1: 0 0 1
# SUM keeps every NaN. So an infinity norm that DTensor computes on CPUs, such as
# torch.nn.utils.get_total_norm(gradients, norm_type=inf), is finite for half of the
# gradients that have a NaN: torch.amax on one process propagates it.
#
# Exits with 1 when the behavior is another.
# usage: findings/gloo_max_nan.sh [a Python that has torch 2.11.0]
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
import os
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

PLACES = [0, 4, 9]
SEEN = {
    ("MAX", 0): [1, 1, 0],
    ("MAX", 1): [0, 0, 1],
    ("MIN", 0): [1, 1, 0],
    ("MIN", 1): [0, 0, 1],
    ("SUM", 0): [1, 1, 1],
    ("SUM", 1): [1, 1, 1],
}


def run(rank, folder):
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    same = True
    for (operation, owner), expected in SEEN.items():
        tensor = torch.ones(10)
        if rank == owner:
            tensor[PLACES] = torch.nan
        dist.all_reduce(tensor, getattr(dist.ReduceOp, operation))
        found = tensor[PLACES].isnan().int().tolist()
        print(f"rank {rank}: {operation}, NaN on rank {owner}: {found}", flush=True)
        same = same and found == expected
    dist.destroy_process_group()
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    print("torch", torch.__version__)
    mp.spawn(run, (sys.argv[1],), nprocs=2)
PROGRAM
"$python" "$folder/program.py" "$folder"
