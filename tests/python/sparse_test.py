"""Gradients of other layouts: the reduced gradient is dense."""

import copy

import pytest
import torch
from torch import nn

from flatshard import fully_shard

from tests.python.device import on_device


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 4, sparse=True)

    def forward(self, ids):
        return self.embed(ids)


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.EmbeddingBag(11, 4, sparse=True, mode="sum")

    def forward(self, ids):
        return self.embed(ids)


class Sparse(torch.autograd.Function):
    """A custom function of the program with a gradient that leaves out rows of
    zeros."""

    @staticmethod
    def forward(ctx, weight, ids):
        ctx.save_for_backward(ids)
        ctx.shape = weight.shape
        return weight[ids]

    @staticmethod
    def backward(ctx, grad):
        (ids,) = ctx.saved_tensors
        ids, grad = ids.flatten(), grad.flatten(0, -2)
        return torch.sparse_coo_tensor(ids[None], grad, ctx.shape), None


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(11, 4))

    def forward(self, ids):
        return Sparse.apply(self.weight, ids)


class Both(Embedding):
    """Dense and sparse gradients of one parameter."""

    def forward(self, ids):
        return self.embed(ids) @ self.embed.weight.t() @ self.embed.weight


def ids_of(rank, step):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return on_device(torch.randint(11, (3, 5), generator=generator))


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("kind", [Embedding, Bag, Own, Both])
def test_a_sparse_gradient(kind, accumulate, mesh, rank, world):
    torch.manual_seed(0)
    plain = on_device(nn.Sequential(kind(), nn.Linear(4, 4)))
    model = copy.deepcopy(plain)
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    for step in range(2):
        if accumulate:
            model.set_requires_gradient_sync(step == 1)
        (
            sum(plain(ids_of(r, step)).square().mean() for r in range(world)) / world
        ).backward()
        model(ids_of(rank, step)).square().mean().backward()
    for p, q in zip(plain.parameters(), model.parameters()):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad.to_dense())


def test_sparse_gradients_that_a_program_asks_for(mesh, rank, world):
    torch.manual_seed(0)
    plain = on_device(Embedding())
    model = fully_shard(copy.deepcopy(plain), mesh=mesh)
    weight = model.embed.weight
    (got,) = torch.autograd.grad(model(ids_of(rank, 0)).sum(), weight)
    losses = [plain(ids_of(r, 0)).sum() for r in range(world)]
    (want,) = torch.autograd.grad(sum(losses) / world, plain.embed.weight)
    torch.testing.assert_close(got.full_tensor(), want.to_dense())
