"""Whose memory `.grad` is: a tensor that the program put there gets the gradients in place, and
one that it keeps is not written again."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import flatshard.optim
from flatshard import CPUOffloadPolicy, ShardOptions, fully_shard

from tests.python.device import on_device
from tests.python.training import backward_both, refused


def stack():
    torch.manual_seed(0)
    return on_device(nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)))


def pair(mesh, **options):
    plain = stack()
    model = copy.deepcopy(plain)
    for layer in model[0], model[2]:
        fully_shard(layer, mesh=mesh, **options)
    return plain, fully_shard(model, mesh=mesh, **options)


def data(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return on_device(torch.randn(5, 4, generator=generator))


def backward(plain, model, rank, world, step):
    backward_both(model, plain, [data(r, step) for r in range(world)], rank)


def close(found, wanted):
    for got, want in zip(found, wanted):
        torch.testing.assert_close(on_device(got.full_tensor()), want)


def zeros(model):
    return [torch.zeros_like(p) for p in model.parameters()]


def give(model, tensors):
    for p, tensor in zip(model.parameters(), tensors):
        p.grad = tensor


def columns(p):
    if p.dim() == 2 and p.shape[1] % dist.get_world_size() == 0:
        return Shard(1)
    return None


OPTIONS = {
    "zero3": {},
    "zero2": {"strategy": "zero2"},
    "zero0": {"strategy": "zero0"},
    "chunk": {"options": ShardOptions(granularity="chunk")},
    "columns": {"shard_placement_fn": columns},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_buffers_of_the_program(options, hooked, mesh, rank, world):
    plain, model = pair(mesh, **OPTIONS[options])
    if hooked:
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: None)
    ours, theirs = zeros(model), zeros(plain)
    give(model, ours)
    give(plain, theirs)
    for step in range(3):
        backward(plain, model, rank, world, step)
        assert all(p.grad is b for p, b in zip(model.parameters(), ours))
        close(ours, theirs)
    model.zero_grad(set_to_none=False)
    plain.zero_grad(set_to_none=False)
    assert all(p.grad is b for p, b in zip(model.parameters(), ours))
    backward(plain, model, rank, world, 3)
    close(ours, theirs)


def test_one_buffer_next_to_others(mesh, rank, world):
    plain, model = pair(mesh)
    buffer = torch.zeros_like(model[0].weight)
    for step in range(3):
        model[0].weight.grad = buffer
        plain[0].weight.grad = buffer.full_tensor()
        backward(plain, model, rank, world, step)
        assert model[0].weight.grad is buffer
        close(
            [p.grad for p in model.parameters()], [p.grad for p in plain.parameters()]
        )


def test_a_flat_buffer(mesh, rank, world):
    """A buffer of all local gradients, for programs that reduce or clip them as one."""
    plain, model = pair(mesh)
    parameters = list(model.parameters())
    sizes = [p.to_local().numel() for p in parameters]
    flat = on_device(torch.zeros(sum(sizes)))
    for p, piece in zip(parameters, flat.split(sizes)):
        p.grad = DTensor.from_local(
            piece.view_as(p.to_local()),
            p.device_mesh,
            p.placements,
            run_check=False,
            shape=p.shape,
            stride=p.stride(),
        )
    for step in range(2):
        backward(plain, model, rank, world, step)
    assert flat.any() or not flat.numel()
    local = [p.grad.to_local().flatten() for p in parameters]
    assert torch.equal(torch.cat(local), flat)
    close([p.grad for p in parameters], [p.grad for p in plain.parameters()])
    flat.zero_()
    assert not any(p.grad.full_tensor().any() for p in parameters)


def test_swapped_gradients(mesh, rank, world):
    """Gradients of two losses, kept apart as in PCGrad and similar methods."""
    plain, model = pair(mesh)
    sets = []
    for step in range(2):
        backward(plain, model, rank, world, step)
        sets.append(
            (
                [p.grad for p in model.parameters()],
                [p.grad for p in plain.parameters()],
            )
        )
        if step == 0:  # another tensor for the second loss
            give(model, zeros(model))
            give(plain, zeros(plain))
    for ours, theirs in sets:
        close(ours, theirs)
    give(model, sets[0][0])
    give(plain, sets[0][1])
    backward(plain, model, rank, world, 2)
    for ours, theirs in sets:
        close(ours, theirs)
    assert all(p.grad is g for p, g in zip(model.parameters(), sets[0][0]))


KEPT = {
    "tensor": lambda grad: grad,
    "local": lambda grad: grad.to_local(),
    "view": lambda grad: grad.view(-1),
    "detached": lambda grad: grad.detach(),
}


@pytest.mark.parametrize("kept", KEPT)
def test_a_kept_gradient_stays(kept, mesh, rank, world):
    """While gradients of its unit are added to, and after zero_grad()."""
    plain, model = pair(mesh)
    backward(plain, model, rank, world, 0)
    reference = KEPT[kept](model[0].weight.grad)
    values = reference.clone()
    model[0].weight.grad = None
    plain[0].weight.grad = None
    for step in range(1, 4):
        backward(plain, model, rank, world, step)
        assert torch.equal(
            *(
                t.to_local() if hasattr(t, "to_local") else t
                for t in (reference, values)
            )
        )
        close(
            [p.grad for p in model.parameters()], [p.grad for p in plain.parameters()]
        )
        if step == 2:
            model.zero_grad()
            plain.zero_grad()


def test_a_gradient_that_comes_back(mesh, rank, world):
    """It was set to None for a backward that did not reach its parameter."""
    plain, model = pair(mesh)
    backward(plain, model, rank, world, 0)
    ours, theirs = model[0].weight.grad, plain[0].weight.grad
    model.zero_grad()
    plain.zero_grad()
    model(data(rank, 1)).sum().backward(inputs=[model[0].bias])
    sum(plain(data(r, 1)).sum() / world for r in range(world)).backward(
        inputs=[plain[0].bias]
    )
    model[0].weight.grad, plain[0].weight.grad = ours, theirs
    backward(plain, model, rank, world, 2)
    assert model[0].weight.grad is ours
    close([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


def test_a_buffer_for_an_unsharded_parameter_is_refused(mesh, rank):
    """Between a forward and its backward a root shows unsharded parameters."""
    model = fully_shard(stack(), mesh=mesh)
    loss = model(data(rank, 0)).sum()
    give(model, zeros(model))
    with refused("0.weight .*assign `.grad` of the sharded parameter", RuntimeError):
        loss.backward()


def test_a_plain_buffer_is_refused(mesh, world):
    if world == 1:
        pytest.skip("one rank has whole tensors")
    _, model = pair(mesh)
    with refused("expected a DTensor", ValueError):
        model[0].weight.grad = on_device(torch.zeros(5, 4))


WAYS = ("buffers", "one buffer", "a kept gradient", "scaled", "without a backward")


@pytest.mark.parametrize("way", WAYS)
def test_the_cores_optimizer_reads_them(way, mesh, rank, world):
    plain, model = pair(mesh)
    ours = flatshard.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1, weight_decay=0.0)
    kept = []
    for step in range(3):
        for each in plain, model:
            if way == "buffers" and step == 0:
                give(each, zeros(each))
            elif way == "one buffer":
                each[0].weight.grad = torch.zeros_like(each[0].weight)
        backward(plain, model, rank, world, step)
        for each in plain, model:
            weight = each[0].weight
            if way == "a kept gradient":
                kept.append((weight.grad, weight.grad.clone()))
                weight.grad = None
            elif way == "scaled":
                weight.grad = 2 * weight.grad
            elif way == "without a backward" and step == 1:
                each.zero_grad()
                weight.grad = torch.ones_like(weight)
        ours.step()
        theirs.step()
        for each in plain, model:
            each.zero_grad(set_to_none=way != "buffers")
    for gradient, values in kept:
        assert torch.equal(gradient, values)
    for p, q in zip(plain.parameters(), model.parameters()):
        torch.testing.assert_close(q.full_tensor(), p, rtol=1e-4, atol=1e-5)


def test_buffers_without_reductions(mesh, rank, world):
    """The first backwards of a step accumulate unsharded gradients."""
    plain, model = pair(mesh)
    ours, theirs = zeros(model), zeros(plain)
    give(model, ours)
    give(plain, theirs)
    for step in range(4):
        model.set_requires_gradient_sync(step % 2 == 1)
        backward(plain, model, rank, world, step)
    assert all(p.grad is b for p, b in zip(model.parameters(), ours))
    close(ours, theirs)


def test_an_exception_leaves_buffers_in_place(mesh, rank, world):
    plain, model = pair(mesh)
    ours, theirs = zeros(model), zeros(plain)
    give(model, ours)
    give(plain, theirs)
    backward(plain, model, rank, world, 0)
    handle = model[2].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(data(rank, 1))
    handle.remove()
    model.reset_iter_state()
    plain.zero_grad(set_to_none=False)  # the failed step's gradients are dropped
    backward(plain, model, rank, world, 2)
    assert all(p.grad is b for p, b in zip(model.parameters(), ours))
    close(ours, theirs)
