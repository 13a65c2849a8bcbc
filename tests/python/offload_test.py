"""CPUOffloadPolicy: sharded parameters, gradients and optimizer state in host memory.

If the device is also a CPU, every bit has to equal a run without offloading. On a GPU
the operations are the same except for optimizers and norms, because they run on the
CPU.
"""

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy as Fsdp2CPUOffloadPolicy

from flatshard import CPUOffloadPolicy, MixedPrecisionPolicy, checkpoint
from flatshard._tensor.row_shard import RowShard
from flatshard._tensor.sharded_tensor import ShardedTensor
from tests.python.device import DEVICE, on_device
from tests.python.models import Mlp, biases_only
from tests.python.sum_order import SMALL_MODEL
from bench.harness.options import fully_shard
from tests.python.training import (
    OPTIMIZERS,
    STRATEGIES,
    full_state,
    shard,
    train,
    twins,
)

OWN = MixedPrecisionPolicy()
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
# On a GPU. A gradient or norm that is rounded otherwise (1e-7) moves a weight by that
# over AdamW's eps (1e-4), times the learning rate (1e-2), a step. A weight that is
# rounded the other way to bf16 changes gradients by 2^-8.
BOUND = {None: SMALL_MODEL, torch.bfloat16: 1e-3}


def pair(make, mesh, **options):
    """The same model sharded, without and with offloading."""
    return twins(make, mesh, {"offload_policy": CPUOffloadPolicy()}, **options)


def assert_same(a, b, precision=OWN):
    """Numbers, tensors, or lists or dicts of them."""
    bound = BOUND[precision.param_dtype] if DEVICE == "cuda" else 0.0
    torch.testing.assert_close(a, b, rtol=bound, atol=bound)


def assert_equal_states(a, b, precision=OWN):
    assert_same(full_state(a), full_state(b), precision)


@pytest.mark.parametrize("precision", [OWN, BF16], ids=["own", "bf16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_trains_as_without(optimizer, precision, mesh, rank):
    models = pair(Mlp, mesh, mp_policy=precision)
    losses = [
        train(m, rank, accumulation=2, optimizer=OPTIMIZERS[optimizer](m.parameters()))
        for m in models
    ]
    assert_same(*losses, precision)
    assert_equal_states(*models, precision)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_under_every_strategy(strategy, mesh, rank):
    models = pair(Mlp, mesh, strategy=strategy)
    losses = [train(m, rank, accumulation=3, sync_last_only=True) for m in models]
    assert_same(*losses)
    assert_equal_states(*models)


@pytest.mark.parametrize("outer", ["replicate", "optim"])
def test_on_two_axes(outer, mesh_2d, rank):
    models = pair(Mlp, mesh_2d, outer=outer)
    losses = [train(m, rank, accumulation=2) for m in models]
    assert_same(*losses)
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


def test_a_shard_on_another_device_than_the_mesh_stays_a_view():
    """On GPUs DTensor.from_local would copy it there."""
    mesh = DeviceMesh("meta", [0], _init_backend=False)
    local = torch.ones(2, 3)
    shard = ShardedTensor.wrap(local, mesh, [RowShard((0, 2))], (2, 3))
    shard._local_tensor.fill_(2)
    assert local.eq(2).all()


def test_frozen_parameters(mesh, rank):
    models = pair(biases_only, mesh)
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
    norms, gradients = [], []
    models = pair(Mlp, mesh)
    for model in models:
        model.loss(torch.Generator().manual_seed(rank)).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        norms.append(on_device(norm.full_tensor()))
        gradients.append([on_device(p.grad.to_local()) for p in model.parameters()])
    assert_same(*norms)
    assert_same(*gradients)


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
