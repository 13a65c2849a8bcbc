"""Small models whose weights every FP8 recipe supports, and how they are trained."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import Float8Policy, MixedPrecisionPolicy
from tests.python.device import named_mesh
from tests.python.models import HuggingFace, TokenModel
from tests.python.models import llama as small_llama
from bench.harness.options import fully_shard

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
DIM, HIDDEN = 128, 256


def policy(recipe, column_plane="auto", **options):
    """Emulated on GPUs that do not multiply the recipe."""
    return Float8Policy(recipe, column_plane=column_plane, emulate=True, **options)


# Every recipe, with both kinds of columns where it has them.
KINDS = {
    "tensorwise": ("tensorwise",),
    "rowwise": ("rowwise",),
    "rowwise stored": ("rowwise", "stored"),
    "blockwise": ("blockwise",),
    "mxfp8": ("mxfp8",),
    "mxfp8 stored": ("mxfp8", "stored"),
}


class Block(nn.Module):
    def __init__(self, dim=DIM, hidden=HIDDEN):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim, bias=False)

    def inner(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))

    def forward(self, x):
        return x + self.inner(x)


class Recomputing(Block):
    """Its matmuls run again in the backward."""

    reentrant = False

    def forward(self, x):
        return x + checkpoint(self.inner, x, use_reentrant=self.reentrant)


class Mlp(TokenModel):
    def __init__(self, blocks=2, block=Block):
        super().__init__(11, DIM, (block() for _ in range(blocks)))


def llama(**options):
    sizes = dict(hidden_size=DIM, intermediate_size=HIDDEN, num_key_value_heads=4)
    return small_llama(**sizes, **options)


def shard(model, mesh, fp8, **options):
    """The units have FP8 weights, the root has not. Of a Hugging Face model the root is
    transformers' own, as in most scripts."""
    options = {"mesh": mesh, "mp_policy": BF16, **options}
    for unit in model.units():
        fully_shard(unit, fp8=fp8, **options)
    fully_shard(model.model if isinstance(model, HuggingFace) else model, **options)
    return model


def one_rank(world):
    """Returns a mesh with only this rank."""
    return named_mesh(copies=world, alone=1)["alone"]


def train(model, batches, steps=3, between=lambda: None):
    """Losses of each step's microbatches.

    Args:
        batches: the numbers of the microbatches of this rank, of all that there are.
    """
    optimizer = flatshard.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(steps):
        for number in batches:
            loss = model.loss(torch.Generator().manual_seed(number))
            (loss / len(batches)).backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        between()
    return losses
