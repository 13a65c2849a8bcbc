"""A mesh that is part of a larger one: only its ranks participate."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from flatshard import fully_shard
from flatshard._tensor.mesh import core_mesh
from tests.python.device import DEVICE
from tests.python.models import Body, plain
from tests.python.sum_order import near
from tests.python.training import adamw, clip_to, data, full_state, shard, train_batches


@pytest.fixture(scope="module")
def grid(world):
    """Data parallel ranks by model parallel ranks."""
    if world != 4:
        pytest.skip("needs 4 ranks")
    return init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("dp", "tp"))


@pytest.fixture(scope="module")
def cube(world):
    if world != 4:
        pytest.skip("needs 4 ranks")
    return init_device_mesh(DEVICE, (2, 2, 1), mesh_dim_names=("replica", "dp", "tp"))


def train(model, batches, steps=3):
    return train_batches(
        lambda step, batch: model(data(batch, step)).square().mean(),
        adamw(model),
        batches,
        steps,
        clip_to(model, 0.5),
    )


def check(model, single):
    expected = single.state_dict()
    for name, value in full_state(model).items():
        torch.testing.assert_close(value, expected[name], **near(expected[name]))


@pytest.mark.parametrize("axis", ["dp", "tp"])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads_params"])
def test_one_dimension_of_two(axis, strategy, grid):
    """Both copies of the dimension train at once, each on separate batches."""
    mesh = grid[axis]
    copy_number = grid.get_local_rank("tp" if axis == "dp" else "dp")
    model = Body(plain)
    single = copy.deepcopy(model)
    shard(model, fully_shard, mesh=mesh, strategy=strategy)
    train(model, [10 * copy_number + mesh.get_local_rank()])
    train(single, [10 * copy_number, 10 * copy_number + 1])
    check(model, single)
    group = mesh.get_group()
    for p in model.parameters():
        rows = [None, None]
        dist.all_gather_object(rows, p.to_local().shape[0], group=group)
        assert sum(rows) == p.shape[0]


def test_ranks_outside_take_no_part(grid, rank):
    """Collectives of a group of two with the other two ranks absent, on all steps:
    they would hang in a collective of all."""
    mesh = grid["dp"]
    if grid.get_local_rank("tp") == 0:
        model = Body(plain)
        single = copy.deepcopy(model)
        shard(model, fully_shard, mesh=mesh)
        train(model, [mesh.get_local_rank()])
        train(single, [0, 1])
        check(model, single)


def test_numbers_of_steps_may_differ_between_copies(grid):
    number = grid.get_local_rank("tp")
    mesh = grid["dp"]
    model = Body(plain)
    single = copy.deepcopy(model)
    shard(model, fully_shard, mesh=mesh)
    train(model, [mesh.get_local_rank()], steps=1 + 2 * number)
    train(single, [0, 1], steps=1 + 2 * number)
    check(model, single)


def test_two_dimensions_of_three(cube):
    mesh = cube["replica", "dp"]
    model = Body(plain)
    single = copy.deepcopy(model)
    shard(model, fully_shard, mesh=mesh)
    train(model, [2 * mesh.get_local_rank(0) + mesh.get_local_rank(1)])
    train(single, range(4))
    check(model, single)


def test_three_dimensions_are_refused(cube):
    with pytest.raises(ValueError, match="choose a part of it"):
        fully_shard(Body(plain), mesh=cube)


def test_a_mesh_of_some_ranks(world, rank):
    """A mesh that is not part of a larger one, created only by its ranks."""
    if world < 3:
        pytest.skip("needs 3 ranks")
    members = [0, world - 1]
    mesh = dist.device_mesh.DeviceMesh(DEVICE, members)
    if rank in members:
        model = Body(plain)
        single = copy.deepcopy(model)
        shard(model, fully_shard, mesh=mesh)
        train(model, [members.index(rank)])
        train(single, [0, 1])
        check(model, single)


def test_a_rank_outside_of_the_mesh_is_named(world, rank):
    if world < 3:
        pytest.skip("needs 3 ranks")
    members = [0, world - 1]
    mesh = dist.device_mesh.DeviceMesh(DEVICE, members)
    if rank not in members:
        with pytest.raises(ValueError, match=f"rank {rank} is not in it"):
            fully_shard(Body(plain), mesh=mesh)


def test_meshes_of_other_names_are_one(world):
    """Also after each other: making another one would wait for the first one's ranks."""
    named = init_device_mesh(DEVICE, (world,), mesh_dim_names=("dp",))
    other = init_device_mesh(DEVICE, (world,), mesh_dim_names=("data",))
    unnamed = init_device_mesh(DEVICE, (world,))
    assert core_mesh(named) is core_mesh(unnamed) is core_mesh(other)
