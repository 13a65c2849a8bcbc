"""`reshard_after_forward` as a number: between forward and backward parameters are
sharded over that many adjacent ranks. Nothing else changes, so every bit equals the
result with True."""

import contextlib

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from flatshard import (
    CPUOffloadPolicy,
    Float8Policy,
    MixedPrecisionPolicy,
    fully_shard,
)
from flatshard.diagnostics import take_trace
from tests.python.device import DEVICE
from tests.python.graph_training import BLOCKS, REPLAYED, Transformer, assert_replays
from tests.python.graph_training import both as both_graphed
from tests.python.models import Body, Mlp, plain
from tests.python.training import (
    adamw,
    data,
    distance,
    full_state,
    refused,
    shard,
    train,
    train_batches,
)

# The core's plane for the slices, after the groups' planes.
SLICES = 1


@pytest.fixture(autouse=True)
def traced(monkeypatch):
    monkeypatch.setenv("FLATSHARD_TRACE_STEPS", "1")


@pytest.fixture
def four(world):
    if world != 4:
        pytest.skip("needs 4 ranks")


def kept(model):
    """Names of the units that kept a slice since the last call, in order."""
    trace = take_trace(model)
    return [a.unit for a in trace if a.kind == "derive" and a.plane == SLICES]


def recomputed(reentrant):
    def body(m, x):
        for block in m.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    return body


def loss_of(model, rank, step=0):
    return model(data(rank, step)).square().mean()


def both(rank, make=Mlp, mesh=None, training=None, **options):
    """Trains with True and with 2; returns the model of 2."""
    results = []
    for reshard in (True, 2):
        torch.manual_seed(0)
        model = shard(
            make(), fully_shard, mesh=mesh, reshard_after_forward=reshard, **options
        )
        losses = train(model, rank, **(training or {}))
        results.append((losses, full_state(model), model))
    (losses, weights, _), (own_losses, own_weights, model) = results
    assert losses == own_losses
    assert distance(weights, own_weights) == 0
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefetch": 0},
        {"prefetch": 3},
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
        {"grads_in_place": True},
        {"copy_engines": "all"},
        {"buffers_on_demand": False},
        {"granularity": "tensor"},
    ],
)
@pytest.mark.parametrize("training", [{}, {"accumulation": 2}])
def test_every_bit_is_that_of_true(options, training, mesh, rank, four):
    model = both(rank, mesh=mesh, training=training, **options)
    # The last block and the root stay unsharded: the backward starts with them.
    assert set(kept(model)) == {"blocks.0", "blocks.1"}


def test_no_sync(mesh, rank, four):
    both(rank, mesh=mesh, training={"accumulation": 3, "sync_last_only": True})


def test_two_dimensions(rank, four):
    """HSDP over 2 x 2: two ranks are all that shard."""
    mesh = init_device_mesh(DEVICE, (2, 2), mesh_dim_names=("outer", "dp"))
    assert kept(both(rank, mesh=mesh)) == []


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant, mesh, rank, four):
    losses = []
    for reshard in (True, 2):
        torch.manual_seed(0)
        model = shard(
            Body(recomputed(reentrant)),
            fully_shard,
            mesh=mesh,
            reshard_after_forward=reshard,
        )
        losses.append(
            train_batches(lambda step, _: loss_of(model, rank, step), adamw(model), [0])
        )
    assert losses[0] == losses[1]
    # The forward of a reentrant checkpoint runs without gradients.
    assert bool(kept(model)) is not reentrant


def test_frozen_parameters(mesh, rank, four):
    def make():
        model = Mlp()
        for block in model.blocks:
            block.down.requires_grad_(False)
        return model

    assert kept(both(rank, make=make, mesh=mesh))


def test_forwards_without_a_backward_keep_nothing(mesh, rank, four):
    model = shard(Body(plain), fully_shard, mesh=mesh, reshard_after_forward=2)
    with torch.no_grad():
        loss_of(model, rank)
    assert kept(model) == []
    loss_of(model, rank).backward()
    assert kept(model)


def test_several_forwards_before_their_backwards(mesh, rank, four):
    grads = []
    for reshard in (True, 2):
        torch.manual_seed(0)
        model = shard(
            Body(plain), fully_shard, mesh=mesh, reshard_after_forward=reshard
        )
        first, second = loss_of(model, rank, 0), loss_of(model, rank, 1)
        with torch.no_grad():
            loss_of(model, rank, 2)
        (first + second).backward()
        first, second = loss_of(model, rank, 3), loss_of(model, rank, 4)
        second.backward()
        first.backward()
        grads.append([p.grad.full_tensor() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*grads))


def test_setters(mesh, rank, four):
    model = shard(Body(plain), fully_shard, mesh=mesh, reshard_after_forward=2)
    loss_of(model, rank).backward()
    assert kept(model)
    model.blocks[0].set_reshard_after_forward(True)
    loss_of(model, rank).backward()
    assert "blocks.0" not in kept(model)
    model.set_reshard_after_forward(False)
    loss_of(model, rank).backward()
    assert kept(model) == []


def test_by_hand(mesh, rank, four):
    """After reshard() the backward all-gathers over all ranks; a write to parameters is
    seen by the next forward."""
    model = shard(Body(plain), fully_shard, mesh=mesh, reshard_after_forward=2)
    twin = shard(
        copy_of(model, Body(plain)), fully_shard, mesh=mesh, reshard_after_forward=True
    )
    for m in (model, twin):
        loss = loss_of(m, rank)
        m.blocks[0].reshard()
        m.blocks[1].unshard()
        loss.backward()
        loss_of(m, rank)  # nobody takes its backward
        with torch.no_grad():
            for p in m.parameters():
                p.mul_(0.5)
        loss_of(m, rank).backward()
    for p, q in zip(model.parameters(), twin.parameters()):
        assert torch.equal(p.grad.full_tensor(), q.grad.full_tensor())


def copy_of(model, other):
    other.load_state_dict(full_state(model))
    return other


def test_second_derivatives(mesh, rank, four):
    found = []
    for reshard in (True, 2):
        torch.manual_seed(0)
        model = shard(
            Body(plain), fully_shard, mesh=mesh, reshard_after_forward=reshard
        )
        x = data(rank).requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        found.append([p.grad.full_tensor() for p in model.blocks.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_after_an_exception(mesh, rank, four):
    model = shard(Body(plain), fully_shard, mesh=mesh, reshard_after_forward=2)
    twin = shard(
        copy_of(model, Body(plain)), fully_shard, mesh=mesh, reshard_after_forward=True
    )
    loss_of(model, rank)
    handle = model.blocks[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, rank)
    handle.remove()
    for m in (model, twin):
        loss_of(m, rank).backward()
    for p, q in zip(model.parameters(), twin.parameters()):
        assert torch.equal(p.grad.full_tensor(), q.grad.full_tensor())


@pytest.mark.usefixtures("graphs_on_cpu")
def test_graphs_of_blocks(mesh, rank, four):
    stats, model = both_graphed(
        Transformer, mesh, rank, {"reshard_after_forward": 2}, microbatches=2
    )
    assert_replays(stats, REPLAYED * BLOCKS * 2)
    assert kept(model)


# -- what the argument means -----------------------------------------------------------


def test_all_ranks_are_true_and_one_is_false(mesh, rank, world):
    for number, meant in ((world, True), (1, False)):
        if world == 1:
            continue
        warns = pytest.warns(UserWarning, match="reshard_after_forward=1 keeps")
        with warns if number == 1 else contextlib.nullcontext():
            model = fully_shard(Mlp(), mesh=mesh, reshard_after_forward=number)
        assert model._state().policy.reshard_after_forward is meant
        model.loss(torch.Generator().manual_seed(rank)).backward()
        assert kept(model) == []


@pytest.mark.parametrize("number", [0, -2, 3, 8])
def test_other_numbers_are_refused(number, mesh, world):
    if world not in (2, 4):
        pytest.skip("3 divides 3")
    match = f"reshard_after_forward: .*a factor of {world}, .*, got {number}"
    with refused(match):
        fully_shard(Mlp(), mesh=mesh, reshard_after_forward=number)


def test_what_does_not_go_together_is_refused(mesh, four):
    with refused("reshard_after_forward=2 has no effect with strategy='optim'"):
        fully_shard(Mlp(), mesh=mesh, reshard_after_forward=2, strategy="optim")
    with refused("reshard_after_forward=2 .* together with fp8", NotImplementedError):
        fully_shard(
            Mlp(),
            mesh=mesh,
            reshard_after_forward=2,
            fp8=Float8Policy("rowwise", emulate=True),
        )
    with refused("reshard_after_forward: .*got 2.0"):
        fully_shard(Mlp(), mesh=mesh, reshard_after_forward=2.0)
