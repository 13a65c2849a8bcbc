"""Unsupported arguments of fully_shard raise errors that name them."""

import copy

import pytest
import torch
import torch.distributed.fsdp
from torch import nn

import flatshard
from tests.python.device import on_device
from tests.python.models import Body, plain
from bench.harness.options import fully_shard
from tests.python.training import data, refused, shard


def test_bad_arguments_are_named(mesh):
    model = Body(plain)
    with refused("strategy: expected one of"):
        fully_shard(model, mesh=mesh, strategy="zero9")
    with refused("granularity"):
        fully_shard(model, mesh=mesh, granularity="row3")
    with refused("containers that do not implement forward, got ModuleList"):
        fully_shard(model.blocks, mesh=mesh)
    with refused("mp_policy"):
        fully_shard(model, mesh=mesh, mp_policy=3)
    with refused("offload_policy: expected OffloadPolicy"):
        fully_shard(model, mesh=mesh, offload_policy="cpu")
    with refused("shard_placement_fn: expected a dimension", AssertionError):
        fully_shard(
            model,
            mesh=mesh,
            shard_placement_fn=lambda p: torch.distributed.tensor.Shard(4),
        )
    fully_shard(model.blocks[0], mesh=mesh)
    with refused("applied to this FSDPBlock before", AssertionError):
        fully_shard(model.blocks[0], mesh=mesh)
    with pytest.raises(AssertionError, match="does not support deepcopy"):
        copy.deepcopy(model.blocks[0])


def test_parameters_outside_of_their_unit_are_named(mesh, rank, world):
    if world == 1:
        pytest.skip("no other rank has other data")
    model = shard(Body(plain), fully_shard, mesh=mesh)
    with refused("parameter weight of Linear .* of its unit.*unshard", RuntimeError):
        model.blocks[1].up(data(rank))
    model.set_reshard_after_forward(True)
    model(data(rank)).sum().backward()
    with refused("parameter weight of Linear .* unit root.*register", RuntimeError):
        model.head(data(rank))
    with refused("linear: parameter weight of Linear .* unit blocks.1", RuntimeError):
        model.blocks[1].up(data(rank))
    plain_tensor = on_device(torch.full((5,), 1.0 + rank))
    with refused("add: parameter bias of Linear .* unit root", RuntimeError):
        model.head.bias.detach() + plain_tensor
    with refused("parameter weight of Linear .* unit blocks.1", RuntimeError):
        model.blocks[1].up.weight[0] * data(rank)[0]
    model.unshard()
    model.head(data(rank))


def test_a_slice_of_an_inner_units_parameter_is_named(mesh, rank, world):
    if world == 1:
        pytest.skip("no other rank has other data")
    model = Body(plain)

    def forward(x):
        return Body.forward(model, x) * model.blocks[0].up.weight[0, 0]

    shard(model, fully_shard, mesh=mesh)
    model.forward = forward
    with refused("parameter weight of Linear .* unit blocks.0", RuntimeError):
        model(data(rank))


@pytest.mark.parametrize("has_root", [False, True])
def test_a_module_around_the_same_shards_is_named(has_root, mesh, rank, world):
    if has_root and world == 1:
        pytest.skip("no other rank has other data")
    model = shard(Body(plain), fully_shard, mesh=mesh)
    if has_root:
        model(data(rank))
    former = model.blocks[1].up
    model.blocks[1].up = other = torch.nn.Linear(5, 5)
    other.weight, other.bias = former.weight, former.bias
    del former
    name = "parameter blocks.1.up.weight"
    text = f"{name} .* gone" if has_root else f"Linear that has {name} was added"
    with refused(text, RuntimeError):
        model(data(rank))


@pytest.mark.parametrize("part", ["itself", "inside"])
def test_modules_that_torch_sharded(part, mesh):
    model = nn.Sequential(nn.Linear(4, 4))
    on_device(model)
    torch.distributed.fsdp.fully_shard(
        model if part == "itself" else model[0], mesh=mesh
    )
    with refused("that it did; import fully_shard only from"):
        fully_shard(model, mesh=mesh)


def test_inner_modules_come_first(mesh):
    model = Body(plain)
    fully_shard(model, mesh=mesh)
    with refused("by another unit: call fully_shard on inner modules first"):
        fully_shard(model.blocks[0], mesh=mesh)


@pytest.mark.parametrize(
    "name, instead",
    {
        "sharding_strategy": "reshard_after_forward=False for SHARD_GRAD_OP",
        "auto_wrap_policy": "call fully_shard on each block",
        "cpu_offload": "offload_policy=CPUOffloadPolicy",
        "mixed_precision": "mp_policy=MixedPrecisionPolicy",
        "device_id": "the device of the mesh",
        "process_group": "mesh=",
        "use_orig_params": "leave it out",
    }.items(),
)
def test_keywords_of_fsdp1_name_what_replaced_them(name, instead, mesh):
    with refused(
        f"keyword argument '{name}', a keyword of FSDP1: .*{instead}", TypeError
    ):
        flatshard.fully_shard(Body(plain), mesh=mesh, **{name: None})
    with refused("unexpected keyword argument 'anything'$", TypeError):
        flatshard.fully_shard(Body(plain), mesh=mesh, anything=1)


def test_no_process_group(monkeypatch, rank):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with refused("there is no process group, and the environment lacks MASTER_PORT"):
        flatshard.fully_shard(Body(plain))


def test_ties_over_units_are_named(mesh):
    model = Body(plain)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    fully_shard(model.blocks[0], mesh=mesh)
    with refused("up.weight is shared with a unit that was wrapped before"):
        fully_shard(model.blocks[1], mesh=mesh)
