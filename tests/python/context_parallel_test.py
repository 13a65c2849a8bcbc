"""Sequences split over ranks by torch's context_parallel, and parameters sharded over the
flattened mesh of data and context parallelism: compared with one process that has every
sequence."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint as recomputed

import flatshard
from bench.harness.options import fully_shard
from flatshard import checkpoint
from flatshard._tensor.mesh import joined_meshes
from tests.python import ring_attention
from tests.python.device import DEVICE, named_mesh, on_device
from tests.python.sum_order import near, sum_tolerance
from tests.python.training import adamw

# A kernel of GPUs pads its log-sum-exps to 32 queries. The ring halves the 64 of a rank.
LENGTH = 128
DIM, HEADS, VOCAB = 32, 4, 17
IGNORED = -100
STEPS = 3
CLIP = 0.5
# A weight gradient adds up the tokens of two sequences. Two blocks of two sums in a row,
# embedding and head in forward and backward, three steps.
TOLERANCE = sum_tolerance(2 * LENGTH, in_a_row=2 * 6 * STEPS)
# (replicas, shards of the batch, context parallelism)
GRIDS = [(1, 1, 2), (1, 2, 2), (1, 1, 4), (2, 1, 2)]


@pytest.fixture(autouse=True)
def ring():
    if DEVICE == "cpu":
        ring_attention.use_on_cpus()
    yield
    ring_attention.end()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.q, self.k, self.v = (nn.Linear(DIM, DIM) for _ in range(3))
        self.out = nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        y = self.norm(x)
        # With tensor parallelism a rank has some of the heads.
        heads = (
            f(y).unflatten(-1, (-1, DIM // HEADS)).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(torch.tanh(self.up(x)))


class Model(nn.Module):
    def __init__(self, recomputes=False):
        super().__init__()
        self.recomputes = recomputes
        self.tokens = nn.Embedding(VOCAB, DIM)
        self.positions = nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, tokens, positions):
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = (
                recomputed(block, x, use_reentrant=False)
                if self.recomputes
                else block(x)
            )
        return self.head(x)


def make(**options):
    torch.manual_seed(0)
    return on_device(Model(**options))


def shard(model, function, mesh, **options):
    for block in model.blocks:
        function(block, mesh=mesh, **options)
    return function(model, mesh=mesh, **options)


class Grid:
    """The meshes of a job, with the names that accelerate gives them."""

    def __init__(self, world, replicas, shards, cp, tp=1):
        if replicas * shards * cp * tp != world:
            pytest.skip("needs another number of ranks")
        sizes = {"dp_replicate": replicas, "dp_shard": shards, "cp": cp}
        root = named_mesh(**sizes, **({"tp": tp} if tp > 1 else {}))
        self.root = root
        self.cp, self.tp = root["cp"], root["tp"] if tp > 1 else None
        self.flat = root["dp_shard", "cp"]._flatten("dp_shard_cp")
        self.fsdp = root["dp_replicate", "dp_shard_cp"] if replicas > 1 else self.flat
        self.rows = replicas * shards
        self.ranks = self.rows * cp
        self.row = root.get_local_rank("dp_replicate") * shards
        self.row += root.get_local_rank("dp_shard")

    def sum(self, value):
        """Returns the sum over the ranks with parts of the batch."""
        total = on_device(torch.tensor(value, dtype=torch.float64))
        for name in ("dp_replicate", "dp_shard", "cp"):
            dist.all_reduce(total, group=self.root.get_group(name))
        return total.item()


def data(step, rows):
    """Returns the tokens, labels and positions of `rows` sequences.

    In the second step one token has a label, so all ranks but one have none.
    """
    generator = torch.Generator().manual_seed(step)
    shape = rows, LENGTH
    tokens = torch.randint(VOCAB, shape, generator=generator)
    labels = torch.randint(VOCAB, shape, generator=generator)
    ignored = torch.rand(shape, generator=generator) < torch.linspace(0, 1, LENGTH)
    if step == 1:
        ignored = torch.arange(rows * LENGTH).view(shape) != LENGTH // 3
    labels[ignored] = IGNORED
    positions = torch.arange(LENGTH).expand(shape)
    return [on_device(t.contiguous()) for t in (tokens, labels, positions)]


def sum_of_losses(model, tokens, labels, positions):
    logits = model(tokens, positions).flatten(0, 1)
    return F.cross_entropy(
        logits, labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def finish(model, optimizer):
    """Clips, steps, and returns the norm."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    optimizer.step()
    optimizer.zero_grad()
    return norm.item()


def train_alone(rows, optimizer=adamw, steps=range(STEPS), microbatches=1, model=None):
    """Trains one process on every sequence. Returns losses and norms, and weights."""
    model = make() if model is None else model
    optimizer = optimizer(model)
    found = []
    for step in steps:
        batches = [data(step + 10 * m, rows) for m in range(microbatches)]
        targets = sum((labels != IGNORED).sum() for _, labels, _ in batches)
        losses = [sum_of_losses(model, *batch) / targets for batch in batches]
        sum(losses).backward()
        found += [sum(losses).item(), finish(model, optimizer)]
    return found, {name: p.detach().clone() for name, p in model.named_parameters()}


def train(
    model, grid, optimizer=None, steps=range(STEPS), microbatches=1, averages=True
):
    """The same, where each rank has a part of a sequence.

    Args:
        averages: gradients are averaged over the ranks, as by default; otherwise added.
    """
    optimizer = adamw(model) if optimizer is None else optimizer
    found = []
    for step in steps:
        batches = [data(step + 10 * m, grid.rows) for m in range(microbatches)]
        targets = sum((labels != IGNORED).sum() for _, labels, _ in batches)
        total = 0.0
        for m, batch in enumerate(batches):
            model.set_requires_gradient_sync(m == microbatches - 1)
            own = [t[grid.row, None].clone() for t in batch]
            with context_parallel(
                grid.cp,
                buffers=own,
                buffer_seq_dims=[1, 1, 1],
                no_restore_buffers=set(own),
            ):
                loss = sum_of_losses(model, *own) / targets
                (loss * grid.ranks if averages else loss).backward()
            total += loss.item()
        found += [grid.sum(total), finish(model, optimizer)]
    return found, full(model)


def full(model):
    return {n: p.detach().full_tensor() for n, p in model.named_parameters()}


def check(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=TOLERANCE)
    assert found[1].keys() == expected[1].keys()
    for name, value in expected[1].items():
        torch.testing.assert_close(
            found[1][name],
            value,
            **near(value, TOLERANCE),
            msg=lambda text: f"{name}: {text}",
        )


@pytest.mark.parametrize("rotate", ["allgather", "alltoall"])
@pytest.mark.parametrize("sizes", GRIDS)
def test_trains_as_one_process_does(sizes, rotate, world):
    grid = Grid(world, *sizes)
    set_rotate_method(rotate)
    expected = train_alone(grid.rows)
    check(train(shard(make(), fully_shard, grid.fsdp), grid), expected)
    check(train(shard(make(), fsdp2, grid.fsdp), grid), expected)


@pytest.mark.parametrize("strategy", ["zero0", "zero1", "zero2"])
def test_strategies(strategy, world):
    grid = Grid(world, 1, world // 2, 2)
    model = shard(make(), fully_shard, grid.fsdp, strategy=strategy)
    check(train(model, grid), train_alone(grid.rows))


@pytest.mark.parametrize("ones", [(), ("dp_replicate",), ("tp",)])
def test_dimensions_that_are_not_flattened(ones, world):
    """Parameters are sharded over "cp" and replicated over "dp_shard", and the program has
    flattened both for its losses. Dimensions of one rank change nothing."""
    grid = Grid(world, 1, world // 2, 2)
    names = ("dp_replicate", "dp_shard", "cp", "tp")
    sizes = {"dp_shard": world // 2, "cp": 2, **dict.fromkeys(ones, 1)}
    root = named_mesh(**{name: sizes[name] for name in names if name in sizes})
    root["dp_shard", "cp"]._flatten("dp_cp")
    found = train(shard(make(), fully_shard, root["dp_shard", "cp"]), grid)
    check(found, train_alone(grid.rows))
    if world == 2:
        found = train(shard(make(), fully_shard, root["cp"]), grid)
        check(found, train_alone(grid.rows))


def test_replicas_over_flattened_dimensions(world):
    """Parameters are replicated over two dimensions, and sharded over "cp"."""
    grid = Grid(world, world // 2, 1, 2)
    grid.root["dp_replicate", "dp_shard"]._flatten("dp")
    dp, cp = grid.root["dp"], grid.cp
    model = shard(make(), fully_shard, joined_meshes([dp, cp]))
    check(train(model, grid), train_alone(grid.rows))


def test_sums_of_gradients(world):
    grid = Grid(world, 1, world // 2, 2)
    model = shard(make(), fully_shard, grid.fsdp)
    for module in (model, *model.blocks):
        module.set_gradient_divide_factor(1.0)
    check(train(model, grid, averages=False), train_alone(grid.rows))


def test_microbatches_of_unequal_targets(world):
    grid = Grid(world, 1, world // 2, 2)
    model = shard(make(), fully_shard, grid.fsdp)
    found = train(model, grid, microbatches=2)
    check(found, train_alone(grid.rows, microbatches=2))


def test_the_ring_is_recomputed_in_the_backward(world):
    grid = Grid(world, 1, world // 2, 2)
    kept = train(shard(make(), fully_shard, grid.fsdp), grid)
    found = train(shard(make(recomputes=True), fully_shard, grid.fsdp), grid)
    assert found[0] == kept[0]
    assert all(torch.equal(value, found[1][name]) for name, value in kept[1].items())


def test_with_tensor_parallelism(world):
    grid = Grid(world, 1, world // 4, 2, tp=2)
    model = make()
    columns = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    rows = {name: RowwiseParallel() for name in ("out", "down")}
    for block in model.blocks:
        parallelize_module(block, grid.tp, columns | rows)
    check(train(shard(model, fully_shard, grid.fsdp), grid), train_alone(grid.rows))


def test_any_grid_reads_a_checkpoint(folder, world):
    """Weights and optimizer states do not depend on how sequences were split."""
    grid = Grid(world, 1, world // 2, 2)
    model = shard(make(), fully_shard, grid.fsdp)
    optimizer = flatshard.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    train(model, grid, optimizer)
    checkpoint.save(f"{folder}/own", STEPS, model, optimizer)
    later = range(STEPS, STEPS + 2)
    saved = full(model)
    expected = train(model, grid, optimizer, steps=later)
    for shards, cp in ((world // 2, 2), (1, world), (world, 1)):
        other = Grid(world, 1, shards, cp)
        again = shard(make(), fully_shard, other.fsdp)
        optimizer = flatshard.optim.AdamW(again.parameters(), lr=1e-2, eps=1e-4)
        checkpoint.load(f"{folder}/own", again, optimizer)
        assert all(torch.equal(v, saved[n]) for n, v in full(again).items())
        if other.rows == grid.rows:
            found = train(again, other, optimizer, steps=later)
            check(found, expected)


def test_files_of_dcp_do_not_depend_on_the_grid(folder, world):
    grid = Grid(world, 1, world // 2, 2)
    model = shard(make(), fully_shard, grid.fsdp)
    optimizer = adamw(model)
    train(model, grid, optimizer)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=f"{folder}/dcp")
    expected = full(model)
    other = named_mesh(dp=world)
    for function in (fully_shard, fsdp2):
        again = shard(copy.deepcopy(make()), function, other)
        with torch.no_grad():
            for p in again.parameters():
                p.zero_()
        optimizer = adamw(again)
        weights, states = get_state_dict(again, optimizer)
        stored = {"model": weights, "optimizer": states}
        dcp.load(stored, checkpoint_id=f"{folder}/dcp")
        set_state_dict(
            again,
            optimizer,
            model_state_dict=stored["model"],
            optim_state_dict=stored["optimizer"],
        )
        assert all(torch.equal(v, expected[n]) for n, v in full(again).items())
