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
