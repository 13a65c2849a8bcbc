#!/usr/bin/env bash
# torch 2.11.0: after an exception inside context_parallel,
# torch.nn.functional.scaled_dot_product_attention stays the one of context parallelism.
#
# `context_parallel` restores the function after its `yield`, without `finally`. A program
# that catches the exception (out of memory, a bad batch) and continues outside the context
# exchanges keys with the other ranks there, as if each tensor were a part of a sequence.
# On a CPU, where torch has no ring attention, it raises an error instead. The next
# context_parallel replaces nothing, and restores the function at its end.
#
# Seen on 2026-11-30 on CPUs:
#   after a context that ended normally: restored
#   after an exception inside: not restored, NotImplementedError in the next attention
#   after the next context: restored
#
# Exits with 1 when the behavior is another.
# usage: findings/context_parallel_stays_after_an_exception.sh [a Python that has torch]
# Without one it installs torch from PyPI into a temporary folder.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python=${1:-$folder/venv/bin/python}
if [ $# -eq 0 ]; then
  python3 -m venv "$folder/venv"
  "$python" -m pip install -q torch==2.11.0
fi
cat >"$folder/program.py" <<'PROGRAM'
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
original = F.scaled_dot_product_attention
heads = torch.randn(1, 2, 8, 4)


def state():
    if F.scaled_dot_product_attention is original:
        return "restored"
    try:
        F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    except NotImplementedError:
        return "not restored, NotImplementedError in the next attention"
    return "not restored"


def run(fails):
    rows = torch.arange(8)
    try:
        with context_parallel(mesh, buffers=[rows], buffer_seq_dims=[0]):
            if fails:
                raise ValueError
    except ValueError:
        pass
    return state()


found = [run(False), run(True), run(False)]
print("after a context that ended normally:", found[0])
print("after an exception inside:", found[1])
print("after the next context:", found[2])
error = "not restored, NotImplementedError in the next attention"
sys.exit(0 if found == ["restored", error, "restored"] else 1)
PROGRAM
"$python" "$folder/program.py" 2>/dev/null
