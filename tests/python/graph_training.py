"""Blocks as CUDA graphs against eager training, for the tests of both ways to ask.

On CPUs a replay calls the captured forward again."""

import contextlib
import copy

import torch
from torch import nn

import flatshard
from tests.python.device import on_device
from bench.harness.options import fully_shard

DIM, HEADS, VOCAB, BLOCKS, SEQ = 16, 2, 29, 3, 6
STEPS, WARMUP = 6, 3
REPLAYED = STEPS - WARMUP  # steps
# On several ranks buffers may be planned again after the first step.
LATE = (REPLAYED - 1, REPLAYED)


class Block(nn.Module):
    """Arguments in a tuple and by keyword, a plain one, a buffer, dropout; the result
    in a dict, with an argument in it."""

    def __init__(self, dropout):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.out = nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(
            nn.Linear(DIM, 3 * DIM), nn.GELU(), nn.Linear(3 * DIM, DIM)
        )
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x, rope, *, mask, factor=1.0):
        cos, sin = rope
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        q, k = q * cos + k * sin, k * cos
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        scores = (q @ k.transpose(-1, -2)) * self.scale
        weights = scores.masked_fill(~mask, -1e4).softmax(-1)
        attended = (weights @ v).transpose(1, 2).flatten(-2)
        x = x + self.dropout(self.out(attended)) * factor
        return {"x": x + self.mlp(x), "mask": mask}


class Transformer(nn.Module):
    def __init__(self, dropout=0.1):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(BLOCKS))
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.factor = 1.0
        self.call = lambda block, *args, **kwargs: block(*args, **kwargs)
        on_device(self)

    def units(self):
        return list(self.blocks)

    def forward(self, tokens):
        x = self.embed(tokens)
        at = torch.arange(tokens.shape[1], device=x.device, dtype=x.dtype)
        rope = at[:, None].cos().expand(-1, DIM), at[:, None].sin().expand(-1, DIM)
        mask = (at[:, None] >= at).expand(len(tokens), 1, -1, -1)
        for block in self.blocks:
            out = self.call(block, x, rope, mask=mask, factor=self.factor)
            x, mask = out["x"], out["mask"]
        return self.head(x)

    def loss(self, generator, batch=2):
        tokens = torch.randint(VOCAB, (batch, SEQ), generator=generator)
        tokens = on_device(tokens)
        logits = self(tokens).float().flatten(0, 1)
        return nn.functional.cross_entropy(logits, tokens.flatten())


def shard(model, mesh, cuda_graph, **options):
    for block in model.units():
        fully_shard(block, mesh=mesh, cuda_graph=cuda_graph, **options)
    return fully_shard(model, mesh=mesh, **options)


def pair(make, mesh, cuda_graph=True, **options):
    """The same model twice, eager and with graphs."""
    torch.manual_seed(0)
    model = make()
    other = copy.deepcopy(model)
    return shard(model, mesh, False, **options), shard(
        other, mesh, cuda_graph, **options
    )


def train(
    model, rank, steps=STEPS, microbatches=1, before=None, after=None, around=None
):
    """Losses and gradients of all microbatches; `before(model, step)` each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    seen = []
    torch.manual_seed(rank)
    for step in range(steps):
        size = (before(model, step) if before else None) or {}
        for micro in range(microbatches):
            generator = torch.Generator().manual_seed(1000 * rank + 10 * step + micro)
            last = micro == microbatches - 1
            with model.no_sync() if not last else contextlib.nullcontext():
                with around() if around else contextlib.nullcontext():
                    loss = model.loss(generator, **size) / microbatches
                loss.backward()
            seen.append(loss.detach())
        seen += [p.grad.to_local().clone() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        if after:
            seen += after(model, step)
    return seen


def assert_same(a, b):
    assert len(a) == len(b)
    for one, other in zip(a, b):
        assert torch.equal(one, other)


def both(make, mesh, rank, options=None, **training):
    """Trains both. Their results have to be bitwise equal. Returns the stats and the
    model."""
    eager, graphs = pair(make, mesh, **(options or {}))
    assert_same(train(eager, rank, **training), train(graphs, rank, **training))
    return flatshard.cuda_graph_stats(graphs), graphs


def assert_replays(stats, forwards, backwards=None, fallbacks=None):
    assert stats["forward_replays"] == forwards
    assert stats["backward_replays"] == (forwards if backwards is None else backwards)
    assert stats["fallbacks"] == (fallbacks or {})


class Body(nn.Module):
    """A block of one Linear and a function."""

    def __init__(self, body):
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.body = body
        on_device(self)

    def forward(self, *args):
        return self.body(self, *args)


class Around(nn.Module):
    def __init__(self, body, call):
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.block = Body(body)
        self.call = call
        on_device(self)

    def units(self):
        return [self.block]

    def forward(self, x):
        return self.call(self.block, self.first(x))

    def loss(self, generator):
        return self(on_device(torch.randn(4, DIM, generator=generator))).mean()
