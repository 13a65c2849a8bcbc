"""torch.amp.GradScaler over sharded parameters: all ranks agree on the scale and on
which steps are skipped, whichever rank has the value that is not finite."""

import copy

import pytest
import torch

import flatshard
from flatshard import fully_shard
from flatshard._tensor.row_shard import RowShard
from tests.python.device import DEVICE
from tests.python.models import Body, plain
from tests.python.training import data, full_state, shard

# With AdamW's default eps (1e-8), a gradient that is almost zero turns its rounding
# error into a full-sized update. That rounding depends on the order of sums, and so on
# ranks and kernels.
EPS = {"eps": 1e-4}
OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, EPS),
    "adamw foreach": (torch.optim.AdamW, {"foreach": True, **EPS}),
    "adamw fused": (torch.optim.AdamW, {"fused": True, **EPS}),
    "the core's adamw": (flatshard.optim.AdamW, EPS),
    "sgd": (torch.optim.SGD, {}),
}


def scaler_of():
    # Powers of two: scaling and unscaling is exact.
    return torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=2)


def step(model, optimizer, scaler, batches, clip=False, spoil=lambda: None):
    for x in batches:
        loss = model(x).square().mean() / len(batches)
        scaler.scale(loss).backward()
    spoil()
    if clip:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clipped"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scaled_training_equals_one_process(name, clip, mesh, rank, world):
    kind, options = OPTIMIZERS[name]
    model = Body(plain)
    single = copy.deepcopy(model)
    shard(model, fully_shard, mesh=mesh)
    ours = kind(model.parameters(), lr=1e-2, **options)
    if name == "sgd":
        theirs = torch.optim.SGD(single.parameters(), lr=1e-2)
    else:
        theirs = torch.optim.AdamW(single.parameters(), lr=1e-2, **EPS)
    a, b = scaler_of(), scaler_of()
    for number in range(4):
        step(model, ours, a, [data(rank, number)], clip)
        step(single, theirs, b, [data(r, number) for r in range(world)], clip)
        assert a.get_scale() == b.get_scale()
    assert a.get_scale() == 4096.0
    expected = single.state_dict()
    for key, value in full_state(model).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)


def spoil_rows_of(rank, where, world, parameter):
    """A gradient that is not finite in what one rank has of it. Whether it has any."""
    placement = parameter.placements[-1]
    if not isinstance(placement, RowShard):
        where = rank  # replicas are equal
    local = parameter.grad.to_local()
    if rank == where and local.numel():
        local.view(-1)[0] = float("inf")
    return not isinstance(placement, RowShard) or placement.rows(where) > 0


def check_skips(model, name, rank, world, parameter, clip=False):
    kind, options = OPTIMIZERS[name]
    optimizer = kind(model.parameters(), lr=1e-2, **options)
    scaler = scaler_of()
    step(model, optimizer, scaler, [data(rank)])
    for where in range(world):
        before, scale = full_state(model), scaler.get_scale()
        spoiled = []
        step(
            model,
            optimizer,
            scaler,
            [data(rank, 1)],
            clip,
            lambda: spoiled.append(spoil_rows_of(rank, where, world, parameter)),
        )
        after = full_state(model)
        changed = [key for key in before if not torch.equal(after[key], before[key])]
        assert bool(changed) != spoiled[0], changed
        assert (scaler.get_scale() == scale / 2) == spoiled[0]
    step(model, optimizer, scaler, [data(rank, 2)])
    after = full_state(model)
    assert all(torch.isfinite(value).all() for value in after.values())
    assert not torch.equal(after["blocks.0.up.weight"], before["blocks.0.up.weight"])


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads_params"])
@pytest.mark.parametrize("clip", [False, True], ids=["plain", "clipped"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_step_is_skipped_on_all_ranks(name, clip, strategy, mesh, rank, world):
    model = Body(plain)
    shard(model, fully_shard, mesh=mesh, strategy=strategy)
    check_skips(model, name, rank, world, model.head.bias, clip)


def test_units_may_be_cut_differently(mesh, rank, world):
    """torch asks the first gradient only how ranks have to agree."""
    model = Body(plain)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, strategy="no_shard")
    fully_shard(model, mesh=mesh)
    check_skips(model, "adamw foreach", rank, world, model.head.bias)


def test_replicas_agree(mesh_2d, rank, world):
    model = Body(plain)
    shard(model, fully_shard, mesh=mesh_2d)
    shards = mesh_2d.size(1)
    check_skips(
        model, "adamw", mesh_2d.get_local_rank(1), shards, model.head.bias, clip=True
    )


def test_beside_ignored_parameters(mesh, rank, world):
    model = Body(plain)
    ignored = model.blocks[1].down.bias
    for block in model.blocks:
        fully_shard(block, mesh=mesh, ignored_params={ignored})
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, foreach=False)
    scaler = scaler_of()
    for spoiled in (False, True):
        before = full_state(model)

        def spoil():
            if spoiled and rank == 0:
                ignored.grad[0] = float("nan")

        step(model, optimizer, scaler, [data(rank)], spoil=spoil)
        assert scaler.get_scale() == (512.0 if spoiled else 1024.0)
        head = full_state(model)["head.bias"]
        assert torch.equal(head, before["head.bias"]) == spoiled


def test_an_overflow_of_one_rank_reaches_all(mesh, rank, world):
    """An input that only the last rank sees."""
    model = Body(plain)
    shard(model, fully_shard, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = scaler_of()
    before = full_state(model)
    x = data(rank)
    if rank == world - 1:
        x[0] = float("nan")
    step(model, optimizer, scaler, [x])
    assert scaler.get_scale() == 512.0
    after = full_state(model)
    assert all(torch.equal(after[key], before[key]) for key in before)
    step(model, optimizer, scaler, [data(rank)])
    assert not torch.equal(full_state(model)["head.bias"], before["head.bias"])
