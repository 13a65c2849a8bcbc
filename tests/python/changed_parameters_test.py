"""requires_grad and dtypes that change between fully_shard and the first forward."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

from flatshard import MixedPrecisionPolicy
from flatshard._fsdp import root

from tests.python.options import fully_shard

STRATEGIES = ["zero3", "zero2", "zero1", "zero0"]


def three_layers():
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 9), nn.Linear(9, 3))


def freeze_first(model):
    model[0].requires_grad_(False)


def swap(model):
    model[0].requires_grad_(False)
    model[1].requires_grad_(True)


def unfreeze_all(model):
    model.requires_grad_(True)


def freeze_biases(model):
    for name, p in model.named_parameters():
        p.requires_grad_(name.endswith("weight"))


@pytest.mark.parametrize("change", [freeze_first, swap, unfreeze_all, freeze_biases])
@pytest.mark.parametrize("units", ["root", "layers"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_requires_grad_before_the_first_forward(
    change, units, strategy, mesh, rank, world
):
    plain = three_layers().to(mesh.device_type)
    plain[1].requires_grad_(False)
    model = copy.deepcopy(plain)
    if units == "layers":
        for layer in model:
            fully_shard(layer, mesh=mesh, strategy=strategy)
    fully_shard(model, mesh=mesh, strategy=strategy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    twin = torch.optim.AdamW(plain.parameters(), lr=0.1)
    kept = list(model.parameters())
    change(model)
    change(plain)
    inputs = [
        torch.randn(2, 5, generator=torch.Generator().manual_seed(r)).to(
            mesh.device_type
        )
        for r in range(world)
    ]
    for _ in range(3):
        model(inputs[rank]).square().mean().backward()
        (sum(plain(x).square().mean() for x in inputs) / world).backward()
        for (name, p), q in zip(plain.named_parameters(), model.parameters()):
            assert (p.grad is None) == (q.grad is None), name
        optimizer.step()
        optimizer.zero_grad()
        twin.step()
        twin.zero_grad()
    for old, p, q in zip(kept, plain.parameters(), model.parameters()):
        assert old is q
        assert q.requires_grad == p.requires_grad
        torch.testing.assert_close(q.full_tensor(), p.detach())


def test_a_parameter_that_is_frozen_later_is_an_error(mesh, rank):
    model = fully_shard(three_layers().to(mesh.device_type), mesh=mesh)
    x = torch.ones(1, 5, device=mesh.device_type)
    model(x)
    model[0].requires_grad_(False)
    with pytest.raises(RuntimeError, match="requires_grad of parameter weight"):
        model(x)


@pytest.mark.parametrize(
    "convert", [lambda m: m.float(), lambda m: m.to(torch.float32)]
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dtypes_before_the_first_forward(convert, strategy, mesh, rank):
    plain = three_layers().to(mesh.device_type, torch.bfloat16)
    plain[0].requires_grad_(False)
    model = copy.deepcopy(plain)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    fully_shard(model[1], mesh=mesh, strategy=strategy, mp_policy=policy)
    fully_shard(model, mesh=mesh, strategy=strategy, mp_policy=policy)
    kept = list(model.parameters())
    convert(model)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model(torch.ones(1, 5, device=mesh.device_type)).float().sum().backward()
    for old, (name, p), q in zip(kept, plain.named_parameters(), model.parameters()):
        assert old is q
        assert q.full_tensor().equal(p.float().detach()) or not q.requires_grad, name
        assert (q.grad is None) == (not p.requires_grad), name
        if q.grad is not None:
            assert q.dtype == q.grad.dtype == torch.float32
    optimizer.step()
    # A step that bfloat16 would round away.
    moved = model[2].bias.full_tensor() - plain[2].bias.float()
    assert (moved.abs() > 0).all()


def test_dtypes_do_not_change_after_the_first_forward(mesh, rank):
    model = fully_shard(three_layers().to(mesh.device_type), mesh=mesh)
    model(torch.ones(1, 5, device=mesh.device_type))
    with pytest.raises(NotImplementedError, match="its dtype until the first forward"):
        model.to(torch.bfloat16)


# -- options of the outermost module ---------------------------------------------------


@pytest.mark.parametrize("option", [{"prefetch": 2}, {"slots_on_demand": False}])
def test_options_of_the_root_are_refused_inside(option, mesh):
    model = three_layers().to(mesh.device_type)
    fully_shard(model[0], mesh=mesh, **option)
    fully_shard(model, mesh=mesh)
    name = next(iter(option))
    with pytest.raises(ValueError, match=f"{name}=.* of unit 0 has no effect"):
        model(torch.ones(1, 5, device=mesh.device_type))
    same = three_layers().to(mesh.device_type)
    fully_shard(same[0], mesh=mesh, **option)
    fully_shard(same, mesh=mesh, **option)
    same(torch.ones(1, 5, device=mesh.device_type))


def test_padding_is_a_warning(mesh, rank, monkeypatch):
    model = fully_shard(three_layers().to(mesh.device_type), mesh=mesh)
    asked = []

    def describe(units, max_padding):
        asked.append(max_padding)
        return "padding is 9.8 %"

    monkeypatch.setattr(root._C, "describe_excessive_padding", describe)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        model(torch.ones(1, 5, device=mesh.device_type))
    texts = [str(w.message) for w in seen]
    assert asked == [0.05]
    assert ("fully_shard: padding is 9.8 %" in texts) == (rank == 0)


def test_one_row_that_no_rank_shares_is_accepted(mesh, rank):
    class Embedded(nn.Module):  # as vit_large_patch16_224
        def __init__(self):
            super().__init__()
            self.positions = nn.Parameter(torch.zeros(1, 197, 1024))
            self.head = nn.Linear(1024, 4)

        def forward(self, x):
            return self.head(x + self.positions)

    model = fully_shard(Embedded().to(mesh.device_type), mesh=mesh)
    x = torch.ones(1, 197, 1024, device=mesh.device_type)
    model(x).sum().backward()
    assert model.positions.grad is not None


def test_a_dtensor_of_another_dtype_takes_the_place_of_a_parameter(mesh, rank):
    values = torch.arange(35.0, device=mesh.device_type).view(7, 5) / 7
    model = three_layers().to(mesh.device_type, torch.bfloat16)
    fully_shard(model, mesh=mesh)
    mine = nn.Parameter(distribute_tensor(values, mesh, [Shard(0)]))
    model[0].weight = mine
    with torch.autocast(mesh.device_type, torch.bfloat16):
        model(torch.ones(1, 5, device=mesh.device_type)).sum().backward()
    assert model[0].weight is mine and mine.grad.dtype == torch.float32
    assert mine.full_tensor().equal(values)
