"""Hooks on gradients: set_all_reduce_hook, and register_post_accumulate_grad_hook on
sharded parameters."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.utils.checkpoint import checkpoint

from flatshard import MixedPrecisionPolicy, fully_shard
from flatshard._tensor.places import state_of
from tests.python.device import DEVICE, named_mesh
from tests.python.models import Body, Mlp, plain
from tests.python.sum_order import SMALL_MODEL, near
from tests.python.training import STRATEGIES, data, distance, full_state, shard, twins


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
    expected = 4 * world * own.norm()
    torch.testing.assert_close(seen[0].norm(), expected, **near(expected))
    unit.set_all_reduce_hook(None)
    model.loss(torch.Generator().manual_seed(rank)).backward()
    assert len(seen) == 1


def test_a_hook_on_a_stream(mesh, rank):
    device = torch.get_device_module(DEVICE)
    stream, seen = device.Stream(), []

    def hook(reduced):
        seen.append(device.current_stream())
        reduced.mul_(2)

    torch.manual_seed(0)
    model = shard(Mlp(), fully_shard, mesh=mesh)
    for unit in [*model.units(), model]:
        unit.set_all_reduce_hook(hook, stream=stream)
    model.loss(torch.Generator().manual_seed(rank)).backward()
    assert seen and all(found == stream for found in seen)
    ours = [p.grad.full_tensor() for p in model.parameters()]
    found = gradients(mesh, rank, lambda reduced: reduced.mul_(2))
    for grad, expected in zip(ours, found.values()):
        torch.testing.assert_close(grad, expected, rtol=0, atol=0)


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
        torch.testing.assert_close(value, expected[name], **near(expected[name]))


def test_what_is_refused(mesh, world):
    model = fully_shard(Mlp(), mesh=mesh)
    with pytest.raises(TypeError, match="hook: expected a callable or None, got 3"):
        model.set_all_reduce_hook(3)
    model = fully_shard(Mlp(), mesh=named_mesh(outer=1, dp=world))
    with pytest.raises(ValueError, match="stream cannot be set when using native HSDP"):
        model.set_all_reduce_hook(print, stream="a stream")


# -- register_post_accumulate_grad_hook --------------------------------------------------


def steps_in_backward(model, kind=torch.optim.AdamW, **options):
    """Gives each parameter an optimizer and a hook that steps it."""
    optimizers = {}

    def hook(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        optimizers[p] = kind([p], **options)
        p.register_post_accumulate_grad_hook(hook)


def run_steps(model, rank, steps=3):
    for step in range(steps):
        model.loss(torch.Generator().manual_seed(10 * step + rank)).backward()


def test_optimizers_in_backward_train_as_under_fsdp2(mesh, rank):
    ours = Mlp()
    theirs = copy.deepcopy(ours)
    before = copy.deepcopy(ours).state_dict()
    for model, function in ((ours, fully_shard), (theirs, fsdp2)):
        shard(model, function, mesh=mesh)
        steps_in_backward(model, lr=1e-2, eps=1e-4)
        run_steps(model, rank)
        assert all(p.grad is None for p in model.parameters())
    assert distance(full_state(ours), full_state(theirs)) < SMALL_MODEL
    assert distance(full_state(ours), before) > 1e-3
    core = state_of(ours.blocks[0]).core
    assert core.grad(0) is None  # its memory is free


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_optimizers_in_backward_do_what_one_does_after_it(mesh, rank, strategy, dtype):
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    options = {"strategy": strategy, "mp_policy": policy}
    ours, after = twins(Mlp, mesh, {}, **options)
    steps_in_backward(ours, lr=1e-2, eps=1e-4)
    run_steps(ours, rank)
    optimizer = torch.optim.AdamW(after.parameters(), lr=1e-2, eps=1e-4)
    for step in range(3):
        after.loss(torch.Generator().manual_seed(10 * step + rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert distance(full_state(ours), full_state(after)) == 0


def test_hooks_run_once_when_fsdp2_runs_them(mesh, rank):
    def seen(function):
        torch.manual_seed(0)
        model = shard(Mlp(), function, mesh=mesh)
        calls, grads = [], {}

        def hook(name, p):
            calls.append(name)
            grads[name] = p.grad.full_tensor()

        for name, p in model.named_parameters():
            p.register_post_accumulate_grad_hook(functools.partial(hook, name))
        for name, block in list(model.blocks.named_children())[1:]:
            block.register_full_backward_hook(
                lambda *_, name=name: calls.append(f"backward of {name}")
            )
        model.loss(torch.Generator().manual_seed(rank)).backward()
        assert all(p.grad is not None for p in model.parameters())
        return calls, grads

    (ours, our_grads), (theirs, their_grads) = seen(fully_shard), seen(fsdp2)
    assert ours == theirs
    for name, grad in their_grads.items():
        torch.testing.assert_close(our_grads[name], grad)


def test_a_removed_hook_and_one_without_synchronization(mesh, rank):
    model = shard(Mlp(), fully_shard, mesh=mesh)
    calls = []
    handle = model.head.weight.register_post_accumulate_grad_hook(calls.append)
    loss = lambda: model.loss(torch.Generator().manual_seed(rank))  # noqa: E731
    with model.no_sync():
        loss().backward()
    assert calls == []
    loss().backward()
    assert calls == [model.head.weight]
    handle.remove()
    loss().backward()
    assert len(calls) == 1


def test_a_unit_in_two_reentrant_checkpoints(mesh, rank, world):
    """Its gradients are reduced twice in one backward; steps see their sum."""

    def body(m, x):
        x = x * m.head.weight.sum()
        for _ in range(2):
            x = checkpoint(m.blocks[0], x, use_reentrant=True)
        return x

    def grads(drops):
        torch.manual_seed(0)
        model = shard(Body(body), fully_shard, mesh=mesh)
        sums = {}

        def hook(p):
            sums[p] = sums.get(p, 0) + p.grad.full_tensor()
            p.grad = None

        if drops:
            for p in model.blocks[0].parameters():
                p.register_post_accumulate_grad_hook(hook)
        model(data(rank)).square().mean().backward()
        if drops:
            return [sums[p] for p in model.blocks[0].parameters()]
        return [p.grad.full_tensor() for p in model.blocks[0].parameters()]

    for ours, theirs in zip(grads(True), grads(False)):
        torch.testing.assert_close(ours, theirs)


def test_what_a_hook_raises_is_raised_by_backward(mesh, rank):
    model = shard(Mlp(), fully_shard, mesh=mesh)

    class Stop(Exception):
        pass

    def stop(p):
        raise Stop

    loss = lambda: model.loss(torch.Generator().manual_seed(rank))  # noqa: E731
    weight = model.blocks[1].up.weight
    handle = weight.register_post_accumulate_grad_hook(stop)
    with pytest.raises(Stop):
        loss().backward()
    handle.remove()
    for call in (
        lambda p: model.blocks[1].unshard(),
        lambda p: model.set_requires_gradient_sync(False),
    ):
        handle = weight.register_post_accumulate_grad_hook(call)
        with pytest.raises(Exception, match="a hook of register_post_acc.*after back"):
            loss().backward()
        handle.remove()
        model.set_requires_gradient_sync(True)
    loss().backward()
    assert all(p.grad is not None for p in model.parameters())


# -- hooks of register_hook ------------------------------------------------------------


def scaled(grad):
    return grad * 2


def first_rows_masked(grad):
    grad = grad.clone()
    grad[:2] = 0
    return grad


def in_place(grad):
    grad.mul_(0.5)


@pytest.mark.parametrize("hook", [scaled, first_rows_masked, in_place])
@pytest.mark.parametrize("when", ["before", "after", "later"])
@pytest.mark.parametrize("strategy", ["zero3", "zero1"])
def test_hooks_on_parameters_take_the_reduced_gradient(
    hook, when, strategy, mesh, rank, world
):
    def run(wrapped):
        torch.manual_seed(0)
        model = Mlp()
        name, weight = next((n, p) for n, p in model.named_parameters() if p.ndim == 2)
        if not wrapped or when == "before":
            handle = weight.register_hook(hook)
        if wrapped:
            shard(model, fully_shard, mesh=mesh, strategy=strategy)
            if when != "before":
                if when == "later":
                    model.loss(torch.Generator().manual_seed(5)).backward()
                    model.zero_grad()
                handle = dict(model.named_parameters())[name].register_hook(hook)
        ranks = [rank] if wrapped else range(world)
        grads = []
        for step in range(2):  # the second adds to existing gradients
            if wrapped:
                model.loss(torch.Generator().manual_seed(rank + 7 * step)).backward()
            else:
                losses = [
                    model.loss(torch.Generator().manual_seed(r + 7 * step))
                    for r in ranks
                ]
                (sum(losses) / world).backward()
            grad = dict(model.named_parameters())[name].grad
            grads.append((grad.full_tensor() if wrapped else grad).clone())
        handle.remove()
        return grads

    for got, expected in zip(run(True), run(False)):
        torch.testing.assert_close(got, expected)


def test_hooks_on_parameters_can_be_removed(mesh, rank):
    model = shard(Mlp(), fully_shard, mesh=mesh)
    weight = next(p for p in model.parameters() if p.ndim == 2)
    handle = weight.register_hook(lambda grad: grad * 0)
    model.loss(torch.Generator().manual_seed(rank)).backward()
    assert not weight.grad.full_tensor().any()
    handle.remove()
    model.zero_grad()
    model.loss(torch.Generator().manual_seed(rank)).backward()
    assert weight.grad.full_tensor().any()


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_accumulate_hooks_return_is_ignored(when, mesh, rank):
    model = Mlp()
    seen = []

    def hook(p):
        seen.append(p.grad is not None)
        return optimizer_step(p), None

    def optimizer_step(p):
        with torch.no_grad():
            p.sub_(p.grad, alpha=0.1)
        p.grad = None

    if when == "before":
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(hook)
    shard(model, fully_shard, mesh=mesh)
    if when == "after":
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(hook)
    before = [p.full_tensor().clone() for p in model.parameters()]
    model.loss(torch.Generator().manual_seed(rank)).backward()
    assert len(seen) == len(before) and all(seen)
    assert all(p.grad is None for p in model.parameters())
    after = [p.full_tensor() for p in model.parameters()]
    assert any(not a.equal(b) for a, b in zip(after, before))
