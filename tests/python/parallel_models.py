"""A model with tensor parallelism over one mesh dimension, sharded over another."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.python.device import named_mesh, on_device
from tests.python.models import TokenModel
from tests.python.training import adamw, train_batches

DIM, HIDDEN, VOCAB = 12, 20, 16
SHAPES = {1: [(1, 1)], 2: [(1, 2), (2, 1)], 4: [(2, 2), (1, 4), (4, 1)]}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, HIDDEN)
        self.down = nn.Linear(HIDDEN, DIM)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(TokenModel):
    def __init__(self, blocks=2):
        super().__init__(VOCAB, DIM, (Block() for _ in range(blocks)))


def make():
    torch.manual_seed(0)
    return Model()


def parallel(model, tp, sequence=False, logits="whole"):
    """Splits the model over `tp`, and with `sequence` also the tokens between its
    layers."""
    for block in model.blocks:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        if sequence:
            plan = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            }
        parallelize_module(block, tp, plan)
    split = Shard(1) if sequence else Replicate()
    parallelize_module(
        model,
        tp,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=split),
            "head": ColwiseParallel(
                input_layouts=split,
                output_layouts=Replicate() if logits == "whole" else None,
                use_local_output=logits == "whole",
            ),
        },
    )
    return model


def shard(model, function, **options):
    for block in model.blocks:
        function(block, **options)
    return function(model, **options)


def meshes(world):
    if world not in SHAPES:
        pytest.skip("needs 1, 2 or 4 ranks")
    for dp, tp in SHAPES[world]:
        yield dp, tp, named_mesh(dp=dp, tp=tp)


def loss_of(model, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = on_device(torch.randint(0, VOCAB, (2, 8), generator=generator))
    logits = model(tokens)
    return nn.functional.cross_entropy(
        logits.flatten(0, 1), tokens.roll(1, 1).flatten()
    )


def train(model, seeds, steps=3, optimizer=None):
    """`seeds`: of the batches of a step, one for each data-parallel rank."""
    return train_batches(
        lambda step, seed: loss_of(model, 100 * step + seed),
        optimizer or adamw(model),
        seeds,
        steps,
    )


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def values(model):
    return {name: whole(p) for name, p in model.named_parameters()}
