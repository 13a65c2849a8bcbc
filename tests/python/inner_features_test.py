"""Backwards that start in the middle of a unit: losses of a feature that a forward hook
recorded, and gradients requested with torch.autograd.grad."""

import copy

import pytest
import torch
from torch import nn

from flatshard import fully_shard
from tests.python.models import on_device


class Block(nn.Module):
    def __init__(self, dim=6):
        super().__init__()
        self.up, self.norm = nn.Linear(dim, 2 * dim), nn.LayerNorm(2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.tanh(self.norm(self.up(x))))


def stack():
    torch.manual_seed(1)
    return on_device(nn.Sequential(Block(), Block(), nn.Linear(6, 3)))


def shard(model, mesh, **options):
    for block in model:
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def take_features(model, names):
    found = {}
    for name in names:
        model.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: found.__setitem__(name, output)
        )
    return found


FEATURES = [["0.norm"], ["1.up"], ["0.up", "1.norm"], ["1.down"]]


@pytest.mark.parametrize("names", FEATURES)
@pytest.mark.parametrize("when", ["before", "after", "later"])
@pytest.mark.parametrize("also_output", [False, True])
@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
def test_losses_of_features(names, when, also_output, strategy, mesh, rank, world):
    plain = stack()
    model = copy.deepcopy(plain)
    expected = take_features(plain, names)
    if when == "before":
        found = take_features(model, names)
    shard(model, mesh, strategy=strategy)
    if when == "later":
        model(on_device(torch.ones(1, 6))).sum().backward()
        model.zero_grad()
    if when != "before":
        found = take_features(model, names)
    inputs = [
        on_device(torch.randn(2, 6, generator=torch.Generator().manual_seed(r)))
        for r in range(world)
    ]

    def loss(model, features, x):
        out = model(x)
        total = sum(feature.square().sum() for feature in features.values())
        return total + out.sum() if also_output else total

    for _ in range(2):
        loss(model, found, inputs[rank]).backward()
        for x in inputs:
            (loss(plain, expected, x) / world).backward()
    for (name, p), q in zip(plain.named_parameters(), model.named_parameters()):
        q = q[1]
        if p.grad is None:
            assert q.grad is None or not q.grad.full_tensor().any(), name
        else:
            torch.testing.assert_close(q.grad.full_tensor(), p.grad, msg=name)


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
def test_gradients_of_the_last_layer(strategy, mesh, rank, world):
    """The adaptive weight of VQGAN: the ratio of the norms of two gradients."""
    plain = stack()
    model = shard(copy.deepcopy(plain), mesh, strategy=strategy)
    inputs = [
        on_device(torch.randn(2, 6, generator=torch.Generator().manual_seed(r)))
        for r in range(world)
    ]

    def weighted(model, xs):
        outs = [model(x) for x in xs]
        nll = sum(out.square().mean() for out in outs) / len(xs)
        other = sum(out.abs().mean() for out in outs) / len(xs)
        last = model[2].weight
        (a,) = torch.autograd.grad(nll, last, retain_graph=True)
        (b,) = torch.autograd.grad(other, [last], retain_graph=True)
        weight = a.norm() / (b.norm() + 1e-4)
        if hasattr(weight, "full_tensor"):
            weight = weight.full_tensor()
        (nll + weight.detach() * other).backward()
        return a, weight

    for _ in range(2):
        got, weight = weighted(model, [inputs[rank]])
        want, expected = weighted(plain, inputs)
        torch.testing.assert_close(got.full_tensor(), want)
        torch.testing.assert_close(weight, expected)
    for p, q in zip(plain.parameters(), model.parameters()):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad)


def test_a_parameter_that_was_not_used(mesh, rank):
    model = shard(stack(), mesh)
    loss = model[:1](on_device(torch.ones(1, 6))).sum()
    last = model[2].weight
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(loss, last, retain_graph=True)
    assert torch.autograd.grad(loss, last, allow_unused=True) == (None,)
