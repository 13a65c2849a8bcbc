"""CPUOffloadPolicy: sharded parameters, gradients and optimizer state in host memory.

Here the device is a CPU as well, so every bit has to be that of no offloading.
"""

import pytest
import torch
from torch.distributed.fsdp import CPUOffloadPolicy as Fsdp2CPUOffloadPolicy

import flatshard
from flatshard import CPUOffloadPolicy, MixedPrecisionPolicy, checkpoint, fully_shard
from tests.python.models import Mlp
from tests.python.training import STRATEGIES, full_state, shard, train, twins

OPTIMIZERS = {
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, foreach=True),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, fused=True),
    "core": lambda p: flatshard.optim.AdamW(p, lr=1e-2, eps=1e-4),
}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def pair(make, mesh, **options):
    """The same model sharded, without and with offloading."""
    return twins(make, mesh, {"offload_policy": CPUOffloadPolicy()}, **options)


def assert_equal_states(a, b):
    a, b = full_state(a), full_state(b)
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].equal(b[name]), name


@pytest.mark.parametrize(
    "precision", [MixedPrecisionPolicy(), BF16], ids=["own", "bf16"]
)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_trains_as_without(optimizer, precision, mesh, rank):
    models = pair(Mlp, mesh, mp_policy=precision)
    losses = [
        train(m, rank, accumulation=2, optimizer=OPTIMIZERS[optimizer](m.parameters()))
        for m in models
    ]
    assert losses[0] == losses[1]
    assert_equal_states(*models)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_under_every_strategy(strategy, mesh, rank):
    models = pair(Mlp, mesh, strategy=strategy)
    losses = [train(m, rank, accumulation=3, sync_last_only=True) for m in models]
    assert losses[0] == losses[1]
    assert_equal_states(*models)


@pytest.mark.parametrize("outer", ["replicate", "optim"])
def test_on_two_axes(outer, mesh_2d, rank):
    models = pair(Mlp, mesh_2d, outer=outer)
    losses = [train(m, rank, accumulation=2) for m in models]
    assert losses[0] == losses[1]
    assert_equal_states(*models)


def test_all_of_it_is_on_the_cpu(mesh, rank):
    _, model = pair(Mlp, mesh, mp_policy=BF16)
    optimizer = torch.optim.AdamW(model.parameters())
    model.loss(torch.Generator().manual_seed(rank)).backward()
    optimizer.step()
    for name, p in model.named_parameters():
        assert p.to_local().device.type == "cpu", name
        assert p.grad.to_local().device.type == "cpu", name
        assert p.dtype == p.grad.dtype == torch.float32, name


def test_frozen_parameters(mesh, rank):
    def make():
        model = Mlp()
        for name, p in model.named_parameters():
            p.requires_grad = "bias" in name
        return model

    models = pair(make, mesh)
    for model in models:
        train(model, rank)
    assert_equal_states(*models)


def test_writes_after_an_evaluation_are_seen(mesh, rank):
    models = pair(Mlp, mesh)
    seen = []
    for model in models:
        with torch.no_grad():
            before = model.loss(torch.Generator().manual_seed(rank))
            for p in model.parameters():
                p.data.mul_(0.5)
            after = model.loss(torch.Generator().manual_seed(rank))
        assert not before.equal(after)
        seen.append(after)
    assert seen[0].equal(seen[1])


def test_a_gradient_that_the_user_keeps(mesh, rank):
    _, model = pair(Mlp, mesh)
    model.loss(torch.Generator().manual_seed(rank)).backward()
    kept = [p.grad for p in model.parameters()]
    expected = [g.to_local().clone() for g in kept]
    model.zero_grad()
    model.loss(torch.Generator().manual_seed(rank + 10)).backward()
    for old, want, p in zip(kept, expected, model.parameters()):
        assert old.to_local().equal(want)
        assert want.numel() == 0 or not p.grad.to_local().equal(want)


def test_clipping(mesh, rank):
    norms = []
    models = pair(Mlp, mesh)
    for model in models:
        model.loss(torch.Generator().manual_seed(rank)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        norms.append(norm.full_tensor())
    assert norms[0].equal(norms[1])
    for a, b in zip(*(m.parameters() for m in models)):
        assert a.grad.to_local().equal(b.grad.to_local())


def test_checkpoints_go_both_ways(mesh, rank, folder):
    for number, order in enumerate(((0, 1), (1, 0))):
        models = pair(Mlp, mesh)
        source, target = (models[i] for i in order)
        optimizers = [torch.optim.AdamW(m.parameters()) for m in (source, target)]
        source.loss(torch.Generator().manual_seed(rank)).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        checkpoint.save(f"{folder}/{number}", 1, source, optimizers[0])
        checkpoint.load(f"{folder}/{number}", target, optimizers[1])
        for model, optimizer in zip((source, target), optimizers):
            model.loss(torch.Generator().manual_seed(rank + 5)).backward()
            optimizer.step()
        assert_equal_states(source, target)


def test_fsdp2s_policy_is_taken(mesh, rank):
    model = shard(
        Mlp(), fully_shard, mesh=mesh, offload_policy=Fsdp2CPUOffloadPolicy(False)
    )
    train(model, rank, steps=1)
