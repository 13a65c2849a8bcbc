"""The host's work in each step: the number of slow paths, not their time."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from flatshard import MixedPrecisionPolicy, fully_shard
from flatshard._fsdp import casts
from flatshard._tensor.watched_tensor import WatchedTensor
from tests.python.device import on_device


def network(mesh, width=8):
    torch.manual_seed(0)
    model = on_device(nn.Sequential(*(nn.Linear(width, width) for _ in range(3))))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    return model


@pytest.fixture
def functions(monkeypatch):
    """Names of the functions that reach __torch_function__ of shards."""
    seen = []
    real = WatchedTensor.__torch_function__.__func__

    def watched(cls, function, types, args=(), kwargs=None):
        seen.append(function.__name__)
        return real(cls, function, types, args, kwargs)

    monkeypatch.setattr(WatchedTensor, "__torch_function__", classmethod(watched))
    return seen


@pytest.mark.parametrize("way", ["fused", "foreach"])
def test_an_optimizer_asks_shards_by_the_list(way, mesh, functions):
    model = network(mesh)
    x = on_device(torch.ones(2, 8))
    optimizer = torch.optim.AdamW(model.parameters(), **{way: True})
    for _ in range(2):
        model(x).sum().backward()
        functions.clear()
        optimizer.step()
        optimizer.zero_grad()
    # Another one for each of the six parameters would be too many.
    assert len([name for name in functions if name != "is_complex"]) < 12
    assert all(p.grad is None for p in model.parameters())


def test_states_of_optimizers_have_the_specs_of_parameters(mesh, world):
    """A fused or foreach update compares nothing else."""
    if world == 1:
        pytest.skip("one rank cuts nothing")
    model = network(mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(on_device(torch.ones(2, 8))).sum().backward()
    optimizer.step()
    for p in model.parameters():
        for name in ("exp_avg", "exp_avg_sq"):
            assert optimizer.state[p][name]._spec is p._spec
        assert p.grad._spec is p._spec


def test_grad_is_set_and_deleted_as_of_any_tensor(mesh):
    model = network(mesh)
    weight = model[0].weight
    assert weight.grad is None
    weight.grad = torch.full_like(weight, 2)
    assert weight.grad.full_tensor().eq(2).all()
    assert torch.Tensor.grad.__get__(weight) is weight.grad
    del weight.grad
    assert weight.grad is None
    assert not weight.is_sparse
    with pytest.raises(RuntimeError, match="size"):
        weight.grad = on_device(torch.zeros(3))


Pair = namedtuple("Pair", "left right")


@dataclass
class Packed:
    inner: object
    number: int


def test_arguments_in_any_nesting_are_cast(monkeypatch):
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    x, ids = torch.ones(2), torch.ones(2, dtype=torch.long)
    kwargs = {
        "mask": None,
        "flag": True,
        "name": "x",
        "cut": [x, (ids, x)],
        "named": {"pair": Pair(x, ids)},
        "packed": Packed(Pair(x, x), 3),
    }
    (first,), cast = casts.cast_inputs(policy, (x,), kwargs)
    assert first.dtype == torch.bfloat16
    assert (cast["mask"], cast["flag"], cast["name"]) == (None, True, "x")
    assert type(cast["cut"]) is list and type(cast["cut"][1]) is tuple
    assert cast["cut"][0].dtype == cast["cut"][1][1].dtype == torch.bfloat16
    assert cast["cut"][1][0] is ids
    pair = cast["named"]["pair"]
    assert type(pair) is Pair and pair.left.dtype == torch.bfloat16
    assert pair.right is ids
    assert cast["packed"].inner.left.dtype == torch.bfloat16
    assert cast["packed"].number == 3
    assert kwargs["cut"][0] is x and kwargs["packed"].inner.left is x
    # Arguments of most models do not reach tree_map.
    monkeypatch.setattr(casts, "tree_map", None)
    casts.cast_inputs(policy, (x,), {"mask": None, "angles": (x, [x]), "more": {1: 2}})
