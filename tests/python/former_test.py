"""Tensors that were parameters before fully_shard and that a model still refers to, from a list
or a closure that __init__ made: reading one raises an error, where it would not train."""

import pytest
import torch
from torch import nn

from flatshard import fully_shard

from tests.python.device import on_device
from tests.python.training import refused

REFUSED = refused(
    "parameter 0.weight is read as it was before fully_shard", RuntimeError
)


class Layer(nn.Module):
    def __init__(self, use):
        super().__init__()
        self.weight = nn.Parameter(on_device(torch.randn(4, 4)))
        self.use = use
        self.weights = [self.weight]
        self.rows = self.weight[:2]
        weight = self.weight
        self.scaled = lambda x: x @ (2 * weight)

    def forward(self, x):
        return self.use(self, x)


USES = {
    "a list": lambda layer, x: x @ layer.weights[0],
    "a closure": lambda layer, x: layer.scaled(x),
    "a view": lambda layer, x: x @ layer.weight + x[:, :2] @ layer.rows,
    "without gradients": lambda layer, x: x @ layer.weight
    + layer.weights[0].detach()[0],
    "data": lambda layer, x: x @ layer.weight + layer.weights[0].data.sum(),
    "a view of it": lambda layer, x: x @ layer.weights[0].t(),
}


def net(use, mesh, around=False):
    torch.manual_seed(0)
    model = on_device(nn.Sequential(Layer(use), nn.Linear(4, 4)))
    if not around:
        fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("around", [False, True])
@pytest.mark.parametrize("use", USES)
def test_used_in_the_forward(use, around, mesh):
    model = net(USES[use], mesh, around)
    with pytest.raises(
        RuntimeError, match="0.weight is read as it was before fully_shard"
    ):
        model(on_device(torch.ones(3, 4))).sum().backward()


def plain_use(layer, x):
    return x @ layer.weight


@pytest.mark.parametrize("where", ["loss", "hook"])
def test_used_around_the_forward(where, mesh):
    model = net(plain_use, mesh)
    former = model[0].weights[0]
    if where == "hook":
        model[1].register_forward_hook(lambda m, args, out: out + former.sum())
    with REFUSED:
        out = model(on_device(torch.ones(3, 4))).sum()
        (out + former.square().sum()).backward()


def test_reading_it_before_the_training(mesh):
    """A program may compare the values."""
    model = net(plain_use, mesh)
    former = model[0].weights[0]
    with torch.no_grad():
        model(on_device(torch.ones(3, 4)))
    assert torch.equal(model[0].weight.full_tensor(), former)


def test_evaluation_of_written_parameters(mesh):
    model = net(USES["a list"], mesh)
    x = on_device(torch.ones(3, 4))
    with torch.no_grad():
        model(x)
        model[0].weight.mul_(2)
        with REFUSED:
            model(x)


def test_frozen_parameters_may_be_shared(mesh):
    """Their values do not change."""
    torch.manual_seed(0)
    model = on_device(nn.Sequential(Layer(USES["a list"]), nn.Linear(4, 4)))
    model[0].requires_grad_(False)
    x = on_device(torch.ones(3, 4))
    want = model(x)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.0
    )
    for _ in range(3):
        out = model(x)
        torch.testing.assert_close(out, want)
        out.sum().backward()
        optimizer.step()


def test_its_hooks_are_the_shards(mesh):
    seen = []
    torch.manual_seed(0)
    model = on_device(nn.Sequential(Layer(plain_use), nn.Linear(4, 4)))
    model[0].weight.register_hook(lambda grad: seen.append(tuple(grad.shape)))
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        model(on_device(torch.ones(3, 4))).sum().backward()
    assert seen == [(4, 4)] * 2


def test_a_recurrent_layer_trains(mesh):
    """It has a list of its weights."""
    torch.manual_seed(0)
    model = fully_shard(on_device(nn.LSTM(4, 4)), mesh=mesh)
    before = [p.full_tensor().clone() for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(2):
        model(on_device(torch.ones(3, 4)))[0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for p, former in zip(model.parameters(), before):
        assert not torch.equal(p.full_tensor(), former)
