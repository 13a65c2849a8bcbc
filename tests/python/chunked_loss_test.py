"""Losses in chunks: the root returns features, and the head runs after it, once for
each chunk and with a backward for each. The head is a unit or a part of a list unit."""

import copy

import pytest
import torch
from torch import nn

from flatshard import fully_shard
from tests.python.device import on_device
from tests.python.training import full_state

VOCAB, DIM = 13, 6


class Model(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.body = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.norm(self.body(self.embed(ids)))


def tokens(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return on_device(torch.randint(0, VOCAB, (8,), generator=generator))


def backward(model, ids, chunks=4):
    features = model(ids)
    grads, losses = [], []
    for chunk in features.detach().chunk(chunks):
        chunk = chunk.clone().requires_grad_()
        losses.append(model.head(chunk).square().sum())
        losses[-1].backward()
        grads.append(chunk.grad)
    features.backward(torch.cat(grads))
    return sum(losses).item()


def wrap(model, units, mesh, **options):
    for unit in units:
        members = [getattr(model, name) for name in unit.split()]
        fully_shard(members if len(members) > 1 else members[0], mesh=mesh, **options)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize(
    "units", [["embed", "norm", "head"], ["embed", "norm head"], ["embed norm head"]]
)
def test_losses_weights_and_gradients(units, reshard, mesh, rank, world):
    torch.manual_seed(0)
    single = on_device(Model(tied=len(units) == 1))
    model = copy.deepcopy(single)
    wrap(model, ["body", *units], mesh, reshard_after_forward=reshard)
    pair = [(m, torch.optim.Adam(m.parameters(), lr=0.01)) for m in (model, single)]
    for step in range(3):
        loss = backward(model, tokens(rank, step))
        expected = [backward(single, tokens(r, step)) for r in range(world)]
        assert loss == pytest.approx(expected[rank], rel=1e-4)
        for p, q in zip(model.parameters(), single.parameters()):
            q.grad /= world
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)
            q.grad.copy_(p.grad.full_tensor())  # Adam divides by what rounding left
        for m, optimizer in pair:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    for a, b in zip(full_state(model).values(), single.state_dict().values()):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("reshard", [True, False])
def test_the_head_stays_unsharded_for_the_chunks(reshard, mesh, rank):
    torch.manual_seed(0)
    model = on_device(Model(tied=False))
    other = copy.deepcopy(model)
    for m in (model, other):
        wrap(m, ["embed", "body", "norm head"], mesh, reshard_after_forward=reshard)
    for step in range(2):
        ids = tokens(rank, step)
        features = model(ids)
        model.head.set_reshard_after_forward(False)
        model.head.set_reshard_after_backward(False)
        grads = []
        for chunk in features.detach().chunk(4):
            chunk = chunk.clone().requires_grad_()
            model.head(chunk).square().sum().backward()
            grads.append(chunk.grad)
        model.head.set_reshard_after_forward(True)
        model.head.set_reshard_after_backward(True)
        model.head.reshard()
        features.backward(torch.cat(grads))
        backward(other, ids)
        for p, q in zip(model.parameters(), other.parameters()):
            assert torch.equal(p.grad.full_tensor(), q.grad.full_tensor())


def test_the_head_does_not_run(mesh, rank):
    model = wrap(on_device(Model(tied=False)), ["norm head"], mesh)
    (model(tokens(rank, 0)).sum() + model(tokens(rank, 1)).sum()).backward()
    without = {name for name, p in model.named_parameters() if p.grad is None}
    assert without == {"head.weight"}
