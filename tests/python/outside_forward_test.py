"""Parameters of a unit that stays unsharded after its forward, used outside the
forward, as with FSDP2: a head that is called once the model returned its features."""

import copy

import pytest
import torch
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import flatshard

from tests.python.device import on_device

LIBRARIES = (flatshard, fsdp2)


class Model(nn.Module):
    def __init__(self, tied):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(11, 6)
        self.body = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=not tied)
        if tied:
            self.head.weight = self.embed.weight
        on_device(self)

    def features(self, ids):
        return torch.tanh(self.body(self.embed(ids)))

    forward = features


def shard(library, model, mesh):
    library.fully_shard(model.body, mesh=mesh)
    library.fully_shard(model, mesh=mesh)
    library.register_fsdp_forward_method(model, "features")
    return model


def ids(rank, step=0):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return on_device(torch.randint(11, (3, 5), generator=generator))


WAYS = {
    "module": lambda model, h: model.head(h),
    "weight": lambda model, h: nn.functional.linear(h, model.head.weight),
    "chunks": lambda model, h: torch.cat([model.head(part) for part in h.chunk(2)]),
    "checkpoint": lambda model, h: checkpoint(model.head, h, use_reentrant=False),
    "view": lambda model, h: h @ model.head.weight.t(),
    # A view of a shard is not a parameter.
    "unshard": lambda model, h: (model.unshard(), h @ model.head.weight.t())[1],
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("method", ["__call__", "features"])
@pytest.mark.parametrize("way", WAYS)
def test_a_head_outside_of_the_forward(way, method, tied, mesh, rank):
    found = []
    for library in LIBRARIES:
        model = shard(library, Model(tied), mesh)
        if way in ("weight", "view", "unshard") and not tied:
            model.head.bias.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for step in range(3):
            x = ids(rank, step)
            logits = WAYS[way](model, getattr(model, method)(x))
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), x.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        found.append(losses + [p.full_tensor() for p in model.parameters()])
    torch.testing.assert_close(*found)


def whole(value):
    """Returns the tensor of a DTensor, or `value` itself, for assert_close."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def test_a_head_in_an_evaluation(mesh, rank):
    model = shard(flatshard, Model(False), mesh)
    theirs = shard(fsdp2, Model(False), mesh)
    for _ in range(2):
        with torch.no_grad():
            logits = [whole(m.head(m(ids(rank)))) for m in (model, theirs)]
        torch.testing.assert_close(*logits)
    model(ids(rank)).sum().backward()
    assert all(isinstance(p, DTensor) for p in model.parameters())


def test_no_collective_after_a_training_forward(mesh, rank):
    """The unit stays unsharded: what a rank does not ask for costs nothing."""
    model = shard(flatshard, Model(False), mesh)
    twin = copy.deepcopy(dict(model.state_dict()))
    h = model(ids(rank))
    model.head(h).sum().backward()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    torch.testing.assert_close(
        model.head.weight.full_tensor(), twin["head.weight"].full_tensor()
    )


def test_of_a_unit_that_is_resharded(mesh, rank, world):
    if world == 1:
        pytest.skip("the ranks have different values only where there are several")
    model = Model(False)
    flatshard.fully_shard(model.head, mesh=mesh)
    shard(flatshard, model, mesh)
    h = model(ids(rank))
    with pytest.raises(
        RuntimeError, match="linear: parameter weight of .*Linear meets"
    ):
        nn.functional.linear(h, model.head.weight)
    model.head.set_reshard_after_forward(False)
    nn.functional.linear(h, model.head.weight).sum().backward()


def are_sharded(model):
    return {name: isinstance(p, DTensor) for name, p in model.named_parameters()}


@pytest.mark.parametrize("reshards", [None, True, False])
def test_parameters_between_forward_and_backward(reshards, mesh, rank):
    """Works as with FSDP2: parameters of a unit that stays unsharded are unsharded."""
    found = []
    for library in LIBRARIES:
        model = Model(False)
        library.fully_shard(model.body, mesh=mesh, reshard_after_forward=reshards)
        library.fully_shard(model, mesh=mesh, reshard_after_forward=reshards)
        for _ in range(2):
            loss = model(ids(rank)).sum()
            found.append(are_sharded(model))
            loss.backward()
            found.append(are_sharded(model))
        model(ids(rank))
        model.reshard()
        model.body.reshard()
        found.append(are_sharded(model))
    half = len(found) // 2
    assert found[:half] == found[half:]
    assert all(found[-1].values())


def test_what_shows_shards_after_a_forward(mesh, rank):
    model = shard(flatshard, Model(False), mesh)
    with torch.no_grad():
        model(ids(rank))
    assert all(are_sharded(model).values())  # such as an EMA's update after validation
    before = {name: p.full_tensor() for name, p in model.state_dict().items()}

    def after_forward():
        h = model(ids(rank))
        assert not isinstance(model.head.weight, DTensor)
        return model.head(h).sum()

    loss = after_forward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(whole(p.detach().clone()), before[name])
        assert p.full_tensor().equal(before[name])
        assert p.to_local().shape == model.state_dict()[name].to_local().shape
        copy.deepcopy(p)
        model(ids(rank))
    loss = after_forward()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value.full_tensor(), before[name])
    loss.backward()
    twice = [2 * p.grad.full_tensor() for p in model.parameters()]
    after_forward().backward()
    torch.testing.assert_close(
        [p.grad.full_tensor() for p in model.parameters()], twice
    )
    loss = after_forward()
    model.zero_grad()
    loss.backward()
    torch.testing.assert_close(
        [2 * p.grad.full_tensor() for p in model.parameters()], twice
    )
    after_forward()
    zeros = {
        name: torch.zeros_like(value) for name, value in model.state_dict().items()
    }
    after_forward()
    model.load_state_dict(zeros)
    assert all(p.full_tensor().eq(0).all() for p in model.parameters())
    after_forward()
    model.to(torch.float64)
    assert all(p.dtype == torch.float64 for p in model.parameters())


def test_an_optimizer_of_unsharded_parameters(mesh, rank):
    """One that is made between a forward and its backward trains the shards."""
    found = []
    for is_late in (False, True):
        model = shard(flatshard, Model(False), mesh)
        if is_late:
            model(ids(rank))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(2):
            model.head(model(ids(rank, step))).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([p.full_tensor() for p in model.parameters()])
    torch.testing.assert_close(*found)
    h = model(ids(rank))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    model.head(h).sum().backward()
    with pytest.raises(RuntimeError, match="state for the unsharded .* embed.weight"):
        optimizer.step()


@pytest.mark.parametrize("then", ["reshard", "forward", "state_dict"])
def test_a_write_after_the_forward_is_kept(then, mesh, rank):
    """A write to unsharded parameters, before a forward reshards them."""
    model = shard(flatshard, Model(False), mesh)
    model(ids(rank))
    with torch.no_grad():
        model.head.bias.fill_(3)
        getattr(model, then)(*[ids(rank)] * (then == "forward"))
    if then == "forward":
        model(ids(rank))
    assert model.state_dict()["head.bias"].full_tensor().eq(3).all()


@pytest.mark.parametrize("ends_in", ["backward", "forward", "state_dict"])
def test_parameters_frozen_after_a_forward(ends_in, mesh, rank):
    """The next forward does not train them."""
    model = shard(flatshard, Model(False), mesh)
    h = model(ids(rank))
    model.embed.requires_grad_(False)
    if ends_in == "backward":
        model.head(h).sum().backward()
    elif ends_in == "state_dict":
        model.state_dict()
    model.zero_grad()
    model.head(model(ids(rank))).sum().backward()
    assert not model.embed.weight.requires_grad and model.embed.weight.grad is None
    assert model.head.weight.grad is not None
