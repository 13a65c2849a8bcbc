"""A list of modules as one unit, and slices of nn.Sequential."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2

from flatshard import fully_shard
from tests.python.device import on_device
from tests.python.models import DIM, HIDDEN, Block, Body, plain
from tests.python.sum_order import SMALL_MODEL
from tests.python.training import (
    assert_same_grads,
    backward_both,
    data,
    distance,
    full_state,
    refused,
)


def test_a_list_is_one_unit(mesh, rank, world):
    model = Body(plain)
    single = copy.deepcopy(model)
    fully_shard(list(model.blocks), mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        backward_both(model, single, [data(r) for r in range(world)], rank)
    assert_same_grads(model, single)


@pytest.mark.parametrize("function", [fully_shard, fsdp2])
def test_slices_of_a_sequence_are_plain(function, mesh, rank):
    """FSDP2's slices are plain as well."""
    model = nn.Sequential(*(Block(DIM, HIDDEN) for _ in range(3)))
    single = copy.deepcopy(model)
    for block in model:
        function(block, mesh=mesh)
    function(model, mesh=mesh)
    x = data(rank)
    model(x)
    part = model[:2]
    assert type(part) is nn.Sequential and part[1] is model[1]
    torch.testing.assert_close(part(x), single[:2](x))
    part(x).square().mean().backward()
    assert part[0].up.weight.grad is not None and model[2].up.weight.grad is None


def test_a_slice_without_units_runs_while_whole(mesh, rank, world):
    if world == 1:
        pytest.skip("no other rank has other data")
    model = nn.Sequential(*(Block(DIM, HIDDEN) for _ in range(2)))
    single = copy.deepcopy(model)
    fully_shard(model, mesh=mesh)
    x = data(rank)
    model.set_reshard_after_forward(True)
    with refused("weight of Linear .*unit root", RuntimeError):
        model(x), model[:1](x)
    model.unshard()
    torch.testing.assert_close(model[:1](x), single[:1](x))
    model.reshard()
    model.set_reshard_after_forward(False)
    model(x)
    torch.testing.assert_close(model[:1](x), single[:1](x))


class Tail(nn.Module):
    """Modules of a list unit, called by `order`; "weight": no module, but a weight of
    one of them."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, DIM)
        on_device(self)

    def forward(self, x, order):
        x = self.body(x)
        for name in order.split():
            if name == "weight":
                x = nn.functional.linear(x, self.head.weight)
            else:
                x = getattr(self, name)(x)
        return x


@pytest.mark.parametrize(
    "order",
    ["norm", "head norm", "norm norm head", "norm head norm", "norm weight", "body"],
)
@pytest.mark.parametrize("strategy", ["optim_grads_params", "optim"])
def test_modules_of_a_list_run_in_any_order(order, strategy, mesh, rank):
    """The next step is right, too, as FSDP2's are."""
    states = []
    for function, options in ((fully_shard, {"strategy": strategy}), (fsdp2, {})):
        torch.manual_seed(0)
        model = Tail()
        function([model.norm, model.head], mesh=mesh, **options)
        function(model, mesh=mesh, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for now in (order, "norm head", order):
            with torch.no_grad():
                model(data(rank), now)
            model(data(rank), now).square().mean().backward()
            optimizer.step(), optimizer.zero_grad()
        states.append(full_state(model))
    assert distance(*states) < SMALL_MODEL


def test_lists_that_interleave_or_nest(mesh, rank, world):
    def act(m, x):
        m(x).square().mean().backward()

    for nested in (False, True):
        states = []
        for function in (fully_shard, fsdp2):
            torch.manual_seed(0)
            model = Body(plain, blocks=4)
            a, b, c, d = model.blocks
            lists = ([[a, a.up], [b, b.down, b.up]]) if nested else ([[a, c], [b, d]])
            for modules in lists:
                function(modules, mesh=mesh)
            function(model, mesh=mesh)
            for _ in range(2):
                act(model, data(rank))
            states.append({n: p.grad for n, p in model.named_parameters()})
        for name, grad in states[0].items():
            torch.testing.assert_close(
                grad.full_tensor(), states[1][name].full_tensor()
            )


def test_weights_of_a_list_stay_for_all_its_modules(mesh, rank):
    model = Tail()
    fully_shard([model.norm, model.head], mesh=mesh)
    fully_shard(model, mesh=mesh)
    seen = []
    model.body.register_forward_hook(
        lambda *_: seen.append(type(model.head.weight) is nn.Parameter)
    )
    with torch.no_grad():
        for order in ("norm body head body", "norm", "body"):
            model(data(rank), order)
    # Unsharded from the first of them to the last, and no longer than the forward.
    assert seen == [False, True, False, False, False, False]


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mid = nn.Embedding(8, DIM), nn.Linear(DIM, DIM)

    def forward(self, ids):
        return self.mid(self.embed(ids))


class WithHead(nn.Module):
    """A model that is not wrapped itself."""

    def __init__(self, tied):
        super().__init__()
        self.base, self.head = Base(), nn.Linear(DIM, 8, bias=False)
        if tied:
            self.head.weight = self.base.embed.weight

    def forward(self, ids):
        return self.head(self.base(ids))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("reshard", [True, False])
def test_a_list_reaches_beyond_the_root(tied, reshard, mesh, rank):
    """One of its modules is inside the outermost wrapped module, one is not."""
    results = []
    for function in (fully_shard, fsdp2):
        torch.manual_seed(0)
        model = on_device(WithHead(tied))
        options = {"mesh": mesh, "reshard_after_forward": reshard}
        function([model.base.embed, model.head], **options)
        function(model.base, **options)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            ids = on_device((torch.arange(4) + rank + step) % 8)
            loss = nn.functional.cross_entropy(model(ids), ids)
            loss.backward()
            optimizer.step(), optimizer.zero_grad()
            losses.append(loss.detach())
            with torch.no_grad():
                losses.append(model(ids).mean())
        results.append((losses, full_state(model)))
    (ours, state), (theirs, other) = results
    torch.testing.assert_close(ours, theirs)
    assert distance(state, other) < 1e-5


class Top(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.mid, self.bias = nn.Linear(DIM, DIM), bias

    def forward(self, x):
        return self.mid(x) + self.bias.sum()


class Shares(nn.Module):
    """Modules outside the unit of embed and head have parameters of it, as the encoder
    of T5 and the head of BERT do."""

    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(8, DIM), nn.Linear(DIM, 8)
        self.encoder, self.top = Base(), Top(self.head.bias)
        self.encoder.embed.weight = self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.top(self.encoder(ids)) + self.embed(ids))


@pytest.mark.parametrize("reshard", [True, False])
def test_modules_of_an_outer_unit_share_parameters(reshard, mesh, rank, world):
    torch.manual_seed(0)
    model = on_device(Shares())
    single = copy.deepcopy(model)
    fully_shard([model.embed, model.head], mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh)
    assert model.encoder.embed.weight is model.head.weight
    assert model.top.bias is model.head.bias
    optimizers = [
        torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (model, single)
    ]
    for step in range(3):
        ids = [on_device((torch.arange(6) + r + step) % 8) for r in range(world)]
        nn.functional.cross_entropy(model(ids[rank]), ids[rank]).backward()
        for r in range(world):
            (nn.functional.cross_entropy(single(ids[r]), ids[r]) / world).backward()
        for ours, theirs in zip(model.parameters(), single.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
        for optimizer in optimizers:
            optimizer.step(), optimizer.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(model(ids[0]), single(ids[0]))
    state = full_state(model)
    assert list(model.state_dict()) == list(single.state_dict())
    assert distance(state, single.state_dict()) < 1e-5
    # Loading writes to all places.
    model.load_state_dict(
        {name: value.detach() * 2 for name, value in model.state_dict().items()},
        assign=True,
    )
    with torch.no_grad():
        for p in single.parameters():
            p.mul_(2)
        torch.testing.assert_close(model(ids[0]), single(ids[0]))
