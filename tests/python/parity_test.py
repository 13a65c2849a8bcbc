"""Flatshard and FSDP2 train the same models from the same weights on the same
data: bitwise equal at two ranks in float32, where sums have one order, else within
a small multiple of the rounding of sums in another order."""

import pytest
import torch

from tests.python.models import MODELS
from tests.python.training import both, distance

STEPS = 3
# AdamW divides by the gradient's size: a rounding error of a gradient moves a
# weight by up to that share of the learning rate (1e-2) a step; weights are ~1.
BOUND = STEPS * 1e-2 * 1e-3


def check(world, ours, theirs, exact=True):
    assert all(torch.isfinite(torch.tensor(ours[0])))
    if exact and world <= 2:
        assert ours[0] == theirs[0]
        assert distance(ours[1], theirs[1]) == 0
    else:
        assert ours[0] == pytest.approx(theirs[0], rel=1e-3)
        assert distance(ours[1], theirs[1]) < BOUND


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_zero3(name, accumulation, mesh, world, rank):
    ours, theirs = both(MODELS[name], mesh, rank, steps=STEPS, accumulation=accumulation)
    check(world, ours, theirs)


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
@pytest.mark.parametrize("name", ["mlp", "llama_tied"])
def test_other_strategies(name, strategy, mesh, world, rank):
    ours, theirs = both(
        MODELS[name], mesh, rank, {"strategy": strategy}, steps=STEPS, accumulation=3
    )
    check(world, ours, theirs)


@pytest.mark.parametrize("name", ["mlp", "llama_tied"])
@pytest.mark.parametrize("strategy", ["optim", "optim_grads", "optim_grads_params"])
def test_hsdp(name, strategy, mesh_2d, world, rank):
    ours, theirs = both(
        MODELS[name], mesh_2d, rank, {"strategy": strategy}, steps=STEPS, accumulation=3
    )
    check(world, ours, theirs)


@pytest.mark.parametrize("name", ["mlp", "gpt2"])
def test_without_sync_until_the_last_microbatch(name, mesh, world, rank):
    ours, theirs = both(
        MODELS[name], mesh, rank, steps=STEPS, accumulation=3, sync_last_only=True
    )
    check(world, ours, theirs)


@pytest.mark.parametrize("name", ["mlp", "llama"])
def test_bf16_compute(name, mesh, world, rank):
    from torch.distributed.fsdp import MixedPrecisionPolicy as Theirs

    from flatshard import MixedPrecisionPolicy

    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    ours, theirs = both(
        MODELS[name],
        mesh,
        rank,
        {"mp_policy": MixedPrecisionPolicy(**dtypes)},
        {"mp_policy": Theirs(**dtypes)},
        steps=STEPS,
    )
    check(world, ours, theirs, exact=False)
