"""Training the same model twice, and how far two results may be apart."""

import copy
import warnings

import torch
from torch.distributed.fsdp import fully_shard as fsdp2

import flatshard


def shard(model, function, **options):
    for unit in model.units():
        function(unit, **options)
    return function(model, **options)


def train(model, rank, steps=3, accumulation=1, optimizer=None, sync_last_only=False):
    """Losses of this rank. Every rank sees batches of its own."""
    if optimizer is None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    losses = []
    for step in range(steps):
        for micro in range(accumulation):
            if sync_last_only:
                model.set_requires_gradient_sync(micro == accumulation - 1)
            generator = torch.Generator().manual_seed(
                1000 * step + 10 * micro + 100_000 * rank
            )
            loss = model.loss(generator) / accumulation
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def full_state(model):
    return {
        name: (t.full_tensor() if hasattr(t, "full_tensor") else t).clone()
        for name, t in model.state_dict().items()
    }


def both(make, mesh, rank, options=None, fsdp2_options=None, **training):
    """(losses, weights) under Flatshard and under FSDP2."""
    torch.manual_seed(0)
    ours = make()
    theirs = copy.deepcopy(ours)
    shard(ours, flatshard.fully_shard, mesh=mesh, **(options or {}))
    shard(theirs, fsdp2, mesh=mesh, **(fsdp2_options or {}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        a = train(ours, rank, **training)
        b = train(theirs, rank, **training)
    return (a, full_state(ours)), (b, full_state(theirs))


def distance(a, b):
    """Largest difference of two states, relative to the largest weight."""
    assert a.keys() == b.keys()
    scale = max(t.abs().max().item() for t in b.values() if t.numel())
    return (
        max(
            ((a[name] - b[name]).abs().max().item() for name in a if a[name].numel()),
            default=0.0,
        )
        / scale
    )
