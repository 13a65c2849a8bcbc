"""Weights that others write, and gradients that users drop."""

import gc
import types

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2

from flatshard import MixedPrecisionPolicy
from flatshard._tensor.places import state_of
from flatshard._tensor.writes import Writes
from tests.python.models import Body, plain
from tests.python.sum_order import SMALL_MODEL
from bench.harness.options import fully_shard
from tests.python.training import STRATEGIES, data, distance, full_state, shard


class Owner:
    """A unit that owns parameters."""


def test_a_model_that_is_collected_late_hides_no_writes():
    """By then the memory of its parameters may belong to the next model."""
    parameter = types.SimpleNamespace(_local_tensor=torch.zeros(4))
    former, present, writes = Owner(), Owner(), Writes()
    writes.add(former, [parameter])
    writes.add(present, [parameter])
    del former
    gc.collect()
    (unit,) = writes.units.values()
    assert unit() is present
    del present
    gc.collect()
    assert not writes.units


def test_dropped_gradients_give_their_memory_back(mesh, rank):
    model = shard(Body(plain), fully_shard, mesh=mesh)
    model(data(rank)).sum().backward()
    kept = model.head.weight.grad
    values = kept._local_tensor.clone()
    model.zero_grad()
    model(2 * data(rank)).sum().backward()
    # The user's tensor keeps its values, and the core fills new memory.
    assert model.head.weight.grad is not kept
    assert torch.equal(kept._local_tensor, values)
    core = state_of(model).core
    model.zero_grad()
    assert core.grad(0) is None


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_writes_reach_the_next_forward(strategy, dtype, mesh, rank):
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    model = shard(
        Body(plain), fully_shard, mesh=mesh, strategy=strategy, mp_policy=policy
    )
    x = data(rank)
    bias = model.head.bias
    model(x)

    def out():
        with torch.no_grad():
            return model(x).float()

    def write_local(value):
        with torch.no_grad():
            bias.to_local().fill_(value)

    def write_data(value):
        bias.data.copy_(torch.full_like(bias, value))

    def write_in_place(value):
        with torch.no_grad():
            bias.fill_(value)

    def assign_data(value):
        bias.data = torch.full_like(bias, value)

    def load(value):
        state = model.state_dict()
        state["head.bias"] = torch.full_like(state["head.bias"], value)
        model.load_state_dict(state)

    with torch.no_grad():
        model.head.weight.zero_()
    for step, write in enumerate(
        (write_local, write_data, write_in_place, assign_data, load)
    ):
        write(float(step + 1))
        found = out()
        assert torch.equal(found, torch.full_like(found, step + 1)), write.__name__


def test_load_state_dict_assign(mesh, rank):
    model = shard(Body(plain), fully_shard, mesh=mesh)
    other = shard(Body(plain), fully_shard, mesh=mesh)
    model.load_state_dict(other.state_dict(), assign=True)
    assert torch.equal(model(data(rank)), other(data(rank)))
    model(data(rank)).sum().backward()
    assert model.head.weight.grad is not None


def test_steps_of_other_models_change_nothing_here(mesh, rank):
    """A model waits for its backward while others are trained, as in a GAN. FSDP2's
    weights."""
    states = []
    for function in (fully_shard, fsdp2):
        torch.manual_seed(0)
        model, other, average = (
            shard(Body(plain), function, mesh=mesh) for _ in range(3)
        )
        optimizers = [
            torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True)
            for m in (model, other)
        ]
        for _ in range(2):
            loss = model(data(rank)).square().mean()
            other(data(rank)).square().mean().backward()
            optimizers[1].step(), optimizers[1].zero_grad()
            with torch.no_grad():
                averages, weights = list(average.parameters()), list(other.parameters())
                torch._foreach_mul_(averages, 0.9)
                torch._foreach_add_(averages, weights, alpha=0.1)
                averages[0].mul_(2)
            loss.backward()
            optimizers[0].step(), optimizers[0].zero_grad()
            average(data(rank))
            average.reshard()  # FSDP2 shows the root's weights whole
        states.append([full_state(m) for m in (model, other, average)])
    for ours, theirs in zip(*states):
        assert distance(ours, theirs) < SMALL_MODEL


def test_a_step_that_fails_or_calls_the_model_is_seen(mesh, rank):
    class Fails(torch.optim.SGD):
        def step(self, closure=None):
            with torch.no_grad():
                torch._foreach_mul_(self.param_groups[0]["params"], 2.0)
                if closure is None:
                    raise ValueError
                closure()
                torch._foreach_mul_(self.param_groups[0]["params"], 0.25)

    model = shard(Body(plain), fully_shard, mesh=mesh)
    single = Body(plain)

    def check():
        single.load_state_dict(full_state(model))
        torch.testing.assert_close(model(data(rank)), single(data(rank)))

    check()
    optimizer = Fails(model.parameters(), lr=0.1)
    with pytest.raises(ValueError):
        optimizer.step()
    check()
    optimizer.step(check)
    check()
    loss = model(data(rank)).square().mean()
    torch.optim.SGD(model.parameters(), lr=0.1).step(loss.backward)
    check()


def test_a_unit_called_alone_after_a_step(mesh, rank):
    """FSDP2's weights."""
    states = []
    for function in (fully_shard, fsdp2):
        torch.manual_seed(0)
        model = shard(Body(plain), function, mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(data(rank)).square().mean().backward()
        for _ in range(2):
            optimizer.step(), optimizer.zero_grad()
            model.blocks[1](data(rank)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            model.blocks[1](data(rank))
        states.append(full_state(model))
    assert distance(*states) < SMALL_MODEL


# -- reads (they do not count as writes), and writes inside a forward ----------------


@pytest.mark.parametrize(
    "look",
    [
        lambda p: p.data.norm(),
        lambda p: p.to_local().sum(),
        lambda p: p.data.clone(),
        lambda p: p.detach().full_tensor(),
        lambda p: p.data.to_local().abs().sum(),
    ],
)
def test_a_look_between_forward_and_backward_is_no_write(look, mesh, rank):
    model = shard(Body(plain), fully_shard, mesh=mesh)
    shards = list(model.parameters())
    for _ in range(2):
        loss = model(data(rank)).sum()
        for p in shards:
            look(p)
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(
    "write",
    [
        lambda p: p.data.mul_(2),
        lambda p: p.to_local().mul_(2),
        lambda p: p.data.to_local().add_(1),
    ],
)
def test_a_write_between_forward_and_backward_is_an_error(write, mesh, rank):
    model = shard(Body(plain), fully_shard, mesh=mesh)
    weight = model.head.weight
    loss = model(data(rank)).sum()
    with torch.no_grad():
        write(weight)
    with pytest.raises(RuntimeError, match="changed between its forward and its back"):
        loss.backward()
    model.reset_iter_state()


class Momentum(nn.Module):
    """Keys follow queries, as in MoCo."""

    def __init__(self, update):
        super().__init__()
        self.q, self.k = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        nn.init.ones_(self.q.weight)
        nn.init.zeros_(self.k.weight)
        self.update = update

    def forward(self, x):
        with torch.no_grad():
            self.update(self.q.weight, self.k.weight)
            keys = self.k(x)
        return self.q(x), keys


def by_lerp(q, k):
    k.lerp_(q, 0.5)


def by_two(q, k):
    k.mul_(0.5).add_(q, alpha=0.5)


def by_data(q, k):
    k.data.mul_(0.5).add_(q.data, alpha=0.5)


def by_copy(q, k):
    k.copy_((q + k) / 2)


def by_lists(q, k):
    torch._foreach_lerp_([k], [q], 0.5)


@pytest.mark.parametrize("update", [by_lerp, by_two, by_data, by_copy, by_lists])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("strategy", ["zero3", "zero2"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_writes_inside_of_a_forward(update, apart, strategy, prefetch, mesh):
    if update is by_data and not apart:
        pytest.skip("no tensor's version tells of a write to .data of a plain tensor")
    model = Momentum(update).to(mesh.device_type)
    if apart:
        fully_shard(model.q, mesh=mesh, strategy=strategy)
        fully_shard(model.k, mesh=mesh, strategy=strategy)
    fully_shard(model, mesh=mesh, strategy=strategy, prefetch=prefetch)
    x = torch.ones(1, 4, device=mesh.device_type)
    for expected in (2.0, 3.0, 3.5):
        queries, keys = model(x)
        assert (keys == expected).all(), keys
        queries.sum().backward()
        model.zero_grad()
    stored = model.k.weight.full_tensor()
    assert (stored == 0.875).all(), stored


def test_writes_to_unsharded_parameters_are_kept(mesh, rank):
    model = shard(Body(plain), fully_shard, mesh=mesh)
    model(data(rank))
    model.unshard()
    with torch.no_grad():
        for p in model.parameters(recurse=False):
            p.fill_(3)
        model.head.bias.fill_(3)
    model.reshard()
    assert (model.head.bias.full_tensor() == 3).all()
