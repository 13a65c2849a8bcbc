"""Saving and loading a sharded model with its optimizer."""

import itertools
import os
import resource
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import flatshard
from flatshard import checkpoint, fully_shard
from tests.python.device import DEVICE, on_device
from tests.python.models import Mlp
from tests.python.sum_order import SMALL_MODEL
from tests.python.training import STRATEGIES, distance, full_state, shard, train


def adam(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, betas=(0.8, 0.99), foreach=True)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def core(parameters):
    return flatshard.optim.AdamW(parameters, lr=1e-2, betas=(0.8, 0.99))


def made(optimizer, mesh, seed=0, make=Mlp, **options):
    torch.manual_seed(seed)
    model = shard(make(), fully_shard, mesh=mesh, **options)
    return model, optimizer(model.parameters())


@pytest.mark.parametrize("optimizer", [adam, sgd, core])
def test_training_goes_on_as_if_never_stopped(optimizer, folder, mesh, rank):
    a, optimizer_a = made(optimizer, mesh)
    train(a, rank, steps=3, optimizer=optimizer_a)
    checkpoint.save(folder, 3, a, optimizer_a, state={"loader": '{"seen": 3}'})
    b, optimizer_b = made(optimizer, mesh, seed=1)
    for group in optimizer_b.param_groups:
        group["lr"] = 1.0
    loaded = checkpoint.load(folder, b, optimizer_b)
    assert loaded == checkpoint.Loaded(step=3, state={"loader": '{"seen": 3}'})
    assert optimizer_b.param_groups[0]["lr"] == 1e-2
    losses = [
        train(model, rank, steps=3, optimizer=own)
        for model, own in ((a, optimizer_a), (b, optimizer_b))
    ]
    assert losses[0] == losses[1]
    assert distance(full_state(a), full_state(b)) == 0


@pytest.mark.parametrize("optimizer", [adam, core])
def test_into_a_model_that_has_trained(optimizer, folder, mesh, rank):
    a, optimizer_a = made(optimizer, mesh)
    train(a, rank, steps=2, optimizer=optimizer_a)
    checkpoint.save(folder, 2, a, optimizer_a)
    b, optimizer_b = made(optimizer, mesh, seed=1)
    train(b, rank, steps=5, optimizer=optimizer_b)
    checkpoint.load(folder, b, optimizer_b, step=2)
    for model, own in ((a, optimizer_a), (b, optimizer_b)):
        train(model, rank, steps=2, optimizer=own)
    assert distance(full_state(a), full_state(b)) == 0


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("writer, reader", [(adam, core), (core, adam), (sgd, sgd)])
def test_every_strategy_reads_every_other(writer, reader, strategy, folder, mesh, rank):
    a, optimizer_a = made(writer, mesh)
    train(a, rank, steps=2, optimizer=optimizer_a)
    checkpoint.save(folder, 2, a, optimizer_a)
    b, optimizer_b = made(reader, mesh, seed=1, strategy=strategy)
    checkpoint.load(folder, b, optimizer_b)
    assert distance(full_state(a), full_state(b)) == 0
    for model, own in ((a, optimizer_a), (b, optimizer_b)):
        train(model, rank, steps=2, optimizer=own)
    assert distance(full_state(a), full_state(b)) < SMALL_MODEL


def test_other_numbers_of_ranks(folder, mesh, rank, world):
    a, optimizer_a = made(adam, mesh)
    train(a, rank, steps=2, optimizer=optimizer_a)
    checkpoint.save(folder, 2, a, optimizer_a)
    state = full_state(a)
    moments = {
        name: optimizer_a.state[p]["exp_avg"].full_tensor()
        for name, p in a.named_parameters()
    }
    # Each rank has a mesh of one rank with the full model on it.
    alone = [DeviceMesh(DEVICE, [r]) for r in range(world)][rank]
    b, optimizer_b = made(adam, alone, seed=1)
    checkpoint.load(folder, b, optimizer_b)
    for name, p in b.named_parameters():
        assert torch.equal(p.full_tensor(), state[name]), name
        own = optimizer_b.state[p]
        assert torch.equal(own["exp_avg"].full_tensor(), moments[name]), name
        assert own["step"] == 2
    # And back, when all ranks have read what is the latest until here.
    dist.barrier()
    if rank == 0:
        train(b, rank, steps=1, optimizer=optimizer_b)
        checkpoint.save(folder, 3, b, optimizer_b)
    dist.barrier()
    assert checkpoint.load(folder, a, optimizer_a).step == 3
    values = full_state(a)
    if rank == 0:
        assert distance(values, full_state(b)) == 0


class Normed(Mlp):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(13)
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        on_device(self)

    def forward(self, x):
        return super().forward(self.norm(x)) * self.scale


def normed(optimizer, mesh, seed):
    torch.manual_seed(seed)
    model = Normed()
    shard(model, fully_shard, mesh=mesh, ignored_params={model.scale})
    sharded = [p for p in model.parameters() if p is not model.scale]
    return model, optimizer(sharded)


def test_buffers_and_ignored_parameters(folder, mesh, rank):
    a, optimizer_a = normed(adam, mesh, seed=0)
    train(a, rank, steps=2, optimizer=optimizer_a)
    with torch.no_grad():
        a.scale.fill_(2.5)
    mean = a.norm.running_mean.clone()
    dist.broadcast(mean, 0)  # rank 0's are saved
    checkpoint.save(folder, 2, a, optimizer_a)
    b, optimizer_b = normed(adam, mesh, seed=1)
    b.scratch.fill_(7)
    checkpoint.load(folder, b, optimizer_b)
    assert torch.equal(b.norm.running_mean, mean)
    assert b.norm.num_batches_tracked == 2
    assert b.scale == 2.5
    assert torch.equal(b.scratch, torch.full_like(b.scratch, 7.0))


def test_into_the_meta_device(folder, mesh, rank):
    a, _ = normed(adam, mesh, seed=0)
    checkpoint.save(folder, 0, a)
    with torch.device("meta"):
        b = Normed()
    b.scale = nn.Parameter(on_device(torch.zeros(())))
    shard(b, fully_shard, mesh=mesh, ignored_params={b.scale})
    checkpoint.load(folder, b)
    assert distance(full_state(a), full_state(b)) == 0
    train(b, rank, steps=1)


@pytest.mark.parametrize("optimizer", [adam, core])
def test_a_save_is_of_the_moment_it_began(optimizer, folder, mesh, rank):
    model, own = made(optimizer, mesh)
    states, saves = {}, []
    for step in range(1, 5):
        train(model, rank, steps=1, optimizer=own)
        states[step] = full_state(model)
        saves.append(checkpoint.async_save(folder, step, model, own, keep_latest=3))
    for saved in saves:
        saved.wait()
        assert saved.done()
    dist.barrier()
    steps = sorted(name for name in os.listdir(folder) if name.startswith("step"))
    assert steps == ["step-2", "step-3", "step-4"]
    for step in (2, 3, 4):
        other, other_own = made(optimizer, mesh, seed=1)
        checkpoint.load(folder, other, other_own, step=step)
        assert distance(full_state(other), states[step]) == 0


def test_what_was_excluded_stays(folder, mesh, rank):
    a, optimizer_a = made(adam, mesh)
    train(a, rank, steps=1, optimizer=optimizer_a)
    checkpoint.save(folder, 1, a, optimizer_a)
    b, optimizer_b = made(adam, mesh, seed=1)
    train(b, rank, steps=4, optimizer=optimizer_b)
    before = full_state(b)
    # Head and root are one unit, so both stay.
    checkpoint.load(folder, b, optimizer_b, exclude=["head.*"])
    after = full_state(b)
    for name, value in full_state(a).items():
        expected = before[name] if name.startswith("head.") else value
        assert torch.equal(after[name], expected), name
    assert optimizer_b.state[b.head.weight]["step"] == 4
    assert optimizer_b.state[b.blocks[0].up.weight]["step"] == 1


def test_a_load_that_fails_changes_nothing(folder, mesh, rank):
    a, optimizer_a = made(adam, mesh, make=lambda: Mlp(hidden=50))
    train(a, rank, steps=1, optimizer=optimizer_a)
    checkpoint.save(folder, 1, a, optimizer_a)
    b, optimizer_b = made(adam, mesh)
    train(b, rank, steps=2, optimizer=optimizer_b)
    before = full_state(b)
    moment = optimizer_b.state[b.head.weight]["exp_avg"].full_tensor().clone()
    with pytest.raises(flatshard.Error, match=r"expected shape \[40.*got \[50"):
        checkpoint.load(folder, b, optimizer_b)
    assert distance(full_state(b), before) == 0
    own = optimizer_b.state[b.head.weight]
    assert own["step"] == 2
    assert torch.equal(own["exp_avg"].full_tensor(), moment)
    c, optimizer_c = made(adam, mesh)
    with pytest.raises(flatshard.Error, match="expected shape"):
        checkpoint.load(folder, c, optimizer_c)
    assert not optimizer_c.state


def test_a_damaged_file_is_named(folder, mesh, rank):
    a, optimizer_a = made(core, mesh)
    checkpoint.save(folder, 1, a, optimizer_a)
    if rank == 0:
        name = next(n for n in os.listdir(f"{folder}/step-1") if "00001" in n)
        with open(f"{folder}/step-1/{name}", "r+b") as file:
            file.seek(-1, os.SEEK_END)
            last = file.read(1)
            file.seek(-1, os.SEEK_END)
            file.write(bytes([last[0] ^ 1]))
    dist.barrier()
    with pytest.raises(flatshard.Error, match="shard-00001|rank 0 failed"):
        checkpoint.load(folder, a, optimizer_a)


@pytest.mark.parametrize("optimizer", [adam, core])
def test_shards_are_plain_safetensors(optimizer, folder, mesh, rank, world):
    a, own = made(optimizer, mesh)
    train(a, rank, steps=1, optimizer=own)
    checkpoint.save(folder, 1, a, own)
    state = full_state(a)
    if rank != 0:
        return
    paths = sorted(Path(folder, "step-1").glob("*.safetensors"))
    assert len(paths) == world
    numel = dict.fromkeys(["", "exp_avg", "exp_avg_sq"], 0)
    for path in paths:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():
                tensor = on_device(file.get_tensor(name))
                assert file.get_slice(name).get_dtype() == "F32", name
                assert tensor.dtype == torch.float32, name
                role, _, name = name.rpartition("/")
                name, _, box = name.partition("[")
                value = state[name]
                if box:
                    cuts = box.removesuffix("]").split(", ")
                    value = value[tuple(slice(*map(int, c.split(":"))) for c in cuts)]
                assert tensor.shape == value.shape, name
                assert role or torch.equal(tensor, value), name
                numel[role] += tensor.numel()
    assert set(numel.values()) == {sum(value.numel() for value in state.values())}


class Unusual(torch.optim.SGD):
    """Keeps a number that cannot be stored in a tensor file."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["trust"] = torch.tensor([1.0, 2.0])


def test_what_cannot_be_saved_is_named(folder, mesh, rank):
    model, _ = made(adam, mesh)
    optimizer = Unusual(model.parameters(), lr=1e-2)
    train(model, rank, steps=1, optimizer=optimizer)
    with pytest.raises(ValueError, match=r"state trust of head.weight is a"):
        checkpoint.save(folder, 1, model, optimizer)
    plain = nn.Linear(2, 2)
    other = adam(itertools.chain(model.parameters(), plain.parameters()))
    with pytest.raises(ValueError, match=r"shape \(2, 2\) that fully_shard did not"):
        checkpoint.save(folder, 1, model, other)
    with pytest.raises(ValueError, match="got a int for 'epoch'"):
        checkpoint.save(folder, 1, model, state={"epoch": 3})
    with pytest.raises(ValueError, match="outermost module"):
        checkpoint.save(folder, 1, plain)
    with pytest.raises(ValueError, match="got unit blocks.1 of one"):
        checkpoint.save(folder, 1, model.blocks[1])
    with pytest.raises(FileNotFoundError, match="there is no checkpoint of step 9"):
        checkpoint.load(folder, model, step=9)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint$"):
        checkpoint.load(folder, model)
    assert os.listdir(folder) == []


def test_a_load_that_fails_on_one_rank_fails_on_all(folder, mesh, rank, world):
    """A file system may show a new checkpoint to some ranks only."""
    model, optimizer = made(adam, mesh)
    checkpoint.save(f"{folder}/all", 1, model, optimizer)
    if rank == 0:
        shutil.copytree(f"{folder}/all", f"{folder}/last")
    dist.barrier()
    checkpoint.save(f"{folder}/all", 2, model, optimizer)
    last = world - 1
    seen = f"{folder}/last" if rank == last and world > 1 else f"{folder}/all"
    before = full_state(model)
    if world > 1:
        kind = FileNotFoundError if rank == last else flatshard.Error
        text = "no checkpoint of step 2" if rank == last else f"rank {last} failed"
        with pytest.raises(kind, match=text):
            checkpoint.load(seen, model, optimizer)
    other, _ = made(adam, mesh, seed=1)
    assert checkpoint.load(seen, other, step=1).step == 1
    assert distance(full_state(other), before) == 0


def test_a_save_that_fails_on_one_rank_fails_on_all(folder, mesh, rank, world):
    model, optimizer = made(core, mesh)
    checkpoint.save(folder, 1, model, optimizer)
    saved = full_state(model)
    train(model, rank, steps=1, optimizer=optimizer)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == world - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(RuntimeError, match="step 2 failed.*File too large") as e:
            checkpoint.save(folder, 2, model, optimizer)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert f"shard-{world:05}-of-{world:05}.safetensors" in str(e.value)
    other, other_optimizer = made(core, mesh, seed=1)
    assert checkpoint.load(folder, other, other_optimizer).step == 1
    assert distance(full_state(other), saved) == 0
