"""Functions of torch.func on sharded models, also as their first call."""

import copy

import pytest
import torch
from torch import nn

from flatshard import fully_shard

from tests.python.device import on_device

CALLS = {
    "jvp": lambda m, x: torch.func.jvp(m, (x,), (torch.ones_like(x),)),
    "vjp": lambda m, x: torch.func.vjp(m, x)[1](torch.ones_like(m(x))),
    "jacrev": lambda m, x: (torch.func.jacrev(lambda y: m(y).sum(0))(x),),
    "vmap": lambda m, x: (torch.vmap(m)(x),),
}


@pytest.mark.parametrize("call", CALLS)
def test_values_and_gradients(call, mesh, rank, world):
    torch.manual_seed(0)
    plain = on_device(nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3)))
    model = copy.deepcopy(plain)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    inputs = [on_device(torch.randn(4, 7)) for _ in range(world)]
    outputs = [CALLS[call](plain, x) for x in inputs]
    found = CALLS[call](model, inputs[rank])
    torch.testing.assert_close(found, outputs[rank])
    sum(value.square().sum() for out in outputs for value in out).backward()
    sum(value.square().sum() for value in found).backward()
    for p, q in zip(plain.parameters(), model.parameters()):
        if p.grad is None:
            assert q.grad is None
        else:
            torch.testing.assert_close(q.grad.full_tensor() * world, p.grad)


def net(mesh):
    torch.manual_seed(0)
    model = on_device(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)))
    fully_shard(model[0], mesh=mesh)
    return fully_shard(model, mesh=mesh)


GIVEN = {
    "tensors": lambda p: torch.zeros(p.shape, device=p.device),
    "one's own": lambda p: p * 2,
    "copies": lambda p: p.detach().clone().requires_grad_(),
}


@pytest.mark.parametrize("when", ["first", "later"])
@pytest.mark.parametrize("given", GIVEN)
def test_functional_call_is_named(given, when, mesh):
    model, x = net(mesh), on_device(torch.ones(3, 4))
    if when == "later":
        model(x)
    parameters = {n: GIVEN[given](p) for n, p in model.named_parameters()}
    for _ in range(2):
        with pytest.raises(NotImplementedError, match="functional_call put another"):
            torch.func.functional_call(model, parameters, (x,))
    torch.func.functional_call(model, {}, (x,)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_functional_call_inside_of_a_unit(mesh):
    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x):
            doubled = {n: 2 * p for n, p in self.linear.named_parameters()}
            return torch.func.functional_call(self.linear, doubled, (x,))

    torch.manual_seed(0)
    plain = on_device(Doubled())
    model = fully_shard(copy.deepcopy(plain), mesh=mesh)
    x = on_device(torch.ones(3, 4))
    for _ in range(2):
        plain(x).square().mean().backward()
        model(x).square().mean().backward()
    for p, q in zip(plain.parameters(), model.parameters()):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad)


def test_functional_call_of_an_inner_unit_is_named(mesh):
    """The unit would show its own parameters in the place of the given ones."""

    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.doubles = True

        def forward(self, x):
            parameters = dict(self.linear.named_parameters())
            if self.doubles:
                parameters = {n: 2 * p for n, p in parameters.items()}
            return torch.func.functional_call(self.linear, parameters, (x,))

    torch.manual_seed(0)
    model = on_device(Doubled())
    fully_shard(model.linear, mesh=mesh)
    fully_shard(model, mesh=mesh)
    x = on_device(torch.ones(3, 4))
    for _ in range(2):
        with pytest.raises(
            NotImplementedError, match="linear.weight. This is not supp"
        ):
            model(x)
    model.doubles = False
    model(x).sum().backward()
    assert model.linear.weight.grad is not None
