"""Parameters of other dtypes and shapes: float64, frozen ones of any, scalars, ignored ones."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import flatshard
from flatshard import MixedPrecisionPolicy, fully_shard
from tests.python.device import on_device
from tests.python.models import DIM, Block, Body, plain
from tests.python.training import (
    STRATEGIES,
    against_one_process,
    data,
    full_state,
    refused,
    shard,
    two_microbatches,
)


class Doubles(Block):
    def __init__(self, dim, hidden):
        super().__init__(dim, hidden)
        self.double()

    def forward(self, x):
        return super().forward(x.to(self.up.weight.dtype)).to(x.dtype)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_float64_parameters_train(strategy, mesh, rank, world):
    model = Body(plain)
    model.blocks[1] = Doubles(DIM, 40)
    model.blocks[0].down.bias.requires_grad_(False)
    against_one_process(model, mesh, rank, world, strategy=strategy)
    assert model.blocks[1].up.weight.dtype == torch.float64
    with refused("float64 parameters are not supported.*torch.optim", RuntimeError):
        flatshard.optim.AdamW(model.parameters())


FROZEN = (
    torch.int64,
    torch.int32,
    torch.int16,
    torch.uint8,
    torch.bool,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float64,
)


@pytest.mark.parametrize("strategy", ["no_shard", "optim_grads_params"])
@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
def test_frozen_parameters_of_any_dtype(strategy, param_dtype, mesh, rank, folder):
    class Quantized(nn.Module):
        def __init__(self, dtype):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            values = torch.randint(2, (5, 3)).to(dtype)
            self.codes = nn.Parameter(values, requires_grad=False)

        def forward(self, x):
            return x + (self.codes.to(x.dtype) * self.scale).sum()

    model = on_device(nn.Sequential(*(Quantized(dtype) for dtype in FROZEN)))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    fully_shard(model, mesh=mesh, strategy=strategy, mp_policy=policy)
    model(on_device(torch.ones(2, 3))).sum().backward()
    after = full_state(model)
    for name, value in before.items():
        if value.is_floating_point() and value.element_size() > 1 and param_dtype:
            assert torch.equal(after[name].to(value), value.to(param_dtype).to(value))
        else:
            assert after[name].dtype == value.dtype
            # Bits: float8 has no comparisons.
            ours, theirs = (t.flatten().view(torch.uint8) for t in (after[name], value))
            assert torch.equal(ours, theirs), name
    assert all(m.scale.grad is not None for m in model)
    optimizer = torch.optim.SGD((m.scale for m in model), lr=0.1)
    optimizer.step()
    flatshard.checkpoint.save(folder, 1, model, optimizer)
    saved = full_state(model)
    with torch.no_grad():
        for p in model.parameters():
            p._local_tensor.zero_()
    flatshard.checkpoint.load(folder, model, optimizer)
    for name, value in full_state(model).items():
        ours, theirs = (t.flatten().view(torch.uint8) for t in (value, saved[name]))
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64])
def test_trainable_parameters_of_other_dtypes_are_named(dtype, mesh):
    layer = nn.Linear(2, 2)
    layer.weight = nn.Parameter(torch.ones(2, 2).to(dtype))
    with refused("parameter weight is of type .* and trainable; .*Freeze it"):
        fully_shard(layer, mesh=mesh)


class Scalars(nn.Module):
    """A temperature, as contrastive models have, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.temperature = nn.Parameter(torch.tensor(0.5))
        self.offset = nn.Parameter(torch.tensor(2), requires_grad=False)
        on_device(self)

    def forward(self, x):
        return self.linear(x) * self.temperature.exp() + self.offset


def scalar_model():
    model = Body(plain)
    model.blocks[1] = Scalars()
    model.bias = nn.Parameter(on_device(torch.tensor(0.1)))
    model.body = lambda m, x: plain(m, x) + m.bias
    return model


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_scalar_parameters_train(strategy, mesh, rank, world):
    def act(m, x):
        two_microbatches(m, x)
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1e9)

    torch.manual_seed(0)
    model = scalar_model()
    against_one_process(model, mesh, rank, world, act=act, strategy=strategy)
    temperature = model.blocks[1].temperature
    assert temperature.shape == () and temperature.placements[0].is_replicate()


def test_scalar_parameters_in_replicas(mesh_2d, rank, world):
    against_one_process(scalar_model(), mesh_2d, rank, world)


def test_scalar_parameters_are_clipped_saved_and_loaded(mesh, rank, folder):
    def made(function, seed):
        torch.manual_seed(seed)
        model = scalar_model()
        if function is not None:
            shard(model, function, mesh=mesh)
        return model

    single, model, norms = made(None, 1), made(fully_shard, 1), []
    for m in (single, model):
        m(data(0)).square().mean().backward()
        for order in (2.0, torch.inf):
            norm = torch.nn.utils.clip_grad_norm_(m.parameters(), 1e9, order)
            norms.append(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)
    torch.testing.assert_close(norms[:2], norms[2:])
    for kind in (torch.optim.AdamW, flatshard.optim.AdamW):
        model, other = made(fully_shard, 1), made(fully_shard, 2)
        optimizers = [kind(m.parameters(), lr=0.1) for m in (model, other)]

        def step(m, optimizer):
            m(data(rank)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step(model, optimizers[0])
        path = f"{folder}/{kind.__module__}"
        flatshard.checkpoint.save(path, 1, model, optimizers[0])
        flatshard.checkpoint.load(path, other, optimizers[1])
        step(model, optimizers[0])
        step(other, optimizers[1])
        ours, theirs = full_state(model), full_state(other)
        assert ours["blocks.1.temperature"] != 0.5
        for name, value in ours.items():
            assert torch.equal(value, theirs[name]), name
    # And DCP, and the unsharded model.
    state = {"model": model.state_dict()}
    dcp.save(state, checkpoint_id=f"{folder}/dcp")
    other = made(fully_shard, 3)
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/dcp")
    other.load_state_dict(state["model"])
    for name, value in full_state(model).items():
        assert torch.equal(value, full_state(other)[name]), name
    single.load_state_dict(full_state(model))


def test_ignored_parameters_stay(mesh, rank):
    model = Body(plain)
    weight = model.head.weight
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, ignored_params={weight})
    assert model.head.weight is weight
    model(data(rank)).sum().backward()
    assert weight.grad is not None and not hasattr(weight.grad, "placements")
