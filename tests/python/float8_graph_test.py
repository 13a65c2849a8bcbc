"""CUDA graphs of blocks whose weights are FP8, with the bits of eager training.

On CPUs a replay calls the captured forward again."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import flatshard
from tests.python.float8_models import BF16, DIM, KINDS, Block, Mlp, policy
from tests.python.graph_training import (
    REPLAYED,
    STEPS,
    assert_replays,
    assert_same,
    train,
)
from bench.harness.options import fully_shard

pytestmark = pytest.mark.usefixtures("graphs_on_cpu")

BLOCKS = 3


class HalfRecomputing(Block):
    """Its first matmul runs again in the backward."""

    def first(self, x):
        return torch.relu(self.up(self.norm(x)))

    def forward(self, x):
        return x + self.down(checkpoint(self.first, x, use_reentrant=False))


def pair(fp8, mesh, block=Block, cuda_graph=True, **options):
    """The same model twice, eager and with graphs."""
    torch.manual_seed(0)
    models = [Mlp(BLOCKS, block)]
    models.append(copy.deepcopy(models[0]))
    for model, is_graph in zip(models, (False, cuda_graph)):
        for unit in model.units():
            fully_shard(
                unit,
                mesh=mesh,
                mp_policy=BF16,
                fp8=fp8,
                cuda_graph=is_graph,
                **options,
            )
        fully_shard(model, mesh=mesh, mp_policy=BF16, **options)
    return models


def both(fp8, mesh, rank, block=Block, options=None, **training):
    """Trains both. Their results have to be bitwise equal. Returns the stats and
    models."""
    eager, graphs = pair(fp8, mesh, block, **(options or {}))
    assert_same(train(eager, rank, **training), train(graphs, rank, **training))
    return flatshard.cuda_graph_stats(graphs), (eager, graphs)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_eager_training(kind, mesh, rank):
    options = {"reshard_after_forward": kind == "rowwise"}
    stats, models = both(policy(*KINDS[kind]), mesh, rank, options=options)
    assert_replays(stats, REPLAYED * BLOCKS)
    assert stats["captures"] == 2 * BLOCKS
    for model in models:
        assert len(flatshard.float8.describe(model).float8) == 2 * BLOCKS


@pytest.mark.parametrize("strategy", ("zero0", "zero1", "zero2"))
@pytest.mark.parametrize("kind", ("tensorwise", "mxfp8 stored"))
def test_strategies(kind, strategy, mesh, rank):
    options = {"strategy": strategy}
    stats, _ = both(policy(*KINDS[kind]), mesh, rank, options=options)
    assert_replays(stats, REPLAYED * BLOCKS)


@pytest.mark.parametrize("parts", ("unit", "recomputed", "module"))
@pytest.mark.parametrize("kind", ("rowwise", "rowwise stored"))
def test_parts(kind, parts, mesh, rank):
    fp8 = policy(*KINDS[kind], gather_parts=parts)
    stats, _ = both(fp8, mesh, rank)
    assert_replays(stats, REPLAYED * BLOCKS)
    # The first backward shows which all-gathers a recompute needs: plans come later.
    stats, _ = both(fp8, mesh, rank, HalfRecomputing, steps=STEPS + 2)
    assert_replays(stats, REPLAYED * BLOCKS)


def test_microbatches_and_columns_that_stay(mesh, rank):
    for keep in (False, True):
        fp8 = policy("tensorwise", keep_column_plane=keep)
        stats, _ = both(fp8, mesh, rank, microbatches=3)
        # Buffers that outlive a step are planned again after the first.
        late = REPLAYED - 1 if keep else REPLAYED
        assert_replays(stats, late * BLOCKS * 3)


def test_frozen_weights(mesh, rank):
    def freeze(model):
        for block in model.blocks:
            block.up.weight.requires_grad_(False)

    torch.manual_seed(0)
    models = [Mlp(BLOCKS), None]
    freeze(models[0])
    models[1] = copy.deepcopy(models[0])
    for model, cuda_graph in zip(models, (False, True)):
        for unit in model.units():
            fully_shard(
                unit,
                mesh=mesh,
                mp_policy=BF16,
                fp8=policy("rowwise"),
                cuda_graph=cuda_graph,
            )
        fully_shard(model, mesh=mesh, mp_policy=BF16)
    losses = []
    for model in models:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = flatshard.optim.AdamW(trained, lr=1e-2)
        losses.append([])
        for step in range(STEPS):
            loss = model.loss(torch.Generator().manual_seed(10 * step + rank))
            loss.backward()
            losses[-1].append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    assert losses[0] == losses[1]
    assert_replays(flatshard.cuda_graph_stats(models[1]), REPLAYED * BLOCKS)


def test_blocks_without_fp8_beside_blocks_with_it(mesh, rank):
    torch.manual_seed(0)
    models = [Mlp(BLOCKS)]
    models.append(copy.deepcopy(models[0]))
    for model, cuda_graph in zip(models, (False, True)):
        for number, unit in enumerate(model.units()):
            fully_shard(
                unit,
                mesh=mesh,
                mp_policy=BF16,
                fp8=policy("blockwise") if number == 1 else None,
                cuda_graph=cuda_graph,
            )
        fully_shard(model, mesh=mesh, mp_policy=BF16)
    assert_same(train(models[0], rank), train(models[1], rank))
    assert_replays(flatshard.cuda_graph_stats(models[1]), REPLAYED * BLOCKS)


def test_make_graphed_callables(mesh, rank):
    eager, graphs = pair(policy("rowwise"), mesh, cuda_graph=False)
    shape = (3, 7, DIM)
    sample = torch.empty(shape, device="meta", dtype=torch.bfloat16, requires_grad=True)
    blocks = tuple(graphs.blocks)
    assert (
        flatshard.make_graphed_callables(blocks, ((sample,),) * len(blocks)) == blocks
    )
    assert_same(train(eager, rank), train(graphs, rank))
    assert_replays(flatshard.cuda_graph_stats(graphs), REPLAYED * BLOCKS)


def test_weights_that_are_written_reach_a_replay(mesh, rank):
    def write(model, step):
        with torch.no_grad():
            model.blocks[1].up.weight.mul_(5.0 if step % 2 else 0.2)

    for kind in ("tensorwise", "mxfp8 stored"):
        stats, _ = both(policy(*KINDS[kind]), mesh, rank, before=write)
        assert_replays(stats, REPLAYED * BLOCKS)


def test_evaluation_in_between(mesh, rank):
    def evaluate(model, step):
        model.eval()
        with torch.no_grad():
            loss = model.loss(torch.Generator().manual_seed(step))
        model.train()
        return [loss]

    stats, _ = both(policy("rowwise", "stored"), mesh, rank, after=evaluate)
    assert_replays(stats, REPLAYED * BLOCKS)
