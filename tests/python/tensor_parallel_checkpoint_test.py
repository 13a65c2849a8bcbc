"""flatshard.checkpoint of models with tensor parallelism: any other grid reads it."""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import flatshard
from flatshard import checkpoint
from tests.python import megatron_tensor_test as experts
from tests.python.device import IS_WHOLE_MATRIX, named_mesh, on_device
from tests.python.parallel_models import Model, make, parallel, shard, train, values
from tests.python.sum_order import SMALL_MODEL
from bench.harness.options import fully_shard


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def core(parameters):
    return flatshard.optim.AdamW(parameters, lr=1e-2, eps=1e-4)


def sharded(model, grid, optimizer, sequence=False, **options):
    """Returns the model on a grid (replicas, dp, tp), its optimizer, and the number of
    this rank's samples."""
    mesh = named_mesh(replicate=grid[0], dp=grid[1], tp=grid[2])
    data = mesh["replicate", "dp"] if grid[0] > 1 else mesh["dp"]
    if grid[2] > 1:
        parallel(model, mesh["tp"], sequence)
    shard(model, fully_shard, mesh=data, **options)
    own = mesh.get_local_rank("replicate") * grid[1] + mesh.get_local_rank("dp")
    return model, optimizer(model.parameters()), own


def states(optimizer):
    """Returns the full tensors of the optimizer's state, and its numbers."""
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state[p]
            found.append({n: _whole(v) for n, v in sorted(state.items())})
    return found


def _whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def check_equal(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=0)


GRIDS = {
    1: [(1, 1, 1)],
    2: [(1, 1, 2), (1, 2, 1)],
    4: [(1, 2, 2), (1, 1, 4), (1, 4, 1), (2, 1, 2)],
}


def grids(world):
    if world not in GRIDS:
        pytest.skip("needs 1, 2 or 4 ranks")
    return GRIDS[world]


@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("optimizer", [adam, sgd, core])
def test_any_grid_reads_any_other(optimizer, sequence, folder, world):
    """Bit for bit, weights and optimizer state.

    One optimizer reads each grid on each. The others read each grid on the next one and
    on itself, so that each is written and read on all."""
    all_grids = grids(world)
    for step, grid in enumerate(all_grids):
        saved, of_saved, own = sharded(make(), grid, optimizer, sequence)
        train(saved, [own], 2, of_saved)
        checkpoint.save(folder, step, saved, of_saved, state={"at": "here"})
        others = all_grids
        if not (IS_WHOLE_MATRIX or (optimizer is adam and not sequence)):
            others = dict.fromkeys((all_grids[(step + 1) % len(all_grids)], grid))
        for other in others:
            torch.manual_seed(1)
            read, of_read, own = sharded(
                on_device(Model()), other, optimizer, not sequence
            )
            loaded = checkpoint.load(folder, read, of_read, step=step)
            assert loaded == checkpoint.Loaded(step=step, state={"at": "here"})
            check_equal(values(read), values(saved))
            check_equal(states(of_read), states(of_saved))
        # A sequence that is sharded is added up in another order.
        seeds = [own] if grid == other else []
        losses = train(saved, seeds, 2, of_saved)
        assert losses == pytest.approx(train(read, seeds, 2, of_read), rel=SMALL_MODEL)


@pytest.mark.parametrize("strategy", ["zero2", "zero0"])
def test_replicas_are_written_once(strategy, folder, world, rank):
    """The files store each element once, whichever ranks have it."""
    grid = grids(world)[0]
    model, optimizer, own = sharded(make(), grid, adam, True, strategy=strategy)
    train(model, [own], 1, optimizer)
    checkpoint.save(folder, 7, model, optimizer)
    expected = 3 * sum(p.numel() for p in make().parameters())
    if rank == 0:
        found = 0
        for path in Path(folder).glob("step-7/*.safetensors"):
            with safe_open(path, "pt") as file:
                found += sum(file.get_tensor(key).numel() for key in file.keys())
        assert found == expected


def test_a_load_that_fails_changes_no_rank(folder, world, rank):
    """Nor ranks of other data-parallel groups than the failed rank's group."""
    grid = grids(world)[0]
    saved, _, _ = sharded(make(), grid, adam)
    checkpoint.save(folder, 1, saved)
    torch.manual_seed(1)
    read, _, _ = sharded(on_device(Model()), grid, adam)
    before = values(read)
    if rank == 0:
        read.register_buffer("own", on_device(torch.zeros(1)))
    with pytest.raises(flatshard.Error, match="own" if rank == 0 else "rank 0"):
        checkpoint.load(folder, read)
    check_equal(values(read), before)


@pytest.mark.parametrize("make", [experts.shares_layers, experts.shares_experts])
def test_experts(make, folder, world):
    if world != 4:
        pytest.skip("needs 4 ranks")
    saved, rank, _ = make(*experts.GRIDS[0])
    experts.train(saved, [rank])
    checkpoint.save(folder, 1, saved)
    expected = experts.state_of(saved)
    for other in (experts.shares_layers, experts.shares_experts):
        loaded, _, _ = other(*experts.GRIDS[1])
        checkpoint.load(folder, loaded)
        check_equal(experts.state_of(loaded), expected)
