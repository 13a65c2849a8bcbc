"""Megatron-FSDP's names: they translate, and refuse by name what they cannot."""

import copy

import pytest
import torch

from flatshard import megatron
from flatshard.row_shard import ShardedTensor
from tests.python.models import Block, Mlp
from tests.python.training import distance, full_state, train


def single(model, world, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    for step in range(steps):
        for r in range(world):
            generator = torch.Generator().manual_seed(1000 * step + 100_000 * r)
            (model.loss(generator) / world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return full_state(model)


@pytest.mark.parametrize("strategy", [0, 1, "optim_grads", 3])
@pytest.mark.parametrize("kind", [Block, "tests.python.models.Block"])
def test_fully_shard_trains(strategy, kind, mesh, world, rank):
    model = Mlp()
    expected = single(copy.deepcopy(model), world, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    model, optimizer = megatron.fully_shard(
        model,
        optimizer,
        fsdp_unit_modules=[kind],
        device_mesh=mesh,
        dp_shard_dim="dp",
        zero_dp_strategy=strategy,
    )
    assert type(model.blocks[0]).__name__ == "FSDPBlock"
    train(model, rank, steps=3, optimizer=optimizer)
    assert distance(full_state(model), expected) < 1e-4


def test_bf16_modules_keep_float32_main_parameters(mesh, rank):
    model = megatron.fully_shard_model(
        Mlp().bfloat16(),
        [Block],
        device_mesh=mesh,
        mixed_precision_policy=megatron.MixedPrecisionPolicy(
            grad_comm_dtype=torch.bfloat16
        ),
    )
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert all(isinstance(p, ShardedTensor) for p in model.parameters())
    out = model(torch.randn(2, 13, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    optimizer = megatron.fully_shard_optimizer(
        torch.optim.SGD(model.parameters(), lr=0.1)
    )
    optimizer.step(sync_grad_before_optimizer_step=True)
    optimizer.zero_grad(zero_grad_buffer=True)
    with pytest.raises(NotImplementedError, match="install_optimized_model_weights"):
        optimizer.step(install_optimized_model_weights=False)


def test_meta_device(mesh, rank):
    with torch.device("meta"):
        model = Mlp()
    megatron.fully_shard_model(
        model, [Block], device_mesh=mesh, init_model_with_meta_device=True
    )
    model.loss(torch.Generator().manual_seed(rank)).backward()


def test_per_token_loss_sums(mesh, rank, world):
    grads = []
    for per_token in (False, True):
        torch.manual_seed(0)
        model = megatron.fully_shard_model(
            Mlp(), [Block], device_mesh=mesh, calculate_per_token_loss=per_token
        )
        model.loss(torch.Generator().manual_seed(rank)).backward()
        grads.append([p.grad.full_tensor() for p in model.parameters()])
    for mean, total in zip(*grads):
        torch.testing.assert_close(total, world * mean)


@pytest.mark.parametrize(
    "name, value",
    [
        ("tp_dim", "tp"),
        ("overlap_grad_reduce", False),
        ("sync_model_each_microbatch", False),
        ("nccl_ub", True),
        ("cuda_graph_mode", True),
        ("enable_fine_grained_param_gather", True),
        ("suggested_communication_unit_size", 10**9),
        ("outer_dp_sharding_strategy", "optim"),
    ],
)
def test_what_has_no_counterpart_is_named(name, value, mesh):
    with pytest.raises(NotImplementedError, match=name):
        megatron.fully_shard_model(Mlp(), device_mesh=mesh, **{name: value})


def test_bad_arguments_are_named(mesh):
    with pytest.raises(TypeError, match="no_such"):
        megatron.fully_shard_model(Mlp(), device_mesh=mesh, no_such=1)
    with pytest.raises(ValueError, match="zero_dp_strategy"):
        megatron.fully_shard_model(Mlp(), device_mesh=mesh, zero_dp_strategy=4)
    with pytest.raises(ValueError, match="fsdp_unit_modules"):
        megatron.fully_shard_model(Mlp(), ["no.such.Class"], device_mesh=mesh)
    with pytest.raises(ValueError, match="a dimension 'xp'"):
        megatron.fully_shard_model(Mlp(), device_mesh=mesh, dp_shard_dim="xp")
    with pytest.raises(ValueError, match="after fully_shard_model"):
        megatron.fully_shard_optimizer(torch.optim.SGD(Mlp().parameters()))
