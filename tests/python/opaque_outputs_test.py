"""Outputs with tensors where pytree does not look: distributions, objects of the
program, closures, iterators."""

import collections
import contextvars
import copy
import functools
import itertools
import queue
import types
import weakref

import pytest
import torch
from torch import nn
from torch.distributions import Categorical, Independent, Normal

from flatshard import fully_shard

from tests.python.device import on_device
from tests.python.training import refused


class Result:
    def __init__(self, mean, scale):
        self.inner = [{"mean": mean}]
        self.scale = scale
        self.again = self


class Slots:
    __slots__ = ("mean", "scale")

    def __init__(self, mean, scale):
        self.mean, self.scale = mean, scale


class Decoder:
    """Runs a module of the unit when it is called."""

    def __init__(self, policy, h):
        self.policy, self.h = policy, h

    def __call__(self):
        return self.policy.mean(self.h)


def lazily(policy, h):
    yield policy.mean(h)
    yield policy.log_std


def finished(tensor):
    future = torch.futures.Future()
    future.set_result(tensor)
    return future


def in_context(tensor):
    variable = contextvars.ContextVar("output")
    variable.set(tensor)
    return variable


def keep(module, tensor):
    module.kept = tensor
    return tensor


def queued(tensor):
    result = queue.SimpleQueue()
    result.put(tensor)
    return result


# Functions of a unit and an activation that return an output, and the loss of it.
RETURNS = {
    "Normal": (
        lambda m, h: Normal(m.mean(h), m.log_std.exp()),
        lambda out: -out.log_prob(torch.ones_like(out.mean)).mean(),
    ),
    "Independent": (
        lambda m, h: Independent(Normal(m.mean(h), m.log_std.exp()), 1),
        lambda out: -out.log_prob(torch.ones_like(out.mean)).mean(),
    ),
    "Categorical": (
        lambda m, h: Categorical(logits=m.mean(h) * m.log_std.exp()),
        lambda out: out.entropy().mean(),
    ),
    "object": (
        lambda m, h: Result(m.mean(h), m.log_std),
        lambda out: (out.inner[0]["mean"] * out.scale.exp()).square().mean(),
    ),
    "slots": (
        lambda m, h: Slots(m.mean(h), m.log_std.exp()),
        lambda out: (out.mean * out.scale).square().mean(),
    ),
    "set": (
        lambda m, h: {m.mean(h)},
        lambda out: sum(out).square().mean(),
    ),
    "deque in a tuple": (
        lambda m, h: (1, collections.deque([m.mean(h)])),
        lambda out: out[1][0].square().mean(),
    ),
    "iterator of a list": (
        lambda m, h: iter([m.mean(h), m.log_std.exp()]),
        lambda out: (next(out) * next(out)).square().mean(),
    ),
    "closure over tensors": (
        lambda m, h: functools.partial(torch.mul, m.mean(h)),
        lambda out: out(2.0).square().mean(),
    ),
    "chain": (
        lambda m, h: itertools.chain([m.mean(h)], [m.log_std.exp()]),
        lambda out: (next(out) * next(out)).square().mean(),
    ),
    "future of torch": (
        lambda m, h: finished(m.mean(h)),
        lambda out: out.wait().square().mean(),
    ),
    "cell": (
        lambda m, h: types.CellType(m.mean(h)),
        lambda out: out.cell_contents.square().mean(),
    ),
    "context variable": (
        lambda m, h: in_context(m.mean(h)),
        lambda out: out.get().square().mean(),
    ),
    "weak reference": (
        lambda m, h: weakref.ref(keep(m, m.mean(h))),
        lambda out: out().square().mean(),
    ),
    "tensor and Normal": (
        lambda m, h: (h, Normal(m.mean(h), m.log_std.exp())),
        lambda out: out[0].mean()
        - out[1].log_prob(torch.ones_like(out[1].mean)).mean(),
    ),
}
LATER = {
    "closure": (
        lambda m, h: lambda: m.mean(h) * m.log_std,
        lambda out: out().square().mean(),
    ),
    "method": (
        lambda m, h: Decoder(m, h).__call__,
        lambda out: out().square().mean(),
    ),
    "callable object": (
        Decoder,
        lambda out: out().square().mean(),
    ),
    "partial": (
        lambda m, h: functools.partial(m.mean, h),
        lambda out: out().square().mean(),
    ),
    "generator": (
        lazily,
        lambda out: (next(out) * next(out)).square().mean(),
    ),
    "map": (
        lambda m, h: map(m.mean, [h, 2 * h]),
        lambda out: sum(out).square().mean(),
    ),
}


class Policy(nn.Module):
    def __init__(self, result):
        super().__init__()
        self.body, self.mean = nn.Linear(4, 4), nn.Linear(4, 2)
        self.log_std = nn.Parameter(torch.zeros(2))
        self.result = result

    def forward(self, x):
        return self.result(self, torch.tanh(self.body(x)))


class Around(nn.Module):
    """Its child is the unit that returns such an object."""

    def __init__(self, result, loss):
        super().__init__()
        self.first, self.policy, self.last = (
            nn.Linear(4, 4),
            Policy(result),
            nn.Linear(1, 1),
        )
        self.loss = loss

    def forward(self, x):
        return self.last(self.loss(self.policy(self.first(x))).reshape(1, 1))


def inputs(world):
    generator = torch.Generator().manual_seed(0)
    return [on_device(torch.randn(3, 4, generator=generator)) for _ in range(world)]


def compare(plain, model, loss, rank, world, steps=2):
    for _ in range(steps):
        xs = inputs(world)
        (sum(loss(plain(x)) for x in xs) / world).backward()
        loss(model(xs[rank])).backward()
    for (name, p), q in zip(plain.named_parameters(), model.named_parameters()):
        if p.grad is None:
            assert q[1].grad is None, name
        else:
            torch.testing.assert_close(q[1].grad.full_tensor(), p.grad, msg=name)


@pytest.mark.parametrize("name", [*RETURNS, *LATER])
def test_of_a_root(name, mesh, rank, world):
    result, loss = {**RETURNS, **LATER}[name]
    torch.manual_seed(0)
    plain = on_device(Policy(result))
    model = copy.deepcopy(plain)
    fully_shard(model.body, mesh=mesh)
    fully_shard(model, mesh=mesh)
    compare(plain, model, loss, rank, world)


@pytest.mark.parametrize("name", RETURNS)
def test_of_a_unit_below_the_root(name, mesh, rank, world):
    torch.manual_seed(0)
    plain = on_device(Around(*RETURNS[name]))
    model = copy.deepcopy(plain)
    fully_shard(model.policy.body, mesh=mesh)
    fully_shard(model.policy, mesh=mesh)
    fully_shard(model, mesh=mesh)
    compare(plain, model, torch.mean, rank, world)


TYPES = {
    "closure": "function",
    "method": "method",
    "callable object": "python.opaque_outputs_test.Decoder",
    "partial": "functools.partial",
    "generator": "generator",
    "map": "map",
}


@pytest.mark.parametrize("name", LATER)
def test_what_runs_later_is_refused_below_the_root(name, mesh, rank):
    torch.manual_seed(0)
    model = on_device(Around(*LATER[name]))
    fully_shard(model.policy, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(2):  # the next step begins anew
        with refused(
            f"unit policy returned a .*{TYPES[name]} that runs later",
            NotImplementedError,
        ):
            model(inputs(1)[0])


HIDDEN = {
    "nothing": (
        lambda m, h: [keep(m, m.mean(h))][:0],
        lambda model, out: model.policy.kept.square().mean(),
    ),
    "queue": (
        lambda m, h: queued(m.mean(h)),
        lambda model, out: out.get().square().mean(),
    ),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_an_output_that_does_not_show_its_tensors_is_named(name, mesh, world):
    torch.manual_seed(0)
    result, loss = HIDDEN[name]
    model = on_device(Around(result, lambda out: loss(model, out)))
    fully_shard(model.policy, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss_of_step = model(inputs(1)[0])
    if world == 1:
        return  # nothing is ever released
    with refused("forward did not return the tensor where this backward", RuntimeError):
        loss_of_step.backward()


def test_what_runs_later_beside_a_tensor(mesh, rank, world):
    """It need not use parameters, so this is not an error."""

    def result(m, h):
        y = m.mean(h)
        return y, lambda: m.training

    torch.manual_seed(0)
    plain = on_device(Around(result, lambda out: out[0].mean() * out[1]()))
    model = copy.deepcopy(plain)
    fully_shard(model.policy, mesh=mesh)
    fully_shard(model, mesh=mesh)
    compare(plain, model, torch.mean, rank, world)


def test_evaluation(mesh):
    torch.manual_seed(0)
    plain = on_device(Policy(RETURNS["Normal"][0]))
    model = fully_shard(copy.deepcopy(plain), mesh=mesh)
    (x,) = inputs(1)
    with torch.no_grad():
        torch.testing.assert_close(model(x).mean, plain(x).mean)
