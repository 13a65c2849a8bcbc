"""Parameters of which no rank got a gradient, in units that have others: `.grad` stays None,
as under FSDP2. Where only some ranks got one, the others count zeros."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2

import flatshard
from flatshard import checkpoint, fully_shard
from flatshard.diagnostics import parameter_norms
from tests.python.device import on_device
from tests.python.models import DIM, Block, Body, plain
from tests.python.training import data, full_state, shard


class TwoWays(Block):
    """Has one more layer that it may use or not."""

    used = False

    def __init__(self):
        super().__init__(DIM, 40)
        self.more = nn.Linear(DIM, DIM)

    def forward(self, x):
        x = super().forward(x)
        return x + self.more(x) if self.used else x


def two_ways():
    model = Body(lambda m, x: plain(m, x))
    model.blocks[1] = TwoWays()
    return on_device(model)


def without_grad(model):
    return {name for name, p in model.named_parameters() if p.grad is None}


UNUSED = {"blocks.1.more.weight", "blocks.1.more.bias"}


def test_as_under_fsdp2(mesh, rank):
    torch.manual_seed(0)
    model = two_ways()
    theirs = shard(copy.deepcopy(model), fsdp2, mesh=mesh)
    shard(model, fully_shard, mesh=mesh)
    pair = model, theirs
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=0.1, weight_decay=0.5) for m in pair
    ]
    # The last step accumulates: unused, used, unused.
    for uses in ([False], [False, False], [True], [False, True, False]):
        for m, optimizer in zip(pair, optimizers):
            for m.blocks[1].used in uses:
                m(data(rank)).sum().backward()
            assert without_grad(m) == (set() if any(uses) else UNUSED)
            optimizer.step()
            optimizer.zero_grad()
        for a, b in zip(full_state(model).values(), full_state(theirs).values()):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero2", "zero3"])
def test_microbatches_without_synchronization(strategy, mesh, rank):
    model = shard(two_ways(), fully_shard, mesh=mesh, strategy=strategy)
    block = model.blocks[1]
    for first, second in ((False, False), (True, False), (False, True)):
        with model.no_sync():
            block.used = first
            model(data(rank)).sum().backward()
        block.used = second
        model(data(rank)).sum().backward()
        assert without_grad(model) == (set() if first or second else UNUSED)
        model.zero_grad()


@pytest.mark.parametrize("hooks", ["none", "looks", "steps"])
def test_a_gradient_on_one_rank(hooks, mesh, rank, world):
    torch.manual_seed(0)
    model = two_ways()
    single = copy.deepcopy(model)
    shard(model, fully_shard, mesh=mesh)
    seen = []
    names = {p: name for name, p in model.named_parameters()}

    def hook(p):
        seen.append(names[p])
        if hooks == "steps":
            with torch.no_grad():
                p.sub_(p.grad, alpha=1e-3)
            p.grad = None

    if hooks != "none":
        for p in names:
            p.register_post_accumulate_grad_hook(hook)
    model(data(rank)).sum().backward()
    assert set(seen) == (set() if hooks == "none" else set(names.values()) - UNUSED)
    seen.clear()
    model.zero_grad()
    before = full_state(model)
    model.blocks[1].used = rank == 0
    model(data(rank)).sum().backward()
    single.load_state_dict(before)
    for of in range(world):
        single.blocks[1].used = of == 0
        (single(data(of)).sum() / world).backward()
    if hooks != "none":
        assert sorted(seen) == sorted(names.values())
    if hooks == "steps":
        with torch.no_grad():
            for p in single.parameters():
                p.sub_(p.grad, alpha=1e-3)
        expected, found = single.state_dict(), full_state(model)
    else:
        expected = {name: p.grad for name, p in single.named_parameters()}
        found = {name: p.grad.full_tensor() for p, name in names.items()}
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=name)
    # A backward without a gradient leaves the existing one.
    if hooks == "none":
        model.blocks[1].used = False
        kept = model.blocks[1].more.weight.grad.full_tensor()
        model(data(rank)).sum().backward()
        assert torch.equal(model.blocks[1].more.weight.grad.full_tensor(), kept)


def test_a_gradient_that_the_program_put_there(mesh, rank):
    model = shard(two_ways(), fully_shard, mesh=mesh)
    weight = model.blocks[1].more.weight
    weight.grad = torch.ones_like(weight)
    model(data(rank)).sum().backward()
    assert weight.grad.full_tensor().eq(1).all()
    assert without_grad(model) == {"blocks.1.more.bias"}


def test_a_hook_of_the_gradient_runs_where_there_is_one(mesh, rank):
    model = shard(two_ways(), fully_shard, mesh=mesh)
    seen = []
    model.blocks[1].more.weight.register_hook(lambda grad: seen.append(grad))
    for model.blocks[1].used in (False, True):
        model(data(rank)).sum().backward()
    assert len(seen) == 1 and without_grad(model) == set()


def test_norms_of_gradients(mesh, rank):
    model = shard(two_ways(), fully_shard, mesh=mesh)
    model(data(rank)).sum().backward()
    assert {norm.name for norm in parameter_norms(model) if norm.grad is None} == UNUSED


@pytest.mark.parametrize("uses", [[False, False], [False, True, False]])
def test_a_checkpoint(uses, folder, mesh, rank):
    models = [shard(two_ways(), fully_shard, mesh=mesh) for _ in range(2)]
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in models]

    def train(model, optimizer, uses):
        for model.blocks[1].used in uses:
            model(data(rank)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    train(models[0], optimizers[0], uses)
    checkpoint.save(folder, 1, models[0], optimizers[0])
    checkpoint.load(folder, models[1], optimizers[1])
    weight = models[1].blocks[1].more.weight
    assert optimizers[1].state[weight].get("step", 0) == sum(uses)
    for model, optimizer in zip(models, optimizers):
        train(model, optimizer, [True, True])
    for a, b in zip(*(full_state(m).values() for m in models)):
        assert torch.equal(a, b)
    core = flatshard.optim.AdamW(models[1].parameters())
    assert checkpoint.load(folder, models[1], core).step == 1
