"""Parameters of a unit that stays unsharded after its forward, used outside of it, as with
FSDP2: a head that is called once the model returned its features."""

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
    # A view of a shard is no parameter.
    "unshard": lambda model, h: (model.unshard(), h @ model.head.weight.t())[1],
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("method", ["__call__", "features"])
@pytest.mark.parametrize("way", WAYS)
def test_a_head_outside_of_the_forward(way, method, tied, mesh, rank):
    found = []
    for library in LIBRARIES:
        model = shard(library, Model(tied), mesh)
        if way in ("weight", "unshard") and not tied:
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


def test_a_head_in_an_evaluation(mesh, rank):
    model = shard(flatshard, Model(False), mesh)
    theirs = shard(fsdp2, Model(False), mesh)
    for _ in range(2):
        with torch.no_grad():
            logits = [m.head(m(ids(rank))) for m in (model, theirs)]
        torch.testing.assert_close(*logits)
    model(ids(rank)).sum().backward()
    assert all(isinstance(p, DTensor) for p in model.parameters())


def test_no_collective_after_a_training_forward(mesh, rank):
    """The unit stays unsharded: what a rank does not ask for costs nothing."""
    model = shard(flatshard, Model(False), mesh)
    twin = copy.deepcopy(dict(model.state_dict()))
    h = model(ids(rank))
    assert all(isinstance(p, DTensor) for p in model.parameters())
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
