"""Unsupported arguments of fully_shard raise errors that name them."""

import copy

import pytest
import torch

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
    with refused("add: a sharded tensor", RuntimeError):
        model.head.bias.detach() + on_device(torch.full((5,), 1.0 + rank))
    model.unshard()
    model.head(data(rank))


def test_ties_over_units_are_named(mesh):
    model = Body(plain)
    model.blocks[1].up.weight = model.blocks[0].up.weight
    fully_shard(model.blocks[0], mesh=mesh)
    with refused("up.weight is shared with a unit that was wrapped before"):
        fully_shard(model.blocks[1], mesh=mesh)
