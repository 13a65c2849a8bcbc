"""FP8 weights of layers that tensor parallelism splits."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import flatshard
from flatshard.float8.linear import Float8Linear
from tests.python.device import DEVICE, named_mesh, on_device
from tests.python.float8_models import BF16, DIM, HIDDEN, Mlp, policy
from tests.python.training import distance, full_state, train_batches
from bench.harness.options import fully_shard

RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8")
TP = 2


@pytest.fixture
def dp(world):
    if world % TP:
        pytest.skip("needs an even number of ranks")
    return world // TP


def cut(model, tp, sequence):
    for block in model.blocks:
        split = Shard(1) if sequence else Replicate()
        plan = {
            "up": ColwiseParallel(input_layouts=split),
            "down": RowwiseParallel(output_layouts=split),
        }
        if sequence:
            plan["norm"] = SequenceParallel()
        parallelize_module(block, tp, plan)
    if sequence:
        plan = {
            "embed": RowwiseParallel(
                input_layouts=Replicate(), output_layouts=Shard(1)
            ),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, tp, plan)


def sharded(mesh, fp8, sequence=False, bias=False, cuda_graph=False, **options):
    torch.manual_seed(0)
    model = Mlp()
    if bias:
        for block in model.blocks:
            block.down.bias = nn.Parameter(
                torch.randn(DIM, device=block.up.bias.device)
            )
    if "tp" in mesh.mesh_dim_names:
        cut(model, mesh["tp"], sequence)
    options = {"mesh": mesh["dp"], "mp_policy": BF16, **options}
    for block in model.blocks:
        fully_shard(block, fp8=fp8, cuda_graph=cuda_graph, **options)
    return fully_shard(model, **options)


def train(model, seeds):
    """Losses of each step's microbatches."""

    def loss_of(step, seed):
        generator = torch.Generator().manual_seed(seed)
        tokens = on_device(torch.randint(11, (2, 8), generator=generator))
        logits = model(tokens).float().flatten(0, 1)
        return nn.functional.cross_entropy(logits, tokens.roll(1, 1).flatten())

    return train_batches(
        loss_of, flatshard.optim.AdamW(model.parameters(), lr=1e-3), seeds
    )


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("recipe", RECIPES)
def test_is_as_near_to_one_rank_as_fp8_is(recipe, sequence, dp, world):
    mesh = named_mesh(dp=dp, tp=TP)
    alone = named_mesh(copies=world, dp=1)
    own = mesh.get_local_rank("dp")
    model = sharded(mesh, policy(recipe), sequence)
    for block in model.blocks:
        assert type(block.up) is Float8Linear and type(block.down) is Float8Linear
    losses = train(model, [own])
    found = [None] * world
    torch.distributed.all_gather_object(found, losses)
    assert found[TP * own] == losses, "ranks of a group differ"
    expected = train(sharded(alone, policy(recipe)), range(dp))
    plain = train(sharded(alone, None), range(dp))
    assert losses == pytest.approx(expected[own::dp], abs=0.03)
    assert losses == pytest.approx(plain[own::dp], abs=0.05)
    assert losses != plain[own::dp] and losses[-1] < losses[0]


@pytest.mark.parametrize("recipe", RECIPES)
def test_ranks_are_bitwise_one_with_their_microbatches(recipe, dp, world):
    """A rank's part of a layer is quantized alike for any number of dp ranks."""
    mesh = named_mesh(dp=dp, tp=TP)
    alone = named_mesh(copies=dp, dp=1, tp=TP)
    many, one = (sharded(m, policy(recipe), True) for m in (mesh, alone))
    own = mesh.get_local_rank("dp")
    losses, expected = train(many, [own]), train(one, range(dp))
    if DEVICE == "cpu" and dp <= 2:
        assert losses == expected[own::dp]
        assert distance(full_state(many), full_state(one)) == 0
    assert losses == pytest.approx(expected[own::dp], abs=2e-2)


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise", "mxfp8"])
def test_a_column_parallel_layer_has_the_numbers_of_the_whole(recipe, dp, world):
    """Its rows have scales of their own. The bias is split with it."""
    results = []
    for mesh in (named_mesh(dp=dp, tp=TP), named_mesh(copies=world, dp=1)):
        torch.manual_seed(0)
        model = on_device(nn.Sequential(nn.Linear(DIM, HIDDEN)))
        if "tp" in mesh.mesh_dim_names:
            style = ColwiseParallel(output_layouts=Replicate())
            parallelize_module(model, mesh["tp"], {"0": style})
        fully_shard(model, mesh=mesh["dp"], mp_policy=BF16, fp8=policy(recipe))
        results.append(model(on_device(torch.randn(4, DIM)).bfloat16()))
        results[-1].float().square().mean().backward()
        results.append(model[0].bias.grad.full_tensor())
    torch.testing.assert_close(results[0], results[2], rtol=0, atol=0)
    torch.testing.assert_close(results[1], results[3])


def test_a_bias_of_a_row_parallel_layer_is_added_once(dp, world):
    mesh, alone = named_mesh(dp=dp, tp=TP), named_mesh(copies=world, dp=1)
    own = mesh.get_local_rank("dp")
    models = [
        sharded(mesh, policy("blockwise"), True, bias=True),
        sharded(alone, policy("blockwise"), bias=True),
    ]
    losses = train(models[0], [own]), train(models[1], range(dp))[own::dp]
    assert losses[0] == pytest.approx(losses[1], abs=0.03)
    for block, of_one in zip(models[0].blocks, models[1].blocks):
        torch.testing.assert_close(
            block.down.bias.full_tensor(),
            of_one.down.bias.full_tensor(),
            rtol=0,
            atol=5e-3,
        )


def test_compiled_blocks(dp):
    mesh = named_mesh(dp=dp, tp=TP)
    losses = []
    for compiles in (False, True):
        torch._dynamo.reset()
        model = sharded(mesh, policy("rowwise"), True)
        for block in model.blocks if compiles else ():
            block.compile(backend="aot_eager", fullgraph=True)
        losses.append(train(model, [mesh.get_local_rank("dp")]))
    assert losses[1] == pytest.approx(losses[0], abs=1e-2)


def test_what_cannot_be_fp8_stays_in_bfloat16(dp):
    mesh = named_mesh(dp=dp, tp=TP)
    model = nn.Sequential(nn.Linear(DIM, 16 * TP, bias=False), nn.Linear(DIM, DIM))
    parallelize_module(on_device(model), mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"], mp_policy=BF16, fp8=policy("mxfp8"))
    report = flatshard.float8.describe(model)
    assert set(report.float8) == {"1.weight"}
    assert report.others["0.weight"] == "16 rows are not a multiple of 32"
    with pytest.raises(NotImplementedError, match="column_plane"):
        sharded(mesh, policy("mxfp8", "stored"))
