"""set_all_reduce_hook: what programs do to reduced gradients."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from flatshard import MixedPrecisionPolicy, fully_shard
from tests.python.device import DEVICE
from tests.python.models import Body, Mlp, plain
from tests.python.training import STRATEGIES, data, full_state, shard


def set_hook(model, hook):
    for unit in [*model.units(), model]:
        unit.set_all_reduce_hook(hook)


def gradients(mesh, rank, hook, microbatches=1, **options):
    torch.manual_seed(0)
    model = shard(Mlp(), fully_shard, mesh=mesh, **options)
    set_hook(model, hook)
    for micro in range(microbatches):
        model.loss(torch.Generator().manual_seed(10 * micro + rank)).backward()
    return {name: p.grad.full_tensor() for name, p in model.named_parameters()}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.bfloat16])
def test_what_the_hook_writes_is_the_gradient(strategy, reduce_dtype, mesh, rank):
    def double(reduced):
        assert reduced.ndim == 1
        assert reduced.dtype == reduce_dtype
        assert not torch.is_grad_enabled()
        reduced.mul_(2)

    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    for microbatches in (1, 2):
        options = {"strategy": strategy, "mp_policy": policy}
        plain = gradients(mesh, rank, None, microbatches, **options)
        doubled = gradients(mesh, rank, double, microbatches, **options)
        for name, grad in plain.items():
            assert doubled[name].equal(2 * grad), name


def test_the_hook_of_one_unit_and_before_the_divisor(mesh, rank, world):
    seen = []
    torch.manual_seed(0)
    model = shard(Mlp(), fully_shard, mesh=mesh)
    unit = model.units()[0]
    unit.set_gradient_divide_factor(4.0 * world)
    unit.set_all_reduce_hook(lambda reduced: seen.append(reduced.clone()))
    model.loss(torch.Generator().manual_seed(rank)).backward()
    assert len(seen) == 1
    own = torch.cat([p.grad.to_local().flatten() for p in unit.parameters()])
    torch.testing.assert_close(
        seen[0].norm(), 4 * world * own.norm(), rtol=1e-5, atol=1e-7
    )
    unit.set_all_reduce_hook(None)
    model.loss(torch.Generator().manual_seed(rank)).backward()
    assert len(seen) == 1


def test_only_what_is_reduced_is_shown(mesh, rank):
    calls = []
    model = shard(Mlp(), fully_shard, mesh=mesh)
    set_hook(model, lambda reduced: calls.append(reduced.numel()))
    with model.no_sync():
        model.loss(torch.Generator().manual_seed(rank)).backward()
    assert not calls
    model.loss(torch.Generator().manual_seed(rank)).backward()
    assert len(calls) == len([*model.units(), model])


def test_an_error_of_the_hook_is_raised_by_the_backward(mesh, rank, world):
    def fail(reduced):
        raise ValueError("the hook does not like this step")

    torch.manual_seed(0)
    model = shard(Mlp(), fully_shard, mesh=mesh)
    untouched = copy.deepcopy(full_state(model))
    set_hook(model, fail)
    with pytest.raises(Exception, match="the hook does not like this step"):
        model.loss(torch.Generator().manual_seed(rank)).backward()
    set_hook(model, None)
    model.zero_grad()
    model.loss(torch.Generator().manual_seed(rank)).backward()
    after = {name: p.grad.full_tensor() for name, p in model.named_parameters()}
    for name, value in full_state(model).items():
        assert value.equal(untouched[name])
    for name, grad in gradients(mesh, rank, None).items():
        torch.testing.assert_close(after[name], grad)


def test_replicas_that_the_core_does_not_know(world):
    """Two copies that are sharded on their own, and averaged by the hook."""
    if world != 4:
        pytest.skip("needs 4 ranks")
    grid = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("replica", "dp"))
    model = Body(plain)
    single = copy.deepcopy(model)
    shard(model, fully_shard, mesh=grid["dp"])
    replicas = grid["replica"].get_group()

    def average(reduced):
        dist.all_reduce(reduced, group=replicas)
        reduced.div_(2)

    set_hook(model, average)
    ours = torch.optim.SGD(model.parameters(), lr=0.01)
    theirs = torch.optim.SGD(single.parameters(), lr=0.01)
    for step in range(3):
        model(data(dist.get_rank(), step)).square().mean().backward()
        for rank in range(world):
            (single(data(rank, step)).square().mean() / world).backward()
        ours.step(), ours.zero_grad()
        theirs.step(), theirs.zero_grad()
    expected = single.state_dict()
    for name, value in full_state(model).items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_what_is_refused(mesh):
    model = fully_shard(Mlp(), mesh=mesh)
    with pytest.raises(TypeError, match="hook: expected a callable or None, got 3"):
        model.set_all_reduce_hook(3)
    with pytest.raises(NotImplementedError, match="not supported with a stream"):
        model.set_all_reduce_hook(print, stream="a stream")
