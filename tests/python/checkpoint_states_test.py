"""States of optimizers in checkpoints: of every dtype and kind, saved and loaded bit for
bit, or refused by the save."""

import copy
import gc

import pytest
import torch

import flatshard
from flatshard import checkpoint, fully_shard
from tests.python.device import DEVICE, on_device
from tests.python.models import Mlp
from tests.python.training import distance, full_state, shard

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def made(kind, mesh, of_parameters=torch.float32, seed=0, **options):
    torch.manual_seed(seed)
    model = shard(Mlp(blocks=1).to(of_parameters), fully_shard, mesh=mesh)
    return model, kind(model.parameters(), **options)


def train(model, optimizer, steps, rank):
    for step in steps:
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = on_device(torch.randn(4, 13, generator=generator))
        model(x.to(model.head.weight.dtype)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def states(optimizer):
    """By parameter and name: this rank's values, their dtypes and kinds."""
    found = {}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for number, parameter in enumerate(parameters):
        for name, value in optimizer.state[parameter].items():
            if torch.is_tensor(value):
                local = value.to_local() if hasattr(value, "to_local") else value
                value = type(value).__name__, local.dtype, local.device, local.clone()
            found[number, name] = value
    return found


def assert_same(a, b):
    assert a.keys() == b.keys()
    for key, value in a.items():
        if isinstance(value, tuple):
            assert value[:-1] == b[key][:-1], key
            assert torch.equal(value[-1], b[key][-1]), key
        else:
            assert value == b[key] and type(value) is type(b[key]), key


class Custom(torch.optim.Optimizer):
    """Keeps a state of `dtype`, and counts with `step`'s type."""

    def __init__(self, parameters, dtype, step=0, lr=0.1):
        self.dtype, self.first = dtype, step
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    if self.first is not None:
                        state["step"] = copy.deepcopy(self.first)
                    state["sum"] = torch.zeros_like(p, dtype=self.dtype)
                if self.first is not None:
                    state["step"] += 1
                new = state["sum"].float() + 4 * p.grad.float()
                state["sum"].copy_(new.abs().clamp(max=100))
                p.add_(state["sum"].to(p.dtype), alpha=-group["lr"])


def both_ways(kind, mesh, rank, folder, of_parameters=torch.float32, **options):
    """Trains, saves, loads into a fresh model and one that has trained, and trains on."""
    a, of_a = made(kind, mesh, of_parameters, **options)
    train(a, of_a, range(3), rank)
    checkpoint.save(folder, 3, a, of_a)
    for trained in (0, 1):
        b, of_b = made(kind, mesh, of_parameters, seed=1, **options)
        train(b, of_b, range(trained), rank)
        checkpoint.load(folder, b, of_b)
        assert_same(states(of_a), states(of_b))
        again, of_again = made(kind, mesh, of_parameters, **options)
        train(again, of_again, range(5), rank)
        train(b, of_b, range(3, 5), rank)
        assert distance(full_state(again), full_state(b)) == 0
        assert_same(states(of_again), states(of_b))


@pytest.mark.parametrize("parameters", DTYPES)
@pytest.mark.parametrize(
    "state",
    [*DTYPES, torch.float64, torch.int8, torch.uint8, torch.int64, torch.bool],
)
def test_states_of_another_dtype(state, parameters, mesh, rank, folder):
    both_ways(Custom, mesh, rank, folder, parameters, dtype=state)


@pytest.mark.parametrize("step", [0, torch.tensor(0.0), torch.tensor(0), None])
def test_kinds_of_step(step, mesh, rank, folder):
    both_ways(Custom, mesh, rank, folder, dtype=torch.float32, step=step)


TORCHS = {
    "adam": (torch.optim.Adam, {"amsgrad": True}),
    "adamw": (torch.optim.AdamW, {}),
    "fused": (torch.optim.AdamW, {"fused": True}),
    "nadam": (torch.optim.NAdam, {}),
    "radam": (torch.optim.RAdam, {}),
    "adamax": (torch.optim.Adamax, {}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adadelta": (torch.optim.Adadelta, {}),
    "asgd": (torch.optim.ASGD, {}),
    "rprop": (torch.optim.Rprop, {}),
    "rmsprop": (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "plain": (torch.optim.SGD, {}),
    "flatshard": (flatshard.optim.AdamW, {}),
}
# They keep numbers for each parameter whose shapes differ from the parameter's shape.
REFUSED = {"nadam": "mu_product", "asgd": "eta|ax|mu"}


@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize("name", TORCHS)
def test_optimizers_of_torch(name, dtype, mesh, rank, folder):
    kind, options = TORCHS[name]
    if name == "flatshard" and DEVICE == "cuda":
        model, optimizer = made(kind, mesh, dtype, lr=1e-2, **options)
        with pytest.raises(flatshard.ConfigError, match="float32 on CUDA"):
            train(model, optimizer, range(1), rank)
        return
    if name in REFUSED:
        model, optimizer = made(kind, mesh, dtype, lr=1e-2, **options)
        train(model, optimizer, range(1), rank)
        with pytest.raises(ValueError, match=f"state ({REFUSED[name]}) of"):
            checkpoint.save(folder, 1, model, optimizer)
        return
    both_ways(kind, mesh, rank, folder, dtype, lr=1e-2, **options)


def test_states_that_only_some_parameters_have(mesh, rank, folder):
    model, optimizer = made(torch.optim.AdamW, mesh)
    train(model, optimizer, range(1), rank)
    last = list(optimizer.state)[-1]
    optimizer.state[last]["more"] = torch.zeros_like(last)
    with pytest.raises(flatshard.Error, match="optimizer state more of .* got none"):
        checkpoint.save(folder, 1, model, optimizer)


@pytest.mark.parametrize("kind", [flatshard.optim.AdamW, torch.optim.SGD])
def test_a_new_optimizer_where_a_former_one_was(kind, mesh, rank, folder):
    """CPython gives its address to the next one."""
    model, optimizer = made(kind, mesh, lr=0.1)
    train(model, optimizer, range(2), rank)
    checkpoint.save(folder, 2, model, optimizer)
    address, others = id(optimizer), []
    del optimizer
    gc.collect()
    for _ in range(100):
        others.append(kind(model.parameters(), lr=0.1))
        if id(others[-1]) == address:
            break
    fresh = others.pop()
    train(model, fresh, range(3), rank)
    expected = states(fresh)
    checkpoint.save(folder, 5, model, fresh)
    b, of_b = made(kind, mesh, seed=1, lr=0.1)
    checkpoint.load(folder, b, of_b)
    assert_same(expected, states(of_b))
