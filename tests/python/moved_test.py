"""Sharded modules that move to another device and back, before the first forward and
between steps. Without GPUs the other device is meta, so its values are lost."""

import copy

import pytest
import torch
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.reductions import StorageWeakRef

import flatshard
from flatshard import CPUOffloadPolicy, MixedPrecisionPolicy

from bench.harness.options import fully_shard
from tests.python.device import DEVICE, named_mesh, on_device

AWAY = "meta" if DEVICE == "cpu" else "cpu"


def made(shard, units="layers", **options):
    torch.manual_seed(0)
    model = on_device(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 9), nn.Linear(9, 3)))
    if units == "layers":
        for layer in model:
            shard(layer, **options)
    return shard(model, **options)


def step(model, optimizer, rank, number):
    generator = torch.Generator().manual_seed(10 * number + rank)
    model(on_device(torch.randn(2, 5, generator=generator))).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def away_and_back(model, device=DEVICE):
    """Moves a model away and back. A copy of the state dict restores values that meta
    loses."""
    kept = copy.deepcopy(model.state_dict())
    model.to(AWAY)
    assert all(p.device.type == AWAY for p in model.parameters())
    if AWAY == "meta":
        model.to_empty(device=device)
        model.load_state_dict(kept)
    else:
        model.to(device)


def weights(model):
    return [
        p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()
    ]


@pytest.mark.parametrize("when", ["before", "between"])
@pytest.mark.parametrize("units", ["root", "layers"])
@pytest.mark.parametrize("strategy", ["zero3", "zero2", "zero1", "zero0", "fsdp2"])
def test_away_and_back(when, units, strategy, mesh, rank):
    shard, options = fully_shard, {"mesh": mesh, "strategy": strategy}
    if strategy == "fsdp2":
        shard, options = fsdp2.fully_shard, {"mesh": mesh}
    found = []
    for moves in (False, True):
        model = made(shard, units, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        kept = list(model.parameters())
        if when == "between":
            step(model, optimizer, rank, 0)
        if moves:
            away_and_back(model)
        assert all(p is q for p, q in zip(kept, model.parameters()))
        for number in range(1, 3):
            step(model, optimizer, rank, number)
        found.append(weights(model))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("strategy", ["zero3", "zero2", "zero1", "zero0"])
def test_memory_is_freed(strategy, mesh, rank):
    model = made(fully_shard, mesh=mesh, strategy=strategy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, rank, 0)
    shards = [p.to_local() for p in model.parameters()]
    model[0].unshard()
    storages = [StorageWeakRef(t.untyped_storage()) for t in [*shards, model[0].weight]]
    del shards
    model[0].reshard()
    model.to(AWAY)
    assert all(storage.expired() for storage in storages)


@pytest.mark.skipif(AWAY == "meta", reason="gradients on meta have no values")
def test_gradients_move(mesh, rank):
    found = []
    for moves in (False, True):
        model = made(fully_shard, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(on_device(torch.ones(2, 5) * rank)).square().mean().backward()
        if moves:
            away_and_back(model)
        step(model, optimizer, rank, 0)
        found.append(weights(model))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_part_of_the_model_moves(mesh, rank):
    found = []
    for moves in (False, True):
        model = made(fully_shard, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer, rank, 0)
        if moves:
            away_and_back(model[1])
        step(model, optimizer, rank, 1)
        found.append(weights(model))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_setters_and_dtypes_while_it_is_away(mesh, rank):
    found = []
    for moves in (False, True):
        model = made(fully_shard, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step(model, optimizer, rank, 0)
        kept = copy.deepcopy(model.state_dict())
        if moves:
            model.to(AWAY)
        model.double()
        for layer in model:
            layer.set_gradient_divide_factor(3.0)
        model.set_reshard_after_backward(False)
        if moves:
            model.to_empty(device=DEVICE)
        model.load_state_dict({name: value.double() for name, value in kept.items()})
        x = on_device(torch.full((2, 5), 1.0 + rank, dtype=torch.float64))
        model(x).square().mean().backward()
        optimizer.step()
        found.append(weights(model))
    assert found[0][0].dtype == torch.float64
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_a_part_along_another_dimension(mesh, rank):
    found = []
    for moves in (False, True):
        torch.manual_seed(0)
        model = on_device(nn.Sequential(nn.Linear(12, 24), nn.Linear(24, 4)))

        def columns(parameter):
            return Shard(1) if parameter.dim() == 2 else None

        fully_shard(model, mesh=mesh, shard_placement_fn=columns)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for number in range(2):
            if moves:
                away_and_back(model)
            x = on_device(torch.full((2, 12), 1.0 + rank + number))
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(weights(model))
    torch.testing.assert_close(*found, rtol=0, atol=0)


# -- errors ------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "between"])
def test_a_forward_of_a_model_that_is_away(when, mesh, rank):
    text = "materialized from meta device" if AWAY == "meta" else "is on cpu, expected"
    model = made(fully_shard, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if when == "between":
        step(model, optimizer, rank, 0)
    kept = copy.deepcopy(model.state_dict())
    model[1].to(AWAY)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=text):
            model(on_device(torch.ones(2, 5)))
    model.to_empty(device=DEVICE)
    model.load_state_dict(kept)
    step(model, optimizer, rank, 1)


def test_the_optimizer_of_the_core_is_made_anew(mesh, rank):
    model = made(fully_shard, mesh=mesh)
    optimizer = flatshard.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer, rank, 0)
    away_and_back(model)
    with pytest.raises(RuntimeError, match="changed dtype or device"):
        step(model, optimizer, rank, 1)
    step(model, flatshard.optim.AdamW(model.parameters(), lr=0.1), rank, 1)


def test_what_cannot_move(mesh, rank):
    model = made(fully_shard, mesh=mesh)
    one_pass = model.backward_pass()
    with one_pass.forward():
        model(on_device(torch.ones(2, 5)))
        with pytest.raises(NotImplementedError, match="while a backward_pass is open"):
            model.to(AWAY)
    one_pass.give_up()
    model = on_device(nn.Sequential(nn.Linear(8, 6)))
    model[0].weight.main_grad = None
    fully_shard(model, mesh=mesh)
    with pytest.raises(NotImplementedError, match="whose modules write to main_grad"):
        model.to(AWAY)


@pytest.mark.skipif(DEVICE == "cpu", reason="parameters rest on the CPU anyway")
def test_offloaded_parameters_stay_on_the_cpu(mesh):
    model = made(fully_shard, mesh=mesh, offload_policy=CPUOffloadPolicy())
    model.to(DEVICE)
    with pytest.raises(RuntimeError, match="expected cpu, where"):
        model(on_device(torch.ones(2, 5)))


def test_mixed_precision_with_replicas(rank, world):
    mesh = named_mesh(outer=1, dp=world)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    found = []
    for moves in (False, True):
        model = made(fully_shard, mesh=mesh, mp_policy=policy)
        model[1].requires_grad_(False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for number in range(3):
            step(model, optimizer, rank, number)
            if moves:
                away_and_back(model)
        found.append(weights(model))
    torch.testing.assert_close(*found, rtol=0, atol=0)
