"""One step of an installed package on several ranks: gradients are the mean over the
ranks, and AdamW moves the parameters. wheel_test.sh runs it outside the checkout.

usage: wheel_step.py FOLDER    that the package has to come from
"""

import copy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import flatshard
from flatshard.megatron import v2  # a package inside the package

assert Path(flatshard.__file__).is_relative_to(sys.argv[1]), flatshard.__file__
assert v2.__file__ is not None
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
single = copy.deepcopy(model)
for layer in (model[0], model):
    flatshard.fully_shard(layer)
optimizer = flatshard.optim.AdamW(model.parameters(), lr=0.1)
reference = torch.optim.AdamW(single.parameters(), lr=0.1)
batches = torch.randn(dist.get_world_size(), 4, 5)
model(batches[dist.get_rank()]).square().mean().backward()
single(batches.flatten(0, 1)).square().mean().backward()
optimizer.step()
reference.step()
for p, q in zip(model.parameters(), single.parameters()):
    torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    torch.testing.assert_close(p.full_tensor(), q)
print(f"rank {dist.get_rank()}: one step of {flatshard.__file__}")
dist.destroy_process_group()
