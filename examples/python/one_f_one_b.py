"""Drives a 1F1B schedule by hand: the backward of one microbatch alternates with the
forward of the next, layer by layer, each layer in two pieces.

    torchrun --nproc-per-node 2 examples/python/one_f_one_b.py

It ends with the largest difference between its weights and the weights of plain
accumulation. The difference is 0. Here both microbatches run on one stream. Where rows
of tokens are exchanged between two pieces, this order hides the exchange under the
other microbatch's compute.
"""

import torch
from torch import nn

from flatshard import fully_shard


class Layer(nn.Module):
    """forward() is attend() and then experts(), as a schedule calls them."""

    def __init__(self, dim):
        super().__init__()
        self.mix = nn.Linear(dim, dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def attend(self, x):
        return x + torch.tanh(self.mix(x))

    def experts(self, x):
        return x + self.down(torch.relu(self.up(x)))

    def forward(self, x):
        return self.experts(self.attend(x))


class Model(nn.Module):
    def __init__(self, dim=16, layers=3):
        super().__init__()
        self.embed = nn.Linear(dim, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(layers))
        self.head = nn.Linear(dim, 1)

    def loss(self, x):
        return self.head(x).square().mean()

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.loss(x)


def shard(model, **options):
    for layer in model.layers:
        fully_shard(layer, **options)
    return fully_shard(model, **options)


class Piece:
    """A part of a forward with a separate graph."""

    def __init__(self, function, x):
        self.input = x.detach().requires_grad_(x.requires_grad)
        self.output = function(self.input)

    def backward(self, grad=None):
        torch.autograd.backward(self.output, grad)
        return self.input.grad


class Microbatch:
    """Forward and backward as lists of steps, one for each layer and end."""

    def __init__(self, model, x, scale, is_last):
        self.model = model
        self.steps = model.backward_pass(is_last=is_last, interleaved=not is_last)
        self.pieces = []
        self.x, self.scale = x, scale

    def run(self, function):
        self.pieces.append(Piece(function, self.x))
        self.x = self.pieces[-1].output

    def forwards(self):
        model, steps = self.model, self.steps
        steps.begin_forward(model)
        self.run(model.embed)
        yield
        for layer in model.layers:
            steps.begin_forward(layer)
            self.run(layer.attend)
            self.run(layer.experts)
            steps.end_forward(layer)
            yield
        self.run(lambda x: model.loss(x) * self.scale)
        steps.end_forward(model)
        yield

    def backwards(self):
        model, steps = self.model, self.steps
        with steps:
            steps.begin_backward(model)
            grad = self.pieces.pop().backward()
            yield
            for layer in reversed(model.layers):
                steps.begin_backward(layer)
                grad = self.pieces.pop().backward(grad)
                grad = self.pieces.pop().backward(grad)
                steps.end_backward(layer)
                yield
            self.pieces.pop().backward(grad)
            steps.end_backward(model)
        yield


def one_f_one_b(model, batches):
    """Losses of the microbatches, each divided by their number."""
    losses, before = [], iter(())
    for m, x in enumerate(batches):
        mine = Microbatch(model, x, 1 / len(batches), m + 1 == len(batches))
        for _ in mine.forwards():
            next(before, None)
        for _ in before:
            pass
        losses.append(mine.x.detach())
        before = mine.backwards()
    for _ in before:
        pass
    return losses


def plain(model, batches):
    losses = []
    for m, x in enumerate(batches):
        model.set_requires_all_reduce(m + 1 == len(batches))
        loss = model(x) * (1 / len(batches))
        loss.backward()
        losses.append(loss.detach())
    return losses


def train(step, batches_of, steps=3, **options):
    """Returns the losses and the full weights after some steps of AdamW."""
    torch.manual_seed(0)
    model = shard(Model(), **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for n in range(steps):
        losses += step(model, batches_of(n))
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), [p.full_tensor() for p in model.parameters()]


def main():
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()

    def batches_of(step):
        generator = torch.Generator().manual_seed(100 * step + rank)
        return list(torch.randn(4, 8, 16, generator=generator))

    losses, weights = train(one_f_one_b, batches_of)
    _, expected = train(plain, batches_of)
    difference = max((a - b).abs().max() for a, b in zip(weights, expected))
    if rank == 0:
        print("losses", *(f"{loss:.4f}" for loss in losses.tolist()))
        print(f"largest difference from plain accumulation: {difference}")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
