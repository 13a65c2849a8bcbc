"""Autograd's other doors than `loss.backward()`: chosen inputs, torch.autograd.grad, gradients
of gradients, hooks on accumulators."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from flatshard import fully_shard

from tests.python.device import on_device
from tests.python.training import refused


def stack():
    torch.manual_seed(0)
    return on_device(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)))


def shard(model, mesh, **options):
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def pair(mesh, make=stack, **options):
    plain = make()
    return plain, shard(copy.deepcopy(plain), mesh, **options)


def data(rank):
    generator = torch.Generator().manual_seed(rank)
    return on_device(torch.randn(5, 4, generator=generator))


def loss_of(model, ranks):
    """The mean of the losses of `ranks`."""
    return sum(model(data(r)).square().mean() for r in ranks) / len(ranks)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def same_gradients(model, plain):
    for (name, p), q in zip(plain.named_parameters(), model.parameters()):
        if p.grad is None:
            assert q.grad is None, name
        else:
            torch.testing.assert_close(whole(q.grad), p.grad, msg=name)


CHOICES = {
    "all": lambda ps: ps,
    "one": lambda ps: ps[:1],
    "last": lambda ps: [ps[-1]],
    "a single tensor": lambda ps: ps[2],
    "twice": lambda ps: ps + ps,
    "edges": lambda ps: [get_gradient_edge(p) for p in ps],
}


@pytest.mark.parametrize("root_alone", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("choice", CHOICES)
def test_backward_of_chosen_parameters(choice, when, root_alone, mesh, rank, world):
    plain = stack()
    model = copy.deepcopy(plain)
    model = fully_shard(model, mesh=mesh) if root_alone else shard(model, mesh)
    for each, ranks in ((plain, range(world)), (model, [rank])):
        for _ in range(2):  # the second adds
            if when == "before":
                chosen = CHOICES[choice](list(each.parameters()))
            loss = loss_of(each, list(ranks))
            if when == "after":
                chosen = CHOICES[choice](list(each.parameters()))
            loss.backward(inputs=chosen)
    same_gradients(model, plain)


def test_backward_of_chosen_parameters_and_inputs(mesh, rank, world):
    plain, model = pair(mesh)
    found = []
    for each, ranks in ((plain, range(world)), (model, [rank])):
        xs = [data(r).requires_grad_() for r in ranks]
        loss = sum(each(x).square().mean() for x in xs) / len(xs)
        torch.autograd.backward(loss, inputs=[*xs, *list(each.parameters())[:2]])
        found.append(xs)
    same_gradients(model, plain)
    torch.testing.assert_close(found[1][0].grad / world, found[0][rank].grad)


class Checkpoint(torch.autograd.Function):
    """As libraries wrote it before torch had one."""

    @staticmethod
    def forward(ctx, block, way, x, *parameters):
        ctx.block, ctx.way, ctx.parameters = block, way, parameters
        ctx.save_for_backward(x)
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        if ctx.way == "grad":
            dx, *others = torch.autograd.grad(y, (x, *ctx.parameters), grad)
            return None, None, dx, *others
        torch.autograd.backward(y, grad, inputs=[x, *ctx.parameters])
        return None, None, x.grad, *[None] * len(ctx.parameters)


@pytest.mark.parametrize("way", ["inputs", "grad"])
def test_a_checkpoint_of_the_programs_own(way, mesh, rank, world):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.block, self.last = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            x = self.first(x)
            x = Checkpoint.apply(self.block, way, x, *self.block.parameters())
            return self.last(x)

    torch.manual_seed(0)
    plain = on_device(Net())
    model = copy.deepcopy(plain)
    fully_shard(model.block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        loss_of(plain, range(world)).backward()
        loss_of(model, [rank]).backward()
    same_gradients(model, plain)


@pytest.mark.parametrize("keep", ["all", "none"])
def test_gradients_after_the_forward(keep, mesh, rank, world):
    """parameters() of a unit that stays unsharded are unsharded then."""
    plain = stack()
    model = shard(copy.deepcopy(plain), mesh, reshard_after_forward=keep == "none")
    results = []
    for each, ranks in ((plain, range(world)), (model, [rank])):
        loss = loss_of(each, list(ranks))
        results.append(torch.autograd.grad(loss, list(each.parameters())))
    for want, got in zip(*results):
        torch.testing.assert_close(whole(got), want)


@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_second_derivatives(when, strategy, mesh, rank, world):
    """A penalty on the norm of the gradient."""
    plain, model = pair(mesh, strategy=strategy)
    for each, ranks in ((plain, range(world)), (model, [rank])):
        for _ in range(2):
            parameters = list(each.parameters())
            loss = loss_of(each, list(ranks))
            if when == "after":
                parameters = list(each.parameters())
            grads = torch.autograd.grad(loss, parameters, create_graph=True)
            penalty = sum(g.square().sum() for g in grads)
            (loss + whole(penalty)).backward()
            torch.optim.SGD(each.parameters(), lr=0.1).step()
            if _ == 0:
                each.zero_grad()
    same_gradients(model, plain)


def test_third_derivatives(mesh, rank, world):
    plain, model = pair(mesh)
    for each, ranks in ((plain, range(world)), (model, [rank])):
        parameters = list(each.parameters())
        loss = loss_of(each, list(ranks))
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        norm = sum(whole(g.square().sum()) for g in first)
        second = torch.autograd.grad(norm, parameters, create_graph=True)
        sum(whole(g.square().sum()) for g in second).backward()
    same_gradients(model, plain)


def test_hooks_and_the_divide_factor_as_in_a_backward(mesh, rank, world):
    plain, model = pair(mesh)
    model[0].set_gradient_divide_factor(1.0)  # the sum of the ranks, not the mean
    seen = []
    for net in plain, model:
        net[0].weight.register_hook(lambda g: 3 * g)
        net[2].bias.register_hook(lambda g: seen.append(g.shape))
    expected = torch.autograd.grad(loss_of(plain, range(world)), plain.parameters())
    results = torch.autograd.grad(loss_of(model, [rank]), model.parameters())
    for i, (result, value) in enumerate(zip(results, expected)):
        factor = world if i < 2 else 1
        torch.testing.assert_close(whole(result), factor * value, msg=str(i))
    assert seen == [plain[2].bias.shape] * 2


def test_parameters_from_before_fully_shard(mesh, rank):
    model = stack()
    former = list(model.parameters())
    shard(model, mesh)
    loss = model(data(rank)).sum()
    with refused("parameter weight as it was before fully_shard", RuntimeError):
        loss.backward(inputs=former, retain_graph=True)
    with refused("parameter weight as it was before fully_shard", RuntimeError):
        torch.autograd.grad(loss, former, allow_unused=True)


def test_batches_of_gradients(mesh, rank):
    """Batches are right for inputs, and refused for parameters."""
    plain, model = pair(mesh)
    rows = torch.eye(15).reshape(15, 5, 3)
    results = []
    for net in plain, model:
        x = data(rank).requires_grad_()
        out = net(x)
        results += torch.autograd.grad(out, x, on_device(rows), is_grads_batched=True)
    torch.testing.assert_close(*results)
    weight = model[0].weight

    def by_vmap(out):
        rows_of = torch.vmap(lambda row: torch.autograd.grad(out, weight, row)[0])
        return rows_of(on_device(rows))

    for ask in (
        lambda out: torch.autograd.grad(
            out, weight, on_device(rows), is_grads_batched=True
        ),
        by_vmap,
    ):
        with refused("call it once for each row", NotImplementedError):
            ask(model(data(rank)))
    model(data(rank)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


# -- hooks -------------------------------------------------------------------------------


def accumulator(p):
    return p.expand_as(p).grad_fn.next_functions[0][0]


def test_hooks_of_accumulators(mesh, rank, world):
    """As DistributedDataParallel puts them."""
    plain, model = pair(mesh)
    seen = []
    for each, ranks in ((plain, range(world)), (model, [rank])):
        called = []
        nodes = [accumulator(p) for p in each.parameters()]
        for i, (node, p) in enumerate(zip(nodes, each.parameters())):

            def before(grads):
                return (2 * grads[0],)

            def after(_, grads, i=i, p=p):
                called.append((i, whole(p.grad).clone()))

            node.register_prehook(before)
            node.register_hook(after)
        for _ in range(2):
            loss_of(each, list(ranks)).backward()
            each.zero_grad()
        seen.append(sorted(called, key=lambda c: c[0]))
    assert len(seen[0]) == len(seen[1]) == 8
    for (i, want), (j, got) in zip(*seen):
        assert i == j
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("before", [False, True])
def test_hooks_of_several_gradients(before, mesh, rank):
    model, calls = stack(), []
    if before:
        register_multi_grad_hook(list(model.parameters()), calls.append)
        with refused("register_multi_grad_hook", NotImplementedError):
            shard(model, mesh)
        return
    shard(model, mesh)
    with refused("register_multi_grad_hook", NotImplementedError):
        register_multi_grad_hook(list(model.parameters()), calls.append)
    register_multi_grad_hook(list(model.parameters()), calls.append, mode="any")
    model(data(rank)).sum().backward()
    assert len(calls) == 1


def test_gradients_of_torchs_dtensors_stay_as_they_are(mesh, rank, world):
    """With and without a parameter: a partial sum is summed where it is used."""
    model = shard(stack(), mesh)
    ones = on_device(torch.ones(4))
    cut = DTensor.from_local(on_device(torch.eye(4)), mesh, [Shard(0)])
    leaf = DTensor.from_local(ones, mesh, [Replicate()]).requires_grad_()
    for others in [], [model[0].weight]:
        total = (cut * leaf).sum().to_local(grad_placements=[Replicate()])
        more = sum(model(data(rank)).sum() for _ in others)
        gradient, *_ = torch.autograd.grad(total + more, [leaf, *others])
        assert type(gradient) is DTensor
        assert world == 1 or gradient.placements == (Partial(),)
        torch.testing.assert_close(gradient.full_tensor(), world * ones)
