"""HFSDP: parameters sharded inside, the optimizer state over all ranks."""

import copy

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from flatshard import checkpoint
from tests.python.device import DEVICE
from tests.python.models import Body, Mlp, plain
from tests.python.sum_order import SMALL_MODEL, near
from bench.harness.options import fully_shard
from tests.python.training import (
    OPTIMIZERS,
    against_one_process,
    data,
    distance,
    full_state,
    shard,
    train,
)


def hfsdp(model, mesh_2d, **options):
    return shard(model, fully_shard, mesh=mesh_2d, outer="optim", **options)


def test_trains_like_one_process(mesh_2d, rank, world):
    against_one_process(Body(plain), mesh_2d, rank, world, outer="optim")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_trains_like_zero_3(optimizer, mesh, mesh_2d, rank):
    make = OPTIMIZERS[optimizer]
    ours = Mlp()
    theirs = shard(copy.deepcopy(ours), fully_shard, mesh=mesh)
    hfsdp(ours, mesh_2d)
    for model in (ours, theirs):
        train(model, rank, accumulation=2, optimizer=make(model.parameters()))
    assert distance(full_state(ours), full_state(theirs)) < SMALL_MODEL


def test_waits_with_the_outer_reduction(mesh_2d, rank):
    """All microbatches but the last stop at the inner one."""
    grads = []
    for wait in (False, True):
        torch.manual_seed(0)
        model = hfsdp(Mlp(), mesh_2d)
        for micro in range(3):
            if wait:
                model.set_requires_all_reduce(micro == 2)
            model.loss(torch.Generator().manual_seed(10 * micro + rank)).backward()
        grads.append([p.grad.full_tensor() for p in model.parameters()])
    for a, b in zip(*grads):
        torch.testing.assert_close(a, b, **near(b))


def test_every_rank_holds_a_part_of_its_own(mesh_2d, world):
    whole = Mlp()
    expected = copy.deepcopy(whole).state_dict()
    model = hfsdp(whole, mesh_2d)
    rows = []
    for name, p in model.named_parameters():
        assert p.device_mesh.ndim == 1 and p.device_mesh.size() == world
        assert p.full_tensor().equal(expected[name]), name
        twice = (2 * p).full_tensor()
        assert twice.equal(2 * expected[name]), name
        rows.append(p.to_local().shape[0])
    sums = [None] * world
    torch.distributed.all_gather_object(sums, rows)
    for name, got in zip(expected, map(sum, zip(*sums))):
        assert got == expected[name].shape[0], name
    # And the norm counts nothing twice.
    norm = torch.nn.utils.get_total_norm(list(model.parameters()))
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    want = torch.cat([t.flatten() for t in expected.values()]).norm()
    torch.testing.assert_close(norm, want)


def test_clipping(mesh, mesh_2d, rank):
    norms, states = [], []
    for options in ({"mesh": mesh}, {"mesh": mesh_2d, "outer": "optim"}):
        torch.manual_seed(0)
        model = shard(Mlp(), fully_shard, **options)
        model.loss(torch.Generator().manual_seed(rank)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        states.append([p.grad.full_tensor() for p in model.parameters()])
    torch.testing.assert_close(*norms)
    for a, b in zip(*states):
        torch.testing.assert_close(a, b, **near(b))


@pytest.mark.parametrize("way", ["dcp", "flatshard"])
def test_checkpoints_go_to_zero_3_and_back(way, mesh, mesh_2d, rank, folder):
    def make(options):
        torch.manual_seed(0)
        model = shard(Mlp(), fully_shard, **options)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(model, optimizer):
        model.loss(torch.Generator().manual_seed(rank)).backward()
        optimizer.step()
        optimizer.zero_grad()

    kinds = [{"mesh": mesh}, {"mesh": mesh_2d, "outer": "optim"}]
    for number, (source, target) in enumerate((kinds, kinds[::-1])):
        model, optimizer = make(source)
        step(model, optimizer)
        other, other_optimizer = make(target)
        place = f"{folder}/{number}"
        if way == "dcp":
            dcp.save({"model": model.state_dict()}, checkpoint_id=place)
            loaded = other.state_dict()
            dcp.load({"model": loaded}, checkpoint_id=place)
            other.load_state_dict(loaded)
        else:
            checkpoint.save(place, 1, model, optimizer)
            checkpoint.load(place, other, other_optimizer)
        expected = full_state(model)
        for name, value in full_state(other).items():
            assert value.equal(expected[name]), name
        if way == "flatshard":
            step(model, optimizer)
            step(other, other_optimizer)
            assert distance(full_state(other), full_state(model)) < SMALL_MODEL


def test_evaluation_sees_the_last_step(mesh_2d, rank):
    model = hfsdp(Body(plain), mesh_2d)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(data(rank)).square().mean().backward()
    optimizer.step()
    single = Body(plain)
    single.load_state_dict(full_state(model))
    with torch.no_grad():
        torch.testing.assert_close(model(data(7)), single(data(7)))


def test_what_is_refused(mesh, mesh_2d, world):
    with pytest.raises(ValueError, match="outer: expected .* got 'grads'"):
        fully_shard(Mlp(), mesh=mesh_2d, outer="grads")
    with pytest.raises(ValueError, match="expects a mesh of 2 dimensions, got 1"):
        fully_shard(Mlp(), mesh=mesh, outer="optim")
    with pytest.raises(NotImplementedError, match="outer: .* got 'optim_grads'"):
        fully_shard(Mlp(), mesh=mesh_2d, outer="optim", strategy="optim_grads")
    unnamed = init_device_mesh(DEVICE, (world, 1))
    with pytest.raises(ValueError, match="mesh_dim_names"):
        fully_shard(Mlp(), mesh=unnamed, outer="optim")
