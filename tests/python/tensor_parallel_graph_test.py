"""cuda_graph=True for blocks whose parameters are DTensors over another mesh dimension.

A graph contains the collectives of a block's layers, and the all-gathers and reductions
of its weights stay outside, as in the trainer:

- A recording makes new DTensors of the weights. The DTensors of eager steps lead to
  accumulators of another stream.
- Hooks of parallelize_module are recorded. Other hooks inside a block make it eager.
- Asynchronous results are awaited at the block's arguments, results and their
  gradients, so a recording's streams join at its end.
- All ranks watch the same steps, so they record in the same order.

On CPUs a replay calls the forward again, with its collectives. On GPUs
(FLATSHARD_TEST_DEVICE=cuda) graphs are captured.
"""

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import flatshard
from flatshard import MixedPrecisionPolicy
from tests.python import float8_models
from tests.python import float8_parallel_test as float8
from tests.python.device import DEVICE, named_mesh, on_device
from tests.python.models import TokenModel
from tests.python.parallel_models import DIM, VOCAB, Model, loss_of, meshes, parallel
from bench.harness.options import fully_shard

pytestmark = pytest.mark.usefixtures("graphs_on_cpu")

WARMUP = 3
STEPS = 20 if DEVICE == "cuda" else 6
BLOCKS = 2


def shard(model, graphs, mesh, **options):
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"], cuda_graph=graphs, **options)
    return fully_shard(model, mesh=mesh["dp"], **options)


def train(model, mesh, steps=STEPS, microbatches=1, loss=loss_of, before=None):
    """Losses and gradients of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    torch.manual_seed(mesh.get_local_rank("dp"))
    seen = []
    for step in range(steps):
        if before is not None:
            before(model, step)
        for micro in range(microbatches):
            model.set_requires_gradient_sync(micro == microbatches - 1)
            seed = 100 * step + 10 * micro + mesh.get_local_rank("dp")
            found = loss(model, seed)
            found.backward()
            seen.append(found.detach())
        grads = (p.grad for p in model.parameters())
        seen += [grad.to_local().clone() for grad in grads if grad is not None]
        optimizer.step()
        optimizer.zero_grad()
    return seen


def both(make, mesh, options=None, **training):
    """Trains eagerly and with graphs, with bitwise equal results. Returns the stats."""
    found = []
    for graphs in (False, True):
        torch.manual_seed(0)
        model = shard(make(mesh), graphs, mesh, **(options or {}))
        found.append(train(model, mesh, **training))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(whole(ours), whole(theirs))
    return flatshard.cuda_graph_stats(model)


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def float8_loss(model, seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = on_device(torch.randint(11, (2, 8), generator=generator))
    logits = model(tokens).float().flatten(0, 1)
    return nn.functional.cross_entropy(logits, tokens.roll(1, 1).flatten())


def assert_replays(stats, each_step=BLOCKS, steps=STEPS):
    assert stats["fallbacks"] == {}
    # On several ranks buffers may be planned again after the first steps.
    replays = [each_step * (steps - WARMUP - late) for late in range(3)]
    assert stats["forward_replays"] in replays
    assert stats["backward_replays"] == stats["forward_replays"]


def cut(mesh, sequence=True, **options):
    return parallel(on_device(Model()), mesh["tp"], sequence, **options)


@pytest.mark.parametrize("sequence", (False, True))
@pytest.mark.parametrize(
    "strategy, reshard",
    (("zero3", True), ("zero3", False), ("zero2", False), ("zero0", False)),
)
def test_bits_of_eager_training(strategy, reshard, sequence, world):
    for _, _, mesh in meshes(world):
        options = {"strategy": strategy, "reshard_after_forward": reshard}
        make = functools.partial(cut, sequence=sequence)
        stats = both(make, mesh, options)
        assert_replays(stats)
        assert stats["captures"] == 2 * BLOCKS


def test_microbatches(world):
    _, _, mesh = next(meshes(world))
    assert_replays(both(cut, mesh, microbatches=2), 2 * BLOCKS)


def test_mixed_precision(world):
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for _, _, mesh in meshes(world):
        assert_replays(both(cut, mesh, {"mp_policy": policy}))


def test_loss_by_vocabulary(world):
    """Its backward is in loss_parallel, too."""
    _, _, mesh = next(meshes(world))

    def train_cut(model, mesh, **_):
        with loss_parallel():
            return train(model, mesh)

    found = []
    for graphs in (False, True):
        torch.manual_seed(0)
        model = shard(cut(mesh, logits="cut"), graphs, mesh)
        found.append(train_cut(model, mesh))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(whole(ours), whole(theirs))
    assert_replays(flatshard.cuda_graph_stats(model))


class Attention(nn.Module):
    """Heads over the ranks, dropout, an activation checkpoint."""

    def __init__(self, heads, recomputes, dropout):
        super().__init__()
        self.heads, self.recomputes = heads, recomputes
        self.norm = nn.LayerNorm(DIM)
        self.qkv = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(3))
        self.out = nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        self.dropout = nn.Dropout(dropout)

    def attend(self, x):
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)) for f in self.qkv)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        weights = self.dropout((q @ k.transpose(-1, -2)).softmax(-1))
        return self.out((weights @ v).transpose(1, 2).flatten(-2))

    def forward(self, x):
        y = self.norm(x)
        if self.recomputes:
            x = x + checkpoint(self.attend, y, use_reentrant=False)
        else:
            x = x + self.attend(y)
        return x + self.down(torch.relu(self.up(x)))


GATHERS = ColwiseParallel(input_layouts=Shard(1))
SCATTERS = RowwiseParallel(output_layouts=Shard(1))


def stack(mesh, blocks, plan):
    """Returns a model of blocks that `plan` splits."""
    tp = mesh["tp"]
    model = TokenModel(VOCAB, DIM, blocks)
    for block in model.blocks:
        parallelize_module(block, tp, plan)
    embed = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    head = ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())
    return parallelize_module(model, tp, {"embed": embed, "head": head})


def cut_attentions(mesh, recomputes, dropout):
    heads = 4 // mesh["tp"].size()
    plan = {"norm": SequenceParallel(), "out": SCATTERS}
    plan |= {"up": GATHERS, "down": SCATTERS}
    plan |= {f"qkv.{number}": GATHERS for number in range(3)}
    blocks = [Attention(heads, recomputes, dropout) for _ in range(BLOCKS)]
    return stack(mesh, blocks, plan)


def linear_blocks(mesh):
    """Arguments, results and their gradients are results of asynchronous
    collectives."""
    layers = [
        (nn.Linear(DIM, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, DIM))
        for _ in range(BLOCKS)
    ]
    plan = {"0": GATHERS, "2": SCATTERS}
    return stack(mesh, [nn.Sequential(*block) for block in layers], plan)


@pytest.mark.parametrize("recomputes, dropout", ((False, 0.2), (True, 0.0)))
def test_attention(recomputes, dropout, world):
    for _, _, mesh in meshes(world):
        make = functools.partial(cut_attentions, recomputes=recomputes, dropout=dropout)
        assert_replays(both(make, mesh))


def test_graphs_are_dropped_before_a_process_group_ends(world):
    """NCCL would wait for them forever. The next steps capture again."""
    _, _, mesh = next(meshes(world))
    model = shard(cut(mesh), True, mesh)
    group = dist.new_group()
    train(model, mesh, WARMUP + 3)
    assert flatshard.cuda_graph_stats(model)["nbytes"] > 0
    dist.destroy_process_group(group)
    before = flatshard.cuda_graph_stats(model)
    assert before["nbytes"] == 0
    train(model, mesh, WARMUP + 3)
    after = flatshard.cuda_graph_stats(model)
    assert after["captures"] == 2 * before["captures"]
    assert after["fallbacks"] == {}


def test_G9_collectives_at_the_ends_of_a_block(world):
    for _, _, mesh in meshes(world):
        assert_replays(both(linear_blocks, mesh))


def test_parameters_that_are_frozen(world):
    """Only one of a block's DTensors trains."""

    def make(mesh):
        model = cut(mesh)
        for block in model.blocks:
            for p in block.parameters():
                p.requires_grad_(p is block.up.weight)
        return model

    for _, _, mesh in meshes(world):
        assert_replays(both(make, mesh))


def test_replicas(world):
    if world != 4:
        pytest.skip("needs 4 ranks")
    mesh = named_mesh(replicate=2, dp=1, tp=2)
    found = []
    for graphs in (False, True):
        torch.manual_seed(0)
        model = cut(mesh)
        for unit in (*model.blocks, model):
            options = {"cuda_graph": graphs and unit is not model}
            fully_shard(unit, mesh=mesh["replicate", "dp"], **options)
        found.append(train(model, mesh))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    assert_replays(flatshard.cuda_graph_stats(model))


def test_weights_that_are_loaded(world):
    """The DTensors of a graph have what the program wrote since."""
    _, _, mesh = next(meshes(world))

    def before(model, step):
        if step == WARMUP + 2:
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.5)

    assert_replays(both(cut, mesh, before=before))


def test_graphed_callables(world):
    _, _, mesh = next(meshes(world))
    sample = on_device(torch.randn(2, 8 // mesh["tp"].size(), DIM)).requires_grad_()
    found = []
    for graphs in (False, True):
        torch.manual_seed(0)
        model = shard(cut(mesh), False, mesh)
        if graphs:
            blocks = tuple(model.blocks)
            flatshard.make_graphed_callables(blocks, ((sample,),) * BLOCKS)
        found.append(train(model, mesh))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    assert_replays(flatshard.cuda_graph_stats(model))


@pytest.mark.parametrize("recipe", ("tensorwise", "rowwise"))
def test_fp8(recipe, world):
    """The scales equal the scales of eager training."""
    if world % 2:
        pytest.skip("needs an even number of ranks")
    mesh = named_mesh(dp=world // 2, tp=2)
    found = []
    for graphs in (False, True):
        options = {"cuda_graph": graphs, "sequence": True, "bias": True}
        model = float8.sharded(mesh, float8_models.policy(recipe), **options)
        found.append(train(model, mesh, loss=float8_loss))
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
    assert_replays(flatshard.cuda_graph_stats(model), len(model.blocks))


def test_hooks_of_the_program_stay_eager(world):
    """New hooks of parallelize_module are watched again."""
    _, _, mesh = next(meshes(world))
    calls = []
    handles = []

    def count(module, args):
        calls.append(module)

    def before(model, step):
        if step == WARMUP + 3:
            up = model.blocks[0].up
            handles.append(up.register_forward_pre_hook(count))
        elif step == WARMUP + 4:
            handles.pop().remove()

    stats = both(cut, mesh, before=before, steps=WARMUP + 7)
    assert len(calls) == 2
    assert stats["fallbacks"] == {"a module inside it has hooks": 1}


class Whole(nn.Module):
    """One block that accepts a DTensor, or returns one."""

    def __init__(self, mesh, takes):
        super().__init__()
        self.mesh, self.takes = mesh, takes
        up, down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)
        block = nn.Sequential(up, nn.ReLU(), down)
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel(use_local_output=takes)}
        self.blocks = nn.ModuleList([parallelize_module(on_device(block), mesh, plan)])
        self.head = on_device(nn.Linear(DIM, 1))

    def forward(self, x):
        if self.takes:
            x = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return self.head(whole(self.blocks[0](x)))


@pytest.mark.parametrize(
    "takes, reason",
    (
        (False, "it returns a DTensor, a kind of tensor"),
        (True, "an argument is a DTensor, a kind of tensor"),
    ),
)
def test_dtensors_between_blocks_stay_eager(takes, reason, world):
    _, _, mesh = next(meshes(world))

    def loss(model, seed):
        generator = torch.Generator().manual_seed(seed)
        return model(on_device(torch.randn(2, 4, DIM, generator=generator))).mean()

    stats = both(lambda mesh: Whole(mesh["tp"], takes), mesh, loss=loss)
    assert stats["forward_replays"] == 0
    assert set(stats["fallbacks"]) == {reason}


def test_a_checkpoint_that_draws_numbers_stays_eager(world):
    """A graph of the backward cannot draw the random numbers of the forward again."""
    if DEVICE == "cpu":
        pytest.skip("of GPUs")
    _, _, mesh = next(meshes(world))
    make = functools.partial(cut_attentions, recomputes=True, dropout=0.2)
    stats = both(make, mesh)
    assert stats["forward_replays"] == 0
    (reason,) = stats["fallbacks"]
    assert "a checkpoint inside it has preserve_rng_state=True" in reason


def dropping_blocks(mesh):
    layers = [
        (nn.Dropout(0.2), nn.Linear(DIM, 2 * DIM), nn.ReLU(), nn.Linear(2 * DIM, DIM))
        for _ in range(BLOCKS)
    ]
    plan = {"0": SequenceParallel(), "1": GATHERS, "3": SCATTERS}
    return stack(mesh, [nn.Sequential(*block) for block in layers], plan)


def test_dropout_of_dtensors_stays_eager(world):
    """torch sets the generator of a GPU by the host, for each part its numbers."""
    _, _, mesh = next(meshes(world))
    stats = both(dropping_blocks, mesh)
    if DEVICE == "cpu":
        return  # one generator for all
    assert stats["forward_replays"] == 0
    (reason,) = stats["fallbacks"]
    assert "its capture failed" in reason
