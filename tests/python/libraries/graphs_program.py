"""Trains a block, a unit of two modules, and a root around them. Prints which of them
were asked for CUDA graphs, and how many forwards were replayed."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from flatshard import cuda_graph_stats

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = nn.Sequential(
    nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
)
for part in (model[0], [model[1], model[2]], model):
    fully_shard(part)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(6):
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print(
    [
        fully_shard.state(m).sharding.options.cuda_graph
        for m in (model[0], model[1], model)
    ]
)
print(cuda_graph_stats(model)["forward_replays"])
